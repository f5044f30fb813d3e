"""Generation's own use of a GPU beside ONNX Runtime: a stream, memory and copies.

quant_moe_cuda.h has the functions. They are in the library whose operators the sessions run. All work is on one stream,
which sessions with CUDA graphs use, too: a copy comes after the run that was started before it. While such a session
captures a graph, no other thread may allocate or free. So memory is given back to this module, and freed when other
memory is asked for.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from quantmoe.custom_ops.c_calls import checked
from quantmoe.exporter.errors import ModelError
from quantmoe.ort_ext import cuda_library_path

#: bytes to which the parts of a block are aligned
ALIGNED = 256
#: addresses and sizes of blocks that were given back
_BLOCKS: list[tuple[int, int]] = []
#: page-locked memory that was given back
_PAGES: list[Any] = []
_SIZE, _PTR = ctypes.c_size_t, ctypes.c_void_p


@functools.cache
def library() -> Any:
    """Load the library of the CUDA operators.

    Raises:
        ModelError: it is of another release than this package.
    """
    found = ctypes.CDLL(cuda_library_path())
    if not hasattr(found, "qm_cuda_choice_bytes"):
        raise ModelError(
            f"{cuda_library_path()}: of another release than this package: make cuda, or install quantmoe-cuda"
        )
    found.qm_cuda_choice_bytes.restype = _SIZE
    return found


@functools.cache
def stream() -> int:
    """Return the stream of this process's sessions on the GPU."""
    return open_stream()


def open_stream() -> int:
    """Open a stream, which is never closed."""
    made = _PTR()
    checked(library().qm_cuda_open_stream, ctypes.byref(made))
    assert made.value is not None
    return made.value


def wait(on: int | None = None) -> None:
    """Wait until all that was started on a stream has ended; None: on the sessions' stream."""
    checked(library().qm_cuda_wait, _PTR(stream() if on is None else on))


def copy(
    to: int, source: int, width: int, *, height: int = 1, to_pitch: int = 0, pitch: int = 0, on: int | None = None
) -> None:
    """Start a copy between addresses of the GPU's memory or the host's.

    Args:
        width: bytes of each of ``height`` pieces. to_pitch, pitch: bytes from a piece to the next; 0: width.
        on: a stream; None: the sessions' stream.
    """
    given = (_PTR(to), _SIZE(to_pitch or width), _PTR(source), _SIZE(pitch or width), _SIZE(width), _SIZE(height))
    checked(library().qm_cuda_copy, *given, _PTR(stream() if on is None else on))


def fetch(array: np.ndarray, address: int) -> None:
    """Copy to an array, and wait for it."""
    copy(array.ctypes.data, address, array.nbytes)
    wait()


class Block:
    """Memory of the GPU.

    Raises:
        ValueError: there is not so much.
    """

    def __init__(self, size: int):
        fitting = [block for block in _BLOCKS if size <= block[1] <= size + size // 4]
        for block in sorted(fitting, key=lambda block: block[1]):
            with contextlib.suppress(ValueError):  # another thread has it
                _BLOCKS.remove(block)
                self.address, self.size = block
                return
        while _BLOCKS:
            checked(library().qm_cuda_free, _PTR(_BLOCKS.pop()[0]))
        memory = _PTR()
        checked(library().qm_cuda_allocate, _SIZE(size), ctypes.byref(memory))
        assert memory.value is not None
        self.address, self.size = memory.value, size

    def __del__(self) -> None:
        if hasattr(self, "address"):
            _BLOCKS.append((self.address, self.size))


class Tensor:
    """A part of a block, which has what a Buffer asks of an OrtValue.

    Args:
        at: bytes of the block before it. dtype: of NumPy.
    """

    def __init__(self, block: Block, at: int, shape: Sequence[int], dtype: np.dtype):
        self._block, self._at, self._shape, self._dtype = block, at, list(shape), dtype

    def rows(self, begin: int, end: int) -> Tensor:
        """Return a part of the first dimension."""
        row = math.prod(self._shape[1:]) * self._dtype.itemsize
        return Tensor(self._block, self._at + begin * row, [end - begin, *self._shape[1:]], self._dtype)

    def shape(self) -> list[int]:
        return self._shape

    def data_ptr(self) -> int:
        return self._block.address + self._at

    def device_name(self) -> str:
        return "cuda"

    def numpy(self) -> np.ndarray:
        """Return a copy."""
        array = np.empty(self._shape, self._dtype)
        fetch(array, self.data_ptr())
        return array


def tensors(shapes: Sequence[tuple[Sequence[int], np.dtype]]) -> list[Tensor]:
    """Return tensors of these shapes and types in one block, whose numbers are anything."""
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in shapes]
    ends = np.cumsum([-(-size // ALIGNED) * ALIGNED for size in sizes], dtype=np.int64).tolist()
    block = Block(max(ends[-1], ALIGNED))
    return [Tensor(block, at, *what) for at, what in zip([0, *ends[:-1]], shapes, strict=True)]


class Pages:
    """Page-locked memory of the host, which kernels read and write."""

    def __init__(self, size: int):
        for memory in [memory for memory in _PAGES if len(memory) >= size]:
            with contextlib.suppress(ValueError):  # another thread has it
                _PAGES.remove(memory)
                self.memory = memory
                return
        made, size = _PTR(), max(size, 4096)
        checked(library().qm_cuda_host_memory, _SIZE(size), ctypes.byref(made))
        assert made.value is not None
        self.memory = (ctypes.c_uint8 * size).from_address(made.value)

    def __del__(self) -> None:
        if hasattr(self, "memory"):
            _PAGES.append(self.memory)
