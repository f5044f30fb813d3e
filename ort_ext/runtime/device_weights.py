"""Weights that are on the GPU before a session is created.

ONNX Runtime copies one initializer after the other from a mapped file, with one thread and through memory that is not
page-locked. Here several threads read the file into page-locked memory, from which the GPU fetches it. ONNX Runtime
takes the tensors over as initializers that the caller owns.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import math
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from quantmoe.custom_ops import DOMAIN
from quantmoe.exporter.errors import ModelError
from quantmoe.exporter.folder.external_tensors import ExternalTensor, external_tensors
from quantmoe.runtime import device as gpu

#: bytes that a thread reads at once; threads, at most
PIECE, THREADS = 16 << 20, 16
#: bytes of a tensor, at least; ONNX Runtime reads the smaller ones
LEAST = 1 << 16
#: standard operators that the CUDA provider runs, whose weights are large
STANDARD = [("", "Gather"), ("", "MatMul")]
#: DLPack's type code and bits by TensorProto.DataType: float, uint8, int8, int32, int64, float16, bfloat16
TYPES = {1: (2, 32), 2: (1, 8), 3: (0, 8), 6: (0, 32), 7: (0, 64), 10: (2, 16), 16: (4, 16)}
#: DLDeviceType
CUDA = 2


def device_weights(path: Path) -> list[tuple[str, Any]]:
    """Return names and OrtValues of a model's large weights, which are then on the GPU.

    They may be given to SessionOptions.add_initializer, and must live until the session is created.

    Raises:
        ModelError: a file of them is missing or cut short. ValueError: the GPU's memory does not hold them.
    """
    import onnxruntime as ort

    tensors = [tensor for tensor in external_tensors(path) if _may_be_given(tensor)]
    if not tensors or not hasattr(ort.OrtValue, "from_dlpack"):
        return []
    starts = [0, *itertools.accumulate(-(-tensor.length // gpu.ALIGNED) * gpu.ALIGNED for tensor in tensors)]
    block = gpu.Block(starts[-1])
    addresses = [block.address + start for start in starts[:-1]]
    _read(path.parent, [(t.file, t.offset, t.length, to) for t, to in zip(tensors, addresses, strict=True)])
    return [
        (tensor.name, ort.OrtValue.from_dlpack(_capsule(tensor, address, block)))
        for tensor, address in zip(tensors, addresses, strict=True)
    ]


def _may_be_given(tensor: ExternalTensor) -> bool:
    """Return whether ONNX Runtime would have the tensor on the GPU, as it is in the file."""
    _, bits = TYPES.get(tensor.data_type, (0, 0))
    return (
        LEAST <= tensor.length == math.prod(tensor.shape) * bits // 8
        and bool(tensor.takers)
        and all(taker[0] == DOMAIN or taker in STANDARD for taker in tensor.takers)
    )


def _read(folder: Path, ranges: list[tuple[str, int, int, int]]) -> None:
    """Copy ranges of files to the GPU. Each is a file, its first byte, its bytes, and an address."""
    pieces = [
        (file, offset + at, min(PIECE, length - at), to + at)
        for file, offset, length, to in ranges
        for at in range(0, length, PIECE)
    ]
    threads = min(THREADS, os.cpu_count() or 1, len(pieces))
    waiting = iter(pieces)
    with ThreadPoolExecutor(threads, "quantmoe-weights") as pool:
        for ended in [pool.submit(_read_some, folder, waiting, stream) for stream in _streams()[:threads]]:
            ended.result()


def _read_some(folder: Path, waiting: Iterator[tuple[str, int, int, int]], stream: int) -> None:
    """Copy pieces until none is left; other threads take theirs from the same iterator."""
    pages = gpu.Pages(PIECE)
    with contextlib.ExitStack() as files:
        opened = dict[str, Any]()
        for name, offset, length, to in waiting:
            if name not in opened:
                opened[name] = files.enter_context(open(folder / name, "rb", buffering=0))
            opened[name].seek(offset)
            into = memoryview(pages.memory)[:length]
            while into:
                if not (count := opened[name].readinto(into)):
                    raise ModelError(f"{folder / name}: ends before byte {offset + length}, where a weight ends")
                into = into[count:]
            gpu.copy(to, ctypes.addressof(pages.memory), length, on=stream)
            gpu.wait(stream)


@functools.cache
def _streams() -> list[int]:
    return [gpu.open_stream() for _ in range(THREADS)]


class _Tensor(ctypes.Structure):
    """DLManagedTensor (https://dmlc.github.io/dlpack): ndim, then type code, bits and lanes of an element."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.CFUNCTYPE(None, ctypes.c_void_p)),
    ]


#: what tensors that ONNX Runtime holds need, by the tensors' addresses
_HELD: dict[int, tuple[Any, ...]] = {}


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _release(tensor: int) -> None:
    _HELD.pop(tensor, None)


def _capsule(tensor: ExternalTensor, address: int, block: gpu.Block) -> Any:
    """Return a DLPack capsule. What takes it over keeps the block until it is deleted."""
    shape = (ctypes.c_int64 * len(tensor.shape))(*tensor.shape)
    code, bits = TYPES[tensor.data_type]
    made = _Tensor(
        data=address, device=(CUDA, 0), ndim=len(shape), code=code, bits=bits, lanes=1, shape=shape, deleter=_release
    )
    _HELD[ctypes.addressof(made)] = made, shape, block
    new: Callable[..., Any] = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]  # type: ignore[attr-defined]
    return new(ctypes.addressof(made), _NAME, None)


#: a capsule's name is not copied
_NAME = ctypes.c_char_p(b"dltensor")
