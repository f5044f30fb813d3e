"""Fields of a protobuf message, without the classes of package onnx, whose import takes a third of a second.

https://protobuf.dev/programming-guides/encoding describes the encoding. onnx.proto numbers the fields.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator


def fields(data: bytes | mmap.mmap, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield the number of each field of the message at ``data[at:end]``, and the first byte and the end of its bytes.

    A field that is a number has the number itself twice in their place.

    Raises:
        ValueError: this is no message.
    """
    while at < end:
        key, at = _varint(data, at, end)
        number, kind = divmod(key, 8)
        if kind == 0:
            value, at = _varint(data, at, end)
            yield number, value, value
            continue
        if kind == 2:
            size, at = _varint(data, at, end)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise ValueError(f"no kind of a protobuf field: {kind}")
        if at + size > end:
            raise ValueError(f"a protobuf field of {size} bytes, {end - at} are there")
        yield number, at, at + size
        at += size


def packed(data: bytes | mmap.mmap, at: int, end: int) -> list[int]:
    """Return the numbers of a packed field. Raises: as :func:`fields`."""
    found = []
    while at < end:
        value, at = _varint(data, at, end)
        found.append(value)
    return found


def _varint(data: bytes | mmap.mmap, at: int, end: int) -> tuple[int, int]:
    """Return a number, and where it ends."""
    value = shift = 0
    while at < end and shift < 64:
        byte = data[at]
        value |= (byte & 127) << shift
        at += 1
        if byte < 128:
            return value, at
        shift += 7
    raise ValueError("no number of a protobuf message")
