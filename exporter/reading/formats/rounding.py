"""Weights that are quantized while they are read: round to nearest, nothing calibrated."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from quantmoe.custom_ops.matrix import SCALE_DTYPES, QuantizedMatrix
from quantmoe.custom_ops.schemes import SCHEMES
from quantmoe.exporter.reading.checkpoint import CheckpointError, unlike_rows

#: what a head can be rounded to -> input features that share a scale
HEAD_GROUPS = {"int4": 32, "int8": -1}
#: weights that are rounded at a time
PIECE = 1 << 16


def rounded_to_nearest(
    weight: np.ndarray, bias: np.ndarray | None, kind: str, group_size: int, where: str
) -> QuantizedMatrix:
    """A matrix [N, K] of floats as a scheme of SCHEMES.

    Raises:
        CheckpointError: naming ``where``: a weight is NaN or infinite.
    """
    scheme, global_scale, rows = SCHEMES[kind], None, unlike_rows(weight)
    # by pieces of rows: float64 and what rounding makes of it take 50 bytes a weight
    step = max(1, PIECE // max(1, weight.shape[1]))
    pieces = [rows[at : at + step] for at in range(0, max(1, len(rows)), step)]
    reach = float(np.max([np.abs(piece.astype(np.float32)).max(initial=0) for piece in pieces]))
    if not np.isfinite(reach):
        raise CheckpointError(f"{where} has values that are NaN or infinite")
    dtype = weight.dtype if scheme.integer else SCALE_DTYPES[scheme.scale_type]
    if kind == "nvfp4":  # the largest scale becomes the largest e4m3
        global_scale = float(np.float32((reach or 1.0) / (np.nanmax(scheme.table) * 448)))
    rounded = [scheme.quantize(p.astype(np.float64) / (global_scale or 1), group_size, dtype) for p in pieces]
    codes, scales = (np.concatenate(parts) for parts in zip(*rounded, strict=True))
    codes, scales = (np.broadcast_to(a, (len(weight), a.shape[1])) for a in (codes, scales))
    return QuantizedMatrix(kind, codes, scales, group_size, global_scale=global_scale, bias=bias)


def distance(m: QuantizedMatrix, weight: np.ndarray) -> float:
    """Root of the mean square error of a matrix without biases or blocks of rows, relative to that of ``weight``."""
    errors = squares = 0.0
    step = max(1, PIECE // max(1, weight.shape[1]))
    for at in range(0, len(weight), step):
        rows = slice(at, at + step)
        exact = weight[rows].astype(np.float32)
        difference = replace(m, codes=m.codes[rows], scales=m.scales[rows], bias=None).dequantize(np.float32) - exact
        errors += float(np.vdot(difference, difference))
        squares += float(np.vdot(exact, exact))
    return (errors / squares) ** 0.5 if squares else 0.0
