"""The KV cache of one sequence: one that grows with each run, and one of a capacity that is bound in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from quantmoe.exporter.errors import ModelError
from quantmoe.exporter.memory import doing

if TYPE_CHECKING:
    from quantmoe.exporter.generate import Generator

#: slots beyond those that are asked for, so that a reply follows its prompt without a copy
ROOM = 1024


class Cache:
    """A sequence of tokens and their keys and values. It may go back, and on from there.

    Attributes:
        tokens: ids of those whose keys and values are there.
    """

    def __init__(self, model: Generator):
        self.model = model
        self.tokens: list[int] = []
        self._past = model.start()

    def append(self, ids: Sequence[int]) -> np.ndarray:
        """Runs tokens after those that are there, ``model.chunk`` at a time.

        Returns:
            Logits f32 [vocabulary] after the last of them.

        Raises:
            ModelError: no tokens, ids outside the vocabulary, more than the model's context or the cache holds.
        """
        self.model.check(ids, len(self.tokens))
        self.reserve(len(self.tokens) + len(ids))
        for at in range(0, len(ids), self.model.chunk):
            part = [int(id) for id in ids[at : at + self.model.chunk]]
            logits = self._run(np.array([part], np.int64))
            self.tokens += part  # after the run: whatever interrupts it, what is in tokens is in the cache
        return np.asarray(logits[0, -1], np.float32)

    def rewind(self, length: int) -> None:
        """Goes back to the first ``length`` tokens.

        Raises:
            ModelError: there are fewer.
        """
        if not 0 <= length <= len(self.tokens):
            raise ModelError(f"the cache has {len(self.tokens)} tokens, there is no going back to {length}")
        del self.tokens[length:]

    def keep(self, ids: Sequence[int]) -> int:
        """Goes back to what begins ``ids``, too; its length, at most all but the last, whose logits are wanted."""
        most = min(len(self.tokens), len(ids) - 1)
        same = next((at for at in range(most) if self.tokens[at] != ids[at]), max(most, 0))
        self.rewind(same)
        return same

    def reserve(self, slots: int) -> None:
        """Makes room for so many tokens at once."""

    def _run(self, ids: np.ndarray) -> np.ndarray:
        """Logits [1, S or 1, vocabulary] of new tokens [1, S]."""
        length = len(self.tokens)
        past = {name: value[:, :, :length] for name, value in self._past.items()}  # it may be longer: rewind
        logits, self._past = self.model.step(ids, past)
        return logits


class SharedCache(Cache):
    """Of models that write a cache in place: past and present are one buffer [1, heads, capacity, width], which is
    allocated once. When it is full it is copied to one of twice the capacity, or refuses if the caller said which."""

    def __init__(self, model: Generator):
        self.model = model
        self.tokens = []
        self.capacity = 0
        self._buffers: dict[str, Any] = {}
        self._binding = model.session.io_binding()
        self._binding.bind_output("logits", "cpu")  # the first of the binding's outputs
        if model.capacity is not None:
            self._allocate(model.capacity)

    def reserve(self, slots: int) -> None:
        """Makes room for so many tokens.

        Raises:
            ModelError: more than the capacity that the caller asked for.
        """
        if slots <= self.capacity:
            return
        if self.model.capacity is not None:
            raise ModelError(f"{self.model.path}: {slots} tokens, the cache has a capacity of {self.capacity}")
        self._allocate(min(max(slots + ROOM, 2 * self.capacity), max(slots, self.model.context)))

    def _allocate(self, capacity: int) -> None:
        import onnxruntime as ort

        length = len(self.tokens)
        for name, (shape, dtype) in self.model.past.items():
            with doing(f"{self.model.path}: {name} of {capacity} tokens"):
                array = np.empty([1, shape[1], capacity, shape[3]], dtype)  # what is not written is not read
            if length:
                array[:, :, :length] = self._buffers[name].numpy()[:, :, :length]
            value = ort.OrtValue.ortvalue_from_numpy(array, self.model.device, 0)
            self._buffers[name] = value
            self._binding.bind_ortvalue_input(name, value)
            self._binding.bind_ortvalue_output(name.replace("past_key_values", "present"), value)
        self.capacity = capacity

    def _run(self, ids: np.ndarray) -> np.ndarray:
        for name, value in self.model.feed(ids, len(self.tokens)).items():
            self._binding.bind_cpu_input(name, value)
        self._binding.bind_output("logits", "cpu")  # anew: of another length than the last
        with self.model.running(ids.shape[1], len(self.tokens)):
            self.model.session.run_with_iobinding(self._binding)
        return np.asarray(self._binding.get_outputs()[0].numpy())
