"""Prompts that run together, each a row of a batch: padded on the right to the longest, 0 in the mask.

Padding takes no slot of a row's cache (FORMAT.md 5), and a row that has ended has only padding. So a row's keys, values
and states are those that it has alone.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

from quantmoe.exporter.errors import ModelError, OptionError
from quantmoe.exporter.running.cache import present

if TYPE_CHECKING:
    from quantmoe.exporter.reading.sampling import Sampling
    from quantmoe.exporter.running.generate import Generator


class Batch(Iterator[tuple[int, int]]):
    """New tokens of prompts that run together, as they are asked for: each with the number of its prompt, from 0.

    Attributes:
        tokens: those that came, of each prompt. prompt: how many were run before, of all prompts.
        finish_reasons: of each prompt, as ``Generated.finish_reason``.
        prefill: seconds until the first came. decode: seconds for the others.
        progress: called with how many tokens of the longest prompt were run, and with how many it has.

    Raises:
        OptionError: prompts that are no token ids.
        ModelError: no prompts, one that cannot run alone, more tokens than the capacity that the Generator was given; a
            model that drafts, or whose cache grows with each run.
    """

    def __init__(
        self,
        model: Generator,
        prompts: Iterable[Iterable[int]],
        max_new_tokens: int,
        stop: Sequence[int],
        sampling: Sampling | None,
    ):
        if not model.shares_buffer:
            raise ModelError(
                f"{model.path}: prompts cannot run together, this model's cache grows with each run: generate one "
                "after the other"
            )
        if model.speculate is not None:
            raise ModelError(f"{model.path}: prompts that run together take no drafts: speculate is {model.speculate}")
        rows = []
        for number, ids in enumerate(prompts):
            try:
                rows.append(model.check(ids, room=1))
            except (ModelError, OptionError) as error:
                raise type(error)(f"prompt {number}: {error}") from None
        if not rows:
            raise ModelError("there are no prompts")
        self.tokens: list[list[int]] = [[] for _ in rows]
        self.finish_reasons: list[Literal["stop", "length"] | None] = [None] * len(rows)
        self.prompt, self.prefill, self.decode = sum(map(len, rows)), 0.0, 0.0
        self._model, self._prompts, self._stop = model, rows, stop
        self._most = [min(max_new_tokens, model.context - len(ids)) for ids in rows]
        self._live = set(range(len(rows)))
        self._samples = [model.sampler(sampling, ids) for ids in rows]
        self._lengths = np.zeros(len(rows), np.int64)  # tokens in the cache
        self._capacity = max(len(ids) + most for ids, most in zip(rows, self._most, strict=True))
        if self._capacity > model.short_context:
            raise ModelError(
                f"{model.path}: {self._capacity} tokens of a prompt and its answer, expected at most "
                f"{model.short_context} of prompts that run together: longer texts have other rotary frequencies; "
                "give fewer new tokens or generate one after the other"
            )
        if model.capacity is not None:
            if self._capacity > model.capacity:
                raise ModelError(f"{model.path}: {self._capacity} tokens, the cache has a capacity of {model.capacity}")
            self._capacity = model.capacity
        self.progress: Callable[[int, int], None] = lambda done, total: None
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

    def end(self, row: int) -> None:
        """A prompt gets no more tokens.

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
        logits = self._read()
        while True:
            ids = np.zeros((len(logits), 1), np.int64)
            for row, length in enumerate(self._lengths.tolist()):
                if row not in self._live:
                    continue
                ids[row] = token = self._samples[row](self._model.finite(logits[row], length))
                if token in self._stop:
                    self.finish_reasons[row] = "stop"
                elif length + 1 == len(self._prompts[row]) + self._most[row]:
                    self.finish_reasons[row] = "length"
                yield row, token
                if self.finish_reasons[row]:
                    self.end(row)
            if not self._live:
                return
            logits = self._run(ids, np.isin(np.arange(len(ids)), list(self._live)).astype(np.int64))

    def _allocate(self) -> None:
        model = self._model
        self._room = model.rooms.take(self._capacity, self._capacity, len(self._prompts))
        leave = weakref.finalize(self, model.rooms.give, self._room)
        leave.atexit = False
        self._binding = model.session.io_binding()
        for name, buffer in self._room.buffers.items():
            buffer.bind(self._binding, name, present(name))

    def _read(self) -> np.ndarray:
        """Runs the prompts, ``model.chunk`` tokens at a time of all together; logits after the last of each."""
        lengths, size = np.array([*map(len, self._prompts)]), max(1, self._model.chunk // len(self._prompts))
        found: list[np.ndarray] = [np.empty(0)] * len(lengths)
        longest = int(lengths.max())
        for at in range(0, longest, size):
            self.progress(at, longest)
            counts = np.clip(lengths - at, 0, size)
            ids = np.zeros((len(counts), counts.max()), np.int64)
            for row, prompt in enumerate(self._prompts):
                ids[row, : counts[row]] = prompt[at : at + size]
            logits = self._run(ids, counts)
            for row, left in enumerate(lengths - at):
                if 0 < left <= size:
                    found[row] = logits[row]
        self.progress(longest, longest)
        return np.array(found)

    def _run(self, ids: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Runs the first ``counts[row]`` of each row's tokens [B, S], one row's S of them.

        Returns:
            Logits f32 [B, V] after the last of them; of rows without any, anything.
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
            logits = model.in_turn(lambda: self._room.step(model).run(ids, before, given))
        else:
            logits = model.in_turn(lambda: self._run_bound(given, new, before, batch))
        self._lengths += counts
        # of all tokens there are padding's, too; a model of the last ones' takes them where the mask ends
        at = np.maximum(counts, 1) - 1 if model.rows == sys.maxsize else -1
        return np.asarray(logits[np.arange(batch), at], np.float32)

    def _run_bound(self, given: dict[str, np.ndarray], new: int, before: int, batch: int) -> np.ndarray:
        for name, value in given.items():
            self._binding.bind_cpu_input(name, value)
        logits = self._model.logits_of(new, "cpu", batch)
        logits.bind(self._binding, output="logits")
        with self._model.running(new, before):
            self._model.session.run_with_iobinding(self._binding, self._model.run_options(-1))
        return logits.numpy()
