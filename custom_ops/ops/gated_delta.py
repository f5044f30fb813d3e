"""The reference of GatedDelta."""

from __future__ import annotations

import numpy as np

from quantmoe.custom_ops.op_def.nodes import GatedDelta
from quantmoe.custom_ops.reference import check_rows, recur, sigmoid


def gated_delta(
    spec: GatedDelta,
    qkv: np.ndarray,
    a: np.ndarray,
    b: np.ndarray,
    z: np.ndarray,
    a_log: np.ndarray,
    dt_bias: np.ndarray,
    norm: np.ndarray,
    past_state: np.ndarray,
    rows: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Compute the gated delta rule and its gated norm, token after token.

    Args:
        spec: the node's attributes. The others: inputs of op.def's shapes, any float type.

    Returns:
        y float64 [B, S, H V], zero for tokens that do not count; present_state float64 of past_state's shape, zeros in
        slots of no token.

    Raises:
        ValueError: ``rows`` asks for tokens that are not there.
    """
    check_rows(rows, qkv.shape[1])
    batch, tokens, _ = qkv.shape
    groups, heads, key, value = spec.num_k_heads, spec.num_v_heads, spec.k_head_size, spec.v_head_size
    sizes = (heads * (key if spec.decay_per_key else 1), heads, heads * value)
    parts = zip((a, b, z), (spec.a_offset, spec.b_offset, spec.z_offset), sizes, strict=True)
    a, b, z = (tensor[..., offset : offset + size] for tensor, offset, size in parts)
    q, k, v = np.split(qkv.astype(np.float64), [groups * key, 2 * groups * key], axis=2)
    q, k = (x.reshape(batch, tokens, groups, key) for x in (q, k))
    q, k = (x / np.sqrt((x * x).sum(3, keepdims=True) + np.float32(spec.l2_epsilon)) for x in (q, k))
    q, k = (np.repeat(x, heads // groups, 2) for x in (q * np.float32(spec.scale), k))
    v = v.reshape(batch, tokens, heads, value)
    time = np.logaddexp(0, a.astype(np.float64) + dt_bias).reshape(batch, tokens, heads, dt_bias.size // heads)
    decay = np.exp(-np.exp(a_log.astype(np.float64))[:, None] * time)
    beta = np.float32(spec.beta_scale) * sigmoid(b.astype(np.float64))

    def step(i: int, t: int, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        state = state * decay[i, t][:, :, None]
        new = (v[i, t] - np.einsum("hk,hkv->hv", k[i, t], state)) * beta[i, t][:, None]
        state = state + k[i, t][:, :, None] * new[:, None]
        return state, np.einsum("hk,hkv->hv", q[i, t], state)

    y, present = recur(spec, past_state, rows, np.zeros((batch, tokens, heads, value)), step)
    y = y / np.sqrt((y * y).mean(3, keepdims=True) + np.float32(spec.norm_epsilon)) * norm.astype(np.float64)
    gate = sigmoid(z.astype(np.float64))
    gate = (gate * z if spec.gate == "silu" else gate).reshape(y.shape)
    for i, (begin, count, _) in enumerate(rows.tolist()):
        y[i, begin : begin + count] *= gate[i, begin : begin + count]
    return y.reshape(batch, tokens, heads * value), present
