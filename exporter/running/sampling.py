"""Choosing a token at random, as transformers does: temperature, then top-k, then top-p."""

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


def probabilities(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Probabilities f64 [vocabulary] of the tokens that are kept, 0 of the others.

    Args:
        logits: [vocabulary], finite.
    """
    scores = logits.astype(np.float64) / sampling.temperature
    if 0 < sampling.top_k < len(scores):
        scores[scores < np.partition(scores, -sampling.top_k)[-sampling.top_k]] = -np.inf
    found = np.exp(scores - scores.max())
    found /= found.sum()
    if sampling.top_p < 1:
        order = np.argsort(found, kind="stable")  # ascending: what is left of a token is less likely
        removed = np.cumsum(found[order]) <= 1 - sampling.top_p
        removed[-1] = False
        found[order[removed]] = 0
        found /= found.sum()
    return found


class Sampler:
    """Chooses token after token; the same seed and logits give the same tokens. None: the likeliest."""

    def __init__(self, sampling: Sampling | None = None):
        self.sampling = sampling
        self._random = np.random.Generator(np.random.PCG64(sampling.seed if sampling else None))

    def __call__(self, logits: np.ndarray) -> int:
        """A token id, from finite logits [vocabulary]."""
        if self.sampling is None:
            return int(logits.argmax())
        total = np.cumsum(probabilities(logits, self.sampling))
        return int(np.searchsorted(total, self._random.random() * total[-1], side="right"))


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
        found = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: {error}") from None
    if not isinstance(found, dict):
        raise ModelError(f"{path}: expected a JSON object")
    return found
