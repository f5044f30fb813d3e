"""A cache of several sequences, each in a row of its own, which begin and end independently of each other."""

from __future__ import annotations

import math
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
from quantmoe.serving.batching.prefixes import BLOCK


class StepInputs:
    """Inputs of a decode step of a fixed shape. Only the mask's columns that change are computed.

    Args:
        step: the step. rows: its sequences. capacity: columns of the mask.
    """

    def __init__(self, step: DecodeStep, rows: int, capacity: int):
        self._step, shapes = step, {"ids": (rows, 1), "positions": (rows, 1), "mask": (rows, capacity)}
        sizes = {name: 8 * math.prod(shape) for name, shape in shapes.items()}
        self._pages = device.Pages(sum(sizes.values())) if step.model.target.on_gpu else None  # quick to copy from
        memory = bytearray(sum(sizes.values())) if self._pages is None else self._pages.memory
        at, self._arrays = 0, dict[str, np.ndarray]()
        for name, shape in shapes.items():
            self._arrays[name] = np.frombuffer(memory, np.int64, math.prod(shape), at).reshape(shape)
            at += sizes[name]
        #: tokens of each row after the run before, and the mask's column of that run; -1: no run was before
        self._lengths, self._column = np.full(rows, -1), -1

    def write(self, tokens: np.ndarray, lengths: np.ndarray, counts: np.ndarray) -> None:
        """Write what runs next. The run before has ended.

        Args:
            tokens: [rows]. lengths: tokens of each row before the run. counts: of each row's new tokens, 0 or 1.
        """
        mask, column = self._arrays["mask"], int(lengths.max())
        (same,), (other,) = np.nonzero(lengths == self._lengths), np.nonzero(lengths != self._lengths)
        mask[same, self._column] = 0
        mask[same, lengths[same] - 1] = lengths[same] > 0  # column -1 is behind all texts
        mask[other] = np.arange(mask.shape[1]) < lengths[other, None]
        mask[:, column] = counts
        self._lengths, self._column = lengths + counts, column
        self._arrays["ids"][:, 0], self._arrays["positions"][:, 0] = tokens, lengths
        for name, array in self._arrays.items():
            self._step.give(name, array)


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
        self._steps: dict[tuple[int, object], tuple[DecodeStep, StepInputs]] = {}
        if model.cuda_graph:
            model.in_turn(self._capture)

    def take(self, row: int, tokens: int) -> bool:
        """Give an empty row the memory of so many tokens. Each row has it."""
        return True

    def leave(self, row: int) -> None:
        """Empty a row."""
        self.tokens[row] = []

    def read(self, row: int, ids: Sequence[int]) -> Buffer:
        """Run tokens after a row's tokens. Return logits [1, .., vocabulary], the last ones of the last token."""
        given = self._model.feed(np.array([ids], np.int64), len(self.tokens[row]))
        logits = self._model.in_turn(lambda: self._run(row, row + 1, given, len(ids)))
        self.tokens[row] += ids
        return logits

    def start(self, tokens: Mapping[int, int]) -> tuple[Buffer, Sequence[int]]:
        """Start the run of one token of each of these rows. On a GPU it goes on when this returns.

        Returns:
            Logits [rows, .., vocabulary], the last ones of each row's token; and the rows.
        """
        begin, end = self._between(tokens)
        rows, lengths = range(begin, end), np.array([len(self.tokens[row]) for row in range(begin, end)])
        ids = np.array([tokens.get(row, 0) for row in rows], np.int64)
        counts = np.array([row in tokens for row in rows], np.int64)
        run = self._step if self._model.cuda_graph else self._run_any
        logits = self._model.in_turn(lambda: run(begin, ids, lengths, counts))
        for row, token in tokens.items():
            self.tokens[row].append(token)
        return logits, rows

    def nearest(self, free: Sequence[int], used: Sequence[int]) -> int:
        """Return the free row with which the fewest rows run together."""
        if self._model.cuda_graph:
            return min(free)

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

    def _capture(self) -> None:
        """Capture the CUDA graphs while no row has tokens, so that no state need be put back."""
        for end in sorted({self._between([row])[1] for row in range(self._count)}):
            step, inputs = self._step_of(end)
            inputs.write(np.zeros(end, np.int64), np.zeros(end, np.int64), np.ones(end, np.int64))
            step.launch(0, states=False)

    def _step_of(self, rows: int) -> tuple[DecodeStep, StepInputs]:
        at = rows, SESSION_THREAD.thread()
        if at not in self._steps:
            step = DecodeStep(weakref.proxy(self._model), self._part(0, rows), self._capacity, 1, rows)
            self._steps[at] = step, StepInputs(step, rows, self._capacity)
        return self._steps[at]

    def _step(self, begin: int, ids: np.ndarray, lengths: np.ndarray, counts: np.ndarray) -> Buffer:
        """Start a CUDA graph. Its rows begin with the first."""
        step, inputs = self._step_of(len(ids))
        inputs.write(ids, lengths, counts)
        step.launch(int(lengths.max()), ahead=True)
        return step.logits

    def _run_any(self, begin: int, ids: np.ndarray, lengths: np.ndarray, counts: np.ndarray) -> Buffer:
        """Run without a CUDA graph."""
        past = int(lengths.max())
        mask = np.arange(past + 1) < lengths[:, None]
        mask[:, past] = counts
        given = {"input_ids": ids[:, None], "attention_mask": mask.astype(np.int64), "position_ids": lengths[:, None]}
        return self._run(begin, begin + len(ids), given, 1)

    def _run(self, begin: int, end: int, given: dict[str, np.ndarray], new: int) -> Buffer:
        if (begin, end) not in self._bindings:
            self._bindings[begin, end] = binding = self._model.session.io_binding()
            for name, buffer in self._part(begin, end).items():
                buffer.bind(binding, name, present(name))
        binding = self._bindings[begin, end]
        for name, value in given.items():
            binding.bind_cpu_input(name, value)
        return self._model.run_bound(binding, new, int(given["position_ids"].max()), end - begin)

    def contents(self, row: int, begin: int, end: int) -> list[dict[str, np.ndarray]]:
        """Return copies of keys and values of a row's tokens, of each BLOCK tokens [1, heads, BLOCK, width].

        Args:
            begin, end: the first token, and that behind the last one; multiples of BLOCK.
        """
        made = {}
        for name in self._keys:
            buffer = self._part(row, row + 1)[name]
            _, heads, _, width = buffer.value.shape()
            made[name] = np.empty((1, heads, end - begin, width), buffer.dtype)
        self._model.in_turn(lambda: self._move(row, begin, made, read=True))
        parts = (slice(at, at + BLOCK) for at in range(0, end - begin, BLOCK))
        return [{name: array[:, :, part].copy() for name, array in made.items()} for part in parts]

    def put(self, row: int, contents: Sequence[Mapping[str, np.ndarray]]) -> None:
        """Write the :meth:`contents` of a row's first tokens."""
        joined = {name: np.concatenate([block[name] for block in contents], 2) for name in self._keys}
        self._model.in_turn(lambda: self._move(row, 0, joined, read=False))

    def states(self, row: int) -> dict[str, np.ndarray]:
        """Return copies of the states of linear attention after a row's last token."""
        return self._model.in_turn(States(self._model, self._part(row, row + 1)).read)

    def put_states(self, row: int, states: Mapping[str, np.ndarray]) -> None:
        self._model.in_turn(lambda: States(self._model, self._part(row, row + 1)).write(states))

    def _move(self, row: int, begin: int, arrays: Mapping[str, np.ndarray], read: bool) -> None:
        """Copy between a row's keys and values and arrays of its tokens from ``begin`` on."""
        for name, array in arrays.items():
            buffer, count = self._part(row, row + 1)[name], array.shape[2]
            if buffer.on_host:
                here = buffer.here()[:, :, begin : begin + count]
                to, source = (array, here) if read else (here, array)
                to[...] = source
                continue
            _, heads, capacity, width = buffer.value.shape()
            size = width * buffer.dtype.itemsize
            there, own, apart = buffer.address() + begin * size, count * size, capacity * size
            if read:
                device.copy(array.ctypes.data, there, own, height=heads, to_pitch=own, pitch=apart)
            else:
                device.copy(there, array.ctypes.data, own, height=heads, to_pitch=apart, pitch=own)
        self._model.wait()
