"""The arithmetic of quant_moe.def in float64, with a bound on how far the float32 of a kernel may be from it.

Written from FORMAT.md and ops/*.def alone. Value and error go through a layer together. The error of every operation is
counted where it is done (Higham, Accuracy and Stability of Numerical Algorithms, 3.3: a running error bound), so that
cancellation and the size of the terms count and no factor is chosen. u = 2^-24 is half an ulp of 1 and TINY half the
smallest subnormal number: one operation errs by at most u |result| + TINY. Bounds are of first order; SECOND is what
products of errors add, for sums of up to 2^14 terms.

Activations that are rounded again (h) are known up to an error, so where one lies next to the middle of two codes, or
its group's largest value next to another scale, either is right. quantize() says which values each element may take.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from quantmoe.custom_ops.hadamard_matrix import rotated
from quantmoe.custom_ops.op import MoESpec

U, TINY, SECOND = 2.0**-24, 2.0**-150, 1 + 2.0**-10
LARGEST = float(np.finfo(np.float32).max)

#: formats of 2.10, first those whose minima are a scale times a zero point, which may be rounded
PLANES = ("int2", "int3", "int5", "int6")
GGML = ("q4_k", "q5_k", "q6_k", "q2_k", "q4_1", "q5_1", "nf4", "bnb_fp4", "q8_min", *PLANES)
#: float activations: bits after the point, smallest exponent, largest value, features of a group (0: the row)
FLOATS = {
    "fp8_token": (3, -6, 448.0, 0),
    "fp8_tensor": (3, -6, 448.0, 0),
    "fp8_group128": (3, -6, 448.0, 128),
    "mxfp8": (3, -6, 448.0, 32),
    "mxfp4": (1, 0, 6.0, 32),
    "nvfp4": (1, 0, 6.0, 16),
}

# elementwise.h's exp is within 4u of the truth; so sigmoid, and z * sigmoid, within 4u, a sum and a quotient; 1 + erf
# and 1 + tanh absolutely within 8u. Largest found on a grid of 2.5 million points: 3.9u, 5.0u, 7.0u and 3.7u.
SIGMOID, ONE_PLUS = 6 * U, 8 * U
# A soft cap is c m / (m + 2) with m = e^2t - 1. e^2t is within 4u, or 4u e^2t / m of m: the most, 13.7u, is where 2t
# passes ln2 / 2. m / (m + 2) has m's relative error times 2 / (m + 2) = 0.83; five more operations round. Largest found
# on the floats to 100: 11.5u.
SOFTCAP = 14 * U
#: exponents are clamped to 88, so a sigmoid is at least this
SMALLEST_SIGMOID = math.exp(-88)
#: where z * sigmoid(z), gelu and gelu_tanh are smallest
TURNING = dict.fromkeys(("silu", "swiglu_step", "swiglu_clamp"), -1.27846454)
TURNING |= {"gelu": -0.75179159, "gelu_tanh": -0.75246137}


class Span(NamedTuple):
    """float64 values, and how far those of a kernel may be from them; infinite where nothing is known."""

    value: np.ndarray
    error: np.ndarray


class Range(NamedTuple):
    low: np.ndarray
    high: np.ndarray


@dataclass(frozen=True)
class Weights:
    """One matrix in the units of FORMAT.md 2.3 to 2.8. N rows, K columns as packed, G groups of them.

    Attributes:
        format, group_size: the node's.
        zero_points: whether some are stored.
        values: float64 [N, K], what the codes are multiplied as.
        scales: float64 [N, G]; channelwise int4's are not divided by 16.
        multiplier: float64 [N]; None for integers.
        bias: float64 [N].
        perm: [K], column j takes feature perm[j]; None when the node has none.
        pre_scale: float32 [K] by feature; or None.
        stored: the input scale; 0 when there is none.
        minima: float64 [N, G] of 2.10, what the groups' weights are less by; None where there are none.
        hadamard: features of a block of activations that are rotated; 0: none.
    """

    format: str
    group_size: int
    zero_points: bool
    values: np.ndarray
    scales: np.ndarray
    multiplier: np.ndarray | None
    bias: np.ndarray
    perm: np.ndarray | None = None
    pre_scale: np.ndarray | None = None
    stored: float = 0.0
    minima: np.ndarray | None = None
    hadamard: int = 0

    @property
    def two_levels(self) -> bool:
        """Panels of 2.10; group_size is that of the groups, 32 or 16."""
        return self.format in GGML

    @property
    def group(self) -> int:
        return self.values.shape[1] if self.group_size == -1 else self.group_size

    @property
    def plain(self) -> bool:
        """Panels of 2.1 to 2.5."""
        return self.format in ("int4", "int8") and not self.zero_points and self.group_size != 16

    @property
    def channelwise(self) -> bool:
        """One int32 sum a row (Products)."""
        return self.plain and self.group_size == -1

    def dequantized(self) -> np.ndarray:
        """float64 [N, K]."""
        w = self.values * np.repeat(self.scales, self.group, axis=1)[:, : self.values.shape[1]]
        if self.minima is not None:
            w = w - np.repeat(self.minima, self.group, axis=1)[:, : self.values.shape[1]]
        return w if self.multiplier is None else w * self.multiplier[:, None]

    def row_sums(self) -> Span:
        """value * scale [N] added up as 2.4 and 2.7 say: exact where channelwise, else pieces in float32."""
        if self.channelwise:
            return Span(self.values.sum(1) * self.scales[:, 0], np.zeros(len(self.values)))
        n, k = self.values.shape
        padded = np.zeros((n, self.scales.shape[1] * self.group))
        padded[:, :k] = self.values
        if self.plain and self.format == "int4":
            pieces = padded.reshape(n, -1, 2, 2, 8).sum((2, 4)).reshape(n, -1)
        else:
            pieces = padded.reshape(n, -1, 8 if self.plain else self.group).sum(2)
        terms = pieces * np.repeat(self.scales, pieces.shape[1] // self.scales.shape[1], axis=1)
        if self.minima is not None:
            columns = np.minimum(self.group, k - self.group * np.arange(self.minima.shape[1])).clip(0)
            terms = np.stack([terms, -columns * self.minima], axis=2).reshape(n, -1)
        sums = terms.cumsum(1)
        rounded = np.abs(terms).sum(1) if self.format in PLANES else 0
        return Span(sums[:, -1], U * ((np.abs(terms) + np.abs(sums)).sum(1) + rounded) + 2 * TINY * terms.shape[1])


@dataclass(frozen=True)
class Rounded:
    """Activations as a product takes them: (value + shift) are the codes, or the rounded floats, each times ``step``.

    Attributes:
        value: float64 [P, K]; NaN in rows that are not finite.
        spread: float64 [P, K], how far another rounding of the same activations may be, in units of ``step``.
        others: float64 [P, K], how far its codes may be, which another step multiplies; 0 but for integers.
        shift, step: float64 [P, 1].
        integers: products of a group are exact.
        columns: of which activations share a step, 0 for a row's.
        steps: float64 [P, K / columns] of those, which values and spread have in them.
    """

    value: np.ndarray
    spread: np.ndarray
    others: np.ndarray
    shift: np.ndarray | float = 0.0
    step: np.ndarray | float = 1.0
    integers: bool = False
    columns: int = 0
    steps: np.ndarray | None = None


def step_columns(w: Weights) -> int:
    """Return how many packed columns of int8_group activations share a step: Activations."""
    group = -(-w.values.shape[1] // 32) * 32 if w.group_size == -1 else w.group_size
    return 64 if group % 64 == 0 else 32


def minifloat(x: np.ndarray, activation_format: str) -> np.ndarray:
    """x to the nearest number of the format, ties to the even code, after clamping."""
    bits, smallest, largest, _ = FLOATS[activation_format]
    x = np.clip(x, -largest, largest)
    spacing = np.ldexp(np.ones_like(x), np.maximum(np.frexp(x)[1] - 1, smallest) - bits)
    return np.rint(x / spacing) * spacing


def steps(m: np.ndarray, activation_format: str, stored: float) -> np.ndarray:
    """The step of Activations, in float32, of groups (or rows) whose largest magnitude is m: never less for a larger m.

    So it is 0 where m / 448 or m / 127.5 is, at m up to 224 or 63 times the smallest subnormal number. The text says 1
    there, which rounds such an x to 0 as well. Were it 1 here, the steps of all m in a range would not be between those
    of its ends.
    """
    m, scale = m.astype(np.float32), np.float32(stored)
    if activation_format == "fp8_tensor" and stored:
        return np.full_like(m, scale)
    if activation_format == "nvfp4":
        return minifloat(m / np.float32(6) / scale, "fp8_token") * scale
    if activation_format in ("mxfp8", "mxfp4"):
        e = ((m.view(np.uint32) + np.uint32(1 << 21)) >> np.uint32(23)).astype(np.int32) - 127
        return np.ldexp(np.float32(1), np.maximum(e - (8 if activation_format == "mxfp8" else 2), -127))
    if activation_format == "int8_group":
        return np.where(np.isfinite(np.float32(127) / m), m / np.float32(127), np.float32(0))
    return m / np.float32(127.5 if activation_format == "int8_token" else 448)


def asymmetric(low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """int8_token_asym's s and zero point (not yet rounded), in the type of low and high: Activations."""
    one = low.dtype.type
    s = np.where(high == low, one(1), one(255) / (high - low))
    a, b = low * s, high * s
    z = np.where((one(-128) + a) + (one(127) + b) > 0, one(-128) - a, one(127) - b)
    return s, np.clip(z, one(-128), one(127))


