"""The reference of AddRMSNormRouter."""

from __future__ import annotations

import numpy as np

from quantmoe.custom_ops.op import NormRouterSpec, NormSpec
from quantmoe.custom_ops.reference import add_norm, router


def add_rms_norm_router(
    spec: NormRouterSpec,
    x: np.ndarray,
    residual: np.ndarray,
    norm_weight: np.ndarray,
    weight: np.ndarray,
    bias: np.ndarray,
    correction_bias: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Compute a norm and the experts of each token.

    Args:
        spec: the node's attributes. The others: inputs of op.def's shapes, any float type.

    Returns:
        y float64, the sum in x's type, topk_ids int32 and topk_weights float64. The router reads y in x's type.
    """
    y, total = add_norm(NormSpec(norm_epsilon=spec.norm_epsilon), x, residual, norm_weight)
    rows = y.astype(x.dtype).reshape(-1, spec.hidden_size)
    chosen = router(spec.router, rows, weight, bias, correction_bias)
    ids, weights = (value.reshape(*x.shape[:-1], -1) for value in chosen)
    return y, total, ids, weights
