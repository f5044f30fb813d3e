"""Families with sparse attention: an indexer selects what a token attends to."""

from __future__ import annotations

from functools import partial

import numpy as np

from quantmoe.exporter.reading.checkpoint import CheckpointError
from quantmoe.exporter.reading.gguf.changed_tensors import ChangedTensors
from quantmoe.exporter.reading.gguf.families.base import (
    DECODER,
    QK_NORM,
    Config,
    GgufFamily,
    Join,
    common,
    experts,
    kinds,
    less_one,
    mlp,
    rope,
    sliding,
    with_partial_rope,
)
from quantmoe.exporter.reading.gguf.families.latent import JOINED, NAMES, latent
from quantmoe.exporter.reading.gguf.metadata import Metadata


def _indexed(m: Metadata, kind: str) -> Config:
    """Return a configuration of latent attention with an indexer."""
    return latent(m, kind) | {
        "index_n_heads": m.integer("attention.indexer.head_count"),
        "index_head_dim": m.integer("attention.indexer.key_length"),
        "index_topk": m.integer("attention.indexer.top_k"),
    }


def _deepseek_v32(m: Metadata) -> Config:
    return _indexed(m, "deepseek_v32")


def _glm_dsa(m: Metadata) -> Config:
    """Return a configuration. A layer without an indexer has the selection of a layer before it."""
    return _indexed(m, "glm_moe_dsa") | {"indexer_types": kinds(m, "indexer.attn_k.weight", "full", "shared")}


def _hy_v4(m: Metadata) -> Config:
    """Return a configuration.

    Raises:
        CheckpointError: layers clamp their experts at different limits.
    """
    limits = set(m.numbers("swiglu_clamp_exp")) or {0.0}
    if len(limits) > 1:
        raise CheckpointError(f"{m.path}: hy_v4.swiglu_clamp_exp is {sorted(limits)}, expected one limit of all layers")
    return _indexed(m, "hy_v4") | {
        "indexer_types": kinds(m, "indexer.attn_k.weight", "full", "shared"),
        "mlp_layer_types": kinds(m, "ffn_gate_inp", "sparse", "dense"),
        "hc_mult": m.integer("hyper_connection.count"),
        "hc_eps": m.number("hyper_connection.epsilon"),
        "hc_magnitude": m.number("hyper_connection.magnitude"),
        "swiglu_limit": limits.pop(),
    }


def _dots3(m: Metadata) -> Config:
    """Return a configuration. Layers with a window have no indexer, and sizes of their own."""
    config = _indexed(m, "dots3_note_text") | sliding(m)
    types = [kind.replace("full", "indexed") for kind in config["layer_types"]]
    heads = dict(zip(types, m.by_layer("attention.head_count"), strict=True))
    own, swa = (heads.get(kind, config["num_attention_heads"]) for kind in ("indexed_attention", "sliding_attention"))
    rotary, keys = config["qk_rope_head_dim"], m.integer("attention.key_length_mla_swa")
    return config | {
        "layer_types": types,
        "num_attention_heads": own,
        "num_key_value_heads": own,
        "head_dim": config["qk_nope_head_dim"] + rotary,
        "swa_num_attention_heads": swa,
        "swa_num_key_value_heads": swa,
        "swa_q_lora_rank": config["q_lora_rank"],
        "swa_kv_lora_rank": m.integer("attention.kv_lora_rank_swa"),
        "swa_head_dim": keys,
        "swa_qk_nope_head_dim": keys - rotary,
        "swa_v_head_dim": m.integer("attention.value_length_mla_swa"),
        "shared_experts_intermediate_size": m.rows("ffn_gate_shexp"),
        "rope_parameters": None,
        "rope_theta": config["rope_parameters"]["rope_theta"],
        "swa_rope_theta": rope(m, "rope.freq_base_swa")["rope_theta"],
    }


def _undo_dots3(ckpt: ChangedTensors) -> None:
    """Undo that norms of latents have the factor of the latents."""
    for layer in ckpt.layers:
        for name in ("q_a_layernorm", "kv_a_layernorm"):
            if (weight := f"{layer}.self_attn.{name}.weight") in ckpt:
                factor = np.float32((ckpt.config["hidden_size"] / ckpt.shape(weight)[0]) ** 0.5)
                ckpt.change(weight, partial(np.multiply, 1 / factor))


