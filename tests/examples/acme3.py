"""CONTRIBUTING.md's weight scheme: signed 3-bit integers."""

import numpy as np

from quantmoe.custom_ops.schemes.base import Scheme

SCHEME = Scheme(bits=3, table=np.arange(8.0) - 4, integer=True, group_size=64, scale_type="f16")
