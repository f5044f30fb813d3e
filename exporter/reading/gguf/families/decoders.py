"""Families with attention in every layer, and no state beside keys and values."""

from __future__ import annotations

from quantmoe.exporter.reading.gguf.families.base import (
    DECODER,
    QK_NORM,
    Config,
    GgufFamily,
    Join,
    common,
    experts,
    mlp,
    sparse,
    undo_pairs,
    with_partial_rope,
)
from quantmoe.exporter.reading.gguf.metadata import Metadata

_MIXTRAL = ("w1", "w3", "w2")
_SHARED = mlp("mlp.shared_experts", "_shexp")
_BIAS = {"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"}


def _gpt_oss(m: Metadata) -> Config:
    config = common(m, "gpt_oss")
    if config["rope_parameters"]["rope_type"] == "yarn":
        config["rope_parameters"]["truncate"] = False  # as OpenAI's own code
    return config | {
        "num_local_experts": m.integer("expert_count"),
        "intermediate_size": m.integer("expert_feed_forward_length"),
        "sliding_window": m.integer("attention.sliding_window"),
        "attention_bias": True,
    }


def _mixtral(m: Metadata) -> Config:
    return common(m, "mixtral") | {
        "num_local_experts": m.integer("expert_count"),
        "intermediate_size": m.integer("feed_forward_length"),
        "sliding_window": None,
    }


def _minimax_m2(m: Metadata) -> Config:
    return with_partial_rope(m, common(m, "minimax_m2")) | {
        "num_local_experts": m.integer("expert_count"),
        "intermediate_size": m.integer("expert_feed_forward_length"),
    }


def _glm4_moe(m: Metadata) -> Config:
    return with_partial_rope(m, common(m, "glm4_moe") | sparse(m)) | {
        "attention_bias": m.has("attn_q.bias"),
        "use_qk_norm": m.has("attn_q_norm"),
    }


def granite(m: Metadata, kind: str) -> Config:
    """Return a configuration with Granite's factors."""
    config = common(m, kind) | {
        "num_local_experts": m.integer("expert_count"),
        "intermediate_size": m.integer("feed_forward_length"),
        "attention_bias": m.has("attn_q.bias"),
        "embedding_multiplier": m.number("embedding_scale", 1.0),
        "residual_multiplier": m.number("residual_scale", 1.0),
        "logits_scaling": m.number("logit_scale", 1.0),
        "attention_multiplier": m.number("attention.scale", 1.0),
    }
    if shared := m.integer("expert_shared_feed_forward_length", 0):
        config["shared_intermediate_size"] = shared
    return config


def _granite_moe(m: Metadata) -> Config:
    return granite(m, "granitemoeshared" if m.has("ffn_up_shexp") else "granitemoe")


GRANITE = DECODER | experts("block_sparse_moe", "router.layer") | {"ffn_down_shexp": "shared_mlp.output_linear"}
GRANITE_JOINED = {"shared_mlp.input_linear": Join(("ffn_gate_shexp", "ffn_up_shexp"))}
_BASE = DECODER | experts("mlp")
FAMILIES = {
    "gpt-oss": GgufFamily(
        _BASE
        | {
            "ffn_gate_inp": "mlp.router",
            "post_attention_norm": "post_attention_layernorm",
            "attn_sinks.weight": "self_attn.sinks",
        },
        _gpt_oss,
    ),
    "llama": GgufFamily(DECODER | experts("block_sparse_moe", projections=_MIXTRAL), _mixtral, undo_pairs),
    "glm4moe": GgufFamily(
        _BASE | QK_NORM | _BIAS | mlp("mlp") | _SHARED | {"post_attention_norm": "post_attention_layernorm"},
        _glm4_moe,
    ),
    "minimax-m2": GgufFamily(
        DECODER
        | QK_NORM
        | experts("block_sparse_moe", projections=_MIXTRAL)
        | {"exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias"},
        _minimax_m2,
    ),
    "granitemoe": GgufFamily(GRANITE, _granite_moe, undo_pairs, GRANITE_JOINED),
}