def _minimax_m3(m: Metadata) -> Config:
    return with_partial_rope(m, common(m, "minimax_m3_vl_text")) | {
        "num_local_experts": m.integer("expert_count"),
        "intermediate_size": m.integer("expert_feed_forward_length"),
        "dense_intermediate_size": m.integer("feed_forward_length"),
        "shared_intermediate_size": m.rows("ffn_gate_shexp"),
        "routed_scaling_factor": m.number("expert_weights_scale", 1.0),
        "rotary_dim": m.integer("rope.dimension_count"),
        "mlp_layer_types": kinds(m, "ffn_gate_inp", "sparse", "dense"),
        "layer_types": kinds(m, "indexer.q_proj.weight", "minimax_m3_sparse", "full_attention"),
        "index_n_heads": m.integer("attention.indexer.head_count"),
        "index_head_dim": m.integer("attention.indexer.key_length"),
        "index_topk_blocks": m.integer("attention.indexer.top_k"),
        "index_block_size": m.integer("attention.indexer.block_size"),
        "index_local_blocks": m.integer("attention.indexer.local_blocks"),
    }


def _undo_minimax_m3(ckpt: ChangedTensors) -> None:
    ckpt.change("model.norm.weight", less_one)
    norms = [f"self_attn.{where}{name}_norm" for where in ("", "indexer.") for name in "qk"]
    for layer in ckpt.layers:
        for name in ("input_layernorm", "post_attention_layernorm", *norms):
            ckpt.change(f"{layer}.{name}.weight", less_one)


_INDEXER = {
    "indexer.attn_q_b": "self_attn.indexer.wq_b",
    "indexer.attn_k": "self_attn.indexer.wk",
    "indexer.k_norm": "self_attn.indexer.k_norm",
    "indexer.proj": "self_attn.indexer.weights_proj",
}
_HC = {
    **{
        f"hc_{where}_{part}.weight": f"{where}_hc.{part}"
        for where in ("attn", "ffn")
        for part in ("fn", "base", "scale")
    },
    **{f"output_hc_{part}.weight": f"model.hc_head.hc_{part}" for part in ("fn", "base", "scale")},
}
_BLOCKS = {f"indexer.{part}": f"self_attn.indexer.{part}" for part in ("q_proj", "k_proj", "q_norm", "k_norm")}
FAMILIES = {
    "deepseek32": GgufFamily(names=NAMES | _INDEXER, config=_deepseek_v32, joined=JOINED, models="DeepSeek-V3.2"),
    "glm-dsa": GgufFamily(names=NAMES | _INDEXER, config=_glm_dsa, joined=JOINED, models="GLM-5"),
    "hy_v4": GgufFamily(
        names=NAMES | _INDEXER | _HC | {"attn_gate": "self_attn.gate_proj", "attn_sinks.weight": "self_attn.sinks"},
        config=_hy_v4,
        joined=JOINED,
        models="Hunyuan 4",
    ),
    "dots3note": GgufFamily(
        names=NAMES | _INDEXER | {"attn_gate": "self_attn.g_proj", "attn_k_norm": "self_attn.k_rope_only_layernorm"},
        config=_dots3,
        undo=_undo_dots3,
        joined=JOINED,
        models="dots3-note",
    ),
    "minimax-m3": GgufFamily(
        names=DECODER
        | QK_NORM
        | experts("mlp")
        | mlp("mlp")
        | mlp("mlp.shared_experts", "_shexp")
        | _BLOCKS
        | {"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"},
        config=_minimax_m3,
        undo=_undo_minimax_m3,
        joined={
            "mlp.gate_up_proj": Join(("ffn_gate", "ffn_up")),
            "mlp.shared_experts.gate_up_proj": Join(("ffn_gate_shexp", "ffn_up_shexp")),
        },
        models="MiniMax-M3 (text)",
    ),
}
