"""Memory that ONNX Runtime's runs are bound to."""

from __future__ import annotations

import ctypes
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from quantmoe.runtime import device as gpu

#: what of a buffer: a place in its first dimensions, or all of it
Slot = int | tuple[int, ...] | None
#: ONNX's code of the type that NumPy lacks, and with it ONNX Runtime's arrays
BFLOAT16 = 16


@dataclasses.dataclass(frozen=True)
class Buffer:
    """Memory that runs are bound to: an OrtValue or device.Tensor, of bfloat16 one of uint16, which has the bits.

    Attributes:
        dtype: NumPy's or ml_dtypes'.
    """

    value: Any
    dtype: np.dtype

    @classmethod
    def of(cls, array: np.ndarray, device: str) -> Buffer:
        """Make a buffer of an array's numbers; on the host it may be the array's memory."""
        import onnxruntime as ort

        return cls(ort.OrtValue.ortvalue_from_numpy(_stored(array), device, 0), array.dtype)

    @classmethod
    def empty(cls, shape: Sequence[int], dtype: Any, device: str) -> Buffer:
        """Allocate memory, with any numbers in it."""
        return cls.several([(shape, dtype)], device)[0]

    @classmethod
    def several(cls, shapes: Sequence[tuple[Sequence[int], Any]], device: str) -> list[Buffer]:
        """Allocate memory of such shapes and types, on a GPU in one piece.

        What ONNX Runtime allocates on a GPU it fills from the host's memory, at 30 GB/s.
        """
        if device == "cpu":
            return [cls.of(np.empty(shape, dtype), device) for shape, dtype in shapes]
        types = [np.dtype(dtype) for _, dtype in shapes]
        stored = [np.dtype(np.uint16) if dtype == ml_dtypes.bfloat16 else dtype for dtype in types]
        made = gpu.tensors([(shape, dtype) for (shape, _), dtype in zip(shapes, stored, strict=True)])
        return [cls(tensor, dtype) for tensor, dtype in zip(made, types, strict=True)]

    def numpy(self) -> np.ndarray:
        """Return a copy."""
        return np.array(self.value.numpy()).view(self.dtype)

    def here(self, slot: Slot = None) -> np.ndarray:
        """Return the host's memory itself; slot: as :meth:`bind`."""
        shape, address = self._place(slot)
        memory: Any = (ctypes.c_uint8 * self.bytes(slot)).from_address(address)
        return np.frombuffer(memory, self.dtype).reshape(shape)

    def address(self, slot: Slot = None) -> int:
        """Return where it begins; slot: as :meth:`bind`."""
        return self._place(slot)[1]

    def rows(self, begin: int, end: int) -> Buffer:
        """Return a part of the first dimension, in the same memory, which lasts as long as this buffer."""
        if self.on_host:
            return Buffer.of(self.here()[begin:end], "cpu")
        return Buffer(self.value.rows(begin, end), self.dtype)

    def row_bytes(self) -> int:
        """Return how many bytes its last dimension has."""
        return int(self.value.shape()[-1]) * self.dtype.itemsize

    def bytes(self, slot: Slot = None) -> int:
        """Return how many it has; slot: as :meth:`bind`."""
        return math.prod(self._place(slot)[0]) * self.dtype.itemsize

    def write(self, array: np.ndarray) -> None:
        """Copy all of an array of the same shape and type here."""
        self.value.update_inplace(_stored(array))

    def bind(self, binding: Any, name: str = "", output: str = "", slot: Slot = None) -> None:
        """Bind to a session as an input and an output, by names; slot: that place in the first dimensions alone."""
        element = BFLOAT16 if self.dtype == ml_dtypes.bfloat16 else self.dtype.type
        device, place = (self.value.device_name(), 0), (element, *self._place(slot))
        if name:
            binding.bind_input(name, *device, *place)
        if output:
            binding.bind_output(output, *device, *place)

    def copy(self, source: Buffer, to: Slot = None, slot: Slot = None) -> None:
        """Copy a slot of another buffer to a slot of this one. A copy on a GPU is started, not waited for."""
        if self.on_host and source.on_host:
            self.here(to)[...] = source.here(slot)
        else:
            gpu.copy(self.address(to), source.address(slot), source.bytes(slot))

    def copy_tokens(self, source: Buffer, count: int) -> None:
        """Copy the first ``count`` tokens of every head, as :meth:`copy`. Both are [1, heads, tokens, width]."""
        if self.on_host and source.on_host:
            if count:
                self.here()[:, :, :count] = source.here()[:, :, :count]
            return
        _, heads, tokens, width = self.value.shape()
        size = width * self.dtype.itemsize
        if count:
            pitch = source.value.shape()[2] * size
            gpu.copy(self.address(), source.address(), count * size, height=heads, to_pitch=tokens * size, pitch=pitch)

    @property
    def on_host(self) -> bool:
        """The memory is the host's, not a GPU's."""
        return bool(self.value.device_name() == "cpu")

    def _place(self, slot: Slot) -> tuple[list[int], int]:
        """Return the shape and the address of a slot."""
        shape, address = list(self.value.shape()), self.value.data_ptr()
        for at in (slot,) if isinstance(slot, int) else slot or ():
            shape = shape[1:]
            address += at * math.prod(shape) * self.dtype.itemsize
        return shape, address


def _stored(array: np.ndarray) -> np.ndarray:
    return array.view(np.uint16) if array.dtype == ml_dtypes.bfloat16 else array
