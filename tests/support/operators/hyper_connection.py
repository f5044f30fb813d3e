"""HyperConnection in float64, with a bound on how far a kernel may be from it; ops/hyper_connection.def.

Logits are exact: the operator says how each is rounded. The error of comb is the error of its logarithm. To first order
this is a sum over all roundings. Each counts times what later steps make of it, which is the product of their
derivatives. A division by a sum takes most of an earlier error back, so a plain product of bounds would say nothing.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
from support.operators.arithmetic import SECOND, SIGMOID, SMALLEST_SIGMOID, TINY, Span, U

from quantmoe.custom_ops.op_def.nodes import HyperConnection
from quantmoe.custom_ops.ops.hyper_connection import hyper_connection
from quantmoe.custom_ops.reference import sigmoid

#: exp, as arithmetic.py says, and the least that it gives
EXP, LEAST = 4 * U, 1.7e-38


@dataclasses.dataclass(frozen=True)
class Inputs:
    """A node and its inputs, in the operator's order."""

    spec: HyperConnection
    streams: np.ndarray
    mixes: np.ndarray
    base: np.ndarray
    scale: np.ndarray

    @property
    def tensors(self) -> tuple[np.ndarray, ...]:
        return self.streams, self.mixes, self.base, self.scale


def inputs(
    spec: HyperConnection, tokens: tuple[int, ...], dtype: Any = np.float32, spread: float = 1.0, seed: int = 0
) -> Inputs:
    """Return random inputs. spread: of the logits."""
    rng, n = np.random.default_rng(seed), spec.num_streams
    weights = n * (2 + n)
    return Inputs(
        spec,
        rng.normal(0, 2, (*tokens, n, spec.hidden_size)).astype(dtype),
        rng.normal(0, spread, (*tokens, weights)).astype(np.float32),
        rng.normal(0, spread, weights).astype(np.float32),
        rng.normal(0, 1, 3).astype(np.float32),
    )


def logits(given: Inputs) -> np.ndarray:
    """Return z, rounded as the operator says."""
    n = given.spec.num_streams
    rounded: np.ndarray = given.mixes * np.repeat(given.scale, [n, n, n * n]) + given.base
    return rounded


def computed(given: Inputs) -> tuple[Span, Span, Span]:
    """Return collapsed, post and comb."""
    spec, z = given.spec, logits(given)
    n, x = spec.num_streams, given.streams.astype(np.float64)
    collapsed, post, comb = hyper_connection(spec, x, z, np.zeros(z.shape[-1]), np.ones(3))
    pre = sigmoid(z[..., :n].astype(np.float64))[..., None]
    of_pre = SIGMOID * pre + SMALLEST_SIGMOID + U * (pre + spec.epsilon)
    terms = np.abs(x)
    limits = ml_dtypes.finfo(given.streams.dtype)
    rounding = float(limits.eps) / 2 if given.streams.dtype != np.float32 else 0.0
    smallest = float(limits.smallest_subnormal) / 2
    error = (terms * of_pre).sum(-2) + n * (U * (terms * (pre + spec.epsilon)).sum(-2) + TINY)
    return (
        Span(collapsed, (error + rounding * np.abs(collapsed) + smallest) * SECOND),
        Span(post, (SIGMOID * post + 2 * SMALLEST_SIGMOID) * SECOND),
        Span(comb, comb * _relative(spec, z[..., 2 * n :].reshape(-1, n, n).astype(np.float64)).reshape(comb.shape)),
    )


def _relative(spec: HyperConnection, z: np.ndarray) -> np.ndarray:
    """Return the relative error of comb. z: [tokens, N, N]."""
    n, tokens = spec.num_streams, len(z)
    p = np.exp(z - z.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    # a difference of logits is rounded, and its exponential; so are a sum, a quotient and the sum with epsilon
    differences = U * np.abs(z - z.max(-1, keepdims=True)).clip(max=88)
    first = differences + EXP
    first = first + first.max(-1, keepdims=True) + n * U
    comb = p + spec.epsilon
    first = (p * first + LEAST) / comb + U
    derivatives = []
    for step in range(2 * spec.iterations - 1):
        axis = -1 if step % 2 else -2
        comb = comb / (comb.sum(axis, keepdims=True) + spec.epsilon)
        own = np.broadcast_to(np.eye(n * n), (tokens, n * n, n * n)).reshape(tokens, n, n, n, n).copy()
        for i in range(n):  # a sum's error is its terms', each by its part of the sum
            if axis == -1:
                own[:, i, :, i, :] -= comb[:, i, None, :]
            else:
                own[:, :, i, :, i] -= comb[:, None, :, i]
        derivatives.append(own.reshape(tokens, n * n, n * n))
    later, error = np.broadcast_to(np.eye(n * n), (tokens, n * n, n * n)), np.zeros((tokens, n * n))
    for own in reversed(derivatives):
        error += np.abs(later).sum(-1) * (n + 1) * U
        later = later @ own
    error += (np.abs(later) @ first.reshape(tokens, n * n, 1))[..., 0]
    return error * SECOND


def assert_near(found: tuple[np.ndarray, ...], given: Inputs) -> None:
    """Raise AssertionError where outputs of a kernel are further from the truth than its roundings allow."""
    for name, own, (value, error) in zip(("collapsed", "post", "comb"), found, computed(given), strict=True):
        assert own.shape == value.shape, name
        distance = np.abs(own.astype(np.float64) - value)
        assert (distance <= error).all(), f"{name}: {np.max(distance / error)} times the bound"
