"""Passes over the traced graph (onnx_ir), in the order convert.py runs them."""
