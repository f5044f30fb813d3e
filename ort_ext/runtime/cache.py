"""The cache of one sequence: one that grows with each run, and one of a capacity that is bound in place.

Linear attention has states instead of keys and values. A state summarizes all tokens so far. So a cache goes back only
to where states were copied, at the ends of prompts. With a window of states it also goes back over the last run's
tokens.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Generator as Generation
from dataclasses import dataclass
from typing import Any

import numpy as np

from quantmoe.exporter.errors import ModelError
from quantmoe.exporter.folder.interface import present
from quantmoe.runtime import device
from quantmoe.runtime.buffer import Buffer
from quantmoe.runtime.cache_memory import DecodeStep, Room, Rooms, States
from quantmoe.runtime.opened_model import OpenedModel

#: copies of states that are kept to go back to
SNAPSHOTS = 4
#: tokens at the end of a prompt that chat templates render otherwise once there is an answer, like <think>
TAIL = 8
#: slots beyond those that are asked for, so that a reply follows its prompt without a copy
ROOM = 1024


@dataclass
class AnswerCount:
    """Count of the answers that were begun on a cache. A result that is kept has this, and not the cache's memory."""

    latest: int = 0


class Cache:
    """KV cache of one sequence of tokens, which can go back to earlier tokens and on from there.

    A model with states of linear attention can go back only to some lengths (:meth:`ends`). These are 0, the ends of
    the last calls of :meth:`append` with several tokens, and the state window of the last step.

    Attributes:
        tokens: ids of the tokens in the cache.
        tail: states are also copied so many tokens before the end of such a call, or at its begin if it is shorter.
            With 0 they are not.
        hidden: hidden states [S, H] of the last step's tokens, if the model gives them; else None.
        given: inputs of the next steps beside the tokens.
        progress: called by :meth:`append` with the number of tokens run so far, and with the number of all.
        generation: weak reference to the generation that uses the cache. The next user of the cache closes it if it is
            unfinished, and its draft tokens are taken back.
        answers: the answer that may go on; a later answer and :meth:`keep` count on.
        gate: lock for each step of an answer. Threads that share the cache wait for each other.
        drafting: cache of the drafting layer for that generation; None if nothing was drafted.
    """

    def __init__(self, model: OpenedModel):
        self.model, self.tail = model, 0
        self.tokens: list[int] = []
        self.hidden: np.ndarray | None = None
        self.given: dict[str, np.ndarray] = {}
        self.progress: Callable[[int, int], None] = lambda done, total: None
        self.generation: weakref.ref[Generation[Any, None, None]] | None = None
        self.drafting: Cache | None = None
        self.answers, self.gate = AnswerCount(), threading.RLock()
        self._whole = True  # states are of self.tokens, and not of a run that was interrupted
        self._slots = 0  # tokens before the last one whose states are in the window
        self._snapshots: dict[int, dict[str, np.ndarray]] = {}
        self._long = False  # keys have the rotary frequencies of texts longer than model.short_context
        self._begin()

    def _begin(self) -> None:
        """Allocate what an empty cache needs."""
        self._past = self.model.start()

    def append(
        self, ids: Sequence[int], heard: Callable[[Sequence[int], np.ndarray | None], None] = lambda ids, hidden: None
    ) -> np.ndarray:
        """Run tokens after the tokens in the cache, ``model.chunk`` at a time.

        Args:
            heard: called after each of these runs with its tokens and ``hidden``.

        Returns:
            Logits f32 [vocabulary] after the last of them.

        Raises:
            ModelError: there are no tokens, ids outside the vocabulary, or more tokens than the context or the cache
                holds. Or a run before was interrupted, and states are not of these tokens: go back first.
        """
        return self._fetch(self.read(ids, heard), 1)[0]

    def read(
        self, ids: Sequence[int], heard: Callable[[Sequence[int], np.ndarray | None], None] = lambda ids, hidden: None
    ) -> Any:
        """Run tokens as :meth:`append` does. Return the logits of the last run, where they are."""
        ids = self._make_ready(ids)
        first = self.model.short_context + 1 if self._long and not self.tokens else 0
        ends = {*range(max(self.model.chunk, first), len(ids), self.model.chunk), len(ids)}
        copied = {len(ids), max(len(ids) - self.tail, 0)} if self.model.states and len(ids) > 1 else set()
        if self.tokens and 0 in copied:  # the tail begins before these tokens: as near as there are states
            self._snapshots[len(self.tokens)] = self._states()
        at = 0
        self.progress(0, len(ids))
        for end in sorted(ends | copied - {0}):
            logits = self._advance(ids[at:end])
            self.progress(end, len(ids))
            heard(ids[at:end], self.hidden)
            at = end
            if end in copied:
                self._snapshots[len(self.tokens)] = self._states()
        self._snapshots = dict(sorted(self._snapshots.items())[-SNAPSHOTS:])
        return logits

    def verify(self, ids: Sequence[int]) -> np.ndarray:
        """Run a token and its draft tokens in one call.

        Returns:
            Logits f32 [.., vocabulary] after each token, or after the last tokens that a step gives logits for.

        Raises:
            ModelError: as :meth:`append`.
        """
        return self._fetch(self._advance(self._make_ready(ids)), len(ids))

    def _make_ready(self, ids: Sequence[int]) -> Sequence[int]:
        """Prepare a run of tokens, and return the tokens to run.

        These are all tokens again if the keys in the cache have the rotary frequencies of a shorter or longer text.
        """
        self.settle()
        self.model.check(ids, len(self.tokens))
        self._check_end(len(self.tokens))
        self.reserve(total := len(self.tokens) + len(ids))
        known, self._long = self._long, total > self.model.short_context
        if self.tokens and known != self._long:
            ids = [*self.tokens, *ids]
            self.rewind(0)
        return ids

    def settle(self) -> None:
        """End a generation that was left: the cache has all tokens but the last that it gave."""
        left = None if self.generation is None else self.generation()
        if left is not None and inspect.getgeneratorstate(left) != inspect.GEN_RUNNING:
            self.generation = None
            self.answers.latest += inspect.getgeneratorstate(left) != inspect.GEN_CLOSED
            left.close()

    def _advance(self, ids: Sequence[int]) -> Any:
        """Return the logits of a call's last tokens, as many as it gives, where they are."""
        part = [int(id) for id in ids]
        self._whole = False
        logits = self._run(np.array([part], np.int64))
        self.tokens += part  # after the run: whatever interrupts it, what is in tokens is in the cache
        self._whole, self._slots = True, min(self.model.window, len(part)) - 1
        return logits

    def _fetch(self, logits: Any, count: int) -> np.ndarray:
        """Return the logits of a run's last tokens f32 [.., vocabulary], at most so many."""
        return np.asarray(logits[0, -count:], np.float32)

    def rewind(self, length: int) -> None:
        """Go back to the first ``length`` tokens.

        Raises:
            ModelError: there are fewer tokens, or no states of this length (:meth:`ends`).
        """
        self.settle()
        if not 0 <= length <= len(self.tokens):
            raise ModelError(f"the cache has {len(self.tokens)} tokens, there is no going back to {length}")
        self._check_end(length)
        back = len(self.tokens) - length
        if self._whole and 0 < back <= self._slots:
            self._crop(back)
        elif length in self._snapshots and (back or not self._whole):
            self._restore(self._snapshots[length])
        del self.tokens[length:]
        self._slots = 0 if back else self._slots
        self._whole = True
        self._snapshots = {at: states for at, states in self._snapshots.items() if at <= length}

    def keep(self, ids: Sequence[int]) -> int:
        """Go back to the tokens that ``ids`` shares, or as near before their end as states allow.

        Returns:
            The number of tokens kept, at most all of ``ids`` except the last, whose logits are needed.
        """
        with self.gate:
            self.settle()
            self.answers.latest += 1
            most = min(len(self.tokens), len(ids) - 1)
            same = next((at for at in range(most) if self.tokens[at] != ids[at]), max(most, 0))
            same = max(at for at in self.ends() if at <= same)
            self.rewind(same)
            return same

    def ends(self) -> Sequence[int]:
        """Return the lengths that the cache can go back to."""
        if not self.model.states:
            return range(len(self.tokens) + 1)
        now = range(len(self.tokens) - self._slots, len(self.tokens) + 1) if self._whole else ()
        return sorted({0, *self._snapshots, *now})

    @property
    def whole(self) -> bool:
        """True if no run was interrupted that changed a state, so the cache can go on as it is."""
        return self._whole or not self.model.states

    def _check_end(self, length: int) -> None:
        if length not in (ends := self.ends()):
            why = f"of all {len(self.tokens)} tokens" if self._whole else "of a run that was interrupted"
            raise ModelError(
                f"the states of linear attention are {why}, they cannot be had of {length}; only of "
                f"{', '.join(map(str, ends))} tokens. Go back to one of these lengths, or export with --state-window"
            )

    def _states(self) -> dict[str, np.ndarray]:
        """Return copies of the states after the last token."""
        return {name: self._live(self._past[name]).copy() for name in self.model.states}

    def _restore(self, states: dict[str, np.ndarray]) -> None:
        for name, array in states.items():
            self._past[name] = self._past[name].copy()  # a run's output may be read-only
            self._live(self._past[name])[...] = array

    def _crop(self, back: int) -> None:
        """Make the states so many tokens before the last, which are in the window, those that are read."""
        self._restore({name: self._past[name][-1 - back] for name in self.model.states})

    def _live(self, states: np.ndarray) -> np.ndarray:
        return states[-1] if self.model.window > 1 else states

    def contents(self) -> tuple[dict[str, np.ndarray], dict[int, dict[str, np.ndarray]]]:
        """Return keys and values by name, [1, heads, tokens, width], and states by their number of tokens.

        Raises:
            ModelError: a run was interrupted, see :meth:`append`.
        """
        self._check_end(len(self.tokens))
        if self._long and len(self.tokens) <= self.model.short_context:
            ids = list(self.tokens)
            self.rewind(0)
            self.append(ids)
        now = {len(self.tokens): self._states()} if self.model.states else {}
        return {name: array[:, :, : len(self.tokens)] for name, array in self._keys()}, self._snapshots | now

    def become(
        self, tokens: Sequence[int], keys: dict[str, np.ndarray], states: dict[int, dict[str, np.ndarray]]
    ) -> None:
        """Replace the contents by tokens and the :meth:`contents` of a cache that has them."""
        self.tokens = []
        self.reserve(len(tokens))
        self._set_keys(keys)
        if states:
            self._restore(states[len(tokens)])
        self.tokens, self._snapshots, self._whole, self._slots = list(tokens), dict(states), True, 0
        self._long = len(tokens) > self.model.short_context

    def _keys(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yield keys and values of at least the tokens, by name."""
        return ((name, array) for name, array in self._past.items() if name not in self.model.states)

    def _set_keys(self, keys: dict[str, np.ndarray]) -> None:
        self._past |= keys

    @property
    def room(self) -> int:
        """Tokens that can follow those that are there."""
        return self.model.context - len(self.tokens)

    def reserve(self, slots: int) -> None:
        """Make room for so many tokens at once."""

    def _run(self, ids: np.ndarray) -> Any:
        """Return the logits [1, min(S, model.rows), vocabulary] of new tokens [1, S], where they are."""
        length = len(self.tokens)
        states = self.model.states
        past = {n: value if n in states else value[:, :, :length] for n, value in self._past.items()}  # longer: rewind
        found = self.model.run(self.model.feed(ids, length) | past | self.given, ids.shape[1], length)
        self._past = {name: found[present(name)] for name in past}
        self.hidden = found[self.model.hidden][0] if self.model.hidden else None
        return found["logits"]


class SharedCache(Cache):
    """A cache that is written in place: past and present are one buffer [1, heads, capacity, width].

    A full buffer is copied to one of twice the capacity. If the caller gave the capacity, it refuses instead.
    """

    def __init__(self, model: OpenedModel, rooms: Rooms):
        self._rooms = rooms
        super().__init__(model)

    def _begin(self) -> None:
        self._room: Room | None = None
        self._leave: Callable[[], object] = lambda: None
        if self.model.capacity is not None:
            self._allocate(self.model.capacity, self.model.capacity)

    @property
    def capacity(self) -> int:
        """Tokens that there is memory for."""
        return 0 if self._room is None else self._room.capacity

    @property
    def room(self) -> int:
        return min(self.model.context, self.model.capacity or self.model.context) - len(self.tokens)

    def reserve(self, slots: int) -> None:
        """Make room for so many tokens.

        Raises:
            ModelError: more than the capacity that the caller asked for.
        """
        if slots <= self.capacity:
            return
        if self.model.capacity is not None:
            raise ModelError(f"{self.model.path}: {slots} tokens, the cache has a capacity of {self.capacity}")
        self._allocate(slots, min(max(slots + ROOM, 2 * self.capacity), max(slots, self.model.context)))

    def _allocate(self, slots: int, capacity: int) -> None:
        self.model.in_turn(lambda: self._move(self._rooms.take(slots, capacity)))

    def _move(self, room: Room) -> None:
        """Copy what is in the cache to a larger room."""
        if self._room is not None:
            self._copy(self._room, room)
        self._leave()
        self._room, self._copies = room, States(self.model, room.buffers)
        self._leave = leave = weakref.finalize(self, self._rooms.give, room)
        leave.atexit = False
        self._binding = self.model.session.io_binding()
        for name, buffer in room.buffers.items():
            buffer.bind(self._binding, name, present(name))

    def _copy(self, old: Room, new: Room) -> None:
        for name, buffer in old.buffers.items():
            if name in self.model.states:
                new.buffers[name].copy(buffer)
            else:
                new.buffers[name].copy_tokens(buffer, len(self.tokens))
        self.model.wait()

    def _keys(self) -> Iterator[tuple[str, np.ndarray]]:
        buffers = {} if self._room is None else self._room.buffers
        names = [name for name in buffers if name not in self.model.states]

        def read() -> list[tuple[str, np.ndarray]]:
            self.model.wait()  # a run may be ahead
            return [(name, buffers[name].numpy()) for name in names]

        return iter(self.model.in_turn(read))

    def _set_keys(self, keys: dict[str, np.ndarray]) -> None:
        self.model.in_turn(lambda: self._write(keys))

    def _write(self, keys: dict[str, np.ndarray]) -> None:
        assert self._room is not None  # it was reserved
        given = {name: Buffer.of(np.ascontiguousarray(array), "cpu") for name, array in keys.items()}
        for name, buffer in given.items():
            self._room.buffers[name].copy_tokens(buffer, keys[name].shape[2])
        self.model.wait()  # before they are freed

    def _states(self) -> dict[str, np.ndarray]:
        return self.model.in_turn(self._copies.read)

    def _restore(self, states: dict[str, np.ndarray]) -> None:
        self.model.in_turn(lambda: self._copies.write(states))

    def _crop(self, back: int) -> None:
        self.model.in_turn(lambda: self._copies.back(back))

    def step(self) -> DecodeStep:
        """Return the run of one token after those that are there.

        Raises:
            ModelError: as :meth:`reserve`.
        """
        self.reserve(len(self.tokens) + 1)
        assert self._room is not None  # it was reserved
        return self._room.step(self.model)

    def follow(self, token: int, step: DecodeStep) -> Buffer:
        """Start the run of a token that the GPU has chosen, whose inputs it has written for ``step``.

        Returns:
            Where the logits after it will be.

        Raises:
            ModelError: as :meth:`append`.
        """
        if step is not self.step() or self._long != (len(self.tokens) + 1 > self.model.short_context):
            return self.read([token])
        self._whole = False
        self.model.in_turn(lambda: step.launch(len(self.tokens), ahead=True))
        self.tokens.append(token)
        self._whole, self._slots = True, 0
        return step.logits

    def _fetch(self, logits: Buffer, count: int) -> np.ndarray:
        _, rows, vocabulary = logits.value.shape()
        if logits.on_host:
            return np.array(logits.here()[0, -count:], np.float32)
        made = np.empty((min(count, rows), vocabulary), logits.dtype)
        self.model.in_turn(lambda: device.fetch(made, logits.address() + logits.bytes() - made.nbytes))
        return made.astype(np.float32)

    def _run(self, ids: np.ndarray) -> Buffer:
        return self.model.in_turn(lambda: self._run_bound(ids))

    def _run_bound(self, ids: np.ndarray) -> Buffer:
        new = ids.shape[1]
        assert self._room is not None  # it was reserved
        if self.model.cuda_graph and new <= self.model.step_tokens:
            step = self._room.step(self.model, new)
            step.run(ids, len(self.tokens), self.given)
            self.hidden = step.hidden_states()
            return step.logits
        for name, value in self.model.feed(ids, len(self.tokens)).items():
            self._binding.bind_cpu_input(name, value)
        given = {name: Buffer.of(value, "cpu") for name, value in self.given.items()}
        for name, buffer in given.items():
            buffer.bind(self._binding, name)
        hidden = self.model.hidden_of(new, "cpu")
        if hidden is not None:
            hidden.bind(self._binding, output=self.model.hidden)
        logits = self.model.run_bound(self._binding, new, len(self.tokens))
        self.hidden = None if hidden is None else hidden.numpy()[0]
        return logits
