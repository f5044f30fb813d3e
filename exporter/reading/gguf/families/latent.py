"""Families with latent attention."""

from __future__ import annotations

import numpy as np

from quantmoe.exporter.reading.gguf.families.base import (
    DECODER,
    Config,
    GgufFamily,
    Join,
    common,
    experts,
    gating,
    mlp,
    sparse,
)
from quantmoe.exporter.reading.gguf.metadata import Metadata

NAMES = (
    DECODER
    | experts("mlp")
    | mlp("mlp")
    | mlp("mlp.shared_experts", "_shexp")
    | {
        "attn_q_a": "self_attn.q_a_proj",
        "attn_q_a_norm": "self_attn.q_a_layernorm",
        "attn_q_b": "self_attn.q_b_proj",
        "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
        "attn_kv_a_norm": "self_attn.kv_a_layernorm",
        "attn_kv_b": "self_attn.kv_b_proj",
        "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    }
)


def _keys_and_values(config: Config, parts: list[np.ndarray]) -> np.ndarray:
    """Make kv_b_proj [heads (features of a key and a value), latent].

    Args:
        parts: keys [heads, latent, features], values [heads, features, latent].
    """
    keys, values = parts
    return np.concatenate([keys.swapaxes(1, 2), values], axis=1).reshape(-1, values.shape[-1])


JOINED = {"self_attn.kv_b_proj": Join(("attn_k_b", "attn_v_b"), _keys_and_values)}


def latent(m: Metadata, kind: str) -> Config:
    """Return a configuration. Files without key_length_mla have the sizes of keys and values of heads."""
    rotary = m.integer("rope.dimension_count")
    keys = m.integer("attention.key_length_mla", 0) or m.integer("attention.key_length")
    values = m.integer("attention.value_length_mla", 0) or m.integer("attention.value_length")
    config = common(m, kind) | sparse(m)
    del config["head_dim"]
    if config["rope_parameters"]["rope_type"] == "yarn":
        factor = round(m.number("rope.scaling.yarn_log_multiplier", 0.1) * 10, 6)
        config["rope_parameters"] |= {"mscale": factor, "mscale_all_dim": factor}
    return config | {
        "num_key_value_heads": config["num_attention_heads"],
        "q_lora_rank": m.integer("attention.q_lora_rank", 0) or None,
        "kv_lora_rank": m.integer("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotary,
        "qk_nope_head_dim": keys - rotary,
        "v_head_dim": values,
    }


def _deepseek2(m: Metadata) -> Config:
    if gating(m) == "sigmoid":
        return latent(m, "deepseek_v3")
    config = latent(m, "deepseek_v2")
    return config | {"topk_method": "group_limited_greedy" if config["n_group"] > 1 else "greedy"}


def _mistral4(m: Metadata) -> Config:
    config = latent(m, "mistral4")
    config["rope_parameters"]["llama_4_scaling_beta"] = m.number("attention.temperature_scale", 0.1)
    return config


FAMILIES = {
    "deepseek2": GgufFamily(
        names=NAMES, config=_deepseek2, joined=JOINED, models="DeepSeek-V2, V3, R1, Kimi-K2, GLM-4.7-Flash"
    ),
    "mistral4": GgufFamily(names=NAMES, config=_mistral4, joined=JOINED, models="Mistral-Small-4 (text)"),
}
