"""Integers of 2, 3, 5 and 6 bits, stored with half of their range added; or unsigned ones with a zero point.

They lie in planes of 4, 2 and 1 bits (FORMAT.md 2.10).
"""

import numpy as np

from quantmoe.custom_ops.schemes.base import Scheme


def _scheme(bits: int) -> Scheme:
    table = np.arange(2.0**bits) - 2 ** (bits - 1)
    return Scheme(bits=bits, table=table, integer=True, group_size=128, scale_type="f16")


INT2, INT3, INT5, INT6 = (_scheme(bits) for bits in (2, 3, 5, 6))
