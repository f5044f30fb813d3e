"""Weights that are quantized while they are read, by the search of src/quantize."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from quantmoe.custom_ops import native
from quantmoe.custom_ops.matrix import SCALE_DTYPES, QuantizedMatrix
from quantmoe.custom_ops.schemes import SCHEMES
from quantmoe.exporter.reading.checkpoint import CheckpointError, unlike_rows

#: what a head can be rounded to -> input features that share a scale
HEAD_GROUPS = {"int4": 32, "int8": -1}
#: of the mean, what a feature's importance is at least: a text is not all that there is
LEAST = 1e-2
#: weights that are looked at at a time
PIECE = 1 << 16


def quantized(
    weight: np.ndarray,
    bias: np.ndarray | None,
    kind: str,
    *,
    group_size: int,
    where: str,
    symmetric: bool = False,
    importance: np.ndarray | None = None,
) -> QuantizedMatrix:
    """Quantize a matrix [N, K] of floats: scales, and zero points or minima, of the least square error.

    Args:
        kind: of SCHEMES. symmetric: int4 without zero points.
        importance: of the squared errors of each input feature, f32 [K]; None: all alike.

    Raises:
        CheckpointError: naming ``where``: a weight is NaN or infinite.
    """
    scheme, rows, global_scale = SCHEMES[kind], unlike_rows(weight), None
    step = max(1, PIECE // max(1, weight.shape[1]))
    pieces = (rows[at : at + step] for at in range(0, max(1, len(rows)), step))
    reach = float(np.max([np.abs(piece.astype(np.float32)).max(initial=0) for piece in pieces]))
    if not np.isfinite(reach):
        raise CheckpointError(f"{where} has values that are NaN or infinite")
    scale_type = scheme.scale_type
    if scheme.integer:
        scale_type = next(name for name, dtype in SCALE_DTYPES.items() if dtype == weight.dtype)
    if kind == "nvfp4":  # the largest group may have 4 as its largest code, and the largest e4m3 as its scale
        global_scale = float(np.float32((reach or 1.0) / (4 * 448)))
    zero_points = kind == "int4" and not symmetric
    m = native.quantize(
        rows,
        kind,
        group_size,
        scale_type=scale_type,
        zero_points=zero_points,
        importance=importance,
        global_scale=global_scale,
    )
    arrays: dict[str, Any] = {
        name: np.broadcast_to(array, (len(weight), array.shape[1]))
        for name in ("codes", "scales", "zero_points")
        if (array := getattr(m, name)) is not None
    }
    return replace(m, bias=bias, **arrays)


def weighed(mean_squares: np.ndarray) -> np.ndarray:
    """Return the importance of input features, f32 [K] around 1, from the mean squares of inputs."""
    return np.maximum(mean_squares / max(float(mean_squares.mean()), 1e-30), LEAST).astype(np.float32)


def distance(m: QuantizedMatrix, weight: np.ndarray) -> float:
    """Return the root mean square error of a matrix without biases or blocks of rows, divided by ``weight``'s own."""
    errors = squares = 0.0
    step = max(1, PIECE // max(1, weight.shape[1]))
    for at in range(0, len(weight), step):
        rows = slice(at, at + step)
        exact, zeros = weight[rows].astype(np.float32), None if m.zero_points is None else m.zero_points[rows]
        part = replace(m, codes=m.codes[rows], scales=m.scales[rows], zero_points=zeros, bias=None)
        difference = part.dequantize(np.float32) - exact
        errors += float(np.vdot(difference, difference))
        squares += float(np.vdot(exact, exact))
    return (errors / squares) ** 0.5 if squares else 0.0
