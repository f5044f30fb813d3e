"""The header of a GGUF file (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), checked before it is used."""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, NoReturn

from quantmoe.exporter.reading.checkpoint import LFS_POINTER, MAX_TENSORS, CheckpointError

#: ggml type -> its name, weights in a block, bytes of a block (ggml-common.h). Those of 1 weight are safetensors' types
TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    39: ("MXFP4", 32, 17),
}
#: names of the types that are blocks
BLOCKS = tuple(name for name, weights, _ in TYPES.values() if weights > 1)
#: of metadata: type -> struct's letter
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_LIMIT = 1 << 20
"""Of fields of metadata, and of characters in a name."""


@dataclass
class Header:
    """What a file says before its data. tensors: name -> dimensions, the fastest last; type; absolute offset."""

    fields: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, tuple[tuple[int, ...], int, int]] = field(default_factory=dict)


def read_header(path: Path) -> Header:
    """Reads and checks a file's header. Arrays of strings, which are the tokenizer's, are read as their length.

    Raises:
        CheckpointError: naming the file, the field or tensor, what was found and what was expected.
    """

    def fail(text: str) -> NoReturn:
        raise CheckpointError(f"{path}: {text[:1000]}")

    size = path.stat().st_size
    if size < 24:
        fail(f"{size} bytes; expected a GGUF file")
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        at = 0

        def take(letters: str) -> Any:
            nonlocal at
            if at + struct.calcsize(letters) > size:
                fail(f"the header does not end in {size} bytes; is it truncated?")
            found = struct.unpack_from(letters, data, at)
            at += struct.calcsize(letters)
            return found[0] if len(found) == 1 else found

        def octets(limit: int) -> bytes:
            nonlocal at
            length = take("<Q")
            if length > min(limit, size - at):
                fail(f"a string of {length} bytes at byte {at - 8}, expected at most {min(limit, size - at)}")
            at += length
            return data[at - length : at]

        def text() -> str:
            try:
                return octets(_LIMIT).decode()
            except UnicodeDecodeError as error:
                fail(f"a name that is not UTF-8 before byte {at}: {error}")

        def value(kind: int, name: str) -> Any:
            nonlocal at
            if kind in _NUMBERS:
                return take("<" + _NUMBERS[kind])
            if kind == _STRING:
                return octets(1 << 26).decode(errors="replace")
            if kind != _ARRAY:
                fail(f"{name} has the type {kind}; known: 0 to 12")
            kind, count = take("<IQ")
            if count > size:  # of at least a byte each
                fail(f"{name} has {count} elements in a file of {size} bytes")
            if kind in _NUMBERS:
                found = take(f"<{count}{_NUMBERS[kind]}") if count else ()
                return list(found) if count > 1 else [found] if count else []
            if kind != _STRING:
                fail(f"{name} is an array of the type {kind}; expected numbers or strings")
            for _ in range(count):
                octets(1 << 26)
            return count

        if data[: len(LFS_POINTER)] == LFS_POINTER:
            fail("a Git LFS pointer, not the file; to fetch it: git lfs pull")
        magic, version, tensors, fields = take("<4sIQQ")
        if magic != b"GGUF" or version not in (2, 3):
            fail(f"begins with {magic!r} and version {version}; expected GGUF of version 2 or 3")
        if tensors > MAX_TENSORS or fields > _LIMIT:
            fail(f"{tensors} tensors and {fields} fields; expected at most {MAX_TENSORS} and {_LIMIT}")
        header = Header()
        for _ in range(fields):
            name = text()
            header.fields[name] = value(take("<I"), name)
        for _ in range(tensors):
            name, count = text(), take("<I")
            if count > 4:
                fail(f"{name}: {count} dimensions, expected at most 4")
            if name in header.tensors:
                fail(f"{name}: twice in the file")
            shape = tuple(take("<Q") for _ in range(count))[::-1]
            kind, offset = take("<IQ")
            if kind not in TYPES:
                fail(f"{name}: ggml type {kind}; known: {', '.join(name for name, *_ in TYPES.values())}")
            header.tensors[name] = (shape, kind, offset)
    align = header.fields.get("general.alignment", 32)
    if type(align) is not int or not 0 < align <= _LIMIT:
        fail(f"general.alignment is {align!r}, expected a positive integer")
    begin = -(-at // align) * align
    for name, (shape, kind, offset) in header.tensors.items():
        title, weights, block = TYPES[kind]
        if not shape or shape[-1] % weights:
            fail(f"{name}: {title} {list(shape)}, expected rows of a multiple of {weights}")
        end = begin + offset + prod(shape) // weights * block
        if offset % align:
            fail(f"{name}: {title} {list(shape)} starts at {offset}, expected a multiple of {align}")
        if end > size:
            fail(f"{name}: {title} {list(shape)} ends at byte {end} of a file of {size} bytes; is it truncated?")
        header.tensors[name] = (shape, kind, begin + offset)
    return header
