"""The reference of StateSpace."""

from __future__ import annotations

import numpy as np

from quantmoe.custom_ops.op_def.nodes import StateSpace
from quantmoe.custom_ops.reference import check_rows, recur, sigmoid


def state_space(
    spec: StateSpace,
    xbc: np.ndarray,
    dt: np.ndarray,
    z: np.ndarray,
    a_log: np.ndarray,
    dt_bias: np.ndarray,
    d: np.ndarray,
    norm: np.ndarray,
    past_state: np.ndarray,
    rows: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Compute Mamba-2's state space and its gated norm, token after token.

    Args:
        spec: the node's attributes. The others: inputs of op.def's shapes, any float type.

    Returns:
        y float64 [B, S, H P], zero for tokens that do not count; present_state float64 of past_state's shape, zeros in
        slots of no token.

    Raises:
        ValueError: ``rows`` asks for tokens that are not there.
    """
    check_rows(rows, xbc.shape[1])
    batch, tokens, _ = xbc.shape
    groups, heads, size, states = spec.num_groups, spec.num_heads, spec.head_size, spec.state_size
    dt, z = dt[..., spec.dt_offset :][..., :heads], z[..., spec.z_offset :][..., : heads * size]
    x, b, c = np.split(xbc.astype(np.float64), [heads * size, heads * size + groups * states], axis=2)
    x = x.reshape(batch, tokens, heads, size)
    b, c = (np.repeat(part.reshape(batch, tokens, groups, states), heads // groups, 2) for part in (b, c))
    time = np.logaddexp(0, dt.astype(np.float64) + dt_bias)
    decay = np.exp(-np.exp(a_log.astype(np.float64)) * time)

    def step(i: int, t: int, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        new = x[i, t] * time[i, t][:, None]
        state = state * decay[i, t][:, None, None] + b[i, t][:, :, None] * new[:, None]
        return state, np.einsum("hn,hnp->hp", c[i, t], state) + d.astype(np.float64)[:, None] * x[i, t]

    y, present = recur(spec, past_state, rows, np.zeros((batch, tokens, heads, size)), step)
    o, z, gated = y.reshape(z.shape), z.astype(np.float64), np.zeros(z.shape)
    for i, (begin, count, _) in enumerate(rows.tolist()):
        own = np.s_[i, begin : begin + count]
        gated[own] = o[own] * z[own] * sigmoid(z[own])
    parts = gated.reshape(batch, tokens, heads * size // spec.norm_size, spec.norm_size)
    parts = parts / np.sqrt((parts * parts).mean(3, keepdims=True) + np.float32(spec.norm_epsilon))
    return parts.reshape(gated.shape) * norm.astype(np.float64), present
