"""QuantMoE: quantized mixture-of-experts models as ONNX."""
