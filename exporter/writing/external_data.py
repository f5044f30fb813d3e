"""The files that hold the weights: each tensor written once, where engines can map it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from quantmoe.exporter.folder import tensor_metadata
from quantmoe.exporter.folder.record import HASH, new_hash
from quantmoe.exporter.memory import naming

if TYPE_CHECKING:
    import onnx_ir as ir

#: Windows maps files at multiples of 64 KiB, Linux of a page
ALIGNMENT = 65536
#: lines of 64 bytes of a packed weight that engines always compare (quant_moe.def, Identity)
SAMPLES, LINE = 8, 64
#: tensors of up to this many bytes stay in the model file
INLINE = 65536


def byte_size(value: ir.Value) -> int:
    """Return the bytes of a value whose shape is static."""
    assert value.shape is not None
    assert value.dtype is not None
    return int(prod(value.shape.numpy()) * value.dtype.itemsize)  # itemsize is a float: 4-bit types exist


class DataFiles:
    """External data of a model being written, in as many files as it takes.

    Args:
        partial: final name of a file beside the model -> path where its bytes go now.
        location: final name of the first file; the next are ``location.1`` and so on.
        limit: bytes a file may have; a tensor that is larger has a file of its own.
    """

    def __init__(self, partial: Callable[[str], Path], location: str, limit: int):
        self._partial, self._location, self._limit = partial, location, limit
        self._files: list[DataFile] = []

    def __enter__(self) -> DataFiles:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files:
            file.close()

    def region(self, value: ir.Value) -> Region:
        """Return the next free bytes, as many as ``value``'s shape and type take."""
        length = byte_size(value)
        if not self._files or (self._files[-1].size and self._files[-1].end + length > self._limit):
            name = f"{self._location}.{len(self._files)}" if self._files else self._location
            self._files.append(DataFile(self._partial(name), name))
        file = self._files[-1]
        region = Region(file, value, file.end, length)
        file.size = file.end + length
        return region


class DataFile:
    """One of them."""

    def __init__(self, path: Path, location: str):
        self.path, self.location, self.size = path, location, 0
        self.file = open(path, "wb")  # noqa: SIM115 - closed by close

    @property
    def end(self) -> int:
        """Return where the next tensor may begin."""
        return -(-self.size // ALIGNMENT) * ALIGNMENT

    def close(self) -> None:
        with naming(self.path):
            self.file.close()


class Region:
    """One tensor's bytes, written in order; several regions may be open at a time."""

    def __init__(self, data: DataFile, value: ir.Value, offset: int, length: int):
        self.value, self.offset, self.length = value, offset, length
        self._data, self._at, self._hash = data, 0, new_hash()
        self._lines = [i * (length // LINE - 1) // (SAMPLES - 1) * LINE for i in range(SAMPLES)]
        self._samples = bytearray(SAMPLES * LINE)

    def write(self, array: np.ndarray) -> None:
        """Append an array's bytes.

        Raises:
            OSError: e.g. the disk is full.
        """
        data = memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8))  # type: ignore[arg-type]
        self._hash.update(data)
        for i, line in enumerate(self._lines):
            begin, end = max(line, self._at), min(line + LINE, self._at + len(data))
            if begin < end:
                at = i * LINE - line
                self._samples[at + begin : at + end] = data[begin - self._at : end - self._at]
        with naming(self._data.path):
            self._data.file.seek(self.offset + self._at)
            self._data.file.write(data)
        self._at += len(data)

    def finish(self, metadata: Mapping[str, str]) -> None:
        """Make these bytes the value's data, with their hash among its metadata."""
        import onnx_ir as ir  # it imports sympy, half a second

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
            metadata_props={tensor_metadata.HASH: f"{HASH}:{self._hash.hexdigest()}"} | dict(metadata),
        )

    def identity(self, checkpoint: str) -> str:
        """Return the identity of the bytes written, as a node's attribute (quant_moe.def, Identity)."""
        samples = new_hash().update(self._samples).hexdigest()[:32]
        return f"{self._hash.hexdigest()} {samples} {self._data.location} of {checkpoint}"
