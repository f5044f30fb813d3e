"""A checkpoint whose tensors are read through functions, which undo what a converter changed of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cached_property
from math import prod

import numpy as np

from quantmoe.exporter.errors import CheckpointError
from quantmoe.exporter.reading.checkpoint import Checkpoint, is_outline
from quantmoe.exporter.safetensors_file import DTYPES, Entry

_LAYER = re.compile(r"(model\.layers|transformer\.blocks)\.[0-9]+")
Change = Callable[[np.ndarray], np.ndarray]


class ChangedTensors(Checkpoint):
    """A checkpoint with changes of its tensors.

    Attributes:
        rows: module -> the order of its rows that transformers has.
        columns: module -> the order of its columns, which keeps groups of columns that share a scale together.
    """

    _changes: dict[str, Change]
    _made: dict[str, Callable[[], np.ndarray]]
    rows: dict[str, np.ndarray]
    columns: dict[str, np.ndarray]

    def tensor(self, name: str, decides: bool = False) -> np.ndarray:
        entry = self._entry(name)
        outlined = self._headers_only and len(entry.shape) > 1 and not decides
        if name in self._made and not outlined:
            found = self._made[name]().view(DTYPES[entry.dtype]).reshape(entry.shape)
        else:
            found = super().tensor(name, decides)
        return self._changes[name](found) if name in self._changes and not is_outline(found) else found

    def sample(self, name: str, size: int) -> bytes:
        return self.tensor(name).tobytes()[:size] if name in self._made else super().sample(name, size)

    def octets(self, entry: Entry) -> np.ndarray:
        """Return the bytes of a tensor of the file."""
        return self._read(entry)

    def make(self, name: str, entry: Entry, what: Callable[[], np.ndarray]) -> None:
        """Add a tensor that the file does not have.

        Args:
            entry: its type and shape, and the file and the name of its first part.
            what: makes its numbers.
        """
        self._entries[name] = entry
        self._made[name] = what

    def change(self, name: str, what: Change) -> None:
        """Make a tensor be read through a function of its numbers, after the functions that it has."""
        if name in self._entries:
            earlier = self._changes.get(name, lambda array: array)
            self._changes[name] = lambda array: what(earlier(array))

    def order(self, name: str, order: np.ndarray) -> None:
        """Make a tensor's rows, or the elements of a vector, be read in another order."""
        if (entry := self._entries.get(name)) is not None:
            if entry.shape[0] != len(order):
                raise CheckpointError(f"{self.where(name)} is {list(entry.shape)}, expected {len(order)} rows")
            self.change(name, lambda array: array[order])

    def reorder(self, module: str, order: np.ndarray) -> None:
        """Make the rows of a module's weight, and its bias, be read in another order."""
        self.rows[module] = order
        for leaf in ("weight", "bias"):
            self.order(f"{module}.{leaf}", order)

    def reorder_columns(self, module: str, order: np.ndarray) -> None:
        """Make the columns of a module's weight be read in another order."""
        self.columns[module] = order
        if (entry := self._entries.get(f"{module}.weight")) is not None and entry.shape[1:] != (len(order),):
            raise CheckpointError(f"{self.where(entry.name)} is {list(entry.shape)}, expected {len(order)} columns")
        self.change(f"{module}.weight", lambda array: array[:, order])

    @cached_property
    def layers(self) -> list[str]:
        """Return ``model.layers.<number>`` of the layers that have tensors."""
        return list(dict.fromkeys(match[0] for name in self._entries if (match := _LAYER.match(name))))

    def flatten(self, name: str) -> None:
        """Make a tensor a vector."""
        if (entry := self._entries.get(name)) is not None:
            self.reshape(name, (prod(entry.shape),))

    def reshape(self, name: str, shape: tuple[int, ...]) -> None:
        """Give a tensor another shape of as many elements."""
        if (entry := self._entries.get(name)) is not None:
            if prod(entry.shape) != prod(shape):
                raise CheckpointError(f"{self.where(name)} is {list(entry.shape)}, expected {list(shape)}")
            self._entries[name] = Entry(
                shard=entry.shard, dtype=entry.dtype, shape=shape, begin=entry.begin, name=entry.name
            )
