"""The file that holds the weights: each tensor written once, where engines can map it."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path

import numpy as np
import onnx_ir as ir

#: Windows maps files at multiples of 64 KiB, Linux of a page
ALIGNMENT = 65536
HASH = "blake2b-256"
#: tensors of up to this many bytes stay in the model file
INLINE = 65536


def byte_size(value: ir.Value) -> int:
    """Of a value whose shape is static."""
    assert value.shape is not None
    assert value.dtype is not None
    return int(prod(value.shape.numpy()) * value.dtype.itemsize)  # itemsize is a float: 4-bit types exist


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Names the file in errors like a full disk, which Python's file objects do not."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def new_hash() -> hashlib.blake2b:
    return hashlib.blake2b(digest_size=32)


class DataFile:
    """External data of a model being written.

    Args:
        path: where the bytes go now.
        location: the file's final name, beside the model.
    """

    def __init__(self, path: Path, location: str):
        self.path = path
        self.file = open(path, "wb")  # noqa: SIM115 - closed by __exit__
        self.location = location
        self.size = 0

    def __enter__(self) -> DataFile:
        return self

    def __exit__(self, *_: object) -> None:
        with naming(self.path):
            self.file.close()

    def region(self, value: ir.Value) -> Region:
        """The next free bytes of the file, as many as ``value``'s shape and type take."""
        offset = -(-self.size // ALIGNMENT) * ALIGNMENT
        region = Region(self, value, offset, byte_size(value))
        self.size = offset + region.length
        return region


class Region:
    """One tensor's bytes, written in order; several regions may be open at a time."""

    def __init__(self, data: DataFile, value: ir.Value, offset: int, length: int):
        self.value, self.offset, self.length = value, offset, length
        self._data, self._at, self._hash = data, 0, new_hash()

    def write(self, array: np.ndarray) -> None:
        """Appends an array's bytes.

        Raises:
            OSError: e.g. the disk is full.
        """
        data = memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8))  # type: ignore[arg-type]
        self._hash.update(data)
        with naming(self._data.path):
            self._data.file.seek(self.offset + self._at)
            self._data.file.write(data)
        self._at += len(data)

    def finish(self, metadata: Mapping[str, str]) -> None:
        """Makes these bytes the value's data, with their hash among its metadata."""
        if self._at != self.length:
            raise ValueError(f"{self.value.name}: {self._at} bytes, its shape {self.value.shape} takes {self.length}")
        assert self.value.shape is not None
        assert self.value.dtype is not None
        self.value.const_value = ir.ExternalTensor(
            self._data.location,
            self.offset,
            self.length,
            self.value.dtype,
            shape=self.value.shape,
            name=self.value.name or "",
            metadata_props={"hash": f"{HASH}:{self._hash.hexdigest()}"} | dict(metadata),
        )