def _product_of_ranges(low: np.ndarray, high: np.ndarray, least: np.ndarray, most: np.ndarray) -> Range:
    """[low, high] times the positive [least, most]."""
    return Range(np.where(low < 0, low * most, low * least), np.where(high < 0, high * least, high * most))


def quantize(
    x: Span, activation_format: str, stored: float, integer_products: bool = False, columns: int = 0
) -> Rounded:
    """x [P, K] in an activation format; its values are float32 (an error of zero) or stand for float32 near them.

    Args:
        integer_products: the nvfp4 product whose codes and steps stay apart (Products).
        columns: see Rounded; x is in the packed order then.
    """
    nominal, exact = x.value.astype(np.float32), not x.error.any()
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        finite = np.isfinite(nominal).all(1, keepdims=True)
        if activation_format == "int8_token_asym":
            finite &= np.isfinite(np.ptp(nominal, axis=1, keepdims=True) if nominal.size else finite)
        value, error = np.where(finite, x.value, 0), np.where(finite, x.error, 0)
        # A row that may overflow is rounded nobody knows how; so are those that share its scale.
        unknown = ~(np.abs(value).max(1, keepdims=True) + error.max(1, keepdims=True) < LARGEST / 2) & (not exact)
        if activation_format == "fp8_tensor" and not stored:
            unknown |= unknown.any()
        known, nominal = Span(value, np.where(unknown, 0, error)), np.where(finite, nominal, np.float32(0))
        if activation_format == "none" or not len(value):
            found = Rounded(value, known.error, np.zeros_like(value))
        elif columns:
            found = _stepped_integers(nominal, known, columns, exact)
        elif activation_format.startswith("int8"):
            found = _integers(nominal, known, activation_format, exact)
        else:
            found = _floats(nominal, known, activation_format, stored, integer_products, exact)
    return dataclasses.replace(
        found, value=np.where(finite, found.value, np.nan), spread=np.where(unknown, np.inf, found.spread)
    )


