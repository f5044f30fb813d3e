"""Passes over transformers' modules and over the traced graph (onnx_ir). graph/trace.py and writing/parts.py run them,
in their order."""
