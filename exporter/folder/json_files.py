"""JSON files of a model's folder, and what config.json says of its text model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantmoe.exporter.errors import ModelError


def is_there(path: Path) -> bool:
    """Return whether a file is there.

    Raises:
        ModelError: it is a link that leads to no file, as an interrupted download leaves one.
    """
    if path.is_symlink() and not path.exists():
        raise ModelError(f"{path}: links to {path.readlink()}, which is not there; fetch or copy the file again")
    return path.is_file()


def read_object(path: Path) -> dict[str, Any]:
    """Return the fields of a JSON object, {} if there is no such file.

    Raises:
        ModelError: it is no JSON object.
    """
    if not is_there(path):
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: {error}") from None
    if not isinstance(found, dict):
        raise ModelError(f"{path}: expected a JSON object")
    return found


def language_part(config: Mapping[str, Any]) -> Any:
    """Return the language model's part of a configuration: of a model that also speaks, its thinker's."""
    thinker = config.get("thinker_config")
    config = thinker if isinstance(thinker, dict) else config
    return config.get("text_config") or config.get("llm_config") or config


def vocabulary_of(config: Mapping[str, Any]) -> int | None:
    """Return how many tokens a config.json says that there are; None: it does not say so."""
    text = language_part(config)
    found = (text if isinstance(text, dict) else config).get("vocab_size")
    return found if type(found) is int and found > 0 else None
