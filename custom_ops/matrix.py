"""The canonical matrix: what every checkpoint format decodes to and every packed layout is made from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np

from quantmoe.custom_ops.hadamard_matrix import rotated
from quantmoe.custom_ops.schemes import SCHEMES

#: scale types by op.def name; scales stay in the dtype the checkpoint stores
SCALE_DTYPES = {
    "f32": np.dtype(np.float32),
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "e8m0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "k32": np.dtype([("d", "<f2"), ("d_min", "<f2"), ("scales", "i1", 8), ("minima", "i1", 8)]),
    "k16": np.dtype([("d", "<f2"), ("scales", "i1", 16)]),
    "k16_minima": np.dtype([("d", "<f2"), ("d_min", "<f2"), ("levels", "u1", 16)]),
    "f16_minima": np.dtype([("d", "<f2"), ("d_min", "<f2")]),
    "f32_minima": np.dtype([("d", "<f4"), ("d_min", "<f4")]),
}

#: integers in planes (FORMAT.md 2.10)
PLANE_INTEGERS = ("int2", "int3", "int5", "int6")


@dataclass(frozen=True, eq=False, kw_only=True)
class QuantizedMatrix:
    """One projection of one expert (N output features, K input features), losslessly as the checkpoint has it.

    ``w[n, perm[j]] = value(codes[n, j]) * scales[n // block_n, j // group_size] * global_scale``; value is the scheme's
    table, or code - zero_point. Scales with fields (``levels``) are products, and minima are subtracted.

    Attributes:
        kind: a ``format`` of op.def; says what a code means.
        codes: uint8 [N, K]; unsigned integer codes, or e2m1 / e4m3 bit patterns. uint16 for bf16 and f16.
        scales: [ceil(N / block_n), ceil(K / group_size)], one of SCALE_DTYPES, never re-rounded.
        group_size: input features that share a scale; -1 when one scale serves the whole row.
        block_n: output features that share a scale.
        zero_points: optional uint8, the shape of ``scales``; None means the midpoint (of int4 8).
        global_scale: optional multiplier, already inverted where the format stores the reciprocal.
        input_scale: optional static activation scale (a multiplier as well).
        pre_scale: optional f32 [K], multiplies the activations (AWQ's pre_quant_scale).
        bias: optional f32 [N].
        perm: optional int32 [K], act-order: column j of ``codes`` belongs to input feature perm[j].
        hadamard: features of a block of the activations that Hadamard's matrix multiplies after the pre-scales
            (ops/hadamard.def); 0: none.
    """

    kind: str
    codes: np.ndarray
    scales: np.ndarray
    group_size: int
    block_n: int = 1
    zero_points: np.ndarray | None = None
    global_scale: float | None = None
    input_scale: float | None = None
    pre_scale: np.ndarray | None = None
    bias: np.ndarray | None = None
    perm: np.ndarray | None = None
    hadamard: int = 0

    def __post_init__(self) -> None:
        n, k = self.shape
        groups = 1 if self.group_size == -1 else -(-k // self.group_size)
        want = (-(-n // self.block_n), groups)
        if self.scales.shape != want:
            raise ValueError(f"scales have shape {list(self.scales.shape)}, expected {list(want)}")
        if self.scales.dtype not in SCALE_DTYPES.values():
            raise ValueError(f"scales have dtype {self.scales.dtype}, expected one of {', '.join(SCALE_DTYPES)}")
        wide = self.kind in SCHEMES and SCHEMES[self.kind].bits == 16
        if self.codes.dtype != (np.uint16 if wide else np.uint8):
            raise ValueError(f"codes have dtype {self.codes.dtype}, expected {'uint16' if wide else 'uint8'}")
        if self.zero_points is not None and self.zero_points.shape != want:
            raise ValueError(f"zero points have shape {list(self.zero_points.shape)}, expected {list(want)}")

    def check_finite(self, what: str) -> None:
        """Refuse what is no number: the one place that decides it, for every layout.

        It reads all codes, so packing asks, not the constructor: a matrix that is only read may hold anything.

        Raises:
            ValueError: ``what`` and what of it is NaN or infinite, or a global or input scale that is not positive.
        """
        scales = [self.scales] if self.scales.dtype.names is None else _factors(self.scales)
        for name, values in (*(("scales", s) for s in scales), ("pre-scales", self.pre_scale), ("biases", self.bias)):
            if values is not None and not np.isfinite(values).all():
                raise ValueError(f"{what}: {name} that are NaN or infinite")
        for name, value in (("global", self.global_scale), ("input", self.input_scale)):
            if value is not None and not 0 < value <= float(np.finfo(np.float32).max):
                raise ValueError(f"{what}: the {name} scale {value}, expected a positive number")
        if self.kind not in SCHEMES:
            return  # a layout says what it carries
        nan = np.flatnonzero(np.isnan(SCHEMES[self.kind].table))
        # Floats of either sign are ordered as their bits are, and what is no number comes last.
        if len(nan) and self.codes.size:
            signed = self.codes.view(np.int8 if self.codes.dtype == np.uint8 else np.int16)
            sign = 1 << (SCHEMES[self.kind].bits - 1)
            if signed.max() >= nan[0] or self.codes.max() >= (nan[0] | sign):
                raise ValueError(f"{what}: {self.kind} weights that are NaN or infinite")

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.codes.shape  # type: ignore[return-value]

    @property
    def scale_type(self) -> str:
        return next(name for name, dtype in SCALE_DTYPES.items() if dtype == self.scales.dtype)

    def values(self, dtype: type = np.float64) -> np.ndarray:
        """Code values before scaling, exact in either float type: [N, K], columns in stored order."""
        if self.kind not in SCHEMES:
            raise ValueError(f"unknown kind {self.kind!r}; known: {', '.join(SCHEMES)}")
        scheme = SCHEMES[self.kind]
        values = scheme.table.astype(dtype)[self.codes]
        if self.zero_points is not None:
            values += dtype(scheme.zero) - self.expand(self.zero_points.astype(dtype))
        return values

    def expand(self, per_group: np.ndarray) -> np.ndarray:
        """Return a per-group array [N / block_n, K / group_size] repeated to [N, K]."""
        n, k = self.shape
        rows = np.repeat(per_group, self.block_n, axis=0)[:n]
        return np.repeat(rows, k if self.group_size == -1 else self.group_size, axis=1)[:, :k]

    @property
    def rounds_last(self) -> bool:
        """True where float32 does not hold what :meth:`dequantize` multiplies: float64 is rounded at the end."""
        factors = self.global_scale is not None or self.pre_scale is not None or self.hadamard > 0
        return factors or self.scale_type == "f32_minima"

    def dequantize(self, dtype: type = np.float64) -> np.ndarray:
        """Return the weights this matrix stands for: float64 or float32 [N, K], rounded once, columns by input
        feature."""
        if dtype != np.float64 and self.rounds_last:
            return self.dequantize().astype(dtype)
        w = self.values(dtype)
        if self.scales.dtype.names is None:
            w *= self.expand(self.scales.astype(dtype))
        else:
            scales, minima = (
                np.repeat(part, self.group_size // part.shape[2], axis=2).reshape(len(w), -1)[:, : w.shape[1]]
                for part in levels(self.scales, dtype)
            )
            w *= scales
            w -= minima
        if self.global_scale is not None:
            w *= self.global_scale
        if self.perm is not None:
            by_feature = np.empty_like(w)
            by_feature[:, self.perm] = w
            w = by_feature
        if self.hadamard:
            w = rotated(w, self.hadamard)
        if self.pre_scale is not None:
            w = w * self.pre_scale.astype(np.float64)
        return w


def _factors(scales: np.ndarray) -> list[np.ndarray]:
    return [scales[name] for name in ("d", "d_min") if name in (scales.dtype.names or ())]


def levels(scales: np.ndarray, dtype: type = np.float32) -> tuple[np.ndarray, np.ndarray]:
    """Return scales and minima of the groups of scales with fields [N, blocks]: [N, blocks, groups] each, exact in
    float32.

    ``levels`` has a scale in the low 4 bits and a minimum in the high ones. Without fields beside ``d`` and ``d_min`` a
    block is one group.
    """
    names = scales.dtype.names or ()
    if "levels" in names:
        of_scales, of_minima = scales["levels"] & 15, scales["levels"] >> 4
    else:
        one = np.ones((*scales.shape, 1))
        of_scales = scales["scales"] if "scales" in names else one
        of_minima = scales["minima"] if "minima" in names else one

    def product(factor: str, of_groups: np.ndarray) -> np.ndarray:
        return scales[factor].astype(dtype)[..., None] * of_groups.astype(dtype)

    found = product("d", of_scales)
    return found, product("d_min", of_minima) if "d_min" in names else np.zeros_like(found)


def k_group(m: QuantizedMatrix) -> int:
    """Return how many columns a product adds up before it takes a scale: FORMAT.md 2.10's groups, or the matrix's."""
    if m.scales.dtype.names is None and m.kind not in ("nf4", "bnb_fp4", *PLANE_INTEGERS):  # whose groups are always 32
        return m.group_size
    return 16 if m.kind in ("q6_k", "q2_k") else 32


def joined(parts: Sequence[QuantizedMatrix]) -> QuantizedMatrix:
    """Return the rows of matrices that multiply the same input, below each other.

    Every row keeps its bytes. Where only some parts have zero points or biases the others get what theirs mean.

    Raises:
        ValueError: the parts differ in what a matrix has one of; says in what.
    """
    first = parts[0]
    for name in ("kind", "group_size", "block_n", "scale_type", "global_scale", "input_scale", "hadamard"):
        if len(values := {getattr(m, name) for m in parts}) > 1:
            raise ValueError(f"{name} differs ({', '.join(sorted(map(str, values)))})")
    for name in ("perm", "pre_scale"):
        if not all(same_order(getattr(m, name), getattr(first, name)) for m in parts):
            raise ValueError(f"{name} differs")
    if any(m.shape[0] % m.block_n for m in parts[:-1]):
        raise ValueError(f"a block of {first.block_n} rows would have rows of two")
    zero_points = bias = None
    if any(m.zero_points is not None for m in parts):
        middle = np.uint8(SCHEMES[first.kind].zero)
        zero_points = _below([np.full_like(m.scales, middle, np.uint8) if m.zero_points is None else m.zero_points
                              for m in parts])  # fmt: skip
    if any(m.bias is not None for m in parts):
        bias = np.concatenate([np.zeros(m.shape[0], np.float32) if m.bias is None else m.bias for m in parts])
    codes, scales = (_below([getattr(m, name) for m in parts]) for name in ("codes", "scales"))
    return replace(first, codes=codes, scales=scales, zero_points=zero_points, bias=bias)


def parted(m: QuantizedMatrix, rows: Sequence[int]) -> list[QuantizedMatrix]:
    """Return the matrices with so many rows each that :func:`joined` made one of.

    Zero points that are all the middle, and biases that are all zero, are none.
    """
    found, ends = [], np.cumsum(rows)
    for begin, end in zip([0, *ends[:-1]], ends, strict=True):
        own = rows_of(m, begin, end)
        if own.zero_points is not None and (own.zero_points == SCHEMES[m.kind].zero).all():
            own = replace(own, zero_points=None)
        found.append(own if own.bias is None or own.bias.any() else replace(own, bias=None))
    return found


def rows_of(m: QuantizedMatrix, begin: int, end: int) -> QuantizedMatrix:
    """Some rows of a matrix, which begin where rows begin that share a scale."""
    blocks = slice(begin // m.block_n, -(-end // m.block_n))
    return replace(
        m,
        codes=m.codes[begin:end],
        scales=m.scales[blocks],
        zero_points=None if m.zero_points is None else m.zero_points[blocks],
        bias=None if m.bias is None else m.bias[begin:end],
    )


def reordered(m: QuantizedMatrix, order: np.ndarray) -> QuantizedMatrix:
    """Return a matrix with other rows first: row i is row order[i] of the given one.

    Raises:
        ValueError: rows that share a scale would not stay together.
    """
    blocks = order[:: m.block_n] // m.block_n
    if (order // m.block_n != np.repeat(blocks, m.block_n)[: len(order)]).any():
        raise ValueError(f"rows in blocks of {m.block_n} do not stay together in another order")

    def rows(array: np.ndarray, order: np.ndarray) -> np.ndarray:
        return array[order] if any(array.strides) else array  # of an outline all are alike, and in no memory

    return replace(
        m,
        codes=rows(m.codes, order),
        scales=rows(m.scales, blocks),
        zero_points=None if m.zero_points is None else rows(m.zero_points, blocks),
        bias=None if m.bias is None else m.bias[order],
    )


def in_order(m: QuantizedMatrix) -> QuantizedMatrix:
    """Return a matrix in act-order for inputs that come as its columns lie: feature j is the given one's perm[j]."""
    if m.perm is None:
        return m
    return replace(m, perm=None, pre_scale=None if m.pre_scale is None else m.pre_scale[m.perm])


def unrotated(m: QuantizedMatrix) -> QuantizedMatrix:
    """Return a matrix for activations that come rotated: without :attr:`QuantizedMatrix.hadamard` and its signs."""
    return replace(m, hadamard=0, pre_scale=None) if m.hadamard else m


def gates_first(rows: int, heads: int) -> np.ndarray:
    """Return the order of rows that puts all gates before all queries.

    The rows of the projection are each head's queries, then its gates.
    """
    return np.arange(rows).reshape(heads, 2, -1)[:, ::-1].swapaxes(0, 1).reshape(-1)


def scattered(m: QuantizedMatrix, count: int) -> bool:
    """Return whether columns are in act-order, and features of a group are in several of ``count`` equal parts."""
    if m.perm is None:
        return False
    size = m.shape[1] // count
    together = size if m.group_size == -1 else m.group_size
    if size % together:
        return True
    parts = m.perm.reshape(-1, together) // size
    return bool((parts != parts[:, :1]).any())


def portion(m: QuantizedMatrix, i: int, count: int, axis: int) -> QuantizedMatrix:
    """Return one of ``count`` equal parts of a matrix: rows (axis 0), or columns (axis 1).

    The products of all parts of columns add up to the whole matrix's product.

    Raises:
        ValueError: rows or columns that share a scale or a bias would be divided, also in act-order.
    """
    if count == 1:
        return m
    size, rest = divmod(m.shape[axis], count)
    together = m.group_size if axis else m.block_n
    if together == -1:
        together = size  # a row's scale is that of all its parts
    if rest or size % together:
        raise ValueError(f"{m.shape[axis]} {('rows', 'columns')[axis]} in blocks of {together} are not {count} parts")
    if not axis:
        return rows_of(m, i * size, (i + 1) * size)
    if m.hadamard and size % m.hadamard:
        raise ValueError(f"{m.shape[axis]} columns that are rotated in blocks of {m.hadamard} are not {count} parts")
    if m.bias is not None:
        raise ValueError("columns with a bias are not divided")
    features, perm = slice(i * size, (i + 1) * size), None
    columns: slice | np.ndarray = features
    groups: slice | np.ndarray = slice(features.start // together, features.stop // together)
    if m.perm is not None:
        if scattered(m, count):
            raise ValueError("columns in act-order are not divided: a group has features of several parts")
        groups = np.flatnonzero(m.perm[::together] // size == i)
        columns = np.flatnonzero(m.perm // size == i)
        perm = m.perm[columns] - np.int32(i * size)

    def own(scales: np.ndarray) -> np.ndarray:
        return scales if m.group_size == -1 else scales[:, groups]

    return replace(
        m,
        codes=m.codes[:, columns],
        scales=own(m.scales),
        zero_points=None if m.zero_points is None else own(m.zero_points),
        pre_scale=None if m.pre_scale is None else m.pre_scale[features],
        perm=None if perm is None else perm_or_none(perm),
    )


def _below(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Join arrays along the first axis; a view without memory if all of them are views of one number."""
    first = arrays[0][:1, :1]
    if all(not any(array.strides) and array[:1, :1].tobytes() == first.tobytes() for array in arrays):
        return np.broadcast_to(first, (sum(map(len, arrays)), arrays[0].shape[1]))
    return np.concatenate(arrays)


def same_order(a: np.ndarray | None, b: np.ndarray | None) -> bool:
    """Return whether two act-order permutations are equal; None is the identity."""
    return a is b or (a is not None and b is not None and np.array_equal(a, b))


def perm_or_none(perm: np.ndarray) -> np.ndarray | None:
    """Return the permutation, or None when it is the identity."""
    return None if np.array_equal(perm, np.arange(len(perm))) else perm
