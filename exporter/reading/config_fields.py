"""Fields of transformers' configuration, config.json."""

import contextlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import regex

from quantmoe.exporter.errors import CheckpointError
from quantmoe.exporter.folder.json_files import language_part
from quantmoe.exporter.reading.families import family_named

#: of anything that config.json counts
MAX_SIZE = 1 << 24


def text_part(config: Mapping[str, Any]) -> Any:
    """Return the language model's part of a configuration, with its family's fields under their usual names."""
    found = language_part(config)
    fields = family_named(found.get("model_type")).fields if isinstance(found, dict) else None
    return {**found, **fields(found)} if fields else found


@contextlib.contextmanager
def reading(where: str) -> Iterator[None]:
    """Make what fields of another type, or infinite numbers, raise a CheckpointError: ``where`` and the reason."""
    try:
        yield
    except CheckpointError:
        raise
    except (ArithmeticError, ValueError, TypeError, AttributeError, LookupError, regex.error) as error:
        raise CheckpointError(f"{where}: {error}") from error


def check_sizes(folder: Path, config: dict[str, Any]) -> None:
    """Refuse sizes that would take hours or terabytes to build a model of."""
    for key, value in config.items():
        limit = 1 << 16 if key == "num_labels" else MAX_SIZE  # transformers names every label
        if re.search("(size|dim|heads|experts|layers|rank|labels)$", key) and type(value) is int and value > limit:
            raise CheckpointError(f"{folder / 'config.json'}: {key} is {value}, expected at most {limit}")
