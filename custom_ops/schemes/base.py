"""A weight scheme: what the codes of a ``format`` of op.def mean, and how weights are brought into it."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np

SMALLEST_E8M0 = np.array(2.0**-127, ml_dtypes.float8_e8m0fnu)


@dataclass(frozen=True, eq=False, kw_only=True)
class Scheme:
    """A table of code values, scaled by groups of input features.

    Attributes:
        bits: width of a code.
        table: float64 [2 ** bits], value of each code before scaling; NaN for codes that are not numbers.
        integer: whether the codes may have zero points.
        group_size, scale_type: what checkpoints of this scheme usually have.
        float_only: whether kernels multiply the codes by floats only: they are floats, places in a table of floats, or
            unsigned bytes. Then activations are not rounded to int8 for them.
        own_scales: whether scales have ``scale_type`` and no other type.
    """

    bits: int
    table: np.ndarray
    integer: bool
    group_size: int
    scale_type: str
    float_only: bool = False
    own_scales: bool = False

    @property
    def zero(self) -> int:
        """The code of value zero, which pads packed layouts."""
        return int(np.flatnonzero(self.table == 0)[0])

    def quantize(self, w: np.ndarray, group_size: int, scale_dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
        """Round w [N, K] to codes uint8 [N, K] and scales [N, ceil(K / group_size)], without zero points.

        The scale brings the largest magnitude of a group to the largest value that the table has with either sign.
        """
        n, k = w.shape
        g = k if group_size == -1 else group_size
        padded = np.zeros((n, -(-k // g) * g))
        padded[:, :k] = w
        groups = padded.reshape(n, -1, g)
        reach = min(np.nanmax(self.table), -np.nanmin(self.table))
        exact = np.abs(groups).max(2) / reach
        if scale_dtype == SMALLEST_E8M0.dtype:  # it has no zero
            exact = np.maximum(exact, float(SMALLEST_E8M0))
        scales = exact.astype(scale_dtype)
        divisor = scales.astype(np.float64)[..., None]
        order = np.argsort(self.table)[: np.isfinite(self.table).sum()]
        values = self.table[order]
        middles = (values[1:] + values[:-1]) / 2
        with np.errstate(divide="ignore", invalid="ignore"):
            scaled = np.where(divisor > 0, groups / divisor, 0)
        codes = order[np.searchsorted(middles, scaled)].astype(np.uint8)
        return codes.reshape(n, -1)[:, :k], scales

    def error_bound(self, scales: np.ndarray) -> np.ndarray:
        """Return the largest |w - dequantized w| that :meth:`quantize` may leave in each group.

        It is half the widest gap of the table, and what the rounding of the scale moves or clips. The rounding is at
        most half an ulp of its type, a binade for e8m0. A scale that is too small for the type rounds to zero.
        """
        values = np.sort(self.table[np.isfinite(self.table)])
        reach = min(values[-1], -values[0])
        ulp = {1: 1.0 if scales.dtype == SMALLEST_E8M0.dtype else 2.0**-4, 2: 2.0**-8, 4: 2.0**-23}
        wide = scales.astype(np.float64)
        least = 0.0 if scales.dtype == SMALLEST_E8M0.dtype else float(ml_dtypes.finfo(scales.dtype).smallest_subnormal)
        return wide * np.diff(values).max() / 2 + reach * np.maximum(wide * ulp[scales.dtype.itemsize], least / 2)
