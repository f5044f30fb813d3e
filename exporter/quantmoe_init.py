"""QuantMoE: quantized mixture-of-experts models as ONNX."""

from quantmoe.ort_ext import library_path as ort_library_path

__all__ = ["ort_library_path"]
