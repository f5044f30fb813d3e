"""Weights of code * scale - minimum with a float minimum, as HQQ, MLX and torchao's int4 have them."""

from __future__ import annotations

import math

import numpy as np

from quantmoe.custom_ops.matrix import SCALE_DTYPES, QuantizedMatrix
from quantmoe.custom_ops.schemes import SCHEMES
from quantmoe.exporter.reading.checkpoint import CheckpointError, is_outline, outline

_LEVELS = SCALE_DTYPES["f32_minima"]


def carrier(bits: int) -> str:
    """Return the format of op.def that takes codes of so many bits."""
    return "q4_1" if bits <= 4 else "q5_1" if bits == 5 else "q8_min"


def carried_group(columns: int, group: int, where: str) -> int:
    """Return the columns that are carried with one scale: a power of two from 32 to 256.

    Args:
        columns: of a row. group: weights that share a scale, counted from the first row on. where: named in the error.

    Raises:
        CheckpointError: groups do not end with 32 columns of a row.
    """
    shared = math.gcd(columns, group)
    if shared % 32:
        raise CheckpointError(
            f"{where}: groups of {group} in rows of {columns} inputs; supported: groups that end with 32 inputs"
        )
    return min(shared & -shared, 256)


def growth(kind: str, scale_bits: int, width: int, bits: float) -> str:
    """Return what a scheme's text says of weights that take more than the checkpoint's ``bits`` each; "" if not more.

    Args:
        scale_bits: of what is carried with ``width`` columns.
    """
    carried = SCHEMES[kind].bits + scale_bits / width
    return f", carried as {kind}: {carried:.4g} bits a weight, the file has {bits:.4g}" if carried > bits else ""


def carried_affine(bits: int, width: int, group: int, stored: int, packed: float = 0) -> str:
    """Return :func:`growth` of ``bits``-bit codes whose groups have ``stored`` bits of scale and minimum.

    Args:
        packed: bits that a code takes in the file, if they are not ``bits``.
    """
    return growth(carrier(bits), 8 * _LEVELS.itemsize, width, (packed or bits) + stored / group)


def affine(
    kind: str, codes: np.ndarray, scales: np.ndarray, *, minima: np.ndarray, width: int, bias: np.ndarray | None
) -> QuantizedMatrix:
    """Return a matrix [N, K] of code * scale - minimum.

    Args:
        codes: uint8 [N, K], or an outline. scales, minima: float64, of N * K / count weights each, in order. Minima are
            rounded to f32.
    """
    n, k = codes.shape
    if is_outline(codes):
        return QuantizedMatrix(
            kind=kind, codes=codes, scales=outline((n, k // width), _LEVELS), group_size=width, bias=bias
        )
    levels = np.empty(n * k // width, _LEVELS)
    for name, values in (("d", scales), ("d_min", minima)):
        levels[name] = np.repeat(values.reshape(-1), len(levels) // values.size)
    return QuantizedMatrix(kind=kind, codes=codes, scales=levels.reshape(n, k // width), group_size=width, bias=bias)
