"""Gemma 4's family."""

from __future__ import annotations

import numpy as np

from quantmoe.exporter.reading.gguf.families.base import DECODER, QK_NORM, Config, GgufFamily, common, mlp, rope
from quantmoe.exporter.reading.gguf.metadata import Metadata


def _gemma4(m: Metadata) -> Config:
    sliding = m.integers("attention.sliding_window_pattern")[: m.layers]
    heads = m.by_layer("attention.head_count_kv")
    config = common(m, "gemma4_text", "hidden_activation", "gelu_pytorch_tanh")
    full = {"head_dim": config["head_dim"]}
    if own := [count for count, slides in zip(heads, sliding, strict=False) if not slides]:
        full["num_key_value_heads"] = own[0]
    window = next((count for count, slides in zip(heads, sliding, strict=False) if slides), heads[0])
    rotating = float(np.mean(m.vector("rope_freqs.weight") == 1))  # other pairs of a head have a factor of 1e30
    return config | {
        "layer_types": ["sliding_attention" if slides else "full_attention" for slides in sliding],
        "head_dim": m.integer("attention.key_length_swa"),
        "num_key_value_heads": window,
        "per_layer_config": {str(i): full for i, slides in enumerate(sliding) if not slides},
        "rope_parameters": {
            "full_attention": rope(m) | {"rope_type": "proportional", "partial_rotary_factor": rotating},
            "sliding_attention": rope(m, "rope.freq_base_swa"),
        },
        "sliding_window": m.integer("attention.sliding_window"),
        "intermediate_size": max(m.by_layer("feed_forward_length")),
        "final_logit_softcapping": m.number("final_logit_softcapping") if m.get("final_logit_softcapping") else None,
        "attention_k_eq_v": not all(m.layer_has("attn_v")),
        "enable_moe_block": True,
        "num_experts": m.integer("expert_count"),
        "top_k_experts": m.integer("expert_used_count"),
        "moe_intermediate_size": m.integer("expert_feed_forward_length"),
        "hidden_size_per_layer_input": m.integer("embedding_length_per_layer_input", 0),
        "num_kv_shared_layers": m.integer("attention.shared_kv_layers", 0),
    }


FAMILIES = {
    "gemma4": GgufFamily(
        names=DECODER
        | QK_NORM
        | mlp("mlp")
        | mlp("experts.{}", "_exps")
        | {
            "ffn_norm": "pre_feedforward_layernorm",
            "post_attention_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
            "post_ffw_norm_1": "post_feedforward_layernorm_1",
            "post_ffw_norm_2": "post_feedforward_layernorm_2",
            "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
            "layer_output_scale.weight": "layer_scalar",
            "ffn_gate_inp": "router.proj",
            "ffn_gate_inp.scale.None": "router.scale",
            "ffn_down_exps.scale.None": "router.per_expert_scale",
            "rope_freqs": "",
        },
        config=_gemma4,
        models="Gemma-4-26B-A4B (text)",
    ),
}
