"""The cache of one sequence: one that grows with each run, and one of a capacity that is bound in place.

Linear attention has states instead of keys and values. They are of all tokens so far: there is no going back but to
where they were copied, at the ends of prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from quantmoe.exporter.errors import ModelError
from quantmoe.exporter.memory import doing

if TYPE_CHECKING:
    from quantmoe.exporter.generate import Generator

#: copies of states that are kept to go back to
SNAPSHOTS = 4
#: tokens at the end of a prompt that chat templates render otherwise once there is an answer, like <think>
TAIL = 8
#: slots beyond those that are asked for, so that a reply follows its prompt without a copy
ROOM = 1024


class Cache:
    """A sequence of tokens and their keys and values. It may go back, and on from there: where the model has states, to
    0 and to the ends of the last calls of :meth:`append` of several tokens only.

    Attributes:
        tokens: ids of those whose keys and values are there.
        tail: states are copied so many tokens before the end of such a call, too; 0: not.
    """

    def __init__(self, model: Generator):
        self.model, self.tail = model, 0
        self.tokens: list[int] = []
        self._whole = True  # states are of self.tokens, and not of a run that was interrupted
        self._snapshots: dict[int, dict[str, np.ndarray]] = {}
        self._begin()

    def _begin(self) -> None:
        """Allocates what an empty cache needs."""
        self._past = self.model.start()

    def append(self, ids: Sequence[int]) -> np.ndarray:
        """Runs tokens after those that are there, ``model.chunk`` at a time.

        Returns:
            Logits f32 [vocabulary] after the last of them.

        Raises:
            ModelError: no tokens, ids outside the vocabulary, more than the model's context or the cache holds; a run
                before was interrupted, and states are not of these tokens: go back first.
        """
        self.model.check(ids, len(self.tokens))
        self._check_end(len(self.tokens))
        self.reserve(len(self.tokens) + len(ids))
        ends = {*range(self.model.chunk, len(ids), self.model.chunk), len(ids)}
        copied = {len(ids), len(ids) - self.tail} if self.model.states and len(ids) > 1 else set()
        at = 0
        for end in sorted(ends | {end for end in copied if end > 0}):
            part = [int(id) for id in ids[at:end]]
            self._whole = False
            logits = self._run(np.array([part], np.int64))
            self.tokens += part  # after the run: whatever interrupts it, what is in tokens is in the cache
            self._whole, at = True, end
            if end in copied:
                self._snapshots[len(self.tokens)] = self._states()
        self._snapshots = dict(sorted(self._snapshots.items())[-SNAPSHOTS:])
        return np.asarray(logits[0, -1], np.float32)

    def rewind(self, length: int) -> None:
        """Goes back to the first ``length`` tokens.

        Raises:
            ModelError: there are fewer, or a state is of more tokens and no copy of it of so many.
        """
        if not 0 <= length <= len(self.tokens):
            raise ModelError(f"the cache has {len(self.tokens)} tokens, there is no going back to {length}")
        self._check_end(length)
        if length in self._snapshots and (length < len(self.tokens) or not self._whole):
            self._restore(self._snapshots[length])
        del self.tokens[length:]
        self._whole = True
        self._snapshots = {at: states for at, states in self._snapshots.items() if at <= length}

    def keep(self, ids: Sequence[int]) -> int:
        """Goes back to what begins ``ids``, too, or as near before its end as states allow; the length, at most all but
        the last, whose logits are wanted."""
        most = min(len(self.tokens), len(ids) - 1)
        same = next((at for at in range(most) if self.tokens[at] != ids[at]), max(most, 0))
        same = max(at for at in self._ends() if at <= same)
        self.rewind(same)
        return same

    def _ends(self) -> Sequence[int]:
        """Lengths that the cache can go back to."""
        if not self.model.states:
            return range(len(self.tokens) + 1)
        return sorted({0, *self._snapshots, *([len(self.tokens)] if self._whole else [])})

    def _check_end(self, length: int) -> None:
        if length not in (ends := self._ends()):
            why = f"of all {len(self.tokens)} tokens" if self._whole else "of a run that was interrupted"
            raise ModelError(
                f"the states of linear attention are {why}, they cannot be had of {length}; only of "
                f"{', '.join(map(str, ends))} tokens"
            )

    def _states(self) -> dict[str, np.ndarray]:
        """Copies of the states as they are."""
        return {name: self._past[name].copy() for name in self.model.states}

    def _restore(self, states: dict[str, np.ndarray]) -> None:
        self._past |= states

    def reserve(self, slots: int) -> None:
        """Makes room for so many tokens at once."""

    def _run(self, ids: np.ndarray) -> np.ndarray:
        """Logits [1, S or 1, vocabulary] of new tokens [1, S]."""
        length = len(self.tokens)
        states = self.model.states
        past = {n: value if n in states else value[:, :, :length] for n, value in self._past.items()}  # longer: rewind
        logits, self._past = self.model.step(ids, past)
        return logits


class SharedCache(Cache):
    """Of models that write a cache in place: past and present are one buffer [1, heads, capacity, width], which is
    allocated once. When it is full it is copied to one of twice the capacity, or refuses if the caller said which."""

    def _begin(self) -> None:
        self.capacity = 0
        self._buffers: dict[str, Any] = {}
        self._binding = self.model.session.io_binding()
        self._binding.bind_output("logits", "cpu")  # the first of the binding's outputs
        for name in self.model.states:
            self._bind(name, np.zeros([1, *self.model.past[name][0][1:]], self.model.past[name][1]))
        if self.model.capacity is not None:
            self._allocate(self.model.capacity)

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
        length = len(self.tokens)
        for name, (shape, dtype) in self.model.past.items():
            if name in self.model.states:
                continue
            with doing(f"{self.model.path}: {name} of {capacity} tokens"):
                array = np.empty([1, shape[1], capacity, shape[3]], dtype)  # what is not written is not read
            if length:
                array[:, :, :length] = self._buffers[name].numpy()[:, :, :length]
            self._bind(name, array)
        self.capacity = capacity

    def _bind(self, name: str, array: np.ndarray) -> None:
        import onnxruntime as ort

        value = ort.OrtValue.ortvalue_from_numpy(array, self.model.device, 0)
        self._buffers[name] = value
        self._binding.bind_ortvalue_input(name, value)
        self._binding.bind_ortvalue_output(name.replace("past_key_values", "present"), value)

    def _states(self) -> dict[str, np.ndarray]:
        return {name: self._buffers[name].numpy().copy() for name in self.model.states}

    def _restore(self, states: dict[str, np.ndarray]) -> None:
        for name, array in states.items():
            self._bind(name, array.copy())  # the snapshot stays

    def _run(self, ids: np.ndarray) -> np.ndarray:
        for name, value in self.model.feed(ids, len(self.tokens)).items():
            self._binding.bind_cpu_input(name, value)
        self._binding.bind_output("logits", "cpu")  # anew: of another length than the last
        with self.model.running(ids.shape[1], len(self.tokens)):
            self.model.session.run_with_iobinding(self._binding)
        return np.asarray(self._binding.get_outputs()[0].numpy())
