"""QuantMoE: quantized mixture-of-experts models as ONNX."""

from typing import TYPE_CHECKING, Any

from quantmoe.ort_ext import cuda_library_path as ort_cuda_library_path
from quantmoe.ort_ext import library_path as ort_library_path
from quantmoe.trt_plugins import library_path as trt_library_path

if TYPE_CHECKING:
    from quantmoe.exporter.convert import export

__all__ = ["export", "ort_cuda_library_path", "ort_library_path", "trt_library_path"]


def __getattr__(name: str) -> Any:
    if name == "export":  # torch and transformers are needed to export, not to run
        from quantmoe.exporter.convert import export

        return export
    raise AttributeError(f"module 'quantmoe' has no attribute {name!r}")
