"""The ONNX Runtime custom-op libraries."""

from __future__ import annotations

import os
from importlib.resources import files


def library_path() -> str:
    """Path of ``libquantmoe_ort.so``, for ``SessionOptions.register_custom_ops_library``."""
    return str(files(__name__) / "libquantmoe_ort.so")


def cuda_library_path() -> str:
    """Path of ``libquantmoe_ort_cuda.so``, the operator for the CUDA execution provider.

    QUANTMOE_ORT_CUDA_LIBRARY names another build of it.

    Raises:
        FileNotFoundError: this installation was made without CUDA.
    """
    path = os.environ.get("QUANTMOE_ORT_CUDA_LIBRARY") or str(files(__name__) / "libquantmoe_ort_cuda.so")
    if not os.path.exists(path):
        raise FileNotFoundError(
            f"{path}: quantmoe was installed without CUDA; build it with QUANTMOE_CUDA=ON (make cuda)"
        )
    return path
