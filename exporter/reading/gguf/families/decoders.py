"""Families with attention in every layer, and no state beside keys and values."""

from __future__ import annotations

from quantmoe.exporter.reading.gguf.changed_tensors import ChangedTensors
from quantmoe.exporter.reading.gguf.families.base import (
    DECODER,
    QK_NORM,
    Config,
    GgufFamily,
    Join,
    common,
    dense_layers,
    experts,
    kinds,
    mlp,
    sliding,
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


def _granite_swa(m: Metadata) -> Config:
    config = granite(m, "granitemoe_swa") | sliding(m)
    theta, rotates = config["rope_parameters"]["rope_theta"], [1] * m.layers
    if m.get("attention.rope_pattern") is not None:
        rotates = m.by_layer("attention.rope_pattern")
    return config | {"layer_rope_theta": [theta if rotary else 0 for rotary in rotates]}


def _olmoe(m: Metadata) -> Config:
    return common(m, "olmoe") | {
        "num_experts": m.integer("expert_count"),
        "intermediate_size": m.integer("feed_forward_length"),
        "clip_qkv": m.number("attention.clamp_kqv") if m.get("attention.clamp_kqv") else None,
        "norm_topk_prob": False,
    }


def _phimoe(m: Metadata) -> Config:
    """Return a configuration. The factors of Phi-3.5-MoE's scores (mscale) are in no key."""
    config = common(m, "phimoe")
    if "rope_factors_long.weight" in m.shapes:
        long, short = (m.vector(f"rope_factors_{kind}.weight").tolist() for kind in ("long", "short"))
        config["rope_parameters"] |= {
            "rope_type": "longrope",
            "long_factor": long,
            "short_factor": short,
            "long_mscale": 1.243163121016122,
            "short_mscale": 1.243163121016122,
            "original_max_position_embeddings": m.integer("rope.scaling.original_context_length"),
        }
    m.get("rope.scaling.attn_factor")  # llama.cpp computes it from the lengths, Phi-3.5-MoE has its own
    return config | {
        "num_local_experts": m.integer("expert_count"),
        "intermediate_size": m.integer("feed_forward_length"),
        "attention_bias": m.has("attn_q.bias"),
        "lm_head_bias": "output.bias" in m.shapes,
        "sliding_window": m.integer("attention.sliding_window", 0) or None,
    }


def _ernie(m: Metadata) -> Config:
    return common(m, "ernie4_5_moe") | {
        "moe_num_experts": m.integer("expert_count"),
        "moe_k": m.integer("expert_used_count"),
        "moe_num_shared_experts": m.integer("expert_shared_count", 0),
        "moe_intermediate_size": m.integer("expert_feed_forward_length"),
        "intermediate_size": m.integer("feed_forward_length"),
        "moe_layer_start_index": dense_layers(m),
        "moe_layer_end_index": m.layers - 1,
        "moe_layer_interval": m.integer("interleave_moe_layer_step", 1),
        "use_bias": m.has("attn_q.bias"),
    }


def _undo_ernie(ckpt: ChangedTensors) -> None:
    for layer in ckpt.layers:
        ckpt.reshape(f"{layer}.mlp.moe_statics.e_score_correction_bias", (1, ckpt.config["moe_num_experts"]))


def _dots1(m: Metadata) -> Config:
    return common(m, "dots1") | sparse(m) | {"attention_bias": m.has("attn_q.bias")}


def _hy_v3(m: Metadata) -> Config:
    width = m.integer("expert_feed_forward_length")
    return common(m, "hy_v3") | {
        "num_experts": m.integer("expert_count"),
        "moe_intermediate_size": width,
        "intermediate_size": m.integer("feed_forward_length"),
        "num_shared_experts": m.integer("expert_shared_feed_forward_length", width) // width,
        "router_scaling_factor": m.number("expert_weights_scale", 1.0),
        "mlp_layer_types": kinds(m, "ffn_gate_inp", "sparse", "dense"),
    }


def _hunyuan(m: Metadata) -> Config:
    return common(m, "hunyuan_v1_moe") | {
        "num_experts": m.integer("expert_count"),
        "moe_topk": m.integer("expert_used_count"),
        "intermediate_size": m.integer("expert_feed_forward_length"),
    }


def _sarvam(m: Metadata) -> Config:
    """Return a configuration of Sarvam's model, whose computation is Ling 2.0's."""
    return with_partial_rope(m, common(m, "sarvam_moe") | sparse(m)) | {"use_qk_norm": m.has("attn_q_norm")}


def _exaone_moe(m: Metadata) -> Config:
    found = sparse(m)
    own = {
        "num_experts": found["n_routed_experts"],
        "num_shared_experts": found["n_shared_experts"],
        "mlp_layer_types": kinds(m, "ffn_gate_inp", "sparse", "dense"),
    }
    return common(m, "exaone_moe") | found | sliding(m, usual=4) | own


def _cohere2_moe(m: Metadata) -> Config:
    width = m.integer("expert_feed_forward_length")
    own = {
        "layer_norm_eps": m.number("attention.layer_norm_epsilon", m.get("attention.layer_norm_rms_epsilon")),
        "logit_scale": m.number("logit_scale"),
        "num_experts": m.integer("expert_count"),
        "intermediate_size": width,
        "prefix_dense_intermediate_size": m.integer("feed_forward_length", width),
        "num_shared_experts": m.integer("expert_shared_count", 0),
        "expert_selection_fn": "softmax" if m.get("expert_gating_func") == 1 else "sigmoid",
        "norm_topk_prob": m.flag("expert_weights_norm"),
        "mlp_layer_types": kinds(m, "ffn_gate_inp", "sparse", "dense"),
    }
    return common(m, "cohere2_moe") | sliding(m, usual=4) | own


def _afmoe(m: Metadata) -> Config:
    own = {
        "num_experts": m.integer("expert_count"),
        "num_shared_experts": m.integer("expert_shared_count", 0),
        "moe_intermediate_size": m.integer("expert_feed_forward_length"),
        "intermediate_size": m.integer("feed_forward_length"),
        "num_dense_layers": dense_layers(m),
        "route_scale": m.number("expert_weights_scale", 1.0),
        "mup_enabled": True,
    }
    return common(m, "afmoe") | sliding(m, usual=4) | own


def _dbrx(m: Metadata) -> Config:
    found = common(m, "dbrx")
    kept = {key: found[key] for key in found if key.endswith("_token_id") or key in ("model_type", "vocab_size")}
    return kept | {
        "tie_word_embeddings": found["tie_word_embeddings"],
        "d_model": found["hidden_size"],
        "n_heads": found["num_attention_heads"],
        "n_layers": found["num_hidden_layers"],
        "num_hidden_layers": found["num_hidden_layers"],
        "max_seq_len": found["max_position_embeddings"],
        "rope_parameters": found["rope_parameters"],
        "attn_config": {
            "kv_n_heads": found["num_key_value_heads"],
            "clip_qkv": m.number("attention.clamp_kqv"),
            "rope_theta": found["rope_parameters"]["rope_theta"],
        },
        "ffn_config": {
            "hidden_size": found["hidden_size"],
            "ffn_hidden_size": m.integer("feed_forward_length"),
            "moe_num_experts": m.integer("expert_count"),
            "moe_top_k": m.integer("expert_used_count"),
        },
    }


GRANITE = DECODER | experts("block_sparse_moe", "router.layer") | {"ffn_down_shexp": "shared_mlp.output_linear"}
GRANITE_JOINED = {"shared_mlp.input_linear": Join(("ffn_gate_shexp", "ffn_up_shexp"))}
_BASE = DECODER | experts("mlp")
FAMILIES = {
    "gpt-oss": GgufFamily(
        names=_BASE
        | {
            "ffn_gate_inp": "mlp.router",
            "post_attention_norm": "post_attention_layernorm",
            "attn_sinks.weight": "self_attn.sinks",
        },
        config=_gpt_oss,
        models="gpt-oss-20b, 120b",
    ),
    "llama": GgufFamily(
        names=DECODER | experts("block_sparse_moe", projections=_MIXTRAL),
        config=_mixtral,
        undo=undo_pairs,
        models="Mixtral",
    ),
    "glm4moe": GgufFamily(
        names=_BASE | QK_NORM | _BIAS | mlp("mlp") | _SHARED | {"post_attention_norm": "post_attention_layernorm"},
        config=_glm4_moe,
        models="GLM-4.5, GLM-4.6, GLM-4.5V (text), Solar-Open",
    ),
    "minimax-m2": GgufFamily(
        names=DECODER
        | QK_NORM
        | experts("block_sparse_moe", projections=_MIXTRAL)
        | {"exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias"},
        config=_minimax_m2,
        models="MiniMax-M2",
    ),
    "olmoe": GgufFamily(names=_BASE | QK_NORM, config=_olmoe, models="OLMoE"),
    "phimoe": GgufFamily(
        names=DECODER
        | experts("block_sparse_moe", projections=_MIXTRAL)
        | {"rope_factors_long": "", "rope_factors_short": ""},
        config=_phimoe,
        models="Phi-3.5-MoE",
    ),
    "ernie4_5-moe": GgufFamily(
        names=_BASE | mlp("mlp") | _SHARED | {"exp_probs_b.bias": "mlp.moe_statics.e_score_correction_bias"},
        config=_ernie,
        undo=_undo_ernie,
        models="ERNIE 4.5",
    ),
    "dots1": GgufFamily(names=_BASE | QK_NORM | _BIAS | mlp("mlp") | _SHARED, config=_dots1, models="dots.llm1"),
    "hy_v3": GgufFamily(
        names=DECODER
        | QK_NORM
        | experts("mlp", "router.gate")
        | mlp("mlp")
        | mlp("mlp.shared_mlp", "_shexp")
        | {"exp_probs_b.bias": "mlp.expert_bias"},
        config=_hy_v3,
        models="Hunyuan 3",
    ),
    "hunyuan-moe": GgufFamily(
        names=DECODER
        | experts("mlp", "gate.wg")
        | mlp("mlp.shared_mlp", "_shexp")
        | {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"},
        config=_hunyuan,
        models="Hunyuan-A13B",
    ),
    "bailingmoe2": GgufFamily(
        names=_BASE | QK_NORM | _BIAS | mlp("mlp") | _SHARED,
        config=_sarvam,
        models="Sarvam-30B; Ling 2.0, which runs as Sarvam's model",
    ),
    "exaone-moe": GgufFamily(
        names=_BASE | QK_NORM | mlp("mlp") | _SHARED | {"exp_probs_b.bias": "mlp.e_score_correction_bias"},
        config=_exaone_moe,
        models="K-EXAONE",
    ),
    "cohere2moe": GgufFamily(names=_BASE | mlp("mlp") | _SHARED, config=_cohere2_moe, models="North-Mini-Code"),
    "afmoe": GgufFamily(
        names=DECODER
        | QK_NORM
        | experts("mlp", "router.gate")
        | mlp("mlp")
        | _SHARED
        | {
            "attn_gate": "self_attn.gate_proj",
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_mlp_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
            "exp_probs_b.bias": "mlp.expert_bias",
        },
        config=_afmoe,
        models="Trinity",
    ),
    "dbrx": GgufFamily(
        names=experts("ffn", "router.layer")
        | {
            "token_embd": "transformer.wte",
            "output_norm": "transformer.norm_f",
            "output": "lm_head",
            "attn_norm": "norm_attn_norm.norm_1",
            "attn_output_norm": "norm_attn_norm.norm_2",
            "attn_qkv": "norm_attn_norm.attn.Wqkv",
            "attn_output": "norm_attn_norm.attn.out_proj",
        },
        config=_dbrx,
        layer="transformer.blocks.{}.",
        models="DBRX",
    ),
    "granite_swa": GgufFamily(
        names=DECODER
        | experts("block_sparse_moe", "router")
        | {
            "attn_sinks.weight": "self_attn.sinks",
            "ffn_up_shexp": "shared_mlp.input_linear",
            "ffn_down_shexp": "shared_mlp.output_linear",
        },
        config=_granite_swa,
        undo=undo_pairs,
        models="Granite with sliding windows",
    ),
    "granitemoe": GgufFamily(
        names=GRANITE, config=_granite_moe, undo=undo_pairs, joined=GRANITE_JOINED, models="Granite 3 MoE"
    ),
}
