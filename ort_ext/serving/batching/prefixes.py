"""Beginnings of prompts that were run, for later prompts that begin alike."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from blake3 import blake3

#: tokens of a block
BLOCK = 32


@dataclasses.dataclass
class Block:
    """Keys and values of :data:`BLOCK` tokens, by the names of the model's inputs.

    Attributes:
        states: of linear attention after the last of them; None: not kept.
    """

    keys: dict[str, np.ndarray]
    states: dict[str, np.ndarray] | None = None

    @property
    def bytes(self) -> int:
        return sum(array.nbytes for array in [*self.keys.values(), *(self.states or {}).values()])


class Prefixes:
    """Blocks of tokens, each found by the hash of all tokens up to its end. The least recently used ones are dropped.

    Args:
        limit: bytes that they take at most; 0: nothing is kept.
        stateful: the model has states of linear attention, so it can begin only after a block with states.
    """

    def __init__(self, limit: int, stateful: bool):
        self.limit, self._stateful, self._bytes = limit, stateful, 0
        self._blocks: OrderedDict[bytes, Block] = OrderedDict()

    @staticmethod
    def names(ids: Sequence[int]) -> list[bytes]:
        """Return the hash of each whole block of a prompt and the blocks before it."""
        hashed, found = blake3(), []
        tokens = np.array(ids, np.int64)
        for end in range(BLOCK, len(ids) + 1, BLOCK):
            hashed.update(tokens[end - BLOCK : end].tobytes())
            found.append(hashed.digest())
        return found

    def find(self, names: Sequence[bytes]) -> tuple[list[Block], int]:
        """Return the blocks with which a prompt can begin.

        Returns:
            The blocks, and how many blocks are known. With states these may be more.
        """
        found: list[Block] = []
        for name in names:
            if (block := self._blocks.get(name)) is None:
                break
            found.append(block)
        known = len(found)
        self.use(names[:known])
        while self._stateful and found and found[-1].states is None:
            found.pop()
        return found, known

    def use(self, names: Sequence[bytes]) -> None:
        """Make these the blocks that were used last. A block without those before it is of no use, so it goes first."""
        for name in reversed(names):
            if name in self._blocks:
                self._blocks.move_to_end(name)

    def has(self, name: bytes, states: bool) -> bool:
        """Return whether a block is known, and with ``states`` also its states."""
        block = self._blocks.get(name)
        return block is not None and not (states and block.states is None)

    def add(self, name: bytes, block: Block) -> None:
        """Keep a block, or add states to a known one."""
        self._bytes -= self._blocks[name].bytes if name in self._blocks else 0
        self._blocks[name] = block
        self._blocks.move_to_end(name)
        self._bytes += block.bytes
        while self._bytes > self.limit:
            self._bytes -= self._blocks.popitem(last=False)[1].bytes
