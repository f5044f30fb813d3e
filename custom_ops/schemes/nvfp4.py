"""e2m1 codes with an e4m3 scale for every 16, and one f32 multiplier a matrix (QuantizedMatrix.global_scale)."""

from quantmoe.custom_ops.schemes.base import Scheme
from quantmoe.custom_ops.schemes.mxfp4 import E2M1

SCHEME = Scheme(bits=4, table=E2M1, integer=False, group_size=16, scale_type="e4m3")
