"""The reference of CausalConv."""

from __future__ import annotations

import numpy as np

from quantmoe.custom_ops.op_def.nodes import CausalConv
from quantmoe.custom_ops.reference import check_rows, sigmoid, windowed


def causal_conv(
    spec: CausalConv, x: np.ndarray, weight: np.ndarray, bias: np.ndarray, past_conv: np.ndarray, rows: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Compute a causal depthwise convolution with state.

    Args:
        spec: the node's attributes. The others: inputs of op.def's shapes, any float type.

    Returns:
        y float64 [B, S, C], zero for tokens that do not count; present_conv of past_conv's shape and type, zeros in
        slots of no token.

    Raises:
        ValueError: ``rows`` asks for tokens that are not there.
    """
    check_rows(rows, x.shape[1])
    before, x = spec.width - 1, x[..., spec.x_offset : spec.x_offset + spec.channels]
    y, present = np.zeros(x.shape), np.zeros_like(past_conv)
    slots, live = windowed(spec, present), windowed(spec, past_conv)[-1]
    for b, (begin, count, past) in enumerate(rows.tolist()):
        if not count:
            slots[-1, b] = live[b]
            continue
        state = live[b] if past else np.zeros_like(live[b])
        seen = np.concatenate([state, x[b, begin : begin + count].T.astype(state.dtype)], 1)  # [C, W - 1 + count]
        for back in range(min(count, len(slots))):
            slots[-1 - back, b] = seen[:, count - back : count - back + before]
        windows = np.lib.stride_tricks.sliding_window_view(seen.astype(np.float64), before + 1, axis=1)
        out = np.einsum("ctw,cw->tc", windows, weight.astype(np.float64)) + (bias if bias.size else 0)
        y[b, begin : begin + count] = out * sigmoid(out) if spec.activation == "silu" else out
    return y, present
