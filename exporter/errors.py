"""Exceptions of the commands, in a module of their own: the command line catches them and imports nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class OptionError(ValueError):
    """An option or argument that does not exist, has a wrong value, or cannot be combined with another."""


class CheckpointError(ValueError):
    """A checkpoint that is damaged or not supported; the message names file, tensor, found and expected."""


class ModelError(ValueError):
    """An exported model that is damaged or cannot do what is asked; the message names file, found and expected."""


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
