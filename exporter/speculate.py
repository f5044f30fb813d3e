"""Speculation: tokens that are likely to come are drafted, and one run verifies them.

A run of a token and its drafts gives the logits after each. A token is chosen from them as without drafts, and where it
is the draft, so are the next. A draft is one token, not a distribution: to choose from the model's own and to accept if
that is the draft is rejection sampling (Leviathan et al., arXiv 2211.17192) of a distribution with one token. Tokens
have the distribution that they have without drafts, and where a run gives each row the logits that it has alone, with
the same seed they are the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

    from quantmoe.exporter.cache import Cache
    from quantmoe.exporter.sampling import Sampler

#: drafts of a run, at most, unless the caller says
DRAFTS = 4
#: lengths of the ends of a text that are looked up in what stood before, the longest first
ENDS = (4, 3, 2)


class Lookup:
    """Drafts what followed the last tokens when they stood in the text before, the longest match and the latest place.

    Saxena, prompt lookup decoding (2023).
    """

    def __init__(self) -> None:
        self._after: dict[tuple[int, ...], int] = {}
        self._read = 0

    def __call__(self, tokens: Sequence[int], count: int) -> list[int]:
        """At most so many tokens that may follow.

        Args:
            tokens: those of the call before, and more.
        """
        for at in range(self._read, len(tokens)):
            self._after |= {tuple(tokens[at - n : at]): at for n in ENDS if n <= at}
        self._read = len(tokens)
        for n in ENDS:
            if (end := tuple(tokens[-n:])) in self._after:
                at = self._after[end]
                return list(tokens[at : at + count])
        return []


class Speculation:
    """Generation with drafts.

    Args:
        draft: what makes them.
        limit: drafts of a run, at most. There are twice as many as the run before accepted, at least one.

    Attributes:
        drafted, accepted: tokens so far. runs: of the model, after those of the prompt.
    """

    def __init__(self, draft: Lookup, limit: int):
        self.draft, self.limit = draft, limit
        self.drafted = self.accepted = self.runs = 0

    def steps(
        self, cache: Cache, ids: list[int], count: int, stop: Sequence[int], sample: Sampler
    ) -> Iterator[tuple[int, np.ndarray]]:
        """At most ``count`` tokens after those of a cache and ``ids``, until one of ``stop``, each with its logits.

        Whenever it is left, the cache has all tokens but the last that was given.
        """
        if not count:
            return
        drafts: list[int] = []
        rows, most = cache.append(ids)[None], self.limit
        given = len(cache.tokens)  # how many of the cache's are of the prompt or were given
        try:
            while True:
                begin = given
                for row, draft in zip(rows, [*drafts, None], strict=True):
                    token, count = sample(cache.model.finite(row, given)), count - 1
                    yield token, row
                    if token in stop or not count:
                        return
                    if token != draft:
                        break
                    given, self.accepted = given + 1, self.accepted + 1
                if drafts:
                    most = min(self.limit, max(1, 2 * (given - begin)))
                cache.rewind(given)
                drafts = self.draft([*cache.tokens, token], min(most, count - 1, cache.room - 1))
                rows = cache.verify([token, *drafts])
                given, self.drafted, self.runs = given + 1, self.drafted + len(drafts), self.runs + 1
        finally:
            if cache.whole:
                cache.rewind(given)
