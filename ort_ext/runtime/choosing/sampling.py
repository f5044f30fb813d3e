"""Choosing a token as transformers does: bias and penalties of logits, then temperature, top-k, top-p, min-p."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from quantmoe.exporter.errors import OptionError
from quantmoe.exporter.folder.sampling_options import Sampling

#: the error where all logits are -inf
NOTHING_LEFT = "logit_bias and no_repeat_ngram_size leave no token to choose; expected at least one"
#: finite logits [vocabulary] -> a token id
Choose = Callable[[np.ndarray], int]


def largest(values: np.ndarray, count: int) -> np.ndarray:
    """Return ids, ascending, of the ``count`` largest of values [vocabulary], and of those equal to the smallest of
    them."""
    if count >= len(values):
        return np.arange(len(values))
    block = max(len(values) // 1024, 1)
    whole = len(values) // block
    if count <= whole:  # so many blocks have one at least as large as the count-th largest maximum
        maxima = values[: whole * block].reshape(whole, block).max(1)
        ids = np.flatnonzero(values >= np.partition(maxima, -count)[-count])
    else:
        ids = np.arange(len(values))
    found = values[ids]
    return ids[found >= np.partition(found, -count)[-count]]


def probabilities(logits: np.ndarray, sampling: Sampling) -> tuple[np.ndarray, np.ndarray]:
    """Return ids, ascending, of the tokens that are kept, and their probabilities f64.

    Args:
        logits: [vocabulary], finite or -inf.
        sampling: its temperature is above 0.
    """
    if logits.min() == -np.inf:  # a rule leaves few tokens
        known = np.flatnonzero(logits > -np.inf)
        ids, found = probabilities(logits[known], sampling)
        return known[ids], found
    ids = largest(logits, sampling.top_k or len(logits))
    scores = (logits if len(ids) == len(logits) else logits[ids]).astype(np.float64)
    scores -= scores.max()  # before the division, which may overflow
    with np.errstate(over="ignore"):
        scores /= sampling.temperature
    found = np.exp(scores)
    found /= found.sum()
    if sampling.top_p < 1:
        ids, found = _most_likely(ids, found, sampling.top_p)
    if sampling.min_p:
        kept = found >= sampling.min_p * found.max()
        ids, found = ids[kept], found[kept]
        found /= found.sum()
    return ids, found


def _most_likely(ids: np.ndarray, found: np.ndarray, top_p: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the fewest tokens whose probabilities sum to more than top_p: a sort of as many as that may be."""
    count, at = 256, np.arange(0)
    while len(at) < len(found) and found[at].sum() <= top_p:
        at, count = largest(found, count), 8 * count
    order = at[np.argsort(found[at], kind="stable")]  # ascending: what is left of a token is less likely
    less = max(1 - found[order].sum(), 0.0) if len(at) < len(found) else 0.0
    removed = less + np.cumsum(found[order]) <= 1 - top_p
    removed[-1] = False
    kept = np.sort(order[~removed])
    return ids[kept], found[kept] / found[kept].sum()


class Penalties:
    """Changes of the next token's logits by the text so far.

    Args:
        prompt: tokens before the first that is chosen.
    """

    def __init__(self, sampling: Sampling, prompt: Sequence[int]):
        self._sampling = sampling
        self._seen: set[int] = set()
        self._chosen: Counter[int] = Counter()
        self._last: list[int] = []  # no_repeat_ngram_size - 1 tokens, and what followed such tokens before
        self._following: dict[tuple[int, ...], set[int]] = {}
        for token in prompt:
            self._read(token)

    def _read(self, token: int) -> None:
        self._seen.add(token)
        if size := self._sampling.no_repeat_ngram_size:
            if len(self._last) == size - 1:
                self._following.setdefault(tuple(self._last), set()).add(token)
            self._last = [*self._last, token][max(len(self._last) + 2 - size, 0) :]

    def add(self, token: int) -> None:
        """Count a token that was chosen."""
        self._read(token)
        self._chosen[token] += 1

    def __call__(self, logits: np.ndarray) -> np.ndarray:
        """Return logits f64 [vocabulary], -inf of tokens that must not come.

        Raises:
            OptionError: a bias of a token outside the vocabulary.
        """
        sampling, scores = self._sampling, logits.astype(np.float64)
        if sampling.logit_bias:
            check_sampling(sampling, len(scores))
            scores[list(sampling.logit_bias)] += list(sampling.logit_bias.values())
        if sampling.repetition_penalty != 1:
            ids, by = list(self._seen), sampling.repetition_penalty
            scores[ids] = np.where(scores[ids] < 0, scores[ids] * by, scores[ids] / by)
        if self._chosen and (sampling.presence_penalty or sampling.frequency_penalty):
            times = np.array([*self._chosen.values()])
            scores[list(self._chosen)] -= sampling.presence_penalty + sampling.frequency_penalty * times
        if sampling.no_repeat_ngram_size:
            scores[list(self._following.get(tuple(self._last), ()))] = -np.inf
        return scores


def check_sampling(sampling: Sampling | None, vocabulary: int) -> None:
    """Check how to choose one of so many tokens.

    Raises:
        OptionError: it is of another type, or has a bias of a token outside the vocabulary.
    """
    if not isinstance(sampling, Sampling | None):
        raise OptionError(f"sampling is {sampling!r}, expected quantmoe.Sampling(..) or None")
    if sampling and (id := max(sampling.logit_bias, default=0)) >= vocabulary:
        raise OptionError(f"logit_bias has token id {id}, expected ids of the vocabulary, 0 to {vocabulary - 1}")


class Sampler:
    """Chooses token after token; the same seed and logits give the same tokens.

    Args:
        sampling: None takes the likeliest.
        prompt: tokens before the first that is chosen.

    Raises:
        OptionError: sampling is of another type.
    """

    def __init__(self, sampling: Sampling | None = None, prompt: Sequence[int] = ()):
        check_sampling(sampling, sys.maxsize)
        self.sampling = sampling
        self._penalties = Penalties(sampling, prompt) if sampling and sampling.changes_logits else None
        self._random = np.random.Generator(np.random.PCG64(sampling.seed if sampling else None))

    def __call__(self, logits: np.ndarray) -> int:
        """Return a token id, from finite logits [vocabulary]."""
        if self._penalties:
            with np.errstate(over="ignore"):
                logits = self._penalties(logits).astype(np.float32)  # as CUDA's kernel has them
            logits = np.minimum(logits, np.finfo(np.float32).max)  # else a penalty that overflows gives inf - inf
            if logits.max() == -np.inf:
                raise OptionError(NOTHING_LEFT)
        if self.sampling is None or not self.sampling.temperature:
            token = int(logits.argmax())
        else:
            ids, found = probabilities(logits, self.sampling)
            total = np.cumsum(found)
            token = int(ids[np.searchsorted(total, self._random.random() * total[-1], side="right")])
        if self._penalties:
            self._penalties.add(token)
        return token
