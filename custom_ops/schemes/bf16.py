"""Unquantized: bfloat16 bit patterns, with scales of 1. Infinities are no weights, as NaN is none."""

import ml_dtypes
import numpy as np

from quantmoe.custom_ops.schemes.base import Scheme

with np.errstate(invalid="ignore"):  # the NaNs
    _TABLE = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float64)
_TABLE[~np.isfinite(_TABLE)] = np.nan
SCHEME = Scheme(bits=16, table=_TABLE, integer=False, group_size=-1, scale_type="f32", float_only=True)
