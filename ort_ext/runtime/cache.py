"""The cache of one sequence: one that grows with each run, and one of a capacity that is bound in place.

Linear attention has states instead of keys and values. They are of all tokens so far: there is no going back but to
where they were copied, at the ends of prompts, and in models with a window of states over the last run's tokens.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Generator as Generation
from typing import TYPE_CHECKING, Any

import numpy as np

from quantmoe.exporter.errors import ModelError
from quantmoe.exporter.folder.interface import HIDDEN, present
from quantmoe.exporter.memory import OutOfMemoryError
from quantmoe.runtime import device
from quantmoe.runtime.buffer import Buffer
from quantmoe.runtime.session_thread import SESSION_THREAD

if TYPE_CHECKING:
    from quantmoe.runtime.generate import Generator

#: copies of states that are kept to go back to
SNAPSHOTS = 4
#: tokens at the end of a prompt that chat templates render otherwise once there is an answer, like <think>
TAIL = 8
#: slots beyond those that are asked for, so that a reply follows its prompt without a copy
ROOM = 1024


class Cache:
    """KV cache of one sequence of tokens, which can go back to earlier tokens and on from there.

    A model with states of linear attention can go back only to some lengths (:meth:`ends`): to 0, to the ends of the
    last calls of :meth:`append` with several tokens, and within the state window of the last step.

    Attributes:
        tokens: ids of the tokens in the cache.
        tail: states are also copied so many tokens before the end of such a call, or at its begin if it is shorter;
            0: they are not.
        hidden: hidden states [S, H] of the last step's tokens, if the model gives them; else None.
        given: inputs of the next steps beside the tokens.
        progress: called by :meth:`append` with the number of tokens run so far, and with the number of all.
        generation: weak reference to the generation that uses the cache. The next user of the cache closes it if it is
            unfinished, and its draft tokens are taken back.
        drafting: cache of the drafting layer for that generation; None if nothing was drafted.
    """

    def __init__(self, model: Generator):
        self.model, self.tail = model, 0
        self.tokens: list[int] = []
        self.hidden: np.ndarray | None = None
        self.given: dict[str, np.ndarray] = {}
        self.progress: Callable[[int, int], None] = lambda done, total: None
        self.generation: weakref.ref[Generation[Any, None, None]] | None = None
        self.drafting: Cache | None = None
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
            ModelError: no tokens, ids outside the vocabulary, more than the model's context or the cache holds; a run
                before was interrupted, and states are not of these tokens: go back first.
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
        self.settle()
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
        """Whether it can go on as it is: no run was interrupted that changed a state."""
        return self._whole or not self.model.states

    def _check_end(self, length: int) -> None:
        if length not in (ends := self.ends()):
            why = f"of all {len(self.tokens)} tokens" if self._whole else "of a run that was interrupted"
            raise ModelError(
                f"the states of linear attention are {why}, they cannot be had of {length}; only of "
                f"{', '.join(map(str, ends))} tokens"
            )

    def _states(self) -> dict[str, np.ndarray]:
        """Copies of the states after the last token."""
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
        """Keys and values of at least the tokens, by name."""
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


class States:
    """The states of linear attention in a cache's buffers, copied where they are.

    Args:
        buffers: of the states at least, by the names of the inputs.
    """

    def __init__(self, model: Generator, buffers: Mapping[str, Buffer]):
        self._model, self._buffers = model, {name: buffers[name] for name in model.states}
        #: that of the last token, which a run reads; None where that is all there is
        self._live = model.window - 1 if model.window > 1 else None

    def read(self) -> dict[str, np.ndarray]:
        """Copies of those after the last token."""
        made = {}
        for name, buffer in self._buffers.items():
            shape = buffer.value.shape()[self._live is not None :]
            made[name] = Buffer.of(np.empty(shape, buffer.dtype), "cpu")
        self._copy(self._buffers, self._live, made, None)
        return {name: buffer.numpy() for name, buffer in made.items()}

    def write(self, states: Mapping[str, np.ndarray]) -> None:
        """Make these the ones after the last token."""
        given = {name: Buffer.of(np.ascontiguousarray(states[name]), "cpu") for name in self._buffers}
        self._copy(given, None, self._buffers, self._live)

    def back(self, count: int) -> None:
        """Make those so many tokens before the last, which are in the window, the ones after the last."""
        assert self._live is not None
        self._copy(self._buffers, self._live - count, self._buffers, self._live)

    def _copy(
        self, sources: Mapping[str, Buffer], slot: int | None, targets: Mapping[str, Buffer], to: int | None
    ) -> None:
        for name in self._buffers:
            if self._model.device == "cpu":
                targets[name].here(to)[...] = sources[name].here(slot)
            else:
                device.copy(targets[name].address(to), sources[name].address(slot), sources[name].bytes(slot))
        if self._buffers and self._model.device != "cpu":
            device.wait()


class Room:
    """Memory of caches that are written in place, and the CUDA graphs of decode steps over it.

    Args:
        capacity: tokens of each row. batch: rows.

    Attributes:
        buffers: by the names of the inputs. steps: by the tokens of a run, and the thread that has its graph.
    """

    def __init__(self, model: Generator, capacity: int, batch: int = 1):
        self.capacity, self.batch = capacity, batch
        self.steps: dict[tuple[int, object], DecodeStep] = {}
        shapes = {name: (model.shape(name, batch), dtype) for name, (_, dtype) in model.past.items()}
        for name in shapes.keys() - set(model.states):
            shapes[name][0][2] = capacity
        with model.allocating(capacity, batch):
            # what is not written is not read, nor is a state before the first token
            made = Buffer.several([*shapes.values()], model.device)
        self.buffers = dict(zip(shapes, made, strict=True))

    def step(self, model: Generator, tokens: int = 1) -> DecodeStep:
        """Return the decode step of so many tokens a row, which is captured when it first runs."""
        at = tokens, SESSION_THREAD.thread()
        if at not in self.steps:
            self.steps[at] = DecodeStep(weakref.proxy(model), self.buffers, self.capacity, tokens, self.batch)
        return self.steps[at]


class Rooms:
    """Rooms that conversations have one after the other.

    ONNX Runtime never frees a CUDA graph, whose addresses are fixed. So a conversation leaves its room to the next one
    of the same number of rows. A room that is too small makes way for one that is at least an eighth larger: however
    lengths follow each other, there are few graphs.

    Args:
        model: held by its user, not from here.
    """

    def __init__(self, model: Generator):
        self._model: Generator = weakref.proxy(model)
        self._free: list[Room] = []

    def take(self, slots: int, capacity: int, batch: int = 1) -> Room:
        """Return a room for at least ``slots`` tokens a row; a new one is of ``capacity``, or more.

        Raises:
            OutOfMemoryError: it says what the cache takes, and what is free.
        """
        model, free = self._model, sorted(self._free, key=lambda room: room.capacity)
        same = [room for room in free if room.batch == batch]
        large = next((room for room in same if room.capacity >= slots), None)
        for room in same if large is None else [large]:
            self._free.remove(room)
        if large is not None:
            return large
        if self._free and model.device != "cpu":
            device.wait()  # a run in a room that makes way may be ahead
        if same and model.capacity is None:
            most = same[-1].capacity
            capacity = max(capacity, min(most + most // 8, model.context))
        same.clear()
        try:
            return Room(model, capacity, batch)
        except OutOfMemoryError:
            if not self._free:
                raise
            self._free.clear()  # those of other numbers of rows
            return Room(model, capacity, batch)

    def give(self, room: Room) -> None:
        """Take a room back. One without graphs is freed."""
        if room.steps:
            self._free.append(room)


class SharedCache(Cache):
    """Of models that write a cache in place: past and present are one buffer [1, heads, capacity, width], which is
    allocated once. When it is full it is copied to one of twice the capacity, or refuses if the caller said which."""

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
        self.model.in_turn(lambda: self._move(self.model.rooms.take(slots, capacity)))

    def _move(self, room: Room) -> None:
        """What is in the cache to a larger room."""
        if self._room is not None:
            self._copy(self._room, room)
        self._leave()
        self._room, self._copies = room, States(self.model, room.buffers)
        self._leave = leave = weakref.finalize(self, self.model.rooms.give, room)
        leave.atexit = False
        self._binding = self.model.session.io_binding()
        for name, buffer in room.buffers.items():
            buffer.bind(self._binding, name, present(name))

    def _copy(self, old: Room, new: Room) -> None:
        length = len(self.tokens)
        for name, buffer in old.buffers.items():
            if self.model.device == "cpu":
                part = ... if name in self.model.states else np.s_[:, :, :length]
                new.buffers[name].here()[part] = buffer.here()[part]
            elif name in self.model.states:
                device.copy(new.buffers[name].address(), buffer.address(), buffer.bytes())
            elif length:
                self._write_front(new.buffers[name], buffer.address(), old.capacity, length)
        if self.model.device != "cpu":
            device.wait()

    def _keys(self) -> Iterator[tuple[str, np.ndarray]]:
        buffers = {} if self._room is None else self._room.buffers
        names = [name for name in buffers if name not in self.model.states]

        def read() -> list[tuple[str, np.ndarray]]:
            if self.model.device != "cpu":
                device.wait()  # a run may be ahead
            return [(name, buffers[name].numpy()) for name in names]

        return iter(self.model.in_turn(read))

    def _set_keys(self, keys: dict[str, np.ndarray]) -> None:
        self.model.in_turn(lambda: self._write(keys))

    def _write(self, keys: dict[str, np.ndarray]) -> None:
        assert self._room is not None  # it was reserved
        for name, array in keys.items():
            buffer, length = self._room.buffers[name], array.shape[2]
            if self.model.device == "cpu":
                buffer.here()[:, :, :length] = array
            elif length:
                given = np.ascontiguousarray(array)
                self._write_front(buffer, given.ctypes.data, length, length)
                device.wait()  # before it is freed

    def _write_front(self, target: Buffer, source: int, slots: int, length: int) -> None:
        """Start the copy of the first ``length`` of ``slots`` tokens' keys or values of each head."""
        _, heads, capacity, width = target.value.shape()
        size = width * target.dtype.itemsize
        device.copy(target.address(), source, length * size, heads, capacity * size, slots * size)

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
        if self.model.device == "cpu":
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
        logits = self.model.logits_of(new, self.model.device)
        logits.bind(self._binding, output="logits")
        hidden = self.model.hidden_of(new, "cpu")
        if hidden is not None:
            hidden.bind(self._binding, output=self.model.hidden)
        with self.model.running(new, len(self.tokens)):
            self.model.session.run_with_iobinding(self._binding, self.model.run_options(-1))
        self.hidden = None if hidden is None else hidden.numpy()[0]
        return logits


