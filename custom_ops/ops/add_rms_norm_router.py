"""The reference of AddRMSNormRouter."""

from __future__ import annotations

import numpy as np

from quantmoe.custom_ops.nodes import AddRMSNormRouter
from quantmoe.custom_ops.op import NormSpec, RouterSpec
from quantmoe.custom_ops.reference import add_norm, router


def add_rms_norm_router(
    spec: AddRMSNormRouter,
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
    own = {name: value for name, value in spec.attributes().items() if name not in ("op_version", "norm_epsilon")}
    rows = y.astype(x.dtype).reshape(-1, spec.hidden_size)
    ids, weights = router(RouterSpec.from_attributes(own | {"op_version": RouterSpec.OPERATOR.version}), rows, weight, bias, correction_bias)
    lead = x.shape[:-1]
    return y, total, ids.reshape(*lead, -1), weights.reshape(*lead, -1)