def _integers(nominal: np.ndarray, x: Span, activation_format: str, exact: bool) -> Rounded:
    zero = np.zeros((len(nominal), 1))
    low, high = x.value - x.error, x.value + x.error
    # A row of zeros has step 1 and zero point 127, whose product with a rounded row sum cancels but for an error.
    perhaps_zero = ((low <= 0) & (high >= 0)).all(1, keepdims=True)
    nominal = np.where(perhaps_zero, np.float32(0), nominal)
    begin, end = nominal.min(1, keepdims=True, initial=0), nominal.max(1, keepdims=True, initial=0)
    if activation_format == "int8_token":
        step = steps(np.maximum(-begin, end), activation_format, 0)
        step = np.where(step > 0, step, np.float32(1))
        value = np.clip(np.rint(nominal / step), -128, 127).astype(np.float64)
    else:
        s, z = asymmetric(begin, end)
        normal = np.isfinite(s)
        s, zero = np.where(normal, s, np.float32(0)), np.where(normal, np.rint(z), 0).astype(np.float64)
        step = np.where(normal, np.float32(1) / s, np.float32(1))
        value = np.clip(np.rint(nominal * s) + zero, -128, 127).astype(np.float64) - zero
    step = step.astype(np.float64)
    if exact:
        return Rounded(value, *[np.zeros_like(value)] * 2, zero, step, integers=True)

    zeros = zero, zero
    if activation_format == "int8_token":
        smallest = _down(_least_magnitude(x).max(1, keepdims=True))
        largest = _up((np.abs(x.value) + x.error).max(1, keepdims=True))
        least, most = (steps(m, activation_format, 0).astype(np.float64) for m in (smallest, largest))
        nothing, lost = most == 0, least == 0
    else:
        begins, ends = ([f(a, axis=1, keepdims=True, initial=0) for a in (low, high)] for f in (np.min, np.max))
        s_at, z_at = (np.array(a) for a in zip(*(asymmetric(b, e) for b in begins for e in ends), strict=True))
        # The numbers below 256 that make z are each rounded to 2^-17, and so is the product with s.
        zeros = (np.minimum(np.rint(z_at.min(0) - 2.0**-14), zero), np.maximum(np.rint(z_at.max(0) + 2.0**-14), zero))
        # 1 / s may be subnormal: s is up to LARGEST.
        least, most = (1 - 4 * U) / s_at.max(0) - TINY, (1 + 4 * U) / s_at.min(0) + TINY
        lost = perhaps_zero | ~(s_at < LARGEST / 2).all(0)
        nothing = np.zeros_like(lost)
    least, most = (np.where(lost, 1, a) for a in (least, most))
    codes = _product_of_ranges(low, high, (1 - 4 * U) / most, (1 + 4 * U) / least)
    codes = Range(*(np.clip(np.rint(c), -128 - zeros[1], 127 - zeros[0]) for c in codes))
    spread = np.where(nothing, 0, _spread(value * step, x, _product_of_ranges(*codes, least, most), lost))
    others = np.where(lost, 255, np.maximum(codes.high - value, value - codes.low).clip(0))
    return Rounded(value, spread / step, np.where(nothing, 0, others), zero, step, integers=True)


