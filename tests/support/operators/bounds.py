"""How far kernels and custom_ops/reference.py may be from arithmetic.py, and so from each other."""

from __future__ import annotations

from typing import Any

import numpy as np
from support.operators.arithmetic import GGML, PLANES, Weights, assert_within, exactly, quant_linear, quant_moe

from quantmoe.custom_ops import reference
from quantmoe.custom_ops.expert import Expert
from quantmoe.custom_ops.matrix import QuantizedMatrix, k_group, levels
from quantmoe.custom_ops.op import MoESpec, Projection
from quantmoe.custom_ops.schemes import SCHEMES


def weights(m: QuantizedMatrix, p: Projection) -> Weights:
    """The matrix of a node whose projection is ``p``."""
    integer = m.kind in ("int4", "int8", *GGML)
    values, group, minima = m.values(), k_group(m), None
    if m.kind in PLANES:  # a code, less a zero point that is a minimum
        of_group = np.minimum(
            np.arange(0, m.shape[1], 32) // (m.shape[1] if m.group_size == -1 else m.group_size), m.scales.shape[1] - 1
        )
        values, scales = m.codes.astype(np.float64), m.scales.astype(np.float64)[:, of_group]
        zeros = np.full_like(m.scales, SCHEMES[m.kind].zero, np.float64) if m.zero_points is None else m.zero_points
        minima = (zeros.astype(np.float64)[:, of_group] * scales).astype(np.float32).astype(np.float64)
    elif m.scales.dtype.names is None:
        scales = np.repeat(m.scales.astype(np.float64), m.block_n, axis=0)[: len(m.codes)]
        scales = np.repeat(scales, max(1, m.group_size // group), axis=1)
    else:
        parts = levels(m.scales, np.float64)
        again = m.group_size // group // parts[0].shape[2]  # groups that share a block's scale
        scales, minima = (np.repeat(part.reshape(len(values), -1), again, axis=1) for part in parts)
    multiplier = np.full(len(values), np.float32(m.global_scale or 1), np.float64)
    if m.kind in ("mxfp4", "nvfp4"):
        values, multiplier = values * 2, multiplier / 2
    if m.kind == "fp8_e4m3":
        values, multiplier = values / 256, multiplier * 256
    if m.scale_type == "e4m3":
        scales, multiplier = scales / 256, multiplier * 256
    return Weights(
        m.kind,
        group,
        bool(p.zero_points),
        values,
        scales,
        None if integer else multiplier,
        np.zeros(len(values)) if m.bias is None else m.bias.astype(np.float64),
        perm=np.arange(values.shape[1]) if p.perm and m.perm is None else m.perm,
        pre_scale=m.pre_scale,
        hadamard=m.hadamard,
        stored=float(np.float32(m.input_scale or 0)),
        minima=None if m.kind == "q6_k" else minima,
    )


def check(layer: Any, tokens: tuple[np.ndarray, np.ndarray, np.ndarray], got: np.ndarray) -> None:
    """Kernel and reference.quant_moe are both where arithmetic.py says that they may be.

    Args:
        layer: has ``spec`` and ``experts``. tokens: hidden_states, topk_ids and topk_weights. got: [T, H].
    """
    spec: MoESpec = layer.spec

    def matrices(e: Expert) -> tuple[Weights | None, Weights, Weights]:
        gate = None if e.gate is None else weights(e.gate, spec.w13)
        return gate, weights(e.up, spec.w13), weights(e.down, spec.w2)

    want = quant_moe(spec, [matrices(e) for e in layer.experts], *tokens)
    assert_within(reference.quant_moe(spec, layer.experts, *tokens), want)
    assert_within(got, want)


def check_linear(x: np.ndarray, m: QuantizedMatrix, p: Projection, got: np.ndarray) -> None:
    """The same for QuantLinear: x [T, K], got [T, N]."""
    want = quant_linear(exactly(x), weights(m, p), p.activation_format)
    assert_within(reference.linear(x, m, p.activation_format), want)
    assert_within(got, want)
