"""Families whose layers have unlike attention: windows or chunks, heads, and rotary embeddings."""

from __future__ import annotations

import numpy as np

from quantmoe.exporter.reading.checkpoint import CheckpointError
from quantmoe.exporter.reading.gguf.changed_tensors import ChangedTensors
from quantmoe.exporter.reading.gguf.families.base import (
    DECODER,
    QK_NORM,
    Config,
    GgufFamily,
    common,
    experts,
    kinds,
    less_one,
    mlp,
    rope,
    sliding,
    sparse,
)
from quantmoe.exporter.reading.gguf.metadata import Metadata

#: low_freq_factor, high_freq_factor and original_max_position_embeddings of published models
_LLAMA3 = ((1.0, 1.0, 8192), (1.0, 4.0, 8192), (1.0, 32.0, 131072))


def _llama3(m: Metadata, config: Config, width: int) -> None:
    """Make ``rope_parameters`` the ones that give the factors of the file.

    Args:
        config: ``rope_parameters``.
        width: features of a head that rotate.

    Raises:
        CheckpointError: no published model has these factors.
    """
    found = m.vector("rope_freqs.weight")[: width // 2]
    factor = float(found.max())
    lengths = 2 * np.pi * config["rope_theta"] ** (np.arange(0, width, 2) / width)
    for low, high, original in _LLAMA3:
        between = (original / lengths - low) / (high - low) if high > low else original / lengths >= low
        want = 1 / ((1 - np.clip(between, 0, 1)) / factor + np.clip(between, 0, 1))
        if np.allclose(found, want, rtol=1e-4, atol=0):
            own = {"low_freq_factor": low, "high_freq_factor": high, "original_max_position_embeddings": original}
            config |= {"rope_type": "llama3", "factor": factor} | own
            return
    raise CheckpointError(
        f"{m.path}: rope_freqs.weight is {found.round(4).tolist()}, expected the factors of Llama 3 with "
        f"(low_freq_factor, high_freq_factor, original_max_position_embeddings) one of {list(_LLAMA3)}"
    )


def _by_kind(m: Metadata, full: float, windows: float = 1.0) -> Config:
    """Return ``rope_parameters`` of layers with all tokens, which may be scaled, and with a window.

    Args:
        full: the part of a head that rotates in layers with all tokens.
    """
    swa = {"rope_type": "default", "rope_theta": rope(m, "rope.freq_base_swa")["rope_theta"]}
    return {
        "full_attention": rope(m) | {"partial_rotary_factor": full},
        "sliding_attention": swa | {"partial_rotary_factor": windows},
    }


def _llama4(m: Metadata) -> Config:
    """Return a configuration. Chunks, layers that do not rotate and temperatures are in no key."""
    config = common(m, "llama4_text")
    if "rope_freqs.weight" in m.shapes:
        _llama3(m, config["rope_parameters"], config["head_dim"])
    return config | {
        "num_local_experts": m.integer("expert_count"),
        "intermediate_size": m.integer("expert_feed_forward_length"),
        "intermediate_size_mlp": m.integer("feed_forward_length"),
        "moe_layers": [i for i, has in enumerate(m.layer_has("ffn_gate_inp")) if has],
        "use_qk_norm": m.integer("expert_count") != 128,  # Maverick has none
    }


def _mimo2(m: Metadata) -> Config:
    """Return a configuration. MiMo's window counts the tokens before a token, transformers' the token itself, too."""
    config = common(m, "mimo_v2_flash") | sparse(m) | sliding(m)
    rotating = m.integer("rope.dimension_count") / config["head_dim"] + 1e-6  # transformers rounds down
    heads = zip(m.by_layer("attention.head_count_kv"), config["layer_types"], strict=True)
    return config | {
        "num_key_value_heads": next((n for n, kind in heads if kind == "full_attention"), 0),
        "v_head_dim": m.integer("attention.value_length"),
        "sliding_window": config["sliding_window"] + 1,
        "mlp_layer_types": kinds(m, "ffn_gate_inp", "sparse", "dense"),
        "norm_topk_prob": True,
        "attention_value_scale": m.number("attention.value_scale", 1.0),
        "rope_parameters": _by_kind(m, rotating, rotating),
    }


def _step35(m: Metadata) -> Config:
    config = common(m, "step3p5") | sliding(m)
    rotary = _by_kind(m, 0.5)
    if "rope_freqs.weight" in m.shapes:
        _llama3(m, rotary["full_attention"], config["head_dim"] // 2)
    heads = dict(zip(config["layer_types"], m.by_layer("attention.head_count"), strict=True))
    return config | {
        "pad_token_id": config["pad_token_id"] or 0,
        "rope_parameters": rotary,
        "num_attention_heads": heads.get("full_attention", config["num_attention_heads"]),
        "num_sliding_attention_heads": heads.get("sliding_attention"),
        "mlp_layer_types": kinds(m, "ffn_gate_inp", "sparse", "dense"),
        "n_routed_experts": m.integer("expert_count"),
        "moe_intermediate_size": m.integer("expert_feed_forward_length"),
        "intermediate_size": m.integer("feed_forward_length"),
        "share_expert_dim": m.integer("expert_shared_feed_forward_length"),
        "moe_router_scaling_factor": m.number("expert_weights_scale", 1.0),
        "swiglu_limits": m.numbers("swiglu_clamp_exp"),
        "swiglu_limits_shared": m.numbers("swiglu_clamp_shexp"),
    }


def _undo_step35(ckpt: ChangedTensors) -> None:
    ckpt.change("model.norm.weight", less_one)
    for layer in ckpt.layers:
        for name in ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"):
            ckpt.change(f"{layer}.{name}.weight", less_one)


def _laguna(m: Metadata) -> Config:
    """Return a configuration. The first layer of four has no window, and no key says so."""
    config = common(m, "laguna")
    heads, width = m.by_layer("attention.head_count"), config["head_dim"]
    full, windows = m.integer("rope.dimension_count"), m.integer("rope.dimension_count_swa", width)
    window = m.integer("attention.sliding_window", 0)
    return config | {
        "rope_parameters": _by_kind(m, full / width, windows / width),
        "layer_types": ["sliding_attention" if window and i % 4 else "full_attention" for i in range(m.layers)],
        "sliding_window": window or config["max_position_embeddings"],
        "num_attention_heads_per_layer": heads,
        "gating": "per-head" if m.shapes.get("blk.0.attn_gate.weight", (0,))[0] == heads[0] else "per-element",
        "mlp_layer_types": kinds(m, "ffn_gate_inp", "sparse", "dense"),
        "num_experts": m.integer("expert_count"),
        "moe_intermediate_size": m.integer("expert_feed_forward_length"),
        "intermediate_size": m.integer("feed_forward_length"),
        "shared_expert_intermediate_size": m.integer("expert_shared_feed_forward_length"),
        "moe_routed_scaling_factor": m.number("expert_weights_scale", 1.0),
    }


def _mellum(m: Metadata) -> Config:
    return (
        common(m, "mellum")
        | sliding(m)
        | {
            "rope_parameters": _by_kind(m, 1.0),
            "num_experts": m.integer("expert_count"),
            "moe_intermediate_size": m.integer("expert_feed_forward_length"),
            "intermediate_size": m.integer("feed_forward_length"),
            "mlp_layer_types": kinds(m, "ffn_gate_inp", "sparse", "dense"),
            "norm_topk_prob": True,
        }
    )


_SINKS = {"attn_sinks.weight": "self_attn.sinks"}
_GATE = {"attn_gate": "self_attn.g_proj"}
_BASE = DECODER | experts("mlp") | mlp("mlp") | {"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"}
_SHARED = mlp("mlp.shared_experts", "_shexp")
FAMILIES = {
    "llama4": GgufFamily(
        names=DECODER
        | experts("feed_forward", "router")
        | mlp("feed_forward")
        | mlp("feed_forward.shared_expert", "_shexp")
        | {"rope_freqs": ""},
        config=_llama4,
        models="Llama-4 Scout, Maverick (text)",
    ),
    "mimo2": GgufFamily(names=_BASE | _SINKS, config=_mimo2, models="MiMo-V2-Flash"),
    "step35": GgufFamily(
        names=_BASE | _SHARED | QK_NORM | _GATE | {"rope_freqs": ""},
        config=_step35,
        undo=_undo_step35,
        models="Step-3.5, Step-3.7-Flash (text)",
    ),
    "laguna": GgufFamily(
        names=_BASE | mlp("mlp.shared_expert", "_shexp") | QK_NORM | _GATE, config=_laguna, models="Laguna"
    ),
    "mellum": GgufFamily(names=_BASE | QK_NORM, config=_mellum, models="Mellum 2"),
}
