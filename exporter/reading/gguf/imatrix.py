"""llama.cpp's importance matrix, which ``llama-imatrix`` writes to a GGUF file: sums of squares of input features."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from quantmoe.exporter.errors import CheckpointError
from quantmoe.exporter.reading.gguf.families import FAMILIES
from quantmoe.exporter.reading.gguf.header import TYPES, read_header

SUMS, COUNTS = ".in_sum2", ".counts"
#: tensors whose input features llama.cpp has in another order
_REORDERED = ("ssm_out",)
#: a tensor of all experts -> its name where transformers fuses them
_FUSED = {"ffn_gate_exps": "gate_up_proj", "ffn_up_exps": "gate_up_proj", "ffn_down_exps": "down_proj"}


def read_imatrix(path: Path) -> dict[str, np.ndarray]:
    """Return mean squares f32 [K] by checkpoint module, or expert and tensor of fused ones: under every name that a
    family gives them. What no token reached is left out.

    Raises:
        CheckpointError: the file is no importance matrix.
    """
    header, found = read_header(path), dict[str, np.ndarray]()
    if header.fields.get("general.type") != "imatrix":
        raise CheckpointError(f"{path}: general.type is {header.fields.get('general.type')!r}, expected 'imatrix'")

    def numbers(name: str) -> np.ndarray:
        shape, kind, begin = header.tensors[name]
        if TYPES[kind][0] != "F32":
            raise CheckpointError(f"{path}: {name} is {TYPES[kind][0]}, expected F32")
        count = int(np.prod(shape))
        return np.fromfile(path, "<f4", count, offset=begin).reshape(shape)

    for name in header.tensors:
        stem = name.removesuffix(SUMS)
        if stem == name or f"{stem}{COUNTS}" not in header.tensors:
            continue
        sums, counts = np.atleast_2d(numbers(name)), numbers(f"{stem}{COUNTS}").reshape(-1)
        if len(sums) != len(counts):
            raise CheckpointError(f"{path}: {name} has {len(sums)} rows, {stem}{COUNTS} {len(counts)} numbers")
        for part, (row, count) in enumerate(zip(sums, counts, strict=True)):
            if count > 0:
                found |= dict.fromkeys(_names(stem, part), row / count)
    return found


def _names(tensor: str, part: int) -> set[str]:
    """Return what checkpoints call a tensor's module, or a part of one of all experts."""
    *block, stem = tensor.removesuffix(".weight").split(".")
    if stem in _REORDERED:
        return set()
    places = {family.names[stem] for family in FAMILIES.values() if stem in family.names}
    prefix = f"model.layers.{block[1]}." if block[:1] == ["blk"] and len(block) == 2 else ""
    names = {prefix + place.format(part) for place in places}
    if stem in _FUSED:
        names |= {f"{prefix}{place.rpartition('.{}')[0]}.{part}.{_FUSED[stem]}" for place in places}
    return names
