"""Prompts that run together, each a row of a batch: padded on the right to the longest, 0 in the mask.

Padding takes no slot of a row's cache, and a row that has ended has only padding. So a row's keys, values
and states are those that it has alone.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

from quantmoe.exporter.errors import ModelError, OptionError
from quantmoe.exporter.folder.interface import present
from quantmoe.runtime.buffer import Buffer
from quantmoe.runtime.cache_memory import DecodeStep, Rooms
from quantmoe.runtime.opened_model import OpenedModel

if TYPE_CHECKING:
    from quantmoe.exporter.folder.sampling_options import Sampling
    from quantmoe.runtime.choosing.constraint import Constraint
    from quantmoe.runtime.choosing.device_sampling import Choice
    from quantmoe.runtime.choosing.sampling import Choose


class Batch(Iterator[tuple[int, int]]):
    """New tokens of prompts that run together, as they are asked for: each with the number of its prompt, from 0.

    Attributes:
        tokens: those that came, of each prompt. prompt: how many were run before, of all prompts.
        finish_reasons: of each prompt, as ``Generated.finish_reason``.
        prefill: seconds until the first came. decode: seconds for the others.
        progress: called with how many tokens of the longest prompt were run, and with how many it has.

    Raises:
        OptionError: prompts that are no token ids.
        ModelError: no prompts, a prompt that cannot run alone, or more tokens than the Generator's capacity. A model
            that drafts, or whose cache grows with each run.
    """

    def __init__(
        self,
        model: OpenedModel,
        rooms: Rooms,
        prompts: Iterable[Iterable[int]],
        *,
        max_new_tokens: int,
        stop: Sequence[int],
        sampling: Sampling | None,
        constraints: Sequence[Constraint | None] = (),
    ):
        if not model.shares_buffer:
            raise ModelError(
                f"{model.path}: prompts cannot run together, this model's cache grows with each run: generate one "
                "after the other"
            )
        if model.speculate is not None:
            raise ModelError(f"{model.path}: prompts that run together take no drafts: speculate is {model.speculate}")
        rows = _checked(model, prompts)
        if constraints and len(constraints) != len(rows):
            raise OptionError(
                f"constraints has {len(constraints)} entries, expected one for each of {len(rows)} prompts"
            )
        self.tokens: list[list[int]] = [[] for _ in rows]
        self.finish_reasons: list[Literal["stop", "length"] | None] = [None] * len(rows)
        self.prompt, self.prefill, self.decode = sum(map(len, rows)), 0.0, 0.0
        self._model, self._rooms, self._prompts, self._stop = model, rooms, rows, stop
        self._most = [min(max_new_tokens, model.context - len(ids)) for ids in rows]
        self._live = set(range(len(rows)))
        self._lengths = np.zeros(len(rows), np.int64)  # tokens in the cache
        self._capacity = max(len(ids) + most for ids, most in zip(rows, self._most, strict=True))
        if self._capacity > model.short_context:
            raise ModelError(
                f"{model.path}: {self._capacity} tokens of a prompt and its answer, expected at most "
                f"{model.short_context} of prompts that run together. Longer texts have other rotary frequencies: "
                "give fewer new tokens or generate one after the other"
            )
        if model.capacity is not None:
            if self._capacity > model.capacity:
                raise ModelError(f"{model.path}: {self._capacity} tokens, the cache has a capacity of {model.capacity}")
            self._capacity = model.capacity
        self.progress: Callable[[int, int], None] = lambda done, total: None
        #: logits [B, 1, V] of the last tokens, where they are; and memory for those of several runs
        self._last: Buffer
        self._kept: Buffer | None = None
        self._choice: Choice | None = None
        self._samples: list[Choose] = []
        if model.chooses_there:
            self._choice = model.in_turn(lambda: model.choose(rows, self._capacity, sampling, constraints))
        else:
            self._samples = [model.sampler(sampling, ids) for ids in rows]
            for row, constraint in enumerate(constraints):
                if constraint is not None:
                    self._samples[row] = constraint.sampler(self._samples[row])
        self._steps = self._generate()

    def __next__(self) -> tuple[int, int]:
        first, begin = not any(self.tokens), time.perf_counter()
        row, token = next(self._steps)
        self.tokens[row].append(token)
        if first:
            self.prefill = time.perf_counter() - begin
        else:
            self.decode += time.perf_counter() - begin
        return row, token

    def step(self) -> DecodeStep:
        """Return the step that runs a token of each row, with a CUDA graph."""
        return self._room.step(self._model)

    def end(self, row: int) -> None:
        """Give a prompt no more tokens.

        Raises:
            ModelError: there is no such prompt.
        """
        if not 0 <= row < len(self.tokens):
            raise ModelError(f"there is no prompt {row}, only 0 to {len(self.tokens) - 1}")
        self._live.discard(row)

    def _generate(self) -> Iterator[tuple[int, int]]:
        if not self._live:
            return
        self._model.in_turn(self._allocate)
        self._read()
        if self._choice is not None:
            yield from self._steps_there(self._choice)
            return
        while True:
            logits = np.asarray(self._model.in_turn(self._last.numpy)[:, 0], np.float32)
            ids = np.zeros((len(logits), 1), np.int64)
            for row, length in enumerate(self._lengths.tolist()):
                if row not in self._live:
                    continue
                ids[row] = token = self._samples[row](self._model.finite(logits[row], length))
                yield from self._tell(row, token, self._reason(row, token))
            if not self._live:
                return
            self._run(ids, self._counts())

    def _steps_there(self, choice: Choice) -> Iterator[tuple[int, int]]:
        """Yield tokens that the GPU chooses, while the next run goes on. A row that ends takes part in this run."""
        model, step = self._model, self.step()

        def start(live: set[int]) -> list[int]:
            past = [n if row in live else -1 for row, n in enumerate(self._lengths.tolist())]
            model.in_turn(lambda: choice.start(self._last, past, step))
            return past

        past = start(self._live)
        while self._live:
            tokens = model.chosen(choice, past)
            rows = [row for row in sorted(self._live) if past[row] >= 0]
            reasons = {row: self._reason(row, tokens[row]) for row in rows}
            if on := {row for row in rows if not reasons[row]}:
                model.in_turn(lambda: step.launch(int(self._lengths.max()), ahead=True))
                self._last = step.logits
                self._lengths += self._counts()
                past = start(on)
            for row in rows:
                if row in self._live:
                    yield from self._tell(row, tokens[row], reasons[row])

    def _counts(self) -> np.ndarray:
        """Return how many tokens each row has in a run of one: 1, or 0 where it has ended."""
        return np.isin(np.arange(len(self._lengths)), list(self._live)).astype(np.int64)

    def _reason(self, row: int, token: int) -> Literal["stop", "length"] | None:
        """Return why a row ends with its next token; None: it goes on."""
        if token in self._stop:
            return "stop"
        return "length" if len(self.tokens[row]) + 1 == self._most[row] else None

    def _tell(self, row: int, token: int, reason: Literal["stop", "length"] | None) -> Iterator[tuple[int, int]]:
        self.finish_reasons[row] = reason
        yield row, token
        if self.finish_reasons[row]:
            self.end(row)

    def _allocate(self) -> None:
        model = self._model
        self._room = self._rooms.take(self._capacity, self._capacity, len(self._prompts))
        leave = weakref.finalize(self, self._rooms.give, self._room)
        leave.atexit = False
        self._binding = model.session.io_binding()
        for name, buffer in self._room.buffers.items():
            buffer.bind(self._binding, name, present(name))

    def _read(self) -> None:
        """Run the prompts, ``model.chunk`` tokens at a time of all together. The logits after each are in ``_last``."""
        lengths, size = np.array([*map(len, self._prompts)]), max(1, self._model.chunk // len(self._prompts))
        longest = int(lengths.max())
        for at in range(0, longest, size):
            self.progress(at, longest)
            counts = np.clip(lengths - at, 0, size)
            ids = np.zeros((len(counts), counts.max()), np.int64)
            for row, prompt in enumerate(self._prompts):
                ids[row, : counts[row]] = prompt[at : at + size]
            self._run(ids, counts, np.flatnonzero((counts > 0) & (lengths - at <= size)).tolist())
        self.progress(longest, longest)

    def _run(self, ids: np.ndarray, counts: np.ndarray, wanted: Sequence[int] | None = None) -> None:
        """Run the first ``counts[row]`` of each row's tokens [B, S], one row's S of them.

        Args:
            wanted: rows whose logits after the last of them are kept in ``_last``; None: all.
        """
        model, (batch, new), before = self._model, ids.shape, int(self._lengths.max())
        own, end = np.arange(new) < counts[:, None], before + new
        given = model.feed(ids, before)
        graph = model.cuda_graph and new == 1
        mask = np.zeros((batch, self._room.capacity if graph else end), np.int64)
        mask[:, :before] = np.arange(before) < self._lengths[:, None]
        mask[:, before:end] = own
        last = self._lengths + np.maximum(counts, 1) - 1
        positions = np.minimum(self._lengths[:, None] + np.arange(new), last[:, None])
        given |= {"attention_mask": mask, "position_ids": positions}
        if graph:
            step = self.step()
            model.in_turn(lambda: step.run(ids, before, given))
            logits = step.logits
        else:
            logits = model.in_turn(lambda: self._run_bound(given, new, before, batch))
        self._lengths += counts
        # of all tokens there are padding's, too; a model of the last ones' takes them where the mask ends
        count = logits.value.shape()[1]
        at = np.maximum(counts, 1) - 1 if model.every_row else np.full(batch, count - 1)
        if count == 1 and (wanted is None or len(wanted) == batch):
            self._last = logits
        else:
            model.in_turn(lambda: self._keep(logits, at.tolist(), range(batch) if wanted is None else wanted))

    def _keep(self, logits: Buffer, at: Sequence[int], rows: Sequence[int]) -> None:
        """Copy the logits of some rows, each at its token ``at[row]``, to ``_last``."""
        if self._kept is None:
            self._kept = self._model.logits_of(1, self._model.device, len(at))
        self._last = self._kept
        for row in rows:
            self._last.copy(logits, to=(row, 0), slot=(row, at[row]))
        self._model.wait()

    def _run_bound(self, given: dict[str, np.ndarray], new: int, before: int, batch: int) -> Buffer:
        for name, value in given.items():
            self._binding.bind_cpu_input(name, value)
        return self._model.run_bound(self._binding, new, before, batch)


def _checked(model: OpenedModel, prompts: Iterable[Iterable[int]]) -> list[list[int]]:
    """Return the token ids of prompts.

    Raises:
        ModelError, OptionError: there are none; a prompt that the model does not take, by its number.
    """
    rows = []
    for number, ids in enumerate(prompts):
        try:
            rows.append(model.check(ids, room=1))
        except (ModelError, OptionError) as error:
            raise type(error)(f"prompt {number}: {error}") from None
    if not rows:
        raise ModelError("there are no prompts")
    return rows
