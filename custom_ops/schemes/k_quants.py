"""ggml's q4_k, q5_k and q6_k: integers with two levels of scales for 256 (block_q4_K and so on of ggml-common.h).

q4_k and q5_k have minima beside their scales, which are subtracted: matrix.py's ``levels``.
src/quantize/k_quants.h quantizes to them.
"""

import numpy as np

from quantmoe.custom_ops.schemes.base import Scheme

Q4_K = Scheme(bits=4, table=np.arange(16.0), integer=False, group_size=256, scale_type="k32")
Q5_K = Scheme(bits=5, table=np.arange(32.0), integer=False, group_size=256, scale_type="k32")
Q6_K = Scheme(bits=6, table=np.arange(64.0) - 32, integer=False, group_size=256, scale_type="k16")
