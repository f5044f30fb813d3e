"""Matrices of transformers that a GGUF file has as several tensors."""

from __future__ import annotations

from functools import partial
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np

from quantmoe.exporter.errors import CheckpointError
from quantmoe.exporter.reading.gguf.blocks import CARRIED, dequantized
from quantmoe.exporter.reading.gguf.changed_tensors import ChangedTensors
from quantmoe.exporter.reading.gguf.families.base import Join
from quantmoe.exporter.reading.gguf.header import TYPES
from quantmoe.exporter.safetensors_file import DTYPES, Entry


class Part(NamedTuple):
    """A tensor of a file, and its ggml type."""

    shard: Path
    name: str
    shape: tuple[int, ...]
    kind: int
    begin: int

    def entry(self) -> Entry:
        """Return where its bytes are; blocks are bytes."""
        title, weights, size = TYPES[self.kind]
        if weights == 1:
            return Entry(shard=self.shard, dtype=title, shape=self.shape, begin=self.begin, name=self.name)
        return Entry(
            shard=self.shard,
            dtype="U8",
            shape=(*self.shape[:-1], self.shape[-1] // weights * size),
            begin=self.begin,
            name=self.name,
        )


def add_joined(ckpt: ChangedTensors, module: str, join: Join, parts: dict[tuple[str, str], Part]) -> None:
    """Add a module's weight, and its bias.

    Rows of one type stay as they are. Rows of several types, and matrices that are computed, become f32.

    Args:
        parts: GGUF's name and its end -> the part.

    Raises:
        CheckpointError: naming a part that is missing, or has another shape.
    """
    for leaf in dict.fromkeys(leaf for _, leaf in parts):
        found = [parts.get((stem, leaf)) for stem in join.parts]
        own = [part for part in found if part is not None]
        if len(own) < len(found):
            missing = [stem for stem in join.parts if (stem, leaf) not in parts]
            raise CheckpointError(f"{own[0].shard}: {own[0].name} is there, expected {missing[0]}.{leaf} beside it")
        first = own[0].entry()
        title, weights, _ = TYPES[own[0].kind]
        if join.how is None and any(part.shape[1:] != own[0].shape[1:] for part in own):
            raise CheckpointError(
                f"{own[1].shard}: {own[1].name} is {list(own[1].shape)}, expected rows as in {own[0].name} "
                f"{list(own[0].shape)}"
            )
        if join.how is None and len({part.kind for part in own}) == 1:
            shape = (sum(part.shape[0] for part in own), *first.shape[1:])
            end = title if weights > 1 else leaf
            entry = Entry(shard=first.shard, dtype=first.dtype, shape=shape, begin=first.begin, name=first.name)
            ckpt.make(f"{module}.{end}", entry, partial(_rows, ckpt, own))
            continue
        make = partial(_computed, ckpt, join, own)
        shape = _shape(ckpt, join, own)
        ckpt.make(
            f"{module}.{leaf}",
            Entry(shard=first.shard, dtype="F32", shape=shape, begin=first.begin, name=first.name),
            make,
        )


def _rows(ckpt: ChangedTensors, parts: list[Part]) -> np.ndarray:
    """Return the bytes of all parts, one after the other."""
    return np.concatenate([ckpt.octets(part.entry()) for part in parts])


def _computed(ckpt: ChangedTensors, join: Join, parts: list[Part]) -> np.ndarray:
    floats = [_floats(ckpt, part) for part in parts]
    return np.ascontiguousarray(join.how(ckpt.config, floats) if join.how else np.concatenate(floats), np.float32)


def _shape(ckpt: ChangedTensors, join: Join, parts: list[Part]) -> tuple[int, ...]:
    """Return the shape of what :func:`_computed` makes, from arrays without memory."""
    empty = [np.broadcast_to(np.float32(0), part.shape) for part in parts]
    return join.how(ckpt.config, empty).shape if join.how else (sum(p.shape[0] for p in parts), *parts[0].shape[1:])


def _floats(ckpt: ChangedTensors, part: Part) -> np.ndarray:
    """Return a part's numbers in f32."""
    title, weights, size = TYPES[part.kind]
    octets = ckpt.octets(part.entry())
    if weights == 1:
        return octets.view(DTYPES[title]).reshape(part.shape).astype(np.float32)
    if title not in CARRIED:
        raise CheckpointError(f"{part.shard}: {part.name} is {title}; supported: {', '.join(CARRIED)}")
    rows = octets.reshape(prod(part.shape[:-1]), part.shape[-1] // weights, size)
    return dequantized(title, rows).reshape(part.shape)
