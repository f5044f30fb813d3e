"""How far a kernel may be from the float64 reference."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
from cases import Layer

from quantmoe.custom_ops import reference


def widest_step(activation_format: str) -> float:
    """The largest distance of two values of the format over the largest of them."""
    if activation_format.startswith("int8"):
        return 1 / 127
    return 32 / 448 if "fp8" in activation_format else 2 / 6


def tolerance(layer: Layer, hidden: np.ndarray, ids: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Bound [T, 1] on |kernel - reference|.

    f32 sums of K terms err by at most K * 2^-24 of the sum of magnitudes, and in the mean by its square root; 2^-18 of
    the magnitudes covers the sizes here. A quantized h may also round the other way where f32 and f64 straddle a half
    (probability about 1e-4 an element): three such steps are allowed a pair.
    """
    spec = layer.spec
    out = np.zeros((len(hidden), 1))
    for i, expert in enumerate(layer.experts):
        for t, j in zip(*np.nonzero(ids == spec.expert_offset + i), strict=True):
            x = hidden[t : t + 1].astype(np.float32) * (weights[t, j] if spec.apply_router_weight_on_input else 1)
            w = 1.0 if spec.apply_router_weight_on_input else abs(weights[t, j])
            if not np.isfinite(x).all():
                continue

            def size(m, x=x):
                return np.abs(x) @ np.abs(m.dequantize()).T + (0 if m.bias is None else np.abs(m.bias))

            up = size(expert.up)
            gate = np.ones_like(up) if expert.gate is None else size(expert.gate)
            bound = np.minimum(gate, 1e30) * (up + 1) if spec.activation != "relu2" else gate**2 * up + up**2
            exact = reference.activate(
                spec,
                None if expert.gate is None else reference.linear(x, expert.gate, spec.w13.activation_format),
                reference.linear(x, expert.up, spec.w13.activation_format),
            )
            w2 = np.abs(expert.down.dequantize())
            error = 2.0**-18 * (bound @ w2.T + np.abs(exact) @ w2.T).max()
            if spec.w2.activation_format != "none":
                scaled = exact if expert.down.pre_scale is None else exact * expert.down.pre_scale
                weight = np.abs(dataclasses.replace(expert.down, pre_scale=None).dequantize()).max()
                error += 3 * np.ptp(np.append(scaled, 0)) * widest_step(spec.w2.activation_format) * weight
            out[t] += w * (error + 2.0**-18 * (0 if expert.down.bias is None else np.abs(expert.down.bias).max()))
    return out


def check(layer: Layer, tokens: tuple, got: np.ndarray) -> None:
    want = reference.quant_moe(layer.spec, layer.experts, *tokens)
    finite = np.isfinite(want).all(1)
    assert np.isnan(got[~finite].astype(np.float64)).all()
    error = np.abs(got[finite].astype(np.float64) - want[finite])
    bound = tolerance(layer, *tokens)[finite] + np.abs(want[finite]) * np.float64(
        {np.dtype(np.float32): 2.0**-23, np.dtype(np.float16): 2.0**-11, np.dtype(ml_dtypes.bfloat16): 2.0**-8}[
            got.dtype
        ]
    )
    assert (error <= bound).all(), (
        f"error {error.max():.3g}, {np.max(error / np.maximum(bound, 1e-30)):.3g} of the bound"
    )
