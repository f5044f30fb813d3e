"""Signed 4-bit integers, stored with 8 added; or unsigned ones with a zero point."""

import numpy as np

from quantmoe.custom_ops.schemes.base import Scheme

SCHEME = Scheme(bits=4, table=np.arange(16.0) - 8, integer=True, group_size=128, scale_type="bf16")
