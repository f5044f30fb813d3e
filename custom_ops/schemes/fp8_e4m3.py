"""e4m3 without infinities (OCP 8-bit floating point v1.0): code 0x7f and 0xff are NaN."""

import ml_dtypes
import numpy as np

from quantmoe.custom_ops.schemes.base import Scheme

_TABLE = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
SCHEME = Scheme(bits=8, table=_TABLE, integer=False, group_size=-1, scale_type="f32", float_only=True)
