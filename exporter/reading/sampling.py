"""How a folder's generation_config.json, or its user, wants tokens chosen."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from quantmoe.exporter.errors import ModelError, OptionError


@dataclass(frozen=True)
class Sampling:
    """How to sample; the defaults are transformers'.

    Attributes:
        temperature: divides the logits; above 0.
        top_k: how many of the likeliest tokens are kept, and those that are as likely as the last of them; 0: all.
        top_p: of these the fewest that have this much probability together are kept.
        seed: of NumPy's PCG64; None takes one from the system.

    Raises:
        OptionError: a number outside its range.
    """

    temperature: float = 1.0
    top_k: int = 50
    top_p: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        for name, holds, expected in (
            ("temperature", 0 < self.temperature < np.inf, "a number above 0"),
            ("top_k", self.top_k >= 0, "a number from 0"),
            ("top_p", 0 < self.top_p <= 1, "a number above 0, at most 1"),
            ("seed", self.seed is None or self.seed >= 0, "a number from 0"),
        ):
            if not holds:
                raise OptionError(f"{name} is {getattr(self, name)}, expected {expected}")


def folder_sampling(
    folder: Path,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
) -> Sampling | None:
    """How to choose tokens: what is asked for, else what generation_config.json says, else transformers' defaults.

    Tokens are sampled if that file says ``do_sample``, as in transformers, or a number is asked for; a temperature of 0
    takes the likeliest.

    Returns:
        None for the likeliest.

    Raises:
        ModelError: the file is not what it should be.
        OptionError: a number outside its range.
    """
    path = folder / "generation_config.json"
    config = read_object(path)
    numbers = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    asked: dict[str, Any] = {name: value for name, value in numbers.items() if value is not None}
    if temperature == 0:
        Sampling(**{**asked, "temperature": 1.0})  # what is asked for beside it is checked all the same
        return None
    if not (asked or config.get("do_sample")):
        return None
    try:
        found = Sampling(**{name: config[name] for name in numbers if config.get(name) is not None})
    except (OptionError, TypeError) as error:
        raise ModelError(f"{path}: {error}") from None
    return replace(found, **asked, seed=seed)


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object's fields, {} where there is no such file.

    Raises:
        ModelError: it is no JSON object.
    """
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: {error}") from None
    if not isinstance(found, dict):
        raise ModelError(f"{path}: expected a JSON object")
    return found
