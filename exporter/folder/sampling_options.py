"""Sampling options, from a folder's generation_config.json or from the user."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import numpy as np

from quantmoe.exporter.errors import ModelError, OptionError
from quantmoe.exporter.folder.files import CONFIG, GENERATION_CONFIG
from quantmoe.exporter.folder.json_files import read_object, vocabulary_of


def _finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond the largest float
        return False


def _whole(least: int) -> tuple[type, Callable[[Any], bool], str]:
    return Integral, lambda value: value >= least, f"an integer from {least}"


#: fields of Sampling that are numbers: their type, whether a number is in range, and what is expected
_NUMBERS: dict[str, tuple[type, Callable[[Any], bool], str]] = {
    "temperature": (Real, lambda value: value >= 0 and _finite(value), "a number from 0"),
    "top_k": _whole(0),
    "top_p": (Real, lambda value: 0 < value <= 1, "a number above 0, at most 1"),
    "seed": _whole(0),
    "min_p": (Real, lambda value: 0 <= value <= 1, "a number from 0 to 1"),
    "repetition_penalty": (Real, lambda value: value > 0 and _finite(value), "a number above 0"),
    "presence_penalty": (Real, _finite, "a number"),
    "frequency_penalty": (Real, _finite, "a number"),
    "no_repeat_ngram_size": _whole(0),
}
#: those of them that only choosing at random has
_RANDOM = ("temperature", "top_k", "top_p", "min_p")
#: fields of generation_config.json that change transformers' tokens and are not applied, with what leaves tokens alone
_NOT_APPLIED: dict[str, Any] = {
    "bad_words_ids": None,
    "begin_suppress_tokens": None,
    "dola_layers": None,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1,
    "exponential_decay_length_penalty": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "guidance_scale": 1,
    "min_length": 0,
    "min_new_tokens": 0,
    "num_beams": 1,
    "penalty_alpha": 0,
    "stop_strings": None,
    "watermarking_config": None,
}
#: the same of sampling
_NOT_SAMPLED: dict[str, Any] = {"epsilon_cutoff": 0, "eta_cutoff": 0, "top_h": None, "typical_p": 1}


@dataclass(frozen=True)
class Sampling:
    """Options for choosing tokens, with transformers' defaults.

    ``quantmoe generate``, ``quantmoe serve`` and ``Chat`` of each language read generation_config.json. An option
    replaces the file's value. ``Generator`` and programs of token ids do not read the file, and take the likeliest
    token. Sampling is on if the file has ``do_sample``, or if temperature, top_k, top_p or min_p is given. Fields of
    the file that change transformers' tokens and are not here, as ``num_beams``, are not applied. ``generate`` names
    them once on standard error.

    A token goes through the attributes in this order, which is transformers'. Those up to ``no_repeat_ngram_size``
    also apply without sampling. On a GPU with CUDA graphs a kernel does all of this, with equal random numbers. The
    host does it with draft tokens, with ``logits=True`` and in ranks of a launcher.

    Attributes:
        logit_bias: token id -> number added to its logit; -inf: the token never occurs. In the file it is
            ``sequence_bias`` of single tokens, and ``suppress_tokens``.
        repetition_penalty: divides the logit of each token of prompt and answer; multiplies a negative logit.
        presence_penalty: subtracted from the logit of each token of the answer. transformers has no such option.
        frequency_penalty: subtracted as often as the token occurs in the answer. transformers has no such option.
        no_repeat_ngram_size: number of tokens in a row that never occur twice in prompt and answer; 0: any may.
        temperature: divides the logits; 0 takes the likeliest token and turns sampling off.
        top_k: keeps the likeliest tokens, and tokens as likely as the last of them; 0: all.
        top_p: keeps the fewest of these tokens whose probabilities sum up to ``top_p``.
        min_p: keeps the tokens that are at least ``min_p`` times as likely as the likeliest; 0: all.
        seed: seed of NumPy's PCG64; None takes one from the system.

    Raises:
        OptionError: a value of another type, or outside its range.
    """

    temperature: float = 1.0
    top_k: int = 50
    top_p: float = 1.0
    _: KW_ONLY
    seed: int | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram_size: int = 0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for name, (_, holds, expected) in _NUMBERS.items():
            value = getattr(self, name)
            if name == "seed" and value is None:
                continue
            _check_type(name, value)
            if not holds(value):
                raise OptionError(f"{name} is {value}, expected {expected}")
        bias = self.logit_bias
        if not isinstance(bias, Mapping) or not all(
            _is(Integral, id) and id >= 0 and _is(Real, by) and (by == -np.inf or _finite(by))
            for id, by in bias.items()
        ):
            raise OptionError(f"logit_bias is {bias!r}, expected token ids and what is added to the logit of each")

    @property
    def changes_logits(self) -> bool:
        """Return whether it changes logits before a token is chosen."""
        return Sampling(self.temperature, self.top_k, self.top_p, seed=self.seed, min_p=self.min_p) != self


def _is(kind: type, value: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _check_type(name: str, value: Any) -> None:
    kind, _, expected = _NUMBERS[name]
    if not _is(kind, value):
        raise OptionError(f"{name} is {value!r}, expected {expected}")


def folder_sampling(folder: Path, **asked: Any) -> Sampling | None:
    """Return how to choose tokens: :func:`sampling_of` of the folder's files.

    Args:
        asked: fields of Sampling; None leaves one to the file.

    Raises:
        ModelError: the file is not what it should be.
        OptionError: a number outside its range.
    """
    path = folder / GENERATION_CONFIG
    return sampling_of(read_object(path), path, vocabulary_of(read_object(folder / CONFIG)), **asked)


def sampling_of(
    config: Mapping[str, Any],
    path: Path = Path(GENERATION_CONFIG),
    vocabulary: int | None = None,
    **asked: Any,
) -> Sampling | None:
    """Return how to choose tokens: as asked for, else as generation_config.json says, else by transformers' defaults.

    Tokens are sampled if that file says ``do_sample``, as in transformers, or if a number of sampling is asked for. A
    temperature of 0 takes the likeliest. Penalties are applied either way.

    Args:
        config: the file's object. path: the file, for errors. vocabulary: how many tokens there are, if that is known.
        asked: fields of Sampling; None leaves one to the file.

    Returns:
        None for the likeliest without penalties.

    Raises:
        ModelError: a field is not what it should be.
        OptionError: a number outside its range.
    """
    asked = {name: value for name, value in asked.items() if value is not None}
    Sampling(**asked)  # what is asked for is checked even where it has no effect
    samples = config.get("do_sample") or False
    if not isinstance(samples, bool):
        raise ModelError(f"{path}: do_sample is {samples!r}, expected true or false")
    samples = asked["temperature"] > 0 if "temperature" in asked else samples or any(name in asked for name in _RANDOM)
    given = {name: config[name] for name in _NUMBERS if name != "seed" and config.get(name) is not None}
    try:
        for name, value in given.items():
            _check_type(name, value)
        bias = {token: number for tokens, number in _bias(config, vocabulary) if len(tokens) == 1 for token in tokens}
        if not samples:
            given = {name: value for name, value in given.items() if name not in _RANDOM} | {"temperature": 0}
        found = replace(Sampling(**given, logit_bias=bias), **asked)
    except OptionError as error:
        raise ModelError(f"{path}: {error}") from None
    return found if samples or found.changes_logits else None


def not_applied(folder: Path) -> list[str]:
    """Return fields of generation_config.json that change transformers' tokens and are not applied.

    Raises:
        ModelError: the file is not what it should be.
    """
    config = read_object(folder / GENERATION_CONFIG)
    neutral = _NOT_APPLIED | (_NOT_SAMPLED if config.get("do_sample") else {})
    found = [name for name, value in neutral.items() if config.get(name) not in (None, [], value)]
    return found + ["sequence_bias"] * any(len(tokens) > 1 for tokens, _ in _bias(config))


def _bias(config: Mapping[str, Any], vocabulary: int | None = None) -> list[tuple[list[int], float]]:
    """Token ids and what is added to the logit of the last after the others; -inf: it never comes."""
    most, ids = sys.maxsize, "token ids"
    if vocabulary is not None:
        most, ids = vocabulary, f"token ids from 0 to {vocabulary - 1}"

    def known(tokens: Any) -> bool:
        return isinstance(tokens, list) and all(_is(Integral, id) and 0 <= id < most for id in tokens)

    def whole(entry: Any) -> bool:
        if not (isinstance(entry, list) and len(entry) == 2 and entry[0] and known(entry[0])):
            return False
        return _is(Real, entry[1]) and (entry[1] == -np.inf or _finite(entry[1]))

    bias, suppressed = (config.get(name) or [] for name in ("sequence_bias", "suppress_tokens"))
    if not isinstance(bias, list) or not all(map(whole, bias)):
        raise OptionError(f"sequence_bias is {bias!r}, expected a list of [{ids}, number]")
    if not known(suppressed):
        raise OptionError(f"suppress_tokens is {suppressed!r}, expected a list of {ids}")
    return [(tokens, float(number)) for tokens, number in bias] + [([id], -np.inf) for id in suppressed]
