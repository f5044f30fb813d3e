"""transformers' architecture as an ONNX graph whose weights are placeholders."""
