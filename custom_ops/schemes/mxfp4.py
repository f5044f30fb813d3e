"""e2m1 codes with a power of two for every 32 (OCP Microscaling Formats v1.0, tables 5 and 7)."""

import numpy as np

from quantmoe.custom_ops.schemes.base import Scheme

_POSITIVE = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E2M1 = np.concatenate([_POSITIVE, -_POSITIVE])
SCHEME = Scheme(bits=4, table=E2M1, integer=False, group_size=32, scale_type="e8m0")