def _floats(
    nominal: np.ndarray, x: Span, activation_format: str, stored: float, integer_products: bool, exact: bool
) -> Rounded:
    p, k = nominal.shape
    group = FLOATS[activation_format][3] or k

    def largest_of_groups(magnitudes: np.ndarray) -> np.ndarray:
        padded = np.zeros((p, -(-k // group), group), magnitudes.dtype)
        padded.reshape(p, -1)[:, :k] = magnitudes
        largest = padded.max(2)
        return np.full_like(largest, largest.max()) if activation_format == "fp8_tensor" else largest

    def step_of(m: np.ndarray) -> np.ndarray:
        return np.repeat(steps(m, activation_format, stored), group, axis=1)[:, :k]

    step = step_of(largest_of_groups(np.abs(nominal)))
    codes = np.where(step == 0, 0, minifloat(nominal / step, activation_format))
    value = (codes * step.astype(np.float64 if integer_products else np.float32)).astype(np.float64)
    if exact:
        return Rounded(value, *[np.zeros_like(value)] * 2, integers=integer_products)

    least = step_of(_down(largest_of_groups(_least_magnitude(x))))
    most = step_of(_up(largest_of_groups(np.abs(x.value) + x.error)))
    nothing, lost = most == 0, least == 0
    least, most = (np.where(lost, 1, a).astype(np.float64) for a in (least, most))
    ratios = _product_of_ranges(x.value - x.error, x.value + x.error, (1 - 2 * U) / most, (1 + 2 * U) / least)
    codes = Range(*(minifloat(r, activation_format) for r in ratios))
    ends = _product_of_ranges(*codes, least * (1 - U), most * (1 + U))
    spread = _spread(value, x, Range(ends.low - TINY, ends.high + TINY), lost)
    return Rounded(value, np.where(nothing, 0, spread), np.zeros_like(value), integers=integer_products)


def _stepped_integers(nominal: np.ndarray, x: Span, columns: int, exact: bool) -> Rounded:
    p, k = nominal.shape

    def largest_of_groups(magnitudes: np.ndarray) -> np.ndarray:
        padded = np.zeros((p, -(-k // columns), columns), magnitudes.dtype)
        padded.reshape(p, -1)[:, :k] = magnitudes
        return padded.max(2)

    def spread_out(of_groups: np.ndarray) -> np.ndarray:
        return np.repeat(of_groups, columns, axis=1)[:, :k]

    largest = largest_of_groups(np.abs(nominal))
    factor = np.float32(127) / largest
    codes = np.rint(nominal * spread_out(np.where(np.isinf(factor), np.float32(0), factor)))
    step = (largest / np.float32(127)).astype(np.float64)
    value = codes.astype(np.float64) * spread_out(step)
    if exact:
        return Rounded(value, *[np.zeros_like(value)] * 2, integers=True, columns=columns, steps=step)

    least = steps(_down(largest_of_groups(_least_magnitude(x))), "int8_group", 0)
    most = steps(_up(largest_of_groups(np.abs(x.value) + x.error)), "int8_group", 0)
    least, most = (spread_out(a).astype(np.float64) for a in (least, most))
    nothing, lost = most == 0, least == 0
    least, most = (np.where(lost, 1, a) for a in (least, most))
    ratios = _product_of_ranges(x.value - x.error, x.value + x.error, (1 - 4 * U) / most, (1 + 4 * U) / least)
    ends = _product_of_ranges(*(np.rint(r) for r in ratios), least * (1 - U), most * (1 + U))
    spread = np.where(nothing, 0, _spread(value, x, Range(ends.low - TINY, ends.high + TINY), lost))
    # Errors of the product count the step, which another largest value makes larger.
    step = np.maximum(step, (largest_of_groups(np.abs(x.value) + x.error) / 127) * (1 + 4 * U) + TINY)
    return Rounded(value, spread, np.zeros_like(value), integers=True, columns=columns, steps=step)


def _spread(value: np.ndarray, x: Span, ends: Range, lost: np.ndarray) -> np.ndarray:
    """How far what x rounds to may be from ``value``, when it is in ``ends``, or not known because the step is not.

    Rounding to nearest never more than doubles a number.
    """
    reach = (2 + 2.0**-20) * (np.abs(x.value) + x.error)
    low, high = (
        np.where(lost, sign * reach, np.clip(end, -reach, reach)) for sign, end in zip((-1, 1), ends, strict=True)
    )
    return np.maximum(high - value, value - low).clip(0)


def _least_magnitude(x: Span) -> np.ndarray:
    return np.maximum(np.abs(x.value) - x.error, 0)


def _up(x: np.ndarray) -> np.ndarray:
    return np.nextafter(x.astype(np.float32), np.float32(np.inf))


def _down(x: np.ndarray) -> np.ndarray:
    return np.maximum(np.nextafter(x.astype(np.float32), np.float32(-np.inf)), np.float32(0))


def product(x: Rounded, w: Weights) -> Span:
    """x w^T + bias as Products has it: [P, N]."""
    p, (n, k) = len(x.value), w.values.shape
    value, spread, others = (a if w.perm is None else a[:, w.perm] for a in (x.value, x.spread, x.others))
    dense = np.abs(w.dequantized())
    columns = value + x.shift
    rounded = U if w.format in PLANES else 0.0  # of a minimum
    acc, error, largest = (np.zeros((p, n)) for _ in range(3))
    with np.errstate(over="ignore", invalid="ignore"):
        values, scales, minima = w.values, w.scales.T, w.minima
        if x.steps is not None:
            acc, error, largest = _stepped_sums(x, w)
            scales = scales[:0]
        if w.two_levels and not x.integers:  # weights are rounded to float32
            error = error + U * np.abs(columns) @ dense.T
            if minima is not None:
                of_columns = np.repeat(np.abs(minima), w.group, axis=1)[:, :k]
                error = error + rounded * np.abs(columns) @ of_columns.T
            values, scales, minima = w.dequantized(), np.ones_like(scales), None
        for g, scale in enumerate(scales[: -(-k // w.group)]):  # of two levels some may be padding
            part = slice(g * w.group, (g + 1) * w.group)
            dot, inner, reach = _dot(columns[:, part], values[:, part], x.integers)
            acc = acc + dot * scale
            error = error + np.abs(scale) * inner + U * np.abs(acc) + TINY
            largest = np.maximum(np.maximum(largest, reach), np.abs(acc))
            if minima is not None:
                subtracted = columns[:, part].sum(1, keepdims=True) * minima[:, g]
                acc = acc - subtracted
                error = error + rounded * np.abs(subtracted) + U * np.abs(acc) + TINY
                largest = np.maximum(largest, np.abs(acc))
        if np.any(x.shift):
            sums = w.row_sums()
            acc = acc - x.shift * sums.value
            error = error + np.abs(x.shift) * sums.error + U * np.abs(acc) + TINY
            largest = np.maximum(largest, np.abs(x.shift * sums.value))
        exact = x.integers and w.channelwise and x.steps is None  # one int32, then float()
        if exact:
            error = U * np.abs(acc)
        if w.multiplier is not None:
            acc = acc * w.multiplier
            error = error * np.abs(w.multiplier) + U * np.abs(acc) + TINY
        y = acc * x.step
        if np.ndim(x.step):
            error = error * x.step + 2 * U * np.abs(y) + TINY
        if exact:  # scale * step may underflow, and multiplies the int32 of these or of other codes
            integer = np.abs(value @ w.values.T) + others @ np.abs(w.values).T
            error = error + TINY * (16 if w.format == "int4" else 1) * integer
        y = y + w.bias
        error = error + U * np.abs(y)
        # The float64 sums here, and other roundings of x.
        slack = 2.0**-53 * (k + 8) * np.abs(columns) + np.where(np.isfinite(spread), spread, 0)
        error = (error + (slack * x.step) @ dense.T) * SECOND
        lost = (
            (~np.isfinite(spread)).any(1, keepdims=True) | (largest > LARGEST / 2) | (np.abs(y) + error > LARGEST / 2)
        )
        return Span(y, np.where(lost, np.inf, error))


def _stepped_sums(x: Rounded, w: Weights) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """int8_group's acc (Products) and its error, [P, N], and the largest number on the way; channelwise times scale."""
    assert x.steps is not None
    (p, k), n, (group, columns) = x.value.shape, len(w.values), (w.group, x.columns)
    acc, error, largest = (np.zeros((p, n)) for _ in range(3))
    minima, size = w.minima, min(group, columns)
    rounded = U if w.format in PLANES else 0.0
    for first in range(0, k, columns):
        step = x.steps[:, first // columns][:, None]
        all_, of_step = np.zeros((p, n)), np.zeros((p, n))
        end = min(first + columns, k)
        for begin in range(first, end, size):
            part, scale = slice(begin, min(begin + size, end)), w.scales[:, begin // group]
            all_ = all_ + (x.value[:, part] @ w.values[:, part].T) * scale
            if not w.channelwise:
                of_step = of_step + U * np.abs(all_) + TINY * step
            largest = np.maximum(largest, np.where(step > 0, np.abs(all_) / np.maximum(step, TINY), 0))
            if begin + size >= end:
                acc = acc + all_
                factor = np.abs(w.scales[:, 0]) if w.channelwise else 1
                error = error + of_step + U * np.abs(acc) + TINY * factor
                largest = np.maximum(largest, np.abs(acc))
            if minima is not None:
                of_tokens, minimum = x.value[:, part].sum(1, keepdims=True), minima[:, begin // group]
                acc = acc - of_tokens * minimum
                minimum_rounded = rounded * np.abs(of_tokens * minimum)
                error = (
                    error + (U * np.abs(of_tokens) + TINY) * np.abs(minimum) + minimum_rounded + U * np.abs(acc) + TINY
                )
                largest = np.maximum(largest, np.abs(acc))
    if w.channelwise:
        error = error + U * np.abs(acc) + TINY
    return acc, error, largest


def _dot(x: np.ndarray, values: np.ndarray, integers: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x [P, g] times values [N, g]: the sums, the error of each in float32, and the largest number on the way."""
    if integers or not len(x):
        dot = x @ values.T
        return dot, np.where(np.abs(dot) > 2.0**24, U, 0) * np.abs(dot), np.abs(dot)
    parts = []
    for rows in np.array_split(x, -(-len(x) // 16)):
        partial = np.cumsum(rows.T[:, :, None] * values.T[:, None, :], axis=0)
        last = partial[-1].copy()
        np.abs(partial, out=partial)
        parts.append((last, U * partial.sum(0) + TINY * len(partial), partial.max(0)))
    return tuple(np.concatenate(part) for part in zip(*parts, strict=True))  # type: ignore[return-value]


def activate(spec: MoESpec, gate: Span | None, up: Span) -> Span:
    """h of op.def's activation function; its own rounding as elementwise.h computes it."""
    z = up if gate is None else gate
    limit, alpha = (float(np.float32(a)) for a in (spec.swiglu_limit, spec.swiglu_alpha))

    def f(z: np.ndarray) -> np.ndarray:
        match spec.activation:
            case "silu":
                return z * _sigmoid(z)
            case "gelu":
                return z / 2 * _ERFC(-z / math.sqrt(2)).astype(np.float64)
            case "gelu_tanh":
                return z / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))
            case "relu2":
                return np.maximum(z, 0) ** 2
            case "swiglu_oai":
                return np.minimum(z, limit) * _sigmoid(alpha * np.minimum(z, limit))
            case "swiglu_step":
                return np.minimum(z * _sigmoid(z), limit)
            case "swiglu_clamp":
                return np.minimum(z, limit) * _sigmoid(np.minimum(z, limit))
            case "swiglu_tanh":
                return alpha * np.tanh(z / alpha) * _sigmoid(z)
        raise ValueError(spec.activation)

    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        turning = TURNING["silu"] / alpha if spec.activation == "swiglu_oai" else TURNING.get(spec.activation, 0.0)
        softcap = spec.activation == "swiglu_tanh"
        if softcap:
            turning = _softcap_turning(alpha)
        error = np.where(np.isfinite(z.error), z.error, 0)
        ends = [z.value - error, z.value + error]
        a = f(z.value)
        around = np.max([np.abs(f(at) - a) for at in (*ends, np.clip(turning, *ends))], axis=0)
        if spec.activation.startswith("gelu"):
            around += np.abs(z.value) / 2 * ONE_PLUS + 2 * U * np.abs(a)
        elif spec.activation == "relu2":
            around += U * a
        else:
            limited = spec.activation in ("swiglu_oai", "swiglu_clamp")
            z_limited = np.abs(np.minimum(z.value, limit)) if limited else np.abs(z.value)
            argument = abs(alpha) * z_limited * U if spec.activation == "swiglu_oai" else 0
            around += (SIGMOID + argument + U) * np.abs(a) + z_limited * SMALLEST_SIGMOID
            if softcap:
                around += SOFTCAP * np.abs(a) + 4 * (alpha + 1) * TINY
        b, b_error = np.float64(1), np.float64(0)
        if gate is not None:
            b, b_error = up.value, np.where(np.isfinite(up.error), up.error, 0)
            if softcap:
                b = limit * np.tanh(b / limit)
                b_error = b_error + SOFTCAP * np.abs(b) + 4 * (limit + 1) * TINY
            elif spec.activation.startswith("swiglu"):
                b = np.clip(b, -limit, limit)
            if spec.activation == "swiglu_oai":
                b = b + 1
                b_error = b_error + U * np.abs(b)
        h = a * b
        around += 3 * TINY  # z / 2, times 1 + erf, which is up to 2; the others lose less
        error = (around * (np.abs(b) + b_error) + np.abs(a) * b_error + U * np.abs(h)) * SECOND + TINY
        unknown = ~(np.isfinite(up.error) & np.isfinite(z.error))
        near = np.abs(h) + error > LARGEST / 2
        certain = np.abs(h) - error > LARGEST * 2
        h = np.where(certain & ~unknown, np.inf, h)
        return Span(h, np.where(unknown | (near & ~certain), np.inf, np.where(certain, 0, error)))


def _softcap_turning(cap: float) -> float:
    """Return where cap tanh(z / cap) sigmoid(z) is smallest: its derivative is 0 where 1 + cap / 2 sinh(2 z / cap) (1 -
    sigmoid(z)) is, which grows with z."""
    low, high = -10 * max(cap, 1.0), 0.0
    for _ in range(60):
        middle = (low + high) / 2
        below = 1 + cap / 2 * np.sinh(2 * middle / cap) * (1 - _sigmoid(middle)) < 0
        low, high = (middle, high) if below else (low, middle)
    return (low + high) / 2


_ERFC = np.frompyfunc(math.erfc, 1, 1)


def _sigmoid(z: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-z))


def rotate(x: Span, size: int) -> Span:
    """Blocks of features times Hadamard's matrix: log2(size) sums of each number, a rounded factor, and a product.

    After every sum a number is at most the sum of the block's magnitudes, and so is the error of a sum. Where those may
    overflow, nothing is known.
    """
    largest = np.abs(x.value) + x.error
    sums, errors = (a.reshape(len(a), -1, size).sum(2) / math.sqrt(size) for a in (largest, x.error))
    each = errors + (math.log2(size) + 2) * U * sums * SECOND + TINY
    each = np.where(sums * math.sqrt(size) > LARGEST / 2, np.inf, each)
    return Span(rotated(x.value, size), np.repeat(each, size, axis=1))


def quant_linear(x: Span, w: Weights, activation_format: str) -> Span:
    """QuantLinear, or one matrix of a layer: x [P, K] by feature -> [P, N]."""
    with np.errstate(over="ignore", invalid="ignore"):
        if w.pre_scale is not None:
            if x.error.any():
                scaled = x.value * w.pre_scale
                x = Span(scaled, x.error * np.abs(w.pre_scale) + U * np.abs(scaled) + TINY)
            else:
                x = Span((x.value.astype(np.float32) * w.pre_scale).astype(np.float64), x.error)
        if w.hadamard:
            x = rotate(x, w.hadamard)
    if activation_format == "int8_group":
        if w.perm is not None:
            x, w = Span(x.value[:, w.perm], x.error[:, w.perm]), dataclasses.replace(w, perm=None)
        return product(quantize(x, activation_format, w.stored, columns=step_columns(w)), w)
    apart = activation_format == w.format == "nvfp4" and w.group_size == 16 and w.perm is None
    return product(quantize(x, activation_format, w.stored, apart), w)


def quant_moe(
    spec: MoESpec,
    experts: Sequence[tuple[Weights | None, Weights, Weights]],
    hidden: np.ndarray,
    topk_ids: np.ndarray,
    topk_weights: np.ndarray,
) -> Span:
    """QuantMoE: [T, H]. experts: gate, up and down of id expert_offset, expert_offset + 1, ..."""
    x = hidden.astype(np.float32)
    weights = topk_weights.astype(np.float32)
    out, error = np.zeros(x.shape), np.zeros(x.shape)
    on_input = bool(spec.apply_router_weight_on_input)
    with np.errstate(over="ignore", invalid="ignore"):
        for i, (gate, up, down) in enumerate(experts):
            slots, tokens = np.nonzero(np.transpose(topk_ids) == spec.expert_offset + i)
            if not len(tokens):
                continue
            w = weights[tokens, slots][:, None]
            given = exactly(x[tokens] * w if on_input else x[tokens])
            sides = [None if m is None else quant_linear(given, m, spec.w13.activation_format) for m in (gate, up)]
            y = quant_linear(activate(spec, *sides), down, spec.w2.activation_format)
            if not on_input:  # an infinite weight of what may be zero: nobody knows
                y = Span(
                    np.where(np.isinf(w), 0, y.value * w.astype(np.float64)),
                    np.where(np.isinf(w), np.inf, np.abs(w) * y.error),
                )
            for slot in np.unique(slots):  # ascending; a token is there once in each
                at, of = tokens[slots == slot], slots == slot
                out[at] += y.value[of]
                error[at] += y.error[of] + U * np.abs(out[at]) + TINY
        error = np.where(np.abs(out) + error > LARGEST / 2, np.inf, error * SECOND)
    out[~np.isfinite(x).all(1)] = np.nan
    return Span(out, error)


def outside(found: np.ndarray, want: Span) -> np.ndarray:
    """Which of ``found``, in its float type, no value within the bound rounds to. NaN stands for itself."""
    with np.errstate(over="ignore", invalid="ignore"):
        known = np.isfinite(want.error) & np.isfinite(want.value)
        error = np.where(known, want.error, 0)
        low = np.nextafter((want.value - error).astype(np.float32), np.float32(-np.inf)).astype(found.dtype)
        high = np.nextafter((want.value + error).astype(np.float32), np.float32(np.inf)).astype(found.dtype)
        got = found.astype(np.float64)
        wrong = known & ~((low.astype(np.float64) <= got) & (got <= high.astype(np.float64)))
        return wrong | (np.isnan(want.value) & ~np.isnan(got))


def exactly(x: np.ndarray) -> Span:
    """Inputs, of any float type."""
    return Span(x.astype(np.float64), np.zeros(x.shape))


def assert_within(found: np.ndarray, want: Span) -> None:
    wrong = outside(found, want)
    if wrong.any():
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise AssertionError(
            f"{wrong.sum()} of {wrong.size} values out of bounds, the first at {at}: {found[at]}, expected "
            f"{want.value[at]:.9g} +- {want.error[at]:.3g}"
        )
