"""What the commands refuse with: here alone, so that the command line can catch it and import nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class OptionError(ValueError):
    """An option that does not exist, or not with the others."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be read as what it says it is; the message names file, tensor, found and expected."""


class ModelError(ValueError):
    """An exported model that is not what it says it is; the message names file, tensor, found and expected."""


class ContextError(ModelError):
    """A prompt that does not fit into the model's context."""


def need_path(name: str, value: Any) -> Path:
    """Return an argument that is a path.

    Raises:
        OptionError: it is something else.
    """
    try:
        return Path(value)
    except TypeError:
        raise OptionError(f"{name} is {value!r}, expected a path") from None
