"""Sylvester's Hadamard matrix (ops/hadamard.def) in float64."""

from __future__ import annotations

import numpy as np


def matrix(size: int) -> np.ndarray:
    """Return the matrix, float64 [size, size] of 1 and -1; size: a power of two."""
    made = np.ones((1, 1))
    while len(made) < size:
        made = np.block([[made, made], [made, -made]])
    return made


def rotated(x: np.ndarray, size: int) -> np.ndarray:
    """Return each ``size`` features of x [.., features] times the matrix, divided by sqrt(size): float64."""
    blocks = x.astype(np.float64).reshape(*x.shape[:-1], x.shape[-1] // size, size)
    return (blocks @ matrix(size) / np.sqrt(size)).reshape(x.shape)
