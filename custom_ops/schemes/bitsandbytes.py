"""bitsandbytes' 4-bit codes: places in a table of floats, which the f32 scale of a block multiplies.

The tables are in its functional.py (get_4bit_type) and in its kernels, as float32.
"""

import numpy as np

from quantmoe.custom_ops.schemes.base import Scheme

_BITS = (0xBF800000, 0xBF3239B1, 0xBF066B30, 0xBECA32A0, 0xBE91A24D, 0xBE3D353F, 0xBDBA7871, 0x00000000,
         0x3DA2FAFF, 0x3E24CAE3, 0x3E7C04DD, 0x3EAD033A, 0x3EE1A4B8, 0x3F1007AB, 0x3F3913B3, 0x3F800000)  # fmt: skip
_POSITIVE = np.array([0, 1 / 192, 2 / 3, 1, 1 / 3, 1 / 2, 1 / 6, 1 / 4], np.float32).astype(np.float64)


def _scheme(table: np.ndarray) -> Scheme:
    return Scheme(bits=4, table=table, integer=False, group_size=64, scale_type="f32", float_only=True, own_scales=True)


NF4 = _scheme(np.array(_BITS, np.uint32).view(np.float32).astype(np.float64))
FP4 = _scheme(np.concatenate([_POSITIVE, -_POSITIVE]))
