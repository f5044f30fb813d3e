"""The reference of Hadamard."""

from __future__ import annotations

import numpy as np

from quantmoe.custom_ops.nodes import Hadamard


def matrix(size: int) -> np.ndarray:
    """Return Sylvester's Hadamard matrix, float64 [size, size] of 1 and -1; size: a power of two."""
    made = np.ones((1, 1))
    while len(made) < size:
        made = np.block([[made, made], [made, -made]])
    return made


def rotated(x: np.ndarray, size: int) -> np.ndarray:
    """Return each ``size`` features of x [.., features] times the matrix, divided by sqrt(size): float64."""
    blocks = x.astype(np.float64).reshape(*x.shape[:-1], x.shape[-1] // size, size)
    return (blocks @ matrix(size) / np.sqrt(size)).reshape(x.shape)


def hadamard(spec: Hadamard, x: np.ndarray) -> np.ndarray:
    """Compute a Hadamard node: float64 [.., features] of x, which may have any float type."""
    return rotated(x, spec.size)
