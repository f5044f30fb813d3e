"""Names of the files of an exported folder, beside the tokenizer's and the checkpoint's own."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from quantmoe.ort_ext import LIBRARIES

#: the checkpoint's own files, which an exported folder has copies of
CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
TOKENIZER, TOKENIZER_CONFIG, SPECIAL_TOKENS = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"
CHAT_TEMPLATE = "chat_template.jinja"
MODEL, DATA = "model.onnx", "model.onnx.data"
#: what drafts for it, with weights in the same files
MTP_MODEL = "mtp.onnx"
#: what makes its inputs of images and tokens, with weights in the same files
VISION_MODEL, EMBEDDINGS_MODEL = "vision.onnx", "embeddings.onnx"
#: what onnxruntime-genai reads, and how images become patches
GENAI, PROCESSOR = "genai_config.json", "vision_processor.json"
README = "README.md"
#: while ``export`` runs: what a calibration text has given so far, and a folder of the new files
CALIBRATION, STAGE = "quantmoe.calibration", "quantmoe.partial"
#: a folder in the folder, from which transformers.js loads, and its first file of weights
JS_FOLDER, JS_WEIGHTS = "onnx", "model.onnx_data"
#: begins the name of a folder in the folder, with the model of a rank
RANK_FOLDER = "rank"


class File(NamedTuple):
    """A row of docs/reference/exported-folder.md."""

    names: tuple[str, ...]
    content: str
    written: str


FILES = (
    File((MODEL,), "the graph and its [metadata](#metadata)", "always"),
    File(
        (DATA, f"{DATA}.1", f"{DATA}.2"),
        "weights; a new file begins at `--max-file-size`",
        "always",
    ),
    File((README,), "what runs the folder, and which files are missing, with the reason", "always"),
    File(
        (CONFIG, GENERATION_CONFIG, TOKENIZER_CONFIG, CHAT_TEMPLATE, "LICENSE"),
        "copies, also of other licence files",
        "if the checkpoint has them",
    ),
    File((TOKENIZER,), "the [tokenizer](#the-tokenizer)", "if it can give transformers' tokens"),
    File(
        (GENAI,),
        "for [onnxruntime-genai](../guides/genai.md)",
        "if onnxruntime-genai [can run the model](onnxruntime-genai.md)",
    ),
    File(
        tuple(LIBRARIES.values()),
        "the library, for the architecture that exported; the second one with `--target cuda`",
        "if the installation has it",
    ),
    File((MTP_MODEL,), "the layer that [drafts tokens](../guides/draft-tokens.md)", "with `--mtp` or `--eagle3`"),
    File(
        (VISION_MODEL, EMBEDDINGS_MODEL, PROCESSOR),
        "the [vision tower](../guides/vision.md)",
        "with `--vision`",
    ),
    File((f"{RANK_FOLDER}0/", f"{RANK_FOLDER}1/"), "a folder for [each rank](slices.md)", "with `--tensor-parallel`"),
    File((f"{JS_FOLDER}/",), "for [transformers.js](../guides/javascript.md)", "with `--browser`"),
    File((CALIBRATION,), "what `--calibrate` has read, to go on from there", "until the export is done"),
    File((STAGE,), "a folder of new files that are not complete", "until the export is done"),
)

#: how a file begins that Git LFS did not fetch
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
#: of a model on the hub, or its page as Path has it
_HUB_NAME = re.compile(r"(https?:/huggingface\.co/)?([\w-][\w.-]*/[\w-][\w.-]*)(/.*)?")
_WEIGHTS = re.compile(r"model\.onnx\.data(\.\d+)?(\.partial)?")
_RANK = re.compile(rf"{RANK_FOLDER}(0|[1-9][0-9]*)")


def is_weights(name: str) -> bool:
    """Return whether a file of the name has weights of an export, also while it is written."""
    return _WEIGHTS.fullmatch(name) is not None


def weight_files(folder: Path) -> set[str]:
    """Return the names of files in the folder that an export may write weights to."""
    return {path.name for path in folder.glob(f"{DATA}*") if is_weights(path.name)}


def rank_folder(folder: Path, rank: int) -> Path:
    """Return the folder in an export by slices that has a rank's model."""
    return folder / f"{RANK_FOLDER}{rank}"


def ranks_in(folder: Path) -> dict[int, Path]:
    """Return each rank, and the folder in this one that has its model."""
    found = ((_RANK.fullmatch(path.name), path) for path in folder.glob(f"{RANK_FOLDER}*") if (path / MODEL).is_file())
    return dict(sorted((int(match[1]), path) for match, path in found if match))


def is_plain(name: str) -> bool:
    """Return whether a name in a stranger's file names a file in its own folder, on every system."""
    return name not in ("", ".", "..") and not any(mark in name for mark in "/\\\0")


def hub_name(path: Path) -> str | None:
    """Return ORG/MODEL where a path that does not exist is a model's name or page on the Hugging Face hub."""
    name = _HUB_NAME.fullmatch(str(path))
    return name[2] if name and (name[1] or not path.parent.exists()) else None
