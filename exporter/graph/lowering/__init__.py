"""The traced graph in its final form: its weights, caches in blocks, operators that ONNX Runtime has itself."""
