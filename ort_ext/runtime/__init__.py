"""An exported folder on ONNX Runtime: caches, drafts, text."""
