"""A cache of several sequences, each in a row of its own, which begin and end independently of each other."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from quantmoe.exporter.folder.interface import present
from quantmoe.runtime import device
from quantmoe.runtime.buffer import Buffer
from quantmoe.runtime.cache_memory import DecodeStep, Room, States
from quantmoe.runtime.generate import Generator
from quantmoe.runtime.session_thread import SESSION_THREAD


class Rows:
    """A cache of ``count`` sequences of at most ``capacity`` tokens.

    A sequence's prompt runs alone. The next tokens of several sequences run together, with the rows between them.

    Attributes:
        tokens: ids of the tokens in each row.
    """

    def __init__(self, model: Generator, count: int, capacity: int):
        self._model, self._count, self._capacity = model, count, capacity
        self.tokens: list[list[int]] = [[] for _ in range(count)]
        self._room = model.in_turn(lambda: Room(model, capacity, count))
        self._keys = [name for name in model.past if name not in model.states]
        self._parts: dict[tuple[int, int], dict[str, Buffer]] = {}
        self._bindings: dict[tuple[int, int], Any] = {}
        self._steps: dict[tuple[int, int, object], DecodeStep] = {}

    def read(self, row: int, ids: Sequence[int]) -> np.ndarray:
        """Run tokens after a row's tokens. Return the logits f32 [vocabulary] after the last of them."""
        given = self._model.feed(np.array([ids], np.int64), len(self.tokens[row]))
        logits = self._run(row, row + 1, given, len(ids))
        self.tokens[row] += ids
        return logits[0]

    def step(self, tokens: Mapping[int, int]) -> dict[int, np.ndarray]:
        """Run one token of each of these rows. Return the logits f32 [vocabulary] after it, by row."""
        begin, end = self._between(tokens)
        rows, lengths = range(begin, end), np.array([len(self.tokens[row]) for row in range(begin, end)])
        past, counts = int(lengths.max()), np.array([row in tokens for row in rows], np.int64)
        ids = np.array([[tokens.get(row, 0)] for row in rows], np.int64)
        width = self._capacity if self._model.cuda_graph else past + 1
        mask = np.zeros((len(rows), width), np.int64)
        mask[:, :past] = np.arange(past) < lengths[:, None]
        mask[:, past] = counts
        given = self._model.feed(ids, past) | {"attention_mask": mask, "position_ids": lengths[:, None]}
        logits = self._run(begin, end, given, 1)
        for row, token in tokens.items():
            self.tokens[row].append(token)
        return {row: logits[row - begin] for row in tokens}

    def nearest(self, free: Sequence[int], used: Sequence[int]) -> int:
        """Return the free row with which the fewest rows run together."""

        def together(row: int) -> int:
            begin, end = self._between([*used, row])
            return end - begin

        return min(free, key=lambda row: (together(row), row))

    def _between(self, rows: Any) -> tuple[int, int]:
        """Return the first and the last of the rows that run together; on a GPU few numbers of rows, since each has a
        CUDA graph."""
        if not self._model.cuda_graph:
            return min(rows), max(rows) + 1
        return 0, min(1 << int(max(rows)).bit_length(), self._count)

    def _part(self, begin: int, end: int) -> dict[str, Buffer]:
        at = begin, end
        if at not in self._parts:
            self._parts[at] = {name: buffer.rows(begin, end) for name, buffer in self._room.buffers.items()}
        return self._parts[at]

    def _run(self, begin: int, end: int, given: dict[str, np.ndarray], new: int) -> np.ndarray:
        """Return the logits f32 [rows, vocabulary] after the last token of each row."""
        return self._model.in_turn(lambda: self._run_here(begin, end, given, new))

    def _run_here(self, begin: int, end: int, given: dict[str, np.ndarray], new: int) -> np.ndarray:
        model, past = self._model, int(given["position_ids"].max())
        if model.cuda_graph and new == 1:
            at = begin, end, SESSION_THREAD.thread()
            if at not in self._steps:
                part = self._part(begin, end)
                self._steps[at] = DecodeStep(weakref.proxy(model), part, self._capacity, 1, end - begin)
            step = self._steps[at]
            step.run(given["input_ids"], past, given)
            return step.logits.numpy()[:, -1].astype(np.float32)
        if (begin, end) not in self._bindings:
            self._bindings[begin, end] = binding = model.session.io_binding()
            for name, buffer in self._part(begin, end).items():
                buffer.bind(binding, name, present(name))
        binding = self._bindings[begin, end]
        for name, value in given.items():
            binding.bind_cpu_input(name, value)
        logits = model.run_bound(binding, new, past, end - begin)
        if model.device == "cpu":
            return logits.here()[:, -1].astype(np.float32)
        return logits.numpy()[:, -1].astype(np.float32)

    def contents(self, row: int, begin: int, end: int) -> dict[str, np.ndarray]:
        """Return copies of keys and values of a row's tokens ``begin`` to ``end``, [1, heads, tokens, width]."""
        made = {}
        for name in self._keys:
            buffer = self._part(row, row + 1)[name]
            _, heads, _, width = buffer.value.shape()
            made[name] = np.empty((1, heads, end - begin, width), buffer.dtype)

        def copy() -> None:
            for name, array in made.items():
                self._move(name, row, begin, array, read=True)
            self._model.wait()

        self._model.in_turn(copy)
        return made

    def put(self, row: int, begin: int, contents: Mapping[str, np.ndarray]) -> None:
        """Write the :meth:`contents` of tokens that begin at ``begin``."""

        def copy() -> None:
            for name, array in contents.items():
                self._move(name, row, begin, array, read=False)
            self._model.wait()

        self._model.in_turn(copy)

    def states(self, row: int) -> dict[str, np.ndarray]:
        """Return copies of the states of linear attention after a row's last token."""
        return self._model.in_turn(States(self._model, self._part(row, row + 1)).read)

    def put_states(self, row: int, states: Mapping[str, np.ndarray]) -> None:
        self._model.in_turn(lambda: States(self._model, self._part(row, row + 1)).write(states))

    def _move(self, name: str, row: int, begin: int, array: np.ndarray, read: bool) -> None:
        """Copy between a row's keys or values and an array of its tokens from ``begin`` on."""
        buffer, count = self._part(row, row + 1)[name], array.shape[2]
        if self._model.device == "cpu":
            here = buffer.here()[:, :, begin : begin + count]
            to, source = (array, here) if read else (here, array)
            to[...] = source
            return
        _, heads, capacity, width = buffer.value.shape()
        size = width * buffer.dtype.itemsize
        there, pitches = buffer.address() + begin * size, (count * size, capacity * size)
        if read:
            device.copy(array.ctypes.data, there, count * size, heads, *pitches)
        else:
            device.copy(there, array.ctypes.data, count * size, heads, *pitches[::-1])
