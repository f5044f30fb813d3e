"""Speculation: tokens that are likely to come are drafted, and one run verifies them.

A run of a token and its drafts gives the logits after each. A token is chosen from them as without drafts. If it is the
draft, the next one is chosen, too. A draft is one token, not a distribution. So this is rejection sampling (Leviathan
et al., arXiv 2211.17192) of a distribution with one token: tokens are distributed as without drafts. One seed gives the
tokens that it gives without drafts, if a run gives each row the logits that it has alone.
"""

from __future__ import annotations

from collections.abc import Generator as Generation
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from quantmoe.exporter.folder.interface import HIDDEN

if TYPE_CHECKING:
    from quantmoe.runtime.cache import Cache
    from quantmoe.runtime.choosing.constraint import Constraint
    from quantmoe.runtime.choosing.sampling import Choose

#: tokens of a prompt that the layer of multi-token prediction reads at once
PENDING = 256
#: lengths of the ends of a text that are looked up in what stood before, the longest first
ENDS = (4, 3, 2)


class Lookup:
    """Drafts what followed the last tokens when they stood in the text before, the longest match and the latest place.

    Saxena, prompt lookup decoding (2023).
    """

    def __init__(self) -> None:
        self._after: dict[tuple[int, ...], int] = {}
        self._read = 0

    def hear(self, ids: Sequence[int], hidden: np.ndarray | None) -> None:
        """Take nothing: the text is enough."""

    def __call__(self, tokens: Sequence[int], count: int) -> list[int]:
        """Return at most ``count`` tokens that may follow.

        Args:
            tokens: the tokens of the call before, and more.
        """
        for at in range(self._read, len(tokens)):
            self._after |= {tuple(tokens[at - n : at]): at for n in ENDS if n <= at}
        self._read = len(tokens)
        for n in ENDS:
            if (end := tuple(tokens[-n:])) in self._after:
                at = self._after[end]
                return list(tokens[at : at + count])
        return []


class Head:
    """Drafts of a layer of multi-token prediction.

    From the main model's hidden state h_i and the next token t_(i + 1) it drafts the likeliest t_(i + 2). From its own
    hidden state and this draft it drafts the next token. It has seen the tokens of one stream, and no earlier turns.

    Args:
        cache: of the layer. It stays from stream to stream, with its CUDA graphs.
    """

    def __init__(self, cache: Cache):
        self._cache = cache
        self._cache.rewind(0)
        self._last: np.ndarray | None = None  # [1, H], of the last token that was heard
        self._ids: list[int] = []  # tokens that were heard and not run yet, and the hidden states before them
        self._hidden: list[np.ndarray] = []

    def hear(self, ids: Sequence[int], hidden: np.ndarray | None) -> None:
        """Take tokens that are certain, with their hidden states [S, H]."""
        assert hidden is not None
        if self._last is not None:
            self._hidden.append(self._last)
        self._hidden.append(hidden[:-1])
        self._ids += ids[0 if self._last is not None else 1 :]
        self._last = hidden[-1:]
        if len(self._ids) >= PENDING:
            self._run(self._ids, np.concatenate(self._hidden))
            self._ids, self._hidden = [], []

    def __call__(self, tokens: Sequence[int], count: int) -> list[int]:
        """At most so many tokens that may follow; the last of ``tokens`` was not heard yet."""
        if count < 1 or self._last is None:
            return []
        known, pending = len(self._cache.tokens), [*self._hidden, self._last]
        found: list[int] = []
        hidden, ids = np.concatenate(pending), [*self._ids, tokens[-1]]
        while True:
            logits = self._run(ids, hidden)
            if not found:  # what was heard stays, what follows may not be
                known += len(self._ids)
                self._ids, self._hidden = [], []
            found.append(int(logits.argmax()))
            if len(found) == count:
                break
            assert self._cache.hidden is not None
            ids, hidden = found[-1:], self._cache.hidden[-1:]
        self._cache.rewind(known)
        return found

    def _run(self, ids: Sequence[int], hidden: np.ndarray) -> np.ndarray:
        self._cache.given = {HIDDEN: hidden[None]}
        return self._cache.verify(ids)[-1]


class OtherModel:
    """Drafts of another model with the same tokenizer: the tokens that it finds likeliest.

    Args:
        cache: of that model, for one conversation. It has the tokens of the call before.
        vocabulary: ids of the model that verifies are below it.
    """

    def __init__(self, cache: Cache, vocabulary: int):
        self._cache, self._vocabulary = cache, vocabulary

    def hear(self, ids: Sequence[int], hidden: np.ndarray | None) -> None:
        """Take nothing: the text is enough."""

    def __call__(self, tokens: Sequence[int], count: int) -> list[int]:
        """At most so many tokens that may follow; none where its context or its vocabulary ends."""
        cache, found = self._cache, list[int]()
        known = cache.keep(tokens)
        new = tokens[known:]
        count = min(count, 1 + cache.room - len(new))
        if max(new) >= (cache.model.vocabulary or self._vocabulary):
            return found
        while len(found) < count:
            logits = cache.append(found[-1:] or new)
            found.append(int(logits[: self._vocabulary].argmax()))
        return found


class Speculation:
    """Generation with drafts.

    Args:
        draft: what makes them.
        limit: drafts of a run, at most. There are twice as many as the run before accepted, at least one.

    Attributes:
        draft: None when the generation has ended: its cache is the next one's.
        drafted, accepted: tokens so far. runs: of the model, after the prompt.
    """

    def __init__(self, draft: Lookup | Head | OtherModel, limit: int):
        self.draft: Lookup | Head | OtherModel | None = draft
        self.limit = limit
        self.drafted = self.accepted = self.runs = 0

    def steps(
        self,
        cache: Cache,
        ids: list[int],
        count: int,
        *,
        stop: Sequence[int],
        sample: Choose,
        constraint: Constraint | None = None,
    ) -> Generation[tuple[int, np.ndarray], None, None]:
        """Yield at most ``count`` tokens after a cache and ``ids``, each with its logits, until one of ``stop``.

        Whenever it is left, the cache has all tokens except the last one that was yielded.
        """
        assert self.draft is not None  # a Speculation is of one generation
        maker = self.draft
        drafts: list[int] = []
        run: list[int] = []
        rows, most = cache.append(ids, maker.hear)[None], self.limit
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
                if run:
                    kept = run[: 1 + given - begin]
                    maker.hear(kept, None if cache.hidden is None else cache.hidden[: len(kept)])
                cache.rewind(given)
                drafts = maker([*cache.tokens, token], min(most, count - 1, cache.room - 1))
                if constraint is not None:  # others would not be chosen
                    drafts = constraint.valid(drafts)
                run = [token, *drafts]
                rows = cache.verify(run)
                given, self.drafted, self.runs = given + 1, self.drafted + len(drafts), self.runs + 1
        finally:
            self.draft = None
            if cache.whole:
                cache.rewind(given)
