"""The header of a GGUF file (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), checked before it is used."""

from __future__ import annotations

import itertools
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np

from quantmoe.exporter.errors import CheckpointError
from quantmoe.exporter.folder.files import LFS_POINTER
from quantmoe.exporter.reading.checkpoint import GGUF_MAGIC, MAX_CONFIG, MAX_TENSORS
from quantmoe.exporter.reading.gguf.blocks import CARRIED

#: ggml type -> its name, weights in a block, bytes of a block (ggml-common.h). Those of 1 weight are safetensors' types
TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}
#: names of the types that are blocks
BLOCKS = tuple(name for name, weights, _ in TYPES.values() if weights > 1)
#: of metadata: type -> NumPy's
_NUMBERS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_STRING, _ARRAY = 8, 9
#: most fields of metadata, and bytes of a name
_LIMIT = 1 << 20
#: most bytes of a file's metadata: a vocabulary of 256,000 tokens takes 15 million
MAX_METADATA = MAX_CONFIG
#: bytes of strings that are looked at together
_PIECE = 1 << 20
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True)
class Strings:
    """An array of strings as the file has it: each string's length in 8 bytes, then the string."""

    octets: bytes
    count: int

    def __len__(self) -> int:
        return self.count

    def __repr__(self) -> str:
        return f"{self.count} strings"

    def __iter__(self) -> Iterator[str]:
        at = 0
        for _ in range(self.count):
            begin = at + _LENGTH.size
            at = begin + _LENGTH.unpack_from(self.octets, at)[0]
            yield self.octets[begin:at].decode(errors="replace")


def shown(value: object) -> str:
    """Return a field's value in an error."""
    return repr(value[:20].tolist() if isinstance(value, np.ndarray) else value)[:200]


@dataclass
class Header:
    """The part of a file before its data.

    Attributes:
        fields: key -> number or string, or an array as :class:`numpy.ndarray` or :class:`Strings`.
        tensors: name -> dimensions, the fastest last; type; absolute offset.
    """

    fields: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, tuple[tuple[int, ...], int, int]] = field(default_factory=dict)


