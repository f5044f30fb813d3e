"""The hashes that tie the files of one export together. The metadata of the model and of its tensors has them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blake3 import blake3

from quantmoe.exporter.errors import ModelError
from quantmoe.exporter.folder.metadata import FILES

#: of a hash: what is before the colon
HASH = "blake3"


def new_hash() -> blake3:
    return blake3()


def file_hash(path: Path) -> str:
    """Return a file's hash as models record it."""
    return f"{HASH}:{new_hash().update_mmap(path).hexdigest()}"


def is_recorded(metadata: Mapping[str, str], name: str) -> bool:
    """Return whether a model's export wrote a file of the name with it, as the model's metadata says."""
    return _stated(metadata, name) is not None


def _stated(metadata: Mapping[str, str], name: str) -> Any:
    """Return the recorded hash of a file; None: there is none."""
    try:
        return json.loads(metadata.get(FILES, "{}"))[name]
    except (ValueError, RecursionError, KeyError, TypeError):
        return None


def check_recorded(model: Path, metadata: Mapping[str, str], path: Path) -> None:
    """Refuse a file that a model's export did not write with it, as the model's metadata says.

    Raises:
        ModelError: it is of another export, was altered, or is missing.
    """
    stated = _stated(metadata, path.name)
    if not path.is_file():
        raise ModelError(f"{path}: is missing, and {model.name} was exported with it: copy the whole folder")
    if stated != file_hash(path):
        raise ModelError(
            f"{path}: is not the one that {model.name} was exported with: put both of one export there, as a whole "
            "folder"
        )
