"""Files of safetensors: headers, checked, and writing.

The safetensors package's own NumPy reader has no bfloat16 or float8, and copies. So this module reads the header
(https://github.com/huggingface/safetensors#format), and checks every field before a byte is used.
"""

from __future__ import annotations

import itertools
import json
import struct
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NoReturn

import ml_dtypes
import numpy as np

from quantmoe.exporter.errors import CheckpointError
from quantmoe.exporter.memory import check_space

#: safetensors dtype name -> NumPy dtype
DTYPES: dict[str, np.dtype] = {
    name: np.dtype(dtype)
    for name, dtype in {
        "BOOL": np.bool_,
        "U8": np.uint8,
        "I8": np.int8,
        "U16": "<u2",
        "I16": "<i2",
        "F16": "<f2",
        "BF16": ml_dtypes.bfloat16,
        "U32": "<u4",
        "I32": "<i4",
        "F32": "<f4",
        "U64": "<u8",
        "I64": "<i8",
        "F64": "<f8",
        "F8_E4M3": ml_dtypes.float8_e4m3fn,
        "F8_E5M2": ml_dtypes.float8_e5m2,
        "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    }.items()
}
#: the reference implementation's limit
MAX_HEADER = 100_000_000
#: brackets, commas and colons in one JSON text: each may cost a hundred bytes of memory once parsed. A 671B model's
#: index has a million, the headers of its shards a hundred thousand
MAX_VALUES = 4_000_000


@dataclass(frozen=True, kw_only=True)
class Entry:
    """The place of a tensor."""

    shard: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    """Absolute offset in the shard."""
    name: str
    """What the shard calls it."""
    half: int | None = None
    """Which of two rows it has of each pair of the stored tensor's; None: it has all rows."""


def read_metadata(path: Path) -> dict[str, str]:
    """Return the texts beside the tensors of a safetensors file. :func:`read_header` found its header sound."""
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        found = parse_json(file.read(length)).get("__metadata__")
    return found if isinstance(found, dict) else {}


def read_header(path: Path) -> dict[str, Entry]:
    """Return the tensors of one safetensors file.

    It checks what the format demands: Tensors cover the data without overlap or holes. A tensor's span is its dtype
    times its shape. Names are unique.

    Raises:
        CheckpointError: naming the file, the tensor, what was found and what was expected.
    """

    def fail(text: str) -> NoReturn:
        raise CheckpointError(f"{path}: {text[:1000]}")  # names and shapes may be megabytes

    size = path.stat().st_size
    with open(path, "rb") as file:
        if size < 8:
            fail(f"{size} bytes; expected a safetensors file, which starts with an 8-byte header length")
        (length,) = struct.unpack("<Q", file.read(8))
        if length > MAX_HEADER or 8 + length > size:
            fail(f"header length {length}; the file has {size} bytes and the limit is {MAX_HEADER}")
        text = file.read(length)
    try:
        header = parse_json(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        fail(f"corrupt header: {error}")
    if not isinstance(header, dict):
        fail("corrupt header: expected a JSON object")
    header.pop("__metadata__", None)

    data = 8 + length
    entries: dict[str, Entry] = {}
    spans = []
    for name, fields in header.items():
        if not isinstance(fields, dict) or not fields.keys() >= {"dtype", "shape", "data_offsets"}:
            fail(f"{name}: expected the fields dtype, shape and data_offsets")
        dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
        if not isinstance(dtype, str) or dtype not in DTYPES:
            fail(f"{name}: dtype {dtype!r}; supported: {', '.join(DTYPES)}")
        if not (_naturals(shape) and _naturals(offsets) and len(offsets) == 2):
            fail(f"{name}: shape {shape!r} and data_offsets {offsets!r}; expected lists of non-negative integers")
        if len(shape) > 32:
            fail(f"{name}: {len(shape)} dimensions, expected at most 32")
        begin, end = offsets
        want = prod(shape) * DTYPES[dtype].itemsize
        if end - begin != want:
            fail(f"{name}: data_offsets {offsets} span {end - begin} bytes; {dtype} {shape} takes {want}")
        entries[name] = Entry(shard=path, dtype=dtype, shape=tuple(shape), begin=data + begin, name=name)
        spans.append((begin, end, name))
    covered = 0
    for begin, end, name in sorted(spans):
        if data + end > size:
            fail(f"{name}: ends at byte {data + end} of a file of {size} bytes; is it truncated?")
        if begin != covered:
            fail(f"{name}: starts at {begin}; the tensors before it end at {covered} (overlap or hole)")
        covered = end
    if data + covered != size:
        fail(f"{size} bytes; the tensors in its header end at byte {data + covered}")
    return entries


def write_safetensors(
    path: Path,
    tensors: Mapping[str, np.ndarray] | Callable[[], Iterable[tuple[str, np.ndarray]]],
    checksum: str | None = None,
) -> None:
    """Write tensors of any dtype of DTYPES.

    Args:
        tensors: all of them, or what yields them; called twice, so that one at a time is in memory.
        checksum: name of a last tensor, U32 [1]: the CRC-32 of all bytes of the file before it.

    Raises:
        OSError: the disk has no room for the file.
    """
    names = {dtype: name for name, dtype in DTYPES.items()}

    def each() -> Iterable[tuple[str, np.ndarray]]:
        return tensors() if callable(tensors) else tensors.items()

    header, offset = {}, 0
    for name, array in each():
        end = offset + array.nbytes
        header[name] = {"dtype": names[array.dtype], "shape": list(array.shape), "data_offsets": [offset, end]}
        offset = end
    if checksum is not None:
        header[checksum] = {"dtype": "U32", "shape": [1], "data_offsets": [offset, offset + 4]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    check_space(path.absolute().parent, 8 + len(text) + offset)
    with open(path, "wb") as file:
        crc = 0
        for part in itertools.chain([struct.pack("<Q", len(text)) + text], (array.tobytes() for _, array in each())):
            file.write(part)
            crc = crc if checksum is None else zlib.crc32(part, crc)
        if checksum is not None:
            file.write(struct.pack("<I", crc))


def parse_json(text: bytes, **options: Any) -> Any:
    """json.loads, refusing first what would take more memory than any checkpoint needs."""
    values = sum(text.count(mark) for mark in b"[{,:")
    if values > MAX_VALUES:
        raise ValueError(f"{values} brackets, commas and colons, expected at most {MAX_VALUES}")
    return json.loads(text, **options)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name!r} appears twice")
        found[name] = value
    return found


def _naturals(values: object) -> bool:
    return isinstance(values, list) and all(type(v) is int and 0 <= v < 2**63 for v in values)
