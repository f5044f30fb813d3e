"""Hadamard through the C ABI, beside the reference and compressed-tensors' matrices."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from compressed_tensors.transform.utils.hadamard import deterministic_hadamard_matrix
from support.operators import native_kernels as native
from support.operators.arithmetic import SECOND, TINY, U

from quantmoe.custom_ops.hadamard_matrix import matrix
from quantmoe.custom_ops.op_def.nodes import Hadamard
from quantmoe.custom_ops.ops.hadamard import hadamard

TYPES = (np.float32, np.float16, ml_dtypes.bfloat16)
SHAPES = {
    "a token": ((1, 2048), 2048),
    "blocks": ((3, 5, 96), 32),
    "smallest": ((7, 3), 1),
    "pairs": ((7, 6), 2),
    "one row": ((64,), 64),
    "more than a task": ((5, 8192), 8192),
    "a task and a rest": ((67, 192), 64),
    "no tokens": ((0, 128), 128),
}


def rounding(dtype: Any) -> float:
    """Half an ulp of 1."""
    return float(ml_dtypes.finfo(dtype).eps) / 2


def bound(x: np.ndarray, y: np.ndarray, size: int) -> np.ndarray:
    """Return how far y may be from the reference: log2(size) sums, the rounded factor, the product, the output's type.

    After every sum a number is at most the sum of the block's magnitudes.
    """
    magnitudes = np.abs(x.astype(np.float64)).reshape(*x.shape[:-1], x.shape[-1] // size, size).sum(-1, keepdims=True)
    sums = np.broadcast_to(magnitudes / np.sqrt(size), (*magnitudes.shape[:-1], size)).reshape(x.shape)
    smallest = float(ml_dtypes.finfo(x.dtype).smallest_subnormal) / 2
    return ((np.log2(size) + 2) * U * sums + rounding(x.dtype) * np.abs(y) + smallest + TINY) * SECOND


@pytest.mark.parametrize("size", [1, 2, 32, 128, 1024])
def test_the_matrix_is_compressed_tensors(size: int) -> None:
    np.testing.assert_array_equal(matrix(size), deterministic_hadamard_matrix(size, torch.float64).numpy())
    assert all((matrix(size)[i, j] < 0) == (bin(i & j).count("1") % 2) for i in range(size)[:40] for j in range(size))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("shape", "size"), SHAPES.values(), ids=SHAPES)
def test_kernel(shape: tuple[int, ...], size: int, dtype: Any) -> None:
    spec = Hadamard(features=shape[-1], size=size)
    x = np.random.default_rng(0).normal(0, 3, shape).astype(dtype)
    want = hadamard(spec, x)
    (found,) = native.run(spec, x)
    assert (np.abs(found.astype(np.float64) - want) <= bound(x, want, size)).all()
    for lanes in (2, 5):
        assert native.run(spec, x, lanes=lanes)[0].tobytes() == found.tobytes()


def test_integers_are_exact_and_twice_is_once() -> None:
    """Small integers have exact sums, and 1 / sqrt(size) is a power of two. So two nodes give what came in."""
    spec = Hadamard(features=768, size=256)
    x = np.random.default_rng(1).integers(-8, 9, (4, 768)).astype(np.float32)
    (once,) = native.run(spec, x)
    np.testing.assert_array_equal(once, hadamard(spec, x))
    np.testing.assert_array_equal(native.run(spec, once)[0], x)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_a_number_that_is_not_finite_stays_in_its_block(value: float) -> None:
    spec = Hadamard(features=96, size=32)
    x = np.random.default_rng(2).normal(0, 1, (3, 96)).astype(np.float32)
    x[1, 40] = value
    (found,) = native.run(spec, x)
    np.testing.assert_array_equal(np.isfinite(found), np.isfinite(hadamard(spec, x)))
    assert not np.isfinite(found[1, 32:64]).any()
    assert np.isfinite(found).sum() == 2 * 96 + 64


def test_zeros_and_infinities_of_both_signs() -> None:
    spec = Hadamard(features=4, size=4)
    x = np.array([[0, -0.0, 0, 0], [np.inf, -np.inf, 0, 0]], np.float32)
    (found,) = native.run(spec, x)
    np.testing.assert_array_equal(found[0], np.zeros(4))
    np.testing.assert_array_equal(found[1], [np.nan, np.inf, np.nan, np.inf])


@pytest.mark.parametrize(
    ("features", "size", "text"),
    [
        (96, 24, "size is 24, expected a power of two that divides features 96"),
        (96, 64, "size is 64, expected a power of two that divides features 96"),
        (96, 0, "size is 0, expected a power of two"),
        (96, -32, "size is -32, expected a power of two"),
        (0, 1, "features is 0, expected 1 to"),
    ],
)
def test_refusals(features: int, size: int, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        native.run(Hadamard(features=features, size=size), np.zeros((2, max(features, 1)), np.float32))
