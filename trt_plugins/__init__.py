"""The TensorRT plug-in library."""

from __future__ import annotations

import os
from importlib.resources import files


def library_path() -> str:
    """Path of ``libquantmoe_trt.so``, for TensorRT's plug-in registry, trtexec and ONNX Runtime's TensorRT EP.

    QUANTMOE_TRT_LIBRARY names another build of it.

    Raises:
        FileNotFoundError: this installation was made without CUDA.
    """
    path = os.environ.get("QUANTMOE_TRT_LIBRARY") or str(files(__name__) / "libquantmoe_trt.so")
    if not os.path.exists(path):
        raise FileNotFoundError(
            f"{path}: quantmoe was installed without CUDA; build it with QUANTMOE_CUDA=ON (make cuda)"
        )
    return path