class _Cursor:
    """Reads a file's header piece by piece. It maps nothing: a mapped file that is cut ends the process.

    Raises:
        CheckpointError: naming the file and what was expected; every method.
    """

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path, self._file, self.size, self.at = path, file, os.fstat(file.fileno()).st_size, 0

    def bytes_at(self, at: int, size: int) -> bytes:
        self._file.seek(at)
        if len(found := self._file.read(size)) < size:
            self.fail(f"ends at byte {at + len(found)}, and had {self.size} bytes: it was cut while it was read")
        return found

    def fail(self, text: str) -> NoReturn:
        raise CheckpointError(f"{self.path}: {text[:1000]}")

    def numbers(self, letters: str) -> tuple[Any, ...]:
        """Read numbers by a format of ``struct``."""
        if self.at + struct.calcsize(letters) > self.size:
            self.fail(f"the header does not end in {self.size} bytes; is it truncated?")
        found = self.bytes_at(self.at, struct.calcsize(letters))
        self.at += len(found)
        return struct.unpack(letters, found)

    def take(self, letters: str) -> Any:
        """Read one number."""
        return self.numbers(letters)[0]

    def string(self, what: str, limit: int) -> bytes:
        length = self.take("<Q")
        if length > limit:
            self.fail(f"{what} of {length} bytes at byte {self.at - _LENGTH.size}, expected at most {limit}")
        return self.octets(what, length)

    def name(self) -> str:
        try:
            return self.string("a name", _LIMIT).decode()
        except UnicodeDecodeError as error:
            self.fail(f"a name that is not UTF-8 before byte {self.at}: {error}")

    def value(self, name: str) -> Any:
        """Return a field's value."""
        kind = self.take("<I")
        if kind in _NUMBERS:
            return self._array(name, kind, 1)[0].item()
        if kind == _STRING:
            return self.octets(name, self.take("<Q")).decode(errors="replace")
        if kind != _ARRAY:
            self.fail(f"{name} has the type {kind}; known: 0 to 12")
        kind, count = self.numbers("<IQ")
        if kind in _NUMBERS:
            return self._array(name, kind, count)
        if kind != _STRING:
            self.fail(f"{name} is an array of the type {kind}; expected numbers or strings")
        return self._strings(name, count)

    def _array(self, name: str, kind: int, count: int) -> np.ndarray:
        dtype = np.dtype(_NUMBERS[kind])
        return np.frombuffer(self.octets(name, count * dtype.itemsize), dtype)

    def _strings(self, name: str, count: int) -> Strings:
        limit = min(self.size, MAX_METADATA)
        end = self.at
        if end + count * _LENGTH.size <= limit:  # as of empty ones
            piece, at = b"", end
            for _ in range(count):
                if (begin := end + _LENGTH.size) > limit:
                    break
                if begin > at + len(piece):
                    piece, at = self.bytes_at(end, min(_PIECE, limit - end)), end
                end = begin + _LENGTH.unpack_from(piece, end - at)[0]
        else:
            end += count * _LENGTH.size
        return Strings(self.octets(name, end - self.at), count)

    def octets(self, what: str, size: int) -> bytes:
        """Return the next bytes of the metadata."""
        if self.at + size > self.size:
            self.fail(f"{what} ends at byte {self.at + size} or later of {self.size} bytes; is the file truncated?")
        if self.at + size > MAX_METADATA:
            self.fail(
                f"{what} ends at byte {self.at + size} or later, expected all metadata in the first {MAX_METADATA} "
                "bytes"
            )
        self.at += size
        return self.bytes_at(self.at - size, size)

    def header(self) -> Header:
        """Read the whole header; offsets are from the data's begin."""
        magic, version, tensors, fields = self.numbers("<4sIQQ")
        if magic != GGUF_MAGIC or version not in (2, 3):
            self.fail(f"begins with {magic!r} and version {version}; expected GGUF of version 2 or 3")
        if tensors > MAX_TENSORS or fields > _LIMIT:
            self.fail(f"{tensors} tensors and {fields} fields; expected at most {MAX_TENSORS} and {_LIMIT}")
        header = Header()
        for _ in range(fields):
            name = self.name()
            if name in header.fields:
                self.fail(f"{name}: twice in the metadata, expected each key once")
            header.fields[name] = self.value(name)
        for _ in range(tensors):
            name, count = self.name(), self.take("<I")
            if count > 4:
                self.fail(f"{name}: {count} dimensions, expected at most 4")
            if name in header.tensors:
                self.fail(f"{name}: twice in the file")
            shape = self.numbers(f"<{count}Q")[::-1]
            kind, offset = self.numbers("<IQ")
            if kind not in TYPES:
                self.fail(f"{name}: ggml type {kind}, which has no name here; supported: {', '.join(_carried())}")
            header.tensors[name] = (shape, kind, offset)
        return header


def _carried() -> tuple[str, ...]:
    return ("F32", "F16", "BF16", *CARRIED)


def read_header(path: Path) -> Header:
    """Read and check a file's header.

    Raises:
        CheckpointError: naming the file, the field or tensor, what was found and what was expected.
    """
    if (size := path.stat().st_size) < 24:
        raise CheckpointError(f"{path}: {size} bytes; expected a GGUF file")
    with open(path, "rb") as file:
        cursor = _Cursor(path, file)
        if file.read(len(LFS_POINTER)) == LFS_POINTER:
            cursor.fail("a Git LFS pointer, not the file; to fetch it: git lfs pull")
        header = cursor.header()
    align = header.fields.get("general.alignment", 32)
    if type(align) is not int or not 0 < align <= _LIMIT:
        cursor.fail(f"general.alignment is {shown(align)}, expected a positive integer")
    begin = -(-cursor.at // align) * align
    spans = []
    for name, (shape, kind, offset) in header.tensors.items():
        title, weights, block = TYPES[kind]
        if 0 in shape:
            cursor.fail(f"{name}: {title} {list(shape)}, expected no dimension of 0")
        if not shape or shape[-1] % weights:
            cursor.fail(f"{name}: {title} {list(shape)}, expected rows of a multiple of {weights}")
        end = begin + offset + prod(shape) // weights * block
        if offset % align:
            cursor.fail(f"{name}: {title} {list(shape)} starts at {offset}, expected a multiple of {align}")
        if end > size:
            cursor.fail(f"{name}: {title} {list(shape)} ends at byte {end} of a file of {size} bytes; is it truncated?")
        header.tensors[name] = (shape, kind, begin + offset)
        spans.append((begin + offset, end, name))
    for (_, end, other), (start, _, name) in itertools.pairwise(sorted(spans)):
        if start < end:
            cursor.fail(f"{name} starts at byte {start}, where {other} has not ended: it ends at {end} (overlap)")
    return header
