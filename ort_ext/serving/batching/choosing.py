"""The next token of each row: chosen on the GPU where its logits are, or on the host."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from quantmoe.exporter.errors import OptionError
from quantmoe.exporter.folder.sampling_options import Sampling
from quantmoe.runtime import device
from quantmoe.runtime.buffer import Buffer
from quantmoe.runtime.choosing.device_sampling import NO_TOKEN, NOT_FINITE, Choice
from quantmoe.runtime.choosing.sampling import NOTHING_LEFT, Choose, Sampler, largest
from quantmoe.runtime.generate import Generator

if TYPE_CHECKING:
    from quantmoe.runtime.choosing.constraint import Constraint

#: kinds of sampling that the GPU has at once; the host chooses for the requests of others
KINDS = 8


@dataclasses.dataclass(frozen=True)
class Chances:
    """Natural logarithms of probabilities, before penalties and temperature.

    Attributes:
        chosen: of the token that was chosen. top: ids of the likeliest tokens with theirs, likeliest first.
    """

    chosen: float
    top: list[tuple[int, float]]


class Chosen(NamedTuple):
    """A row's next token.

    Attributes:
        chances: of the token, if they were asked for. error: why there is no token.
    """

    token: int = -1
    chances: Chances | None = None
    error: Exception | None = None


@dataclasses.dataclass(frozen=True)
class Kind:
    """Rows whose tokens one launch on the GPU chooses."""

    choice: Choice
    rows: set[int] = dataclasses.field(default_factory=set)


class Choosing:
    """Chooses tokens of rows. Each row has its own sampling.

    Args:
        rows: how many there are. longest: tokens of a text at most.
    """

    def __init__(self, model: Generator, rows: int, longest: int):
        self._model, self._count, self._longest = model, rows, longest
        #: by what decides how tokens are chosen
        self._kinds: dict[object, Kind] = {}
        self._host: dict[int, Choose] = {}
        self._top: dict[int, int] = {}
        self._started: list[Kind] = []

    def join(
        self, row: int, text: Sequence[int], sampling: Sampling | None, constraint: Constraint | None, top: int | None
    ) -> None:
        """Begin a text in a row.

        Args:
            text: the prompt. constraint: which tokens may come; None: all.
            top: how many of the likeliest tokens :class:`Chances` has; None: there are no Chances.
        """
        seed = None if sampling is None else sampling.seed
        same = None if sampling is None else dataclasses.replace(sampling, seed=None)
        kind = repr(same), constraint is None
        if self._model.chooses_there and top is None and (kind in self._kinds or len(self._kinds) < KINDS):
            if kind not in self._kinds:
                none = [[]] * self._count  # type: ignore[var-annotated]
                rules = () if constraint is None else [constraint] * self._count
                self._kinds[kind] = Kind(
                    self._model.in_turn(lambda: self._model.choose(none, self._longest, same, rules))
                )
            found = self._kinds[kind]
            self._model.in_turn(lambda: found.choice.join(row, text, seed, constraint))
            found.rows.add(row)
            return
        sample: Choose = Sampler(sampling, text)
        self._host[row] = sample if constraint is None else constraint.sampler(sample)
        if top is not None:
            self._top[row] = top

    def leave(self, row: int) -> None:
        """End a row's text."""
        self._host.pop(row, None)
        self._top.pop(row, None)
        for kind, found in [*self._kinds.items()]:
            found.rows.discard(row)
            if not found.rows:
                del self._kinds[kind]

    def start(self, logits: Buffer, rows: Sequence[int], past: Mapping[int, int]) -> None:
        """Choose after the run that was started last.

        Args:
            logits: [rows, .., vocabulary]; the last of each row counts. rows: these rows, on a GPU a range.
            past: tokens of each row that gets a token.
        """
        self._logits, self._rows, self._past = logits, rows, past
        self._started = [kind for kind in self._kinds.values() if not kind.rows.isdisjoint(past)]

        def launch() -> None:
            for kind in self._started:
                own = [past.get(row, -1) if row in kind.rows else -1 for row in rows]
                kind.choice.start(logits, own, None, rows[0])

        self._model.in_turn(launch)

    def take(self) -> dict[int, Chosen]:
        """Wait for the tokens, and return them by row."""
        found = {}
        for kind in self._started:
            tokens = self._model.in_turn(kind.choice.take)
            for row in kind.rows & self._past.keys():
                found[row] = self._there(tokens[row], self._past[row])
        for row in self._host.keys() & self._past.keys():
            found[row] = self._here(row)
        return found

    def _there(self, token: int, length: int) -> Chosen:
        if token == NOT_FINITE:
            return Chosen(error=self._model.not_finite(length))
        return Chosen(error=OptionError(NOTHING_LEFT)) if token == NO_TOKEN else Chosen(token)

    def _here(self, row: int) -> Chosen:
        try:
            logits = self._model.finite(self._fetch(self._rows.index(row)), self._past[row])
            token = self._host[row](logits)
        except Exception as error:  # whatever it is, it is of this row
            return Chosen(error=error)
        return Chosen(token, chances_of(logits, token, self._top[row]) if row in self._top else None)

    def _fetch(self, at: int) -> np.ndarray:
        """Return the logits f32 [vocabulary] of one of the rows that ran."""
        count, *_, vocabulary = self._logits.value.shape()
        if self._logits.on_host:
            return self._logits.here().reshape(count, -1, vocabulary)[at, -1].astype(np.float32)
        made = np.empty(vocabulary, self._logits.dtype)
        place = self._logits.address() + (at + 1) * (self._logits.bytes() // count) - made.nbytes
        self._model.in_turn(lambda: device.fetch(made, place))
        return made.astype(np.float32)


def chances_of(logits: np.ndarray, token: int, top: int) -> Chances:
    """Return the logarithms of probabilities that finite logits [vocabulary] give."""
    scores = logits - logits.max()
    scores -= np.log(np.exp(scores).sum())
    ids = largest(scores, top)[:top] if top else np.empty(0, np.int64)
    ids = ids[np.argsort(-scores[ids], kind="stable")]
    return Chances(float(scores[token]), [(int(id), float(scores[id])) for id in ids])
