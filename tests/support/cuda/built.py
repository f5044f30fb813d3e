"""What tests of the CUDA library need: torch and the library, without which what imports this is skipped."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from quantmoe.custom_ops import cuda

torch = pytest.importorskip("torch")
try:
    cuda.library()
except FileNotFoundError:
    pytest.skip("no CUDA library was built (QUANTMOE_CUDA)", allow_module_level=True)

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
TORCH = {"f16": torch.float16, "bf16": torch.bfloat16}
SM80 = cuda.Device(80, 108, 167936)
NUMPY = {"f16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}
# Half an ulp. Roundings of layers to 16 bits: the activations between the GEMMs and the output, and in the wgmma path
# the weights and the experts' products. Each is uniform in half an ulp, at most u / sqrt(3) of the norm; f32 sums and
# the fast exponential are far below.
UNIT = {"f16": 2.0**-11, "bf16": 2.0**-8}