class DecodeStep:
    """A decode step whose shapes and addresses never change, as a CUDA graph wants it: so many tokens a row, one or one
    and its drafts, and a mask of the whole capacity. ONNX Runtime captures the first and replays it; each room has a
    graph of its own in the session, for each number of tokens.

    The call that captures runs several times (microsoft/onnxruntime 32243), and a state goes on with each: states are
    put back after it, and the tokens are run again. Keys and values are only written again.

    Attributes:
        logits: of the last run, [batch, min(tokens, ``model.rows``), vocabulary].
    """

    def __init__(self, model: Generator, buffers: Mapping[str, Buffer], capacity: int, tokens: int = 1, batch: int = 1):
        self.model, self._tokens = model, tokens
        graph = next(model.graphs)
        self._options = model.run_options(graph)
        self._ahead = model.run_options(graph, ahead=True) if model.choice is not None else self._options
        self._mask = np.zeros((batch, capacity), np.int64)
        arrays = model.feed(np.zeros((batch, tokens), np.int64), 0) | {"attention_mask": self._mask}
        if model.takes_hidden:
            arrays[HIDDEN] = model.hidden_array(tokens)
        self._inputs = {name: Buffer.of(array, model.device) for name, array in arrays.items()}
        #: of what the GPU writes, the places by their names in qm_cuda_choice_tensors
        names = {"ids": "input_ids", "positions": "position_ids", "mask": "attention_mask"}
        self.places = {name: self._inputs[of].address() for name, of in names.items()}
        #: tokens of each row before the run whose inputs the GPU has written, and the mask's column; None: the host has
        self._expected: tuple[Sequence[int], int] | None = None
        self.logits = model.logits_of(tokens, model.device, batch)
        self._hidden = model.hidden_of(tokens, model.device)
        self._states = States(model, buffers)
        self._captured = False
        self._binding = model.session.io_binding()
        self.logits.bind(self._binding, output="logits")
        if self._hidden is not None:
            self._hidden.bind(self._binding, output=model.hidden)
        for name, buffer in self._inputs.items():
            buffer.bind(self._binding, name)
        for name, buffer in buffers.items():
            buffer.bind(self._binding, name, present(name))

    def run(self, ids: np.ndarray, length: int, given: Mapping[str, np.ndarray] | None = None) -> None:
        """Run tokens [batch, ``tokens``] after ``length`` others of each row; given: as :meth:`put`."""
        self.put(ids, length, given)
        self.launch(length)

    def put(self, ids: np.ndarray, length: int, given: Mapping[str, np.ndarray] | None = None) -> None:
        """The inputs of a run; given: those beside the tokens."""
        end = length + self._tokens
        self._expected = None
        self._mask[:, :end], self._mask[:, end:] = 1, 0
        arrays = self.model.feed(ids, length) | {"attention_mask": self._mask} | dict(given or {})
        for name, array in arrays.items():
            self._write(name, array)

    def _write(self, name: str, array: np.ndarray) -> None:
        """Write an input, on a GPU after the run that may be ahead."""
        if self.model.device == "cpu":
            self._inputs[name].write(array)
        else:
            given = np.ascontiguousarray(array)
            device.copy(self._inputs[name].address(), given.ctypes.data, given.nbytes)
            device.wait()

    def expect(self, past: Sequence[int]) -> tuple[int, int, int]:
        """Prepare the mask for inputs that the GPU writes.

        Args:
            past: tokens of each row before the run; -1: the row has ended.

        Returns:
            Columns of the mask; the column of the run before, -1 if there is none; and the column of the next run.
        """
        known, before = self._expected or ((), -1)
        if len(known) != len(past) or any(n >= 0 and n != m + 1 for n, m in zip(past, known, strict=True)):
            before = -1
            self._mask[:] = np.arange(self._mask.shape[1]) < np.array(past)[:, None]
            self._write("attention_mask", self._mask)
        column = max(before, *past)
        self._expected = past, column
        return self._mask.shape[1], before, column

    def launch(self, length: int, ahead: bool = False) -> None:
        """The run of what was put or written; length: for errors; ahead: return before it has ended."""
        with self.model.running(self._tokens, length):
            if self.model.states and not self._captured:
                before = self._states.read()
                self.model.session.run_with_iobinding(self._binding, self._options)
                self._states.write(before)
            self._captured = True
            self.model.session.run_with_iobinding(self._binding, self._ahead if ahead else self._options)

    def hidden_states(self) -> np.ndarray | None:
        """Of the last run's tokens [``tokens``, H]; None where nobody wants them."""
        return None if self._hidden is None else self._hidden.numpy()[0]
