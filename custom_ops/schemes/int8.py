"""Signed 8-bit integers, stored with 128 added; or unsigned ones with a zero point."""

import numpy as np

from quantmoe.custom_ops.schemes.base import Scheme

SCHEME = Scheme(bits=8, table=np.arange(256.0) - 128, integer=True, group_size=-1, scale_type="bf16")
