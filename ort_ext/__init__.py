"""The ONNX Runtime custom-op library."""

from __future__ import annotations

from importlib.resources import files


def library_path() -> str:
    """Path of ``libquantmoe_ort.so``, for ``SessionOptions.register_custom_ops_library``."""
    return str(files(__name__) / "libquantmoe_ort.so")
