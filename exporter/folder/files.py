"""Names of the files of an exported folder, beside the tokenizer's and the checkpoint's own."""

from __future__ import annotations

import re
from pathlib import Path

MODEL, DATA = "model.onnx", "model.onnx.data"
#: what drafts for it, with weights in the same files
MTP_MODEL = "mtp.onnx"
#: what makes its inputs of images and tokens, with weights in the same files
VISION_MODEL, EMBEDDINGS_MODEL = "vision.onnx", "embeddings.onnx"
#: what onnxruntime-genai reads, and how images become patches
GENAI, PROCESSOR = "genai_config.json", "vision_processor.json"
_WEIGHTS = re.compile(r"model\.onnx\.data(\.\d+)?(\.partial)?")
_RANK = re.compile(r"rank(0|[1-9][0-9]*)")


def is_weights(name: str) -> bool:
    """Return whether a file of the name has weights of an export, also while it is written."""
    return _WEIGHTS.fullmatch(name) is not None


def weight_files(folder: Path) -> set[str]:
    """Return the names of files in the folder that an export may write weights to."""
    return {path.name for path in folder.glob(f"{DATA}*") if is_weights(path.name)}


def ranks_in(folder: Path) -> dict[int, Path]:
    """Return each rank, and the folder in this one that has its model."""
    found = ((_RANK.fullmatch(path.name), path) for path in folder.glob("rank*") if (path / MODEL).is_file())
    return dict(sorted((int(match[1]), path) for match, path in found if match))
