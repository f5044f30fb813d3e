"""Choosing a token at random, as transformers does: temperature, then top-k, then top-p."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from quantmoe.exporter.reading.sampling import Sampling

#: finite logits [vocabulary] -> a token id
Choose = Callable[[np.ndarray], int]


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
