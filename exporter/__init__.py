"""The commands: checkpoints in (``reading``), ONNX folders out (``writing``, ``folder``), and answers from them."""
