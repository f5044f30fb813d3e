"""A cache in blocks, which sequences share: each has the blocks that its tokens need."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from quantmoe.exporter.errors import OptionError
from quantmoe.exporter.folder.interface import BLOCK, present
from quantmoe.runtime import device
from quantmoe.runtime.buffer import Buffer
from quantmoe.serving.batching.prefixes import BLOCK as PART
from quantmoe.serving.served_model import ServedModel


class BlockStep:
    """A run of one token a row whose shapes and addresses never change, as a CUDA graph wants it.

    Args:
        given: inputs beside the cache, of such a run.
    """

    def __init__(self, model: ServedModel, blocks: Mapping[str, Buffer], given: Mapping[str, np.ndarray]):
        self._options = model.run_options(next(model.graphs), ahead=True)
        self._inputs = {name: Buffer.of(array, model.device) for name, array in given.items()}
        self._pages = device.Pages(sum(array.nbytes for array in given.values())) if model.target.on_gpu else None
        self.logits = model.logits_of(1, model.device, len(given["input_ids"]))
        self._binding = bind(model, blocks)
        self.logits.bind(self._binding, output="logits")
        for name, buffer in self._inputs.items():
            buffer.bind(self._binding, name)

    def start(self, model: ServedModel, given: Mapping[str, np.ndarray], length: int) -> None:
        """Start the run; length: tokens of the longest row, for errors."""
        at = 0
        for name, array in given.items():
            if self._pages is None:
                self._inputs[name].write(array)
                continue
            held = np.frombuffer(self._pages.memory, array.dtype, array.size, at)  # page-locked, until the run has read
            held[:] = array.ravel()
            device.copy(self._inputs[name].address(), held.ctypes.data, held.nbytes)
            at += held.nbytes
        with model.running(1, length):
            model.session.run_with_iobinding(self._binding, self._options)


def bind(model: ServedModel, blocks: Mapping[str, Buffer]) -> Any:
    """Return a binding that has the blocks."""
    binding = model.session.io_binding()
    for name, buffer in blocks.items():
        buffer.bind(binding, name, present(name))
    return binding


class PagedRows:
    """A cache of ``count`` sequences of at most ``capacity`` tokens, in blocks.

    Block 0 is no row's. Rows that have nothing to run write there, as a CUDA graph has tokens for all rows.

    Args:
        size: bytes of the blocks at most; None: there are enough for all rows.

    Raises:
        OptionError: one row of ``capacity`` tokens takes more.

    Attributes:
        tokens: ids of the tokens in each row.
    """

    def __init__(self, model: ServedModel, count: int, capacity: int, size: int | None = None):
        self._model, self._count = model, count
        self.tokens: list[list[int]] = [[] for _ in range(count)]
        columns = -(-capacity // BLOCK)
        self._table = np.zeros((count, columns), np.int32)
        one = sum(math.prod(shape[1:]) * dtype.itemsize for shape, dtype in model.past.values())
        blocks = count * columns if size is None else min(size // one - 1, count * columns)
        if blocks < columns:
            raise OptionError(
                f"cache_memory is {size}, expected at least {(columns + 1) * one} for {capacity} tokens of a request"
            )
        self._free = list(range(blocks, 0, -1))
        self._held: list[list[int]] = [[] for _ in range(count)]
        shapes = [([len(self._free) + 1, *shape[1:]], dtype) for shape, dtype in model.past.values()]

        def allocate() -> None:
            with model.allocating(capacity, count):
                self._blocks = dict(zip(model.past, Buffer.several(shapes, model.device), strict=True))
            self._binding = bind(model, self._blocks)
            self._steps: dict[int, BlockStep] = {}
            for rows in sorted({self._together(row + 1) for row in range(count)}) if model.cuda_graph else ():
                given = self._feed(range(rows), {})
                self._steps[rows] = BlockStep(model, self._blocks, given)
                self._steps[rows].start(model, given, 0)

        model.in_turn(allocate)

    def take(self, row: int, tokens: int) -> bool:
        """Give an empty row blocks for so many tokens. Return whether there are enough."""
        count = -(-tokens // BLOCK)
        if count > len(self._free):
            return False
        self._held[row] = [self._free.pop() for _ in range(count)]
        self._table[row, :count] = self._held[row]
        return True

    def leave(self, row: int) -> None:
        """Empty a row."""
        self.tokens[row] = []
        self._free += self._held[row]
        self._held[row] = []
        self._table[row] = 0

    def read(self, row: int, ids: Sequence[int]) -> Buffer:
        """Run tokens after a row's tokens. Return the logits [1, vocabulary] of the last of them."""
        logits = self._model.in_turn(lambda: self._run([row], {row: ids}))
        self.tokens[row] += ids
        return logits

    def start(self, tokens: Mapping[int, int]) -> tuple[Buffer, Sequence[int]]:
        """Start the run of one token of each of these rows. On a GPU it goes on when this returns.

        Returns:
            Logits [rows, vocabulary], and the rows.
        """
        given = {row: [token] for row, token in tokens.items()}
        rows = range(self._together(max(tokens) + 1)) if self._model.cuda_graph else sorted(tokens)
        run = self._step if self._model.cuda_graph else self._run
        logits = self._model.in_turn(lambda: run(rows, given))
        for row, token in tokens.items():
            self.tokens[row].append(token)
        return logits, rows

    def nearest(self, free: Sequence[int], used: Sequence[int]) -> int:
        """Return the free row with which the fewest rows run together."""
        return min(free)

    def _together(self, rows: int) -> int:
        """Return how many rows run together on a GPU: few numbers, as each has a CUDA graph."""
        return min(1 << (rows - 1).bit_length(), self._count)

    def _feed(self, rows: Sequence[int], tokens: Mapping[int, Sequence[int]]) -> dict[str, np.ndarray]:
        """Return the inputs beside the cache; a row without new tokens has one in block 0."""
        news = [tokens.get(row, (0,)) for row in rows]
        live = np.array([row in tokens for row in rows])
        ends = np.cumsum([len(new) for new in news])
        given: dict[str, np.ndarray] = {
            "input_ids": np.concatenate(news, dtype=np.int64),
            "block_table": np.where(live[:, None], self._table[list(rows)], 0).astype(np.int32),
            "cumulative_sequence_lengths": np.array([0, *ends], np.int32),
            "past_sequence_lengths": np.array([len(self.tokens[row]) * (row in tokens) for row in rows], np.int32),
        }
        return given | ({"logits_indices": (ends - 1).astype(np.int32)} if self._model.indexed else {})

    def _step(self, rows: Sequence[int], tokens: Mapping[int, Sequence[int]]) -> Buffer:
        """Start a CUDA graph."""
        step = self._steps[len(rows)]
        step.start(self._model, self._feed(rows, tokens), max(len(self.tokens[row]) for row in tokens))
        return step.logits

    def _run(self, rows: Sequence[int], tokens: Mapping[int, Sequence[int]]) -> Buffer:
        """Run without a CUDA graph."""
        given, new = self._feed(rows, tokens), sum(map(len, tokens.values()))
        for name, array in given.items():
            self._binding.bind_cpu_input(name, array)
        logits = self._model.logits_of(len(rows) if self._model.indexed else new, self._model.device)
        logits.bind(self._binding, output="logits")
        with self._model.running(new, max(len(self.tokens[row]) for row in rows)):
            self._model.session.run_with_iobinding(self._binding, self._model.run_options(-1))
        return logits if len(rows) == new or self._model.indexed else logits.rows(new - 1, new)

    def contents(self, row: int, begin: int, end: int) -> list[dict[str, np.ndarray]]:
        """Return copies of keys and values of a row's tokens, of each part of a prompt [PART, heads, width].

        Args:
            begin, end: the first token, and that behind the last one; multiples of PART.
        """
        made = {
            name: np.empty((end - begin, *buffer.value.shape()[2:]), buffer.dtype)
            for name, buffer in self._blocks.items()
        }
        self._model.in_turn(lambda: self._copy(row, begin, made, read=True))
        parts = (slice(at, at + PART) for at in range(0, end - begin, PART))
        return [{name: array[part].copy() for name, array in made.items()} for part in parts]

    def put(self, row: int, contents: Sequence[Mapping[str, np.ndarray]]) -> None:
        """Write the :meth:`contents` of a row's first tokens."""
        joined = {name: np.concatenate([part[name] for part in contents]) for name in self._blocks}
        self._model.in_turn(lambda: self._copy(row, 0, joined, read=False))

    def _copy(self, row: int, begin: int, arrays: Mapping[str, np.ndarray], read: bool) -> None:
        """Copy between a row's blocks and arrays of its tokens from ``begin`` on."""
        for name, whole in arrays.items():
            buffer, at = self._blocks[name], 0
            while at < len(whole):
                column, slot = divmod(begin + at, BLOCK)
                array, block = whole[at : at + BLOCK - slot], int(self._table[row, column])
                at += len(array)
                if buffer.on_host:
                    here = buffer.here()[block, slot : slot + len(array)]
                    to, source = (array, here) if read else (here, array)
                    to[...] = source
                    continue
                there = buffer.address((block, slot))
                target, origin = (array.ctypes.data, there) if read else (there, array.ctypes.data)
                device.copy(target, origin, array.nbytes)
        self._model.wait()
