"""Qwen's families."""

from __future__ import annotations

import numpy as np

from quantmoe.exporter.reading.gguf.changed_tensors import ChangedTensors
from quantmoe.exporter.reading.gguf.families.base import (
    DECODER,
    QK_NORM,
    Config,
    GgufFamily,
    Join,
    a_log,
    common,
    experts,
    less_one,
    mlp,
    with_partial_rope,
)
from quantmoe.exporter.reading.gguf.metadata import Metadata

_SHARED = {"ffn_gate_inp_shexp": "mlp.shared_expert_gate"} | mlp("mlp.shared_expert", "_shexp")
_LINEAR = {
    "post_attention_norm": "post_attention_layernorm",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "ssm_a.None": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
}


def _qwen(m: Metadata, kind: str) -> Config:
    return common(m, kind) | {
        "num_experts": m.integer("expert_count"),
        "moe_intermediate_size": m.integer("expert_feed_forward_length"),
        "intermediate_size": m.integer("feed_forward_length", m.integer("expert_feed_forward_length")),
    }


def _qwen2_moe(m: Metadata) -> Config:
    return _qwen(m, "qwen2_moe") | {
        "shared_expert_intermediate_size": m.integer("expert_shared_feed_forward_length"),
        "norm_topk_prob": False,
    }


def _qwen3_moe(m: Metadata) -> Config:
    return _qwen(m, "qwen3_moe") | {"norm_topk_prob": True}


def _hybrid(m: Metadata, kind: str) -> Config:
    values = m.integer("ssm.time_step_rank")
    linear = m.layer_has("ssm_conv1d")
    return with_partial_rope(m, _qwen(m, kind)) | {
        "norm_topk_prob": True,
        "shared_expert_intermediate_size": m.integer("expert_shared_feed_forward_length"),
        "linear_conv_kernel_dim": m.integer("ssm.conv_kernel"),
        "linear_key_head_dim": m.integer("ssm.state_size"),
        "linear_num_key_heads": m.integer("ssm.group_count"),
        "linear_num_value_heads": values,
        "linear_value_head_dim": m.integer("ssm.inner_size") // values,
        "layer_types": ["linear_attention" if found else "full_attention" for found in linear],
    }


def _qwen3_next(m: Metadata) -> Config:
    return _hybrid(m, "qwen3_next")


def _qwen35_moe(m: Metadata) -> Config:
    config = _hybrid(m, "qwen3_5_moe_text")
    config["rope_parameters"] |= {
        "mrope_section": [n for n in m.integers("rope.dimension_sections") if n],
        "mrope_interleaved": True,
    }
    return config


def _undo_shared(ckpt: ChangedTensors) -> None:
    for layer in ckpt.layers:
        ckpt.reshape(f"{layer}.mlp.shared_expert_gate.weight", (1, ckpt.config["hidden_size"]))


def _undo_hybrid(ckpt: ChangedTensors) -> None:
    """Undo what both hybrid families have: 1 added to norms, and decays as -exp(A_log)."""
    _undo_shared(ckpt)
    config = ckpt.config
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    channels = 2 * keys + config["linear_num_value_heads"] * config["linear_value_head_dim"]
    ckpt.change("model.norm.weight", less_one)
    for layer in ckpt.layers:
        for name in ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"):
            ckpt.change(f"{layer}.{name}.weight", less_one)
        ckpt.change(f"{layer}.linear_attn.A_log", a_log)
        ckpt.reshape(f"{layer}.linear_attn.conv1d.weight", (channels, 1, config["linear_conv_kernel_dim"]))


def _undo_qwen3_next(ckpt: ChangedTensors) -> None:
    """Undo the order of the rows of queries, keys, values and gates, which transformers has by key heads."""
    _undo_hybrid(ckpt)
    config = ckpt.config
    heads, width = config["linear_num_key_heads"], config["linear_key_head_dim"]
    values = config["linear_num_value_heads"] // heads * config["linear_value_head_dim"]
    sizes, begin, parts = (width, width, values, values), 0, []
    for size in sizes:
        parts.append(begin + np.arange(heads * size).reshape(heads, size))
        begin += heads * size
    rows = np.concatenate(parts, axis=1).reshape(-1)
    for layer in ckpt.layers:
        ckpt.reorder(f"{layer}.linear_attn.in_proj_qkvz", rows)


def _undo_qwen35(ckpt: ChangedTensors) -> None:
    """Undo the order of value heads, which is by their number within a key head."""
    _undo_hybrid(ckpt)
    config = ckpt.config
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    width = config["linear_value_head_dim"]
    heads = np.arange(values).reshape(-1, keys).T.reshape(-1)
    features = (heads[:, None] * width + np.arange(width)).reshape(-1)
    first = 2 * keys * config["linear_key_head_dim"]
    joined = np.concatenate([np.arange(first), first + features])
    for layer in ckpt.layers:
        linear = f"{layer}.linear_attn"
        for name, order in (("A_log", heads), ("dt_bias", heads), ("conv1d.weight", joined)):
            ckpt.order(f"{linear}.{name}", order)
        for name, order in (
            ("in_proj_a", heads),
            ("in_proj_b", heads),
            ("in_proj_z", features),
            ("in_proj_qkv", joined),
        ):
            ckpt.reorder(f"{linear}.{name}", order)
        ckpt.reorder_columns(f"{linear}.out_proj", features)


_BASE = DECODER | experts("mlp")
FAMILIES = {
    "qwen2moe": GgufFamily(names=_BASE | _SHARED, config=_qwen2_moe, undo=_undo_shared, models="Qwen1.5-MoE"),
    "qwen3moe": GgufFamily(names=_BASE | QK_NORM, config=_qwen3_moe, models="Qwen3-30B-A3B"),
    # text has one position on all axes, as Qwen3-MoE
    "qwen3vlmoe": GgufFamily(names=_BASE | QK_NORM, config=_qwen3_moe, models="Qwen3-VL (text)"),
    "qwen3next": GgufFamily(
        names=_BASE | _SHARED | QK_NORM | _LINEAR | {"ssm_ba": "linear_attn.in_proj_ba"},
        config=_qwen3_next,
        undo=_undo_qwen3_next,
        joined={"linear_attn.in_proj_qkvz": Join(("attn_qkv", "attn_gate"))},
        models="Qwen3-Next",
    ),
    "qwen35moe": GgufFamily(
        names=_BASE
        | _SHARED
        | QK_NORM
        | _LINEAR
        | {
            "attn_qkv": "linear_attn.in_proj_qkv",
            "attn_gate": "linear_attn.in_proj_z",
            "ssm_alpha": "linear_attn.in_proj_a",
            "ssm_beta": "linear_attn.in_proj_b",
        },
        config=_qwen35_moe,
        undo=_undo_qwen35,
        models="Qwen3.5, Qwen3.6",
    ),
}
