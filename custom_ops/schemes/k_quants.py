"""ggml's integers with minima, or with two levels of scales for 256 weights (block_q4_K and so on of ggml-common.h).

All except q6_k have minima beside their scales, which are subtracted: matrix.py's ``levels``. src/quantize/k_quants.h
quantizes to q4_k, q5_k and q6_k.
"""

import numpy as np

from quantmoe.custom_ops.schemes.base import Scheme

Q4_K = Scheme(bits=4, table=np.arange(16.0), integer=False, group_size=256, scale_type="k32")
Q5_K = Scheme(bits=5, table=np.arange(32.0), integer=False, group_size=256, scale_type="k32")
Q6_K = Scheme(bits=6, table=np.arange(64.0) - 32, integer=False, group_size=256, scale_type="k16")
Q2_K = Scheme(bits=2, table=np.arange(4.0), integer=False, group_size=256, scale_type="k16_minima")
Q4_1 = Scheme(bits=4, table=np.arange(16.0), integer=False, group_size=32, scale_type="f16_minima")
#: no ggml type: MLX's and HQQ's codes of 6 and 8 bits
Q8_MIN = Scheme(bits=8, table=np.arange(256.0), integer=False, group_size=64, scale_type="f32_minima", float_only=True)
Q5_1 = Scheme(bits=5, table=np.arange(32.0), integer=False, group_size=32, scale_type="f16_minima")
