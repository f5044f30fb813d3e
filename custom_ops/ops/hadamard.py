"""The reference of Hadamard."""

from __future__ import annotations

import numpy as np

from quantmoe.custom_ops.hadamard_matrix import rotated
from quantmoe.custom_ops.op_def.nodes import Hadamard


def hadamard(spec: Hadamard, x: np.ndarray) -> np.ndarray:
    """Compute a Hadamard node: float64 [.., features] of x, which may have any float type."""
    return rotated(x, spec.size)
