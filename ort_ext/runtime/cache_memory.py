"""The memory of caches that are written in place, and the decode steps over it, which may be CUDA graphs."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence

import numpy as np

from quantmoe.exporter.folder.interface import HIDDEN, present
from quantmoe.exporter.memory import OutOfMemoryError
from quantmoe.runtime import device
from quantmoe.runtime.buffer import Buffer
from quantmoe.runtime.opened_model import OpenedModel
from quantmoe.runtime.session_thread import SESSION_THREAD


class States:
    """The states of linear attention in a cache's buffers, copied where they are.

    Args:
        buffers: of the states at least, by the names of the inputs.
    """

    def __init__(self, model: OpenedModel, buffers: Mapping[str, Buffer]):
        self._model, self._buffers = model, {name: buffers[name] for name in model.states}
        #: that of the last token, which a run reads; None where that is all there is
        self._live = model.window - 1 if model.window > 1 else None

    def read(self) -> dict[str, np.ndarray]:
        """Return copies of the states after the last token."""
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
            targets[name].copy(sources[name], to, slot)
        self._model.wait()


class Room:
    """Memory of caches that are written in place, and the CUDA graphs of decode steps over it.

    Args:
        capacity: tokens of each row. batch: rows.

    Attributes:
        buffers: by the names of the inputs. steps: by the tokens of a run, and the thread that has its graph.
    """

    def __init__(self, model: OpenedModel, capacity: int, batch: int = 1):
        self.capacity, self.batch = capacity, batch
        self.steps: dict[tuple[int, object], DecodeStep] = {}
        shapes = {name: (model.shape(name, batch), dtype) for name, (_, dtype) in model.past.items()}
        for name in shapes.keys() - set(model.states):
            shapes[name][0][2] = capacity
        with model.allocating(capacity, batch):
            # what is not written is not read, nor is a state before the first token
            made = Buffer.several([*shapes.values()], model.device)
        self.buffers = dict(zip(shapes, made, strict=True))

    def step(self, model: OpenedModel, tokens: int = 1) -> DecodeStep:
        """Return the decode step of so many tokens a row, which is captured when it first runs."""
        at = tokens, SESSION_THREAD.thread()
        if at not in self.steps:
            self.steps[at] = DecodeStep(weakref.proxy(model), self.buffers, self.capacity, tokens, self.batch)
        return self.steps[at]


class Rooms:
    """Rooms that conversations have one after the other.

    ONNX Runtime never frees a CUDA graph, whose addresses are fixed. So a conversation leaves its room to the next one
    of the same number of rows. A room that is too small makes way for one that is at least an eighth larger. So there
    are few graphs, however lengths follow each other.

    Args:
        model: held by its user, not from here.
    """

    def __init__(self, model: OpenedModel):
        self._model: OpenedModel = weakref.proxy(model)
        self._free: list[Room] = []
        self._closed = False

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
        if self._free:
            model.wait()  # a run in a room that makes way may be ahead
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
        if room.steps and not self._closed:
            self._free.append(room)

    def close(self) -> None:
        """Free the rooms that are here, and those that are given back later."""
        self._closed = True
        self._free.clear()


class DecodeStep:
    """A decode step whose shapes and addresses never change, as a CUDA graph wants it.

    It has so many tokens a row, one or one and its drafts, and a mask of the whole capacity. ONNX Runtime captures the
    first and replays it. Each room has a graph of its own in the session, for each number of tokens.

    The call that captures runs several times (microsoft/onnxruntime 32243), and a state goes on with each. So states
    are put back after it, and the tokens are run again. Keys and values are only written again.

    Attributes:
        logits: of the last run, [batch, min(tokens, ``model.rows``), vocabulary].
    """

    def __init__(
        self, model: OpenedModel, buffers: Mapping[str, Buffer], capacity: int, tokens: int = 1, batch: int = 1
    ):
        self.model, self._tokens = model, tokens
        graph = next(model.graphs)
        self._options = model.run_options(graph)
        self._ahead = model.run_options(graph, ahead=True) if model.choice is not None else self._options
        self._mask = np.zeros((batch, capacity), np.int64)
        arrays = model.feed(np.zeros((batch, tokens), np.int64), 0) | {"attention_mask": self._mask}
        if model.takes_hidden:
            arrays[HIDDEN] = model.hidden_array(tokens)
        self._inputs = {name: Buffer.of(array, model.device) for name, array in arrays.items()}
        #: of what the GPU writes, the places by their names in qm_cuda_choice
        self._names = {"ids": "input_ids", "positions": "position_ids", "mask": "attention_mask"}
        self.places = {name: self._inputs[of].address() for name, of in self._names.items()}
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
        """Write the inputs of a run; given: those beside the tokens."""
        end = length + self._tokens
        self._expected = None
        self._mask[:, :end], self._mask[:, end:] = 1, 0
        arrays = self.model.feed(ids, length) | {"attention_mask": self._mask} | dict(given or {})
        for name, array in arrays.items():
            self._write(name, array)

    def _write(self, name: str, array: np.ndarray) -> None:
        """Write an input, on a GPU after the run that may be ahead."""
        if self._inputs[name].on_host:
            self._inputs[name].write(array)
        else:
            given = np.ascontiguousarray(array)
            device.copy(self._inputs[name].address(), given.ctypes.data, given.nbytes)
            device.wait()

    def give(self, name: str, array: np.ndarray) -> None:
        """Start to write one of ``places``; the array stays as it is until the run has ended."""
        self._expected, buffer = None, self._inputs[self._names[name]]
        if buffer.on_host:
            buffer.write(array)
        else:
            device.copy(self.places[name], array.ctypes.data, array.nbytes)

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

    def launch(self, length: int, ahead: bool = False, states: bool = True) -> None:
        """Run what was put or written.

        Args:
            length: for errors. ahead: return before it has ended. states: those before the run matter.
        """
        with self.model.step_lock(), self.model.running(self._tokens, length):
            if self.model.states and states and not self._captured:
                before = self._states.read()
                self.model.session.run_with_iobinding(self._binding, self._options)
                self._states.write(before)
            self._captured = True
            self.model.session.run_with_iobinding(self._binding, self._ahead if ahead else self._options)

    def hidden_states(self) -> np.ndarray | None:
        """Return the hidden states of the last run's tokens [``tokens``, H]; None where nobody wants them."""
        return None if self._hidden is None else self._hidden.numpy()[0]
