"""The torch operators CausalConv and GatedDelta in the place of transformers' own functions, layer by layer."""

from __future__ import annotations

import json
from typing import Any

import torch
from support.operators.specs import conv_spec, delta_spec
from transformers import KimiLinearConfig, Qwen3NextConfig
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from quantmoe.custom_ops import torch_op  # noqa: F401
from quantmoe.custom_ops.op import ConvSpec, DeltaSpec


def as_nodes(a: torch.Tensor, convs: tuple[ConvSpec, torch.Tensor], spec: DeltaSpec, *tensors: torch.Tensor) -> Any:
    """CausalConv, then GatedDelta, as torch operators from nothing; tensors: a, b, z, a_log, dt_bias, norm."""
    batch, tokens, channels = a.shape
    conv, weight = convs
    rows = torch.tensor([[0, tokens, 0]] * batch, dtype=torch.int32)
    past = torch.zeros(batch, channels, conv.width - 1)
    bias, attributes = torch.empty(0), json.dumps(conv.attributes())
    y, _ = torch.ops.quantmoe.causal_conv(a, weight.squeeze(1), bias, past, rows, attributes)
    state = torch.zeros(batch, spec.num_v_heads, spec.k_head_size, spec.v_head_size)
    return torch.ops.quantmoe.gated_delta(y, *tensors, state, rows, json.dumps(spec.attributes()))[0]


@torch.no_grad()
def test_transformers_qwen3_next() -> None:
    torch.manual_seed(0)
    sizes = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16}
    config = Qwen3NextConfig(hidden_size=32, linear_value_head_dim=24, num_hidden_layers=1, **sizes)
    layer = Qwen3NextGatedDeltaNet(config, 0).eval()
    layer.norm.weight.copy_(1 + torch.randn(24) / 4)
    layer.dt_bias.copy_(torch.randn(4))
    x = torch.randn(2, 70, 32)
    q, k, v, z, b, a = layer.fix_query_key_value_ordering(layer.in_proj_qkvz(x), layer.in_proj_ba(x))
    spec = delta_spec(2, 4, 16, v_head_size=24, norm_epsilon=config.rms_norm_eps)
    flat = torch.cat([t.flatten(2) for t in (q, k, v)], 2)
    tensors = (a, b, z.flatten(2), layer.A_log, layer.dt_bias, layer.norm.weight)
    y = as_nodes(flat, (conv_spec(flat.shape[2]), layer.conv1d.weight), spec, *tensors)
    torch.testing.assert_close(layer.out_proj(y), layer(x), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_transformers_kimi_linear() -> None:
    torch.manual_seed(0)
    config = KimiLinearConfig(hidden_size=32, linear_num_heads=2, linear_head_dim=16, num_hidden_layers=1)
    layer = KimiLinearDeltaAttention(config, 0).eval()
    layer.forget_gate.A_log.copy_(torch.rand_like(layer.forget_gate.A_log) * 2)
    layer.forget_gate.dt_bias.copy_(torch.randn_like(layer.forget_gate.dt_bias))
    layer.o_norm.weight.copy_(1 + torch.randn(16) / 4)
    x = torch.randn(2, 70, 32)
    flat = torch.cat([layer.q_proj(x), layer.k_proj(x), layer.v_proj(x)], 2)
    spec = delta_spec(2, 2, 16, decay_per_key=1, gate="sigmoid", norm_epsilon=config.rms_norm_eps)
    gate = layer.forget_gate
    z = layer.g_b_proj(layer.g_a_proj(x))
    tensors = (gate.f_b_proj(gate.f_a_proj(x)), layer.b_proj(x), z, gate.A_log.flatten(), gate.dt_bias)
    y = as_nodes(flat, (conv_spec(flat.shape[2]), layer.conv1d.weight), spec, *tensors, layer.o_norm.weight)
    torch.testing.assert_close(layer.o_proj(y), layer(x), rtol=1e-4, atol=1e-5)
