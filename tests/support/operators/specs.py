"""Attributes of nodes for tests: defaults for what a test does not say. The product has none."""

from __future__ import annotations

from typing import Any

from quantmoe.custom_ops.op import (
    AttentionSpec,
    ConvSpec,
    DeltaSpec,
    LinearSpec,
    MoESpec,
    Projection,
    RoutingSpec,
    SpaceSpec,
)


def projection(format: str, group_size: int, scale_type: str, activation_format: str, **others: Any) -> Projection:
    unsaid = {"block_n": 1, "layout": "cpu_panel", "layout_version": 1}
    unsaid |= dict.fromkeys(("zero_points", "bias", "perm", "pre_scale"), 0)
    return Projection(
        format=format,
        group_size=group_size,
        scale_type=scale_type,
        activation_format=activation_format,
        **(unsaid | others),
    )


def moe_spec(
    num_experts: int, hidden_size: int, intermediate_size: int, w13: Projection, w2: Projection, **others: Any
) -> MoESpec:
    unsaid = {"activation": "silu", "gated": 1, "expert_offset": 0, "swiglu_alpha": 0.0, "swiglu_limit": 0.0}
    unsaid |= {"apply_router_weight_on_input": 0}
    return MoESpec(
        num_experts=num_experts,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        w13=w13,
        w2=w2,
        **(unsaid | others),
    )


def linear_spec(in_features: int, out_features: int, w: Projection) -> LinearSpec:
    return LinearSpec(in_features=in_features, out_features=out_features, w=w)


def routing_spec(
    num_experts: int,
    top_k: int,
    method: str,
    renormalize: int = 0,
    n_group: int = 1,
    topk_group: int = 1,
    routed_scaling_factor: float = 1.0,
    shared_experts: int = 0,
    shared_gate: int = 0,
) -> RoutingSpec:
    return RoutingSpec(
        num_experts=num_experts,
        top_k=top_k,
        method=method,
        renormalize=renormalize,
        n_group=n_group,
        topk_group=topk_group,
        routed_scaling_factor=routed_scaling_factor,
        shared_experts=shared_experts,
        shared_gate=shared_gate,
    )


def attention_spec(num_heads: int, kv_num_heads: int, head_size: int, **others: Any) -> AttentionSpec:
    unsaid: dict[str, Any] = {"v_head_size": head_size, "scale": head_size**-0.5, "qk_norm": "none", "softcap": 0.0}
    unsaid |= dict.fromkeys(("sliding_window", "chunk_size", "rotary_size", "rotary_interleaved"), 0)
    unsaid |= {"norm_epsilon": 1e-6}
    return AttentionSpec(num_heads=num_heads, kv_num_heads=kv_num_heads, head_size=head_size, **(unsaid | others))


def conv_spec(channels: int, width: int = 4, activation: str = "silu", state_window: int = 1) -> ConvSpec:
    return ConvSpec(channels=channels, width=width, activation=activation, state_window=state_window)


def delta_spec(num_k_heads: int, num_v_heads: int, k_head_size: int, **others: Any) -> DeltaSpec:
    unsaid: dict[str, Any] = {"v_head_size": k_head_size, "scale": k_head_size**-0.5, "l2_epsilon": 1e-6}
    unsaid |= {"decay_per_key": 0, "beta_scale": 1.0, "gate": "silu", "norm_epsilon": 1e-6}
    return DeltaSpec(num_k_heads=num_k_heads, num_v_heads=num_v_heads, k_head_size=k_head_size, **(unsaid | others))


def space_spec(num_groups: int, num_heads: int, state_size: int, head_size: int, **others: Any) -> SpaceSpec:
    unsaid: dict[str, Any] = {"norm_size": num_heads // num_groups * head_size, "norm_epsilon": 1e-5, "state_window": 1}
    unsaid |= dict.fromkeys(("dt_size", "dt_offset", "z_size", "z_offset"), 0)
    sizes = {"num_groups": num_groups, "num_heads": num_heads, "state_size": state_size, "head_size": head_size}
    return SpaceSpec(**(sizes | unsaid | others))


def state_shapes(spec: ConvSpec | DeltaSpec | SpaceSpec, batch: int, tokens: int) -> list[tuple[int, ...]]:
    """Of an operator's inputs, then outputs."""
    x = (batch, tokens)
    states = (*[spec.state_window] * (spec.state_window > 1), batch)
    if isinstance(spec, ConvSpec):
        state: tuple[int, ...] = (*states, spec.channels, spec.width - 1)
        weights = [(spec.channels, spec.width), (spec.channels,)]
        return [(*x, spec.channels), *weights, state, (batch, 3), (*x, spec.channels), state]
    if isinstance(spec, SpaceSpec):
        heads, width = spec.num_heads, spec.num_heads * spec.head_size
        state, y = (*states, heads, spec.state_size, spec.head_size), (*x, width)
        xbc = (*x, width + 2 * spec.num_groups * spec.state_size)
        return [xbc, (*x, heads), y, *[(heads,)] * 3, (width,), state, (batch, 3), y, state]
    heads, k, v = spec.num_v_heads, spec.k_head_size, spec.v_head_size
    decays, state, y = heads * (k if spec.decay_per_key else 1), (*states, heads, k, v), (*x, heads * v)
    qkv = (*x, 2 * spec.num_k_heads * k + heads * v)
    return [qkv, (*x, decays), (*x, heads), y, (heads,), (decays,), (v,), state, (batch, 3), y, state]
