"""The canonical matrix: what every checkpoint format decodes to and every packed layout is made from."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from quantmoe.custom_ops.schemes import SCHEMES

#: scale types by op.def name; scales stay in the dtype the checkpoint stores
SCALE_DTYPES = {
    "f32": np.dtype(np.float32),
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "e8m0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
}


@dataclass(frozen=True, eq=False)
class QuantizedMatrix:
    """One projection of one expert (N output features, K input features), losslessly as the checkpoint has it.

    ``w[n, perm[j]] = value(codes[n, j]) * scales[n // block_n, j // group_size] * global_scale``; value is the scheme's
    table, or code - zero_point.

    Attributes:
        kind: a ``format`` of op.def; says what a code means.
        codes: uint8 [N, K]; unsigned integer codes, or e2m1 / e4m3 bit patterns. uint16 for bf16 and f16.
        scales: [ceil(N / block_n), ceil(K / group_size)], one of SCALE_DTYPES, never re-rounded.
        group_size: input features that share a scale; -1 when one scale serves the whole row.
        block_n: output features that share a scale.
        zero_points: optional uint8, the shape of ``scales``; None means the midpoint (8 or 128).
        global_scale: optional multiplier, already inverted where the format stores the reciprocal.
        input_scale: optional static activation scale (a multiplier as well).
        pre_scale: optional f32 [K], multiplies the activations (AWQ's pre_quant_scale).
        bias: optional f32 [N].
        perm: optional int32 [K], act-order: column j of ``codes`` belongs to input feature perm[j].
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
        """Refuses what is no number: the one place that decides it, for every layout.

        It reads all codes, so packing asks, not the constructor: a matrix that is only read may hold anything.

        Raises:
            ValueError: ``what`` and what of it is NaN or infinite, or a global or input scale that is not positive.
        """
        for name, values in (("scales", self.scales), ("pre-scales", self.pre_scale), ("biases", self.bias)):
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
        """A per-group array [N / block_n, K / group_size] repeated to [N, K]."""
        n, k = self.shape
        rows = np.repeat(per_group, self.block_n, axis=0)[:n]
        return np.repeat(rows, k if self.group_size == -1 else self.group_size, axis=1)[:, :k]

    def dequantize(self, dtype: type = np.float64) -> np.ndarray:
        """The weights this matrix stands for: float64 or float32 [N, K], rounded once, columns by input feature."""
        if dtype != np.float64 and (self.global_scale is not None or self.pre_scale is not None):
            return self.dequantize().astype(dtype)  # more than one product
        w = self.values(dtype)
        w *= self.expand(self.scales.astype(dtype))
        if self.global_scale is not None:
            w *= self.global_scale
        if self.perm is not None:
            by_feature = np.empty_like(w)
            by_feature[:, self.perm] = w
            w = by_feature
        if self.pre_scale is not None:
            w = w * self.pre_scale.astype(np.float64)
        return w


def same_order(a: np.ndarray | None, b: np.ndarray | None) -> bool:
    """Whether two act-order permutations are the same; None is the identity."""
    return a is b or (a is not None and b is not None and np.array_equal(a, b))


def perm_or_none(perm: np.ndarray) -> np.ndarray | None:
    """The permutation, or None when it is the identity."""
    return None if np.array_equal(perm, np.arange(len(perm))) else perm
