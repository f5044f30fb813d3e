"""The reference of HyperConnection."""

from __future__ import annotations

import numpy as np

from quantmoe.custom_ops.op_def.nodes import HyperConnection
from quantmoe.custom_ops.reference import sigmoid


def hyper_connection(
    spec: HyperConnection, streams: np.ndarray, mixes: np.ndarray, base: np.ndarray, scale: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Compute what a block reads of the residual streams, and the weights by which they go on.

    Args:
        spec: the node's attributes. The others: inputs of op.def's shapes, any float type.

    Returns:
        collapsed, post and comb, float64.
    """
    n = spec.num_streams
    factors = np.repeat(scale.astype(np.float64), [n, n, n * n])
    pre, post, comb = np.split(mixes.astype(np.float64) * factors + base, [n, 2 * n], -1)
    comb = comb.reshape(*comb.shape[:-1], n, n)
    comb = np.exp(comb - comb.max(-1, keepdims=True))
    comb = comb / comb.sum(-1, keepdims=True) + spec.epsilon
    for step in range(2 * spec.iterations - 1):
        comb = comb / (comb.sum(-1 if step % 2 else -2, keepdims=True) + spec.epsilon)
    collapsed = ((sigmoid(pre) + spec.epsilon)[..., None] * streams.astype(np.float64)).sum(-2)
    return collapsed, 2 * sigmoid(post), comb
