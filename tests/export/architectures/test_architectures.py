"""Architectures of transformers beside those of test_model.py: a tiny random model of each, its experts in 16 bits.

Every tensor is random, norms and biases, too: what is left at zero or one hides what an export drops.
"""

from __future__ import annotations

import copy
import csv
import json
import re
import shutil
from collections import Counter
from dataclasses import replace
from inspect import getfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.harness.sweeps import every
from support.models.genai import check_tokens
from support.models.published import PUBLISHED, kept
from support.models.tiny import add_quantization, rewrite_linears
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMultimodalLM, DynamicCache, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES
from transformers.models.deepseek_v4 import modeling_deepseek_v4

from quantmoe.custom_ops.op import IndexerSpec, inputs, optional_inputs
from quantmoe.exporter.graph import trace
from quantmoe.exporter.graph.architectures.model_types import MODEL_TYPES, RAN, TEXT_OF
from quantmoe.exporter.graph.model import Skeleton, dequantized
from quantmoe.exporter.inspecting.inspect import inspect
from quantmoe.exporter.reading.checkpoint import CheckpointError
from quantmoe.exporter.reading.families import FAMILIES, UNSUPPORTED
from quantmoe.exporter.reading.formats import open_checkpoint
from quantmoe.exporter.reading.weights.unquantized import Unquantized
from quantmoe.exporter.report import selection
from quantmoe.exporter.surveying.survey import survey
from quantmoe.exporter.targets import CPU, TARGETS
from quantmoe.exporter.writing.convert import export
from quantmoe.exporter.writing.plan import plan
from quantmoe.runtime.generate import Generator

#: of the fields that a configuration has
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "max_position_embeddings": 256,
    "sliding_window": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
#: all fields of a family whose layers differ in sizes that the others have once
GEMMA4: dict[str, Any] = (
    PUBLISHED["gemma4_text"].fields
    | {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "per_layer_config": {"1": {"head_dim": 32}, "3": {"head_dim": 32}},
        "top_k_experts": 2,
        "vocab_size_per_layer_input": 128,
    }
    | {name: SIZES[name] for name in ("hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers")}
)
GEMMA4 |= {name: SIZES[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")}
GEMMA4 |= {name: SIZES[name] for name in ("num_experts", "sliding_window", "max_position_embeddings")}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
LINEAR |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
LLAMA4 = {"intermediate_size_mlp": 64, "num_experts_per_tok": 1, "attention_chunk_size": 8, "floor_scale": 4}
LLAMA4 |= {"no_rope_layer_interval": 2}
#: queries are scaled from the 8th token on, of 8192 published ones
MISTRAL4 = {"num_key_value_heads": 4, "head_dim": 32, "rope_parameters": {"original_max_position_embeddings": 8}}
#: of 14 tokens each attends to 6
INDEXED = {"num_key_value_heads": 4, "index_n_heads": 8, "index_head_dim": 24, "index_topk": 6}
MISTRAL_LARGE4 = INDEXED | {"indexer_types": ["full", "full", "shared", "full"], "no_rope_layers": [1, 1, 1, 0]}
#: a layer attends to another's keys, as no published configuration has it: standard nodes
OF_OTHERS = "mistral_large4 kv_source_layers"
HY_V4 = INDEXED | {"swiglu_limit": 0.5, "indexer_types": ["full", "full", "shared", "full"]}
#: dots.3's configuration has no sizes of all layers
DOTS3: dict[str, Any] = (
    {name: SIZES[name] for name in ("hidden_size", "intermediate_size", "moe_intermediate_size", "vocab_size")}
    | {name: SIZES[name] for name in ("num_hidden_layers", "num_attention_heads", "n_routed_experts", "q_lora_rank")}
    | {name: SIZES[name] for name in ("num_experts_per_tok", "kv_lora_rank", "sliding_window")}
    | {name: 4 for name in ("num_key_value_heads", "swa_num_attention_heads", "swa_num_key_value_heads")}
    | {name: 16 for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "swa_v_head_dim")}
    | {"head_dim": 32, "swa_head_dim": 32, "swa_qk_nope_head_dim": 16, "swa_q_lora_rank": 24, "swa_kv_lora_rank": 48}
    | {"index_head_dim": 24, "index_n_heads": 8, "index_topk": 6, "shared_experts_intermediate_size": 64}
    | {"layer_types": ["sliding_attention", "indexed_attention"] * 2, "mlp_layer_types": ["dense", *["sparse"] * 3]}
    | {name: SIZES[name] for name in ("eos_token_id", "pad_token_id", "bos_token_id", "max_position_embeddings")}
)
#: the end of texts of a model of n-grams: the fourth token of the first row of difference()
EOS = 36
#: two experts in each of eight groups
SIXTEEN = {"n_routed_experts": 16, "num_local_experts": 16, "num_experts": 16}
#: 14 tokens are more than the window, than the distances with a bias, and than the texts whose scores are not scaled
INKLING = {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 16, "d_rel": 4}
INKLING |= {"sliding_window_size": 8, "rel_extent": 6, "unpadded_vocab_size": 120, "log_scaling_n_floor": 4}
#: the norms of some queries and relative states are clipped, and gates, what they multiply and logits reach their caps
INKLING2: dict[str, Any] = INKLING | {"qk_l2_clip_threshold": 4.0, "rel_l2_clip_threshold": 2.0}
INKLING2 |= {"mlp_gate_softcap": 1.0, "mlp_up_softcap": 2.0, "final_logit_softcapping": 3.0}
INKLING2 |= {"n_layers_per_attn_res_block": 2}
#: layers 2 to 5, two blocks of them, are visited three times
INKLING2_LOOP = INKLING2 | {"num_hidden_layers": 8, "layer_types": ["hybrid_sliding", "hybrid"] * 4}
INKLING2_LOOP |= {"loop_layer_index_start": 2, "loop_layer_index_end": 6, "loop_gate_rank": 8}
#: the vision tower of Inkling 2, which no test of this file runs
INKLING_TOWER = {"model_type": "inkling2_vision", "hidden_size": 32, "num_hidden_layers": 1, "patch_size": 4}
INKLING_TOWER |= {"num_attention_heads": 2, "posemb_grid_size": 4, "projection_hidden_dim": 32, "text_hidden_size": 64}
#: the vision tower of Qwen's and GLM's models, which no test of this file runs
QWEN_TOWER = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 64}
#: model_type -> what a model of several modalities has beside its text model
OUTER: dict[str, dict[str, Any]] = {
    "ernie4_5_vl_moe": {
        "vision_config": {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "in_channels": 3}
    },
    "glm4v_moe": {"vision_config": QWEN_TOWER | {"image_size": 56, "patch_size": 14}},
    "glm5_next": {
        "vision_config": QWEN_TOWER | {"image_size": 56, "patch_size": 14, "projection_intermediate_size": 32}
    },
    "hy_v4_vl": {
        "vision_config": {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        | {"out_hidden_size": 64, "max_image_size": 64}
    },
    "inkling2": {"vision_config": INKLING_TOWER},
    "inkling2_loop": {"vision_config": INKLING_TOWER},
    "inkling_mm_model": {
        # fewer layers would ask scipy for their sizes
        "vision_config": {"hidden_size": 32, "num_hidden_layers": 24, "patch_size": 4, "num_attention_heads": 2},
        "audio_config": {"n_mel_bins": 4, "mel_vocab_size": 8},
    },
    "kimi_k25": {
        "tie_word_embeddings": False,
        "vision_config": {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
        | {"patch_size": 14, "pos_emb_height": 4, "pos_emb_width": 4, "pos_emb_time": 2}
        | {"mm_hidden_size": 32, "text_hidden_size": 64, "projection_hidden_size": 128, "merge_kernel_size": [2, 2]},
    },
    "aria": {
        "vision_config": {"model_type": "idefics3_vision", "hidden_size": 32, "intermediate_size": 32}
        | {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 56, "patch_size": 14},
        "projector_patch_to_query_dict": {"16": 4},
    },
    "deepseek_ocr2": {
        "vision_config": {
            "sam_config": {"hidden_size": 32, "output_channels": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
            | {"image_size": 64, "global_attn_indexes": [0], "downsample_channels": [16, 32], "mlp_dim": 32},
            "encoder_config": {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
            | {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16},
        }
    },
    "mistral3": {
        "vision_config": {"model_type": "pixtral", "hidden_size": 32, "intermediate_size": 32, "head_dim": 16}
        | {"num_hidden_layers": 1, "num_attention_heads": 2}
    },
    "mistral_large4": {
        "vision_config": {"model_type": "pixtral", "hidden_size": 32, "intermediate_size": 32, "head_dim": 16}
        | {"num_hidden_layers": 1, "num_attention_heads": 2}
    },
    "muse_spark": {
        "vision_config": {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        | {"pos_emb_height": 4, "pos_emb_width": 4},
        "audio_config": {"hidden_sizes": [8, 8, 8, 16], "depths": [1, 1, 1, 1], "out_hidden_size": 64},
        "out_hidden_size": 128,
        "projector_hidden_size": 32,
    },
    "step3p7": {
        "vision_config": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 56}
        | {"mlp_ratio": 1.0}
    },
    "qwen3_vl_moe": {"vision_config": QWEN_TOWER | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}},
    "qwen3_omni_moe_thinker": {
        "vision_config": QWEN_TOWER | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
        "audio_config": {"d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 32}
        | {"output_dim": 64, "downsample_hidden_size": 16},
    },
}
#: a name of PUBLISHED -> fields beside the published ones
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "ernie4_5_moe": {},
    "ernie4_5_vl_moe": {"moe_intermediate_size": [64, 32], "rope_parameters": {"mrope_section": [3, 3, 2]}},
    "laguna": {"num_attention_heads_per_layer": [4, 8, 4, 8]},
    "afmoe": {},
    "cohere2_moe": {},
    "exaone_moe": {},
    "flex_olmo": {},
    "flint": {},
    "granitemoe_swa": {},
    "hy_v3": {},
    "kolibri1": {},
    "aria": {},
    "aria_text": {},
    "bailing_hybrid": {"num_key_value_heads": 4} | SIXTEEN,
    "beam": SIXTEEN,
    "axk1": {"num_key_value_heads": 4} | SIXTEEN,
    "dbrx": {
        **{"d_model": 64, "n_heads": 4, "n_layers": 4, "max_seq_len": 256},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 0.5, "rope_theta": 5e5},  # of 8, which no tiny model reaches
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 48, "moe_num_experts": 8, "moe_top_k": 2},
    },
    "deepseek_v2": {"num_key_value_heads": 4, "num_experts_per_tok": 2},
    "deepseek_v2 group_limited_greedy": {"num_key_value_heads": 4, "num_experts_per_tok": 2} | SIXTEEN,
    "deepseek_v32": INDEXED | SIXTEEN,
    "deepseek_v3": {"num_key_value_heads": 4} | SIXTEEN,
    "deepseek_ocr2": {"num_experts_per_tok": 2, "mlp_layer_types": ["dense", *["sparse"] * 3]},
    "axk2": INDEXED,
    "axk2 groups": INDEXED | SIXTEEN,
    "glm_moe_dsa": INDEXED | {"indexer_types": ["full", "full", "shared", "full"]},
    "dots3_note_text": DOTS3,
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"] * 2, "index_n_heads": 2}
    | {"index_head_dim": 24, "index_block_size": 3, "index_topk_blocks": 2, "dense_intermediate_size": 64}
    | {"shared_intermediate_size": 64, "intermediate_size": 64, "mlp_layer_types": ["dense", *["sparse"] * 3]},
    "mistral_large4": MISTRAL_LARGE4,
    OF_OTHERS: MISTRAL_LARGE4 | {"kv_source_layers": [0, 1, 1, 3]},
    "qwen4_exp_text": LINEAR
    | {"hc_lowrank": 8, "ple_layer_ids": [1], "ple_embed_dim": 32, "heads_per_ngram": 2, "ngram_vocab_size_base": 200}
    | {
        "split_ngram_parts": 4,
        "indexer_n_heads": 16,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 24,
        "indexer_budget": 6,
    }
    | {"indexer_compress_ratio": 2, "rope_parameters": {"mrope_section": [1, 1, 0]}, "eos_token_id": EOS},
    "hy_v4": HY_V4,
    "hy_v4_vl": HY_V4 | {"rope_parameters": {"mrope_section": [3, 3, 2]}},
    "deepseek_v4": {"num_key_value_heads": 1, "head_dim": 32, "o_groups": 2, "o_lora_rank": 16, "swiglu_limit": 0.5}
    | {"index_n_heads": 16, "index_head_dim": 24, "index_topk": 3, "mlp_layer_types": ["hash_moe", *["moe"] * 3]}
    | {"compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4}}
    | {"num_nextn_predict_layers": 0},
    "glm5_next": {"num_key_value_heads": 4, "qk_rope_head_dim": 0, "index_n_heads": 8, "index_head_dim": 24}
    | {"index_topk": 6, "index_kpool": 2, "swiglu_limit": 0.5, "linear_num_heads": 2, "linear_head_dim": 16},
    "doge": {"num_experts": 64, "num_experts_per_tok": 4, "keep_window_size": 6},
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2, "topk_group": 1},
    "gemma4": {"text_config": GEMMA4, "vision_config": None, "audio_config": None},
    "gemma4_text": GEMMA4,
    "glm4_moe": {},
    "glm4_moe_lite": {"num_key_value_heads": 4},
    "glm4v_moe": {"rope_parameters": {"mrope_section": [2, 1, 1]}},
    "gpt_oss": {},
    "granitemoe": {},
    "granitemoehybrid": {"shared_intermediate_size": 96, "mamba_n_heads": 8, "mamba_d_state": 16},
    "granitemoeshared": {"shared_intermediate_size": 64},
    "hunyuan_v1_moe": {"moe_topk": 2, "head_dim": 16},
    "inkling2": INKLING2,
    "inkling2_loop": INKLING2_LOOP,
    "inkling2_loop_text": INKLING2_LOOP,
    "inkling2_text": INKLING2,
    "inkling_mm_model": INKLING,
    "inkling_text": INKLING,
    "jamba": {"attn_layer_period": 4, "attn_layer_offset": 2, "mamba_d_state": 16, "mamba_dt_rank": 4},
    "jetmoe": {"kv_channels": 16},
    "kimi_k25": {"num_key_value_heads": 4} | SIXTEEN,
    "kimi_linear": {"num_key_value_heads": 4, "linear_num_heads": 2, "linear_head_dim": 16},
    "lfm2_moe": {},
    "llama4_text": LLAMA4,
    "llama4_text interleaved": LLAMA4,
    "lara_mini": LINEAR,
    "longcat_flash": {"num_layers": 2, "ffn_hidden_size": 64, "expert_ffn_hidden_size": 64, "zero_expert_num": 4}
    | {"num_key_value_heads": 4, "moe_topk": 4, "qk_head_dim": None},
    "mellum": {},
    "mimo_v2_flash": {"swa_head_dim": 16, "swa_num_key_value_heads": 2},
    "minimax": {},
    "minimax_m2": {},
    "mistral4": MISTRAL4,
    "mistral3 mistral4": MISTRAL4,
    "mixtral": {"head_dim": 16},
    "muse_spark": {"moe_hidden_size": 32, "layer_rope_theta": [5e5, 0, 5e5, 0]},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention", "moe"],
        "moe_shared_expert_intermediate_size": 128,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 2,
        "n_group": 2,
    },
    "olmoe": {},
    "phimoe": {},
    "qwen2_moe": {},
    "qwen3_5_moe_text": LINEAR | {"rope_parameters": {"mrope_section": [1, 1, 0]}},
    "qwen3_moe": {"head_dim": 16},
    "qwen3_next": LINEAR,
    "qwen3_omni_moe_thinker": {"rope_parameters": {"mrope_section": [4, 2, 2]}},
    "qwen3_vl_moe": {"moe_intermediate_size": 48, "rope_parameters": {"mrope_section": [4, 2, 2]}},
    "sarvam_mla": {"num_key_value_heads": 4},
    "sarvam_moe": {},
    "solar_open": {},
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 32},
    "step3p7": {
        "num_sliding_attention_heads": 8,
        "share_expert_dim": 64,
        "query_pre_attn_scalar": None,
        "sliding_window": 8,
    }
    | {"swiglu_limits": [0, 0, 0.5, 0.25], "swiglu_limits_shared": [0, 0, 1, 0]},
}
#: latent attention with a shared expert, and linear attention
BRIEF = ("glm4_moe_lite", "kimi_linear")
#: MiniMax's tables of decays, which transformers makes in f32 where there are none; stored they would be in bf16
TABLES = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")
#: types that select what a token attends to: the same in any pieces of a prompt
SELECTING = (
    "axk2",
    "deepseek_v32",
    "deepseek_v4",
    "doge",
    "dots3_note_text",
    "glm5_next",
    "glm_moe_dsa",
    "hy_v4",
    "hy_v4_vl",
    "minimax_m3_vl_text",
    "mistral_large4",
    "qwen4_exp_text",
)
#: of these, types whose indexer is a node
INDEXERS = {*SELECTING} - {"doge"}
#: types whose hyper-connections are nodes, two a layer
CONNECTED = ("deepseek_v4", "glm5_next")
#: types that onnxruntime-genai does not run -> what it needs. Of SELECTING, Doge alone caches no keys of an indexer.
NOT_GENAI = dict.fromkeys(({*SELECTING} - {"doge"}) | {"kimi_linear"}, "keys and values of one size") | {
    **dict.fromkeys(INDEXERS, "layers without an indexer"),
    OF_OTHERS: "keys and values of one size",
    **dict.fromkeys(
        [*(name for name in ARCHITECTURES if name.startswith("inkling")), "zaya"],
        "a recurrent state in a layer with a convolution",
    ),
    "minimax": "a convolution in a layer with a state",
}
#: types whose text model's type is a row, too
WRAPPERS = {"gemma4", "llama4", "qwen3_5_moe", "qwen3_omni_moe"}
#: types around a text model -> its row, what config.json calls it, and the prefix of its tensors
INSIDE = {
    "dots3_note": ("dots3_note_text", "text_config", "model.language_model."),
    "internvl": ("qwen3_moe", "text_config", "language_model.model."),
    "minimax_m3_vl": ("minimax_m3_vl_text", "text_config", "language_model.model."),
    "nemotron_h_omni": ("nemotron_h", "llm_config", "language_model.backbone."),
    "qwen4_exp": ("qwen4_exp_text", "text_config", "model.language_model."),
}
#: types of text models that are published alone -> the row of the model around it
ALONE = {"step3p5": "step3p7"}
LATENT = ("bailing_hybrid", "deepseek_v2", "glm4_moe_lite", "axk1", "sarvam_mla", "mistral4", "longcat_flash")


def fields(name: str) -> dict[str, Any]:
    """Small sizes, each kind of layer once, and the published mechanisms."""
    own, model_type = ARCHITECTURES[name], name.partition(" ")[0]
    if model_type in ("gemma4", "gemma4_text", "dots3_note_text"):  # whose configurations have no sizes of all layers
        return own
    published = PUBLISHED[name].fields if name in PUBLISHED else {}
    usual = CONFIG_MAPPING[model_type]().get_text_config()
    if model_type == "mistral3":
        usual = CONFIG_MAPPING["mistral4"]()
    names = usual.to_dict().keys() | (usual.attribute_map or {}).keys()
    found = {name: value for name, value in SIZES.items() if name in names and getattr(usual, name) is not None}
    if model_type == "jamba":  # whose kinds of layers follow from periods
        return found | {name: value for name, value in published.items() if not isinstance(value, set)} | own
    kinds = list(dict.fromkeys(getattr(usual, "layer_types", None) or ()))
    if kinds := [*kinds, *sorted(published.get("layer_types", set()) - set(kinds))]:
        found["layer_types"] = (kinds * 4)[:4]
    if getattr(usual, "mlp_layer_types", None):
        found["mlp_layer_types"] = ["dense", *["sparse"] * 3]
    found |= {name: value for name, value in published.items() if not isinstance(value, set)} | own
    if (rope := published.get("rope_parameters")) is not None:
        found["rope_parameters"] = copy.deepcopy(rope | own.get("rope_parameters", {}))
    outer = OUTER.get(model_type)
    return found if outer is None else {"text_config": {"model_type": usual.model_type} | found} | outer


def transformers_class(config: Any) -> Any:
    """The auto class that has the configuration's model."""
    return AutoModelForCausalLM if type(config) in AutoModelForCausalLM._model_mapping else AutoModelForMultimodalLM


def make_checkpoint(folder: Path, name: str, **sizes: Any) -> None:
    config = CONFIG_MAPPING[name.partition(" ")[0]](**fields(name) | sizes)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = transformers_class(config).from_config(config, dtype=torch.float32)
        biases = ((name, buffer) for name, buffer in model.named_buffers() if name.endswith("bias"))
        for name, buffer in model.named_buffers():
            if name.endswith("tid2eid"):  # the experts of each token
                buffer.copy_(torch.stack([torch.randperm(8)[: buffer.shape[1]] for _ in buffer]))
        for name, tensor in (*model.named_parameters(), *biases):
            own = torch.randn_like(tensor)
            if "norm" in name:
                tensor += own / 10
            else:
                tensor.copy_(own * (0.1 if "bias" in name else tensor.shape[-1] ** -0.5))
    state = {name: tensor for name, tensor in model.bfloat16().state_dict().items() if not name.endswith(TABLES)}
    model.save_pretrained(folder, state_dict=state)
    if config.model_type == "kimi_k25":  # transformers 5.24 saves the text model with the tower's names
        tensors = load_file(folder / "model.safetensors")
        published = {name.replace("language_model.model.blocks.", "language_model.model.layers."): tensor
                     for name, tensor in tensors.items()}  # fmt: skip
        save_file(published, folder / "model.safetensors", {"format": "pt"})


def expected(model: Any, ids: torch.Tensor) -> np.ndarray:
    """Return transformers' logits: of the tokens one by one, where its router mixes those of a prompt."""
    with torch.no_grad():
        if model.config.model_type != "doge":
            return np.asarray(model(ids).logits)
        rows = []
        for row in ids:
            cache, found = DynamicCache(), []
            for token in row:
                found.append(model(token.reshape(1, 1), cache=cache).logits[0])
            rows.append(torch.cat(found))
        return np.stack(rows)


#: what a dry run and a report both have
ALIKE = ("shared", "apart", "not_ort", "dequantized", "plain_attention", "activations")
ALIKE += ("kv_cache", "left_out", "drafting", "chat", "tokenizer")


def planned_export(checkpoint: Path, output: Path, **options: Any) -> None:
    """Export, and compare what the dry run said before, what the report says, and what ``inspect`` finds in the
    checkpoint and in the exported folder."""
    dry = plan(checkpoint, output, **options)
    report = export(checkpoint, output, **options)
    assert {name: getattr(dry, name) for name in ALIKE} == {name: getattr(report, name) for name in ALIKE}
    assert dry.packed == report.packed_bytes
    found = inspect(output)
    for kind in ("layers", "linears"):
        planned: dict[str, Any] = getattr(dry, kind)
        assert {name: row[:2] for name, row in planned.items()} == getattr(report, kind)
        rows = {row["module"]: (row["format"], row["bytes"]) for row in found[kind]}
        assert rows == {name: (scheme, size) for name, (scheme, _, size) in planned.items()}
    assert found["plain_attention"] == dry.plain_attention
    assert [node["attributes"] for node in found["indexers"]] == dry.indexers
    assert {layer["module"] for layer in survey(checkpoint)["layers"]} == dry.layers.keys()


def errors(model_type: str, quantize: str, folder: Path, **sizes: Any) -> dict[str, float]:
    """Return the largest error of logits, over the largest logit: of a prompt, of tokens after it, of padded prompts.

    The others are transformers' in float32, with the same weights.
    """
    make_checkpoint(folder / "checkpoint", model_type, **sizes)
    planned_export(folder / "checkpoint", folder / "onnx", quantize=quantize, activations="float", cache="f32")
    if quantize == "none":
        own = transformers_class(AutoConfig.from_pretrained(folder / "checkpoint"))
        torch_model = own.from_pretrained(folder / "checkpoint", dtype=torch.float32).eval()
    else:
        torch_model = dequantized(Skeleton(Unquantized(open_checkpoint(folder / "checkpoint"), quantize)))
    ids = np.random.default_rng(0).integers(3, SIZES["vocab_size"], (2, 14))
    want = expected(torch_model, torch.from_numpy(ids))
    pieces = [(10, 1, 1, 2)]  # past the window of 8
    if model_type.partition(" ")[0] in SELECTING:
        pieces += [(14,), (3, 4, 2, 5)]
    found: dict[str, list[float]] = {"prompt": [], "tokens": [0.0]}
    for own in pieces:
        error = np.abs(logits_of(folder / "onnx", ids, own) - want)
        found["prompt"].append(error[:, : own[0]].max())
        found["tokens"].append(error[:, own[0] :].max(initial=0))
    if quantize == "none":
        found["padded"] = [padded_error(folder / "onnx", ids, want, left) for left in (True, False)]
    return {name: float(max(some) / np.abs(want).max()) for name, some in found.items()}


def difference(model_type: str, quantize: str, folder: Path, **sizes: Any) -> float:
    """Return the largest of :func:`errors`."""
    return max(errors(model_type, quantize, folder, **sizes).values())


def padded_error(folder: Path, ids: np.ndarray, want: np.ndarray, left: bool) -> float:
    """Return the largest error of the logits of each row's last token, where the second row's prompt is padded."""
    generator = Generator(folder)
    past, mask, done, errors = generator.start(2), np.zeros((2, 0), np.int64), [0, 0], []
    for counts in ((8, 3), (3, 3), (1, 1), (2, 2)):
        new, length = max(counts), mask.shape[1]
        given, seen, positions = (np.zeros((2, new), np.int64) for _ in range(3))
        for row, count in enumerate(counts):
            at, places = slice(new - count, new) if left else slice(count), np.arange(done[row], done[row] + count)
            given[row, at], seen[row, at], positions[row, at] = ids[row, places], 1, places
            done[row] += count
        mask = np.concatenate((mask, seen), 1)
        feed = {"input_ids": given, "attention_mask": mask, "position_ids": positions}
        inputs = {value.name for value in generator.session.get_inputs()}
        found = generator.run({name: feed[name] for name in feed.keys() & inputs} | past, new, length)
        past = {name: found[name.replace("past_key_values", "present")] for name in past}
        assert found["logits"].shape[1] == 1
        errors += [np.abs(found["logits"][row, 0] - want[row, done[row] - 1]).max() for row in (0, 1)]
    return float(max(errors))


def check_attention(name: str, folder: Path) -> None:
    """Compare an export's nodes with what the table of model types says."""
    said = next(row.attention for row in MODEL_TYPES if name.partition(" ")[0] in row.types)
    found = inspect(folder)
    assert ("one node" in said or said.startswith("latent")) == bool(found["attention"]), name
    standard = "standard nodes" in said.replace("lightning attention in standard nodes", "")
    assert standard == bool(found["plain_attention"]), name


@pytest.mark.parametrize("model_type", every([*BRIEF, *sorted(ARCHITECTURES.keys() - set(BRIEF))], len(BRIEF)))
def test_architecture(model_type: str, tmp_path: Path) -> None:
    """Against transformers in float32: sums in another order, as in test_model.py.

    onnxruntime-genai chooses Generator's tokens, or README.md says why it cannot.
    """
    assert difference(model_type, "none", tmp_path) < 2e-5
    folder, reason = tmp_path / "onnx", NOT_GENAI.get(model_type, NOT_GENAI.get(model_type.partition(" ")[0]))
    text = (folder / "README.md").read_text(encoding="utf-8")
    found = re.search("no genai_config.json: onnxruntime-genai 0.18 cannot run the model: it needs (.*), and ", text)
    assert (found[1] if found else None) == reason
    assert (folder / "genai_config.json").exists() == (reason is None)
    if reason is None:
        check_tokens(folder, np.random.default_rng(1).integers(3, SIZES["vocab_size"], 20).tolist(), 12)
    if model_type != OF_OTHERS:
        check_attention(model_type, folder)
    nodes = Counter(node.op_type for node in onnx.load(folder / "model.onnx", load_external_data=False).graph.node)
    assert nodes["HyperConnection"] == (8 if model_type in CONNECTED else 0)
    indexes = model_type.partition(" ")[0] in INDEXERS and model_type != OF_OTHERS
    assert (nodes["SparseIndexer"] > 0) == indexes
    assert len(inspect(folder)["indexers"]) == nodes["SparseIndexer"]
    if model_type in LATENT:
        caches = {node["bytes_per_token"] for node in inspect(tmp_path / "onnx")["attention"]}
        assert caches == {4 * (SIZES["kv_lora_rank"] + SIZES["qk_rope_head_dim"])}


def deep(name: str) -> dict[str, Any]:
    """Sizes of a model in which the same layers, or the same two or four in turn, come more than three times."""
    own = fields(name)
    text = own.get("text_config", own)
    if name == "deepseek_v4":
        return {"layer_types": ["compressed_sparse_attention"] * 5, "mlp_layer_types": ["moe"] * 5} | {
            "num_hidden_layers": 5
        }
    lists = {key: value for key, value in text.items() if isinstance(value, list) and len(value) == 4}
    kinds = {key: value for key, value in lists.items() if key != "mlp_layer_types"}
    count = 18 if any(value[:2] != value[2:] for value in kinds.values()) else 10 if kinds else 6
    sizes = {key: (value * 5)[:count] for key, value in kinds.items()} | {"num_hidden_layers": count}
    if sources := kinds.get("kv_source_layers"):
        sizes["kv_source_layers"] = [sources[i % 4] + i // 4 * 4 for i in range(count)]
    if "mlp_layer_types" in lists:
        sizes["mlp_layer_types"] = ["dense", *["sparse"] * (count - 1)]
    return {"text_config": text | sizes} if "text_config" in own else sizes


@pytest.mark.parametrize(
    "model_type",
    every(
        ["deepseek_v4", *sorted({*SELECTING, OF_OTHERS, "flex_olmo", "inkling2_text", "llama4_text"} - {"deepseek_v4"})]
    ),
)
def test_a_deep_model_is_traced_once(model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer layers than it has are traced; the others are copies, and give transformers' logits."""
    traced = []
    once = trace._trace
    monkeypatch.setattr(trace, "_trace", lambda s, *a: traced.append(s.model.config.num_hidden_layers) or once(s, *a))
    assert difference(model_type, "none", tmp_path, **deep(model_type)) < 2e-5
    config = json.loads((tmp_path / "checkpoint" / "config.json").read_text(encoding="utf-8"))
    assert max(traced) < config.get("text_config", config)["num_hidden_layers"]


@pytest.mark.parametrize("model_type", every(["sarvam_moe", *sorted(ARCHITECTURES.keys() - {"sarvam_moe"})]))
def test_architecture_in_int4(model_type: str, tmp_path: Path) -> None:
    """Experts and linears rounded to 4 bits; the same sums."""
    assert difference(model_type, "int4", tmp_path) < 2e-5


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_tiny_model_has_the_published_mechanisms(name: str) -> None:
    """What its configuration says after transformers has read it; layers of every published kind."""
    config = CONFIG_MAPPING[name.partition(" ")[0]](**fields(name)).get_text_config()
    for field, value in PUBLISHED[name].fields.items():
        found = getattr(config, field)
        if field == "rope_parameters":
            parts = {"": value} if "rope_type" in value else value
            for layers, part in parts.items():
                own = found[layers] if layers else found
                assert own == part or {key: own[key] for key in part} == part, (field, layers)
        elif isinstance(value, set) and all(isinstance(kind, int) for kind in value):
            assert len(set(found)) == len(value), field
        elif isinstance(value, set):
            assert set(found) >= value, field
        else:
            assert (found, type(found)) == (value, type(value)), field


def test_the_docs_have_the_published_mechanisms() -> None:
    """Every type that runs, or is refused for what was published, and no other."""
    docs = Path(__file__).parents[3] / "docs"
    published = (docs / "lab" / "published-models.md").read_text(encoding="utf-8").partition("## Published")[2]
    rows = re.findall(r"^\| `(.+)` \| (\S+) \| (.+) \| (.+) \|$", published, re.MULTILINE)
    want = [(name, one.model, kept(one), one.seen or "not seen") for name, one in PUBLISHED.items()]
    assert rows == want
    runs = [name for row in MODEL_TYPES for name in row.types]
    assert len(runs) == len({*runs})
    known = {name.partition(" ")[0] for name in PUBLISHED}
    accepted = {name for name in known if name.removesuffix("_text") not in UNSUPPORTED}
    assert {*runs} == accepted | WRAPPERS | INSIDE.keys() | ALONE.keys()
    readme = (Path(__file__).parents[3] / "README.md").read_text(encoding="utf-8")
    assert f"[{len(runs)} model types]" in readme


def test_the_table_of_errors() -> None:
    """It has each type that a test runs, within the tests' bound; the others have a text model of the table."""
    with (Path(__file__).parents[3] / "docs" / "lab" / "architecture_errors.csv").open(encoding="utf-8") as file:
        rows = {row.pop("name"): {key: float(value) for key, value in row.items()} for row in csv.DictReader(file)}
    assert rows.keys() == ARCHITECTURES.keys()
    assert all(0 < error < 2e-5 for row in rows.values() for error in row.values())
    runs = {name for row in MODEL_TYPES for name in row.types}
    measured = {name.partition(" ")[0] for name in rows}
    assert runs - measured == TEXT_OF.keys()
    assert {name: TEXT_OF[name] for name in INSIDE} == {name: text for name, (text, *_) in INSIDE.items()}
    assert set().union(*RAN.values(), TEXT_OF.values()) <= measured


def parts_of(config: Any) -> list[Any]:
    """Return a configuration and all configurations in it."""
    inner = [value for value in vars(config).values() if isinstance(value, PreTrainedConfig)]
    return [config, *(part for value in inner for part in parts_of(value))]


#: types whose configuration is refused without arguments, which have no experts of their own
NO_DEFAULT = {"gemma4_assistant", "nougat"}


def test_every_type_with_experts_is_listed() -> None:
    """Among the types that run or, with a reason, among the refused ones; ``.._text`` with the model around it.

    A type has experts if a field of its default configuration says so, also in a part of it. Where a modelling file
    has a class of experts, one of the file's types at least is listed, whatever its defaults say.
    """
    listed = {name for row in MODEL_TYPES for name in row.types} | UNSUPPORTED.keys()
    listed |= {name for name, family in FAMILIES.items() if family.encoder}
    found, files = set(), {}
    for kind in sorted(CONFIG_MAPPING_NAMES):
        name = kind if kind in listed else kind.removesuffix("_text")
        for path in Path(getfile(CONFIG_MAPPING[kind])).parent.glob("modeling_*.py"):
            if re.search(r"^class \w*Experts\w*\(", path.read_text(encoding="utf-8"), re.MULTILINE):
                files.setdefault(path.name, set()).add(name)
        if kind not in NO_DEFAULT:
            fields = [own for part in parts_of(CONFIG_MAPPING[kind]()) for own in vars(part).items()]
            if any(re.search(r"experts|^moe_|_moe_", field) and value for field, value in fields):
                found.add(name)
    assert found - listed == set()
    assert {name for name, kinds in files.items() if not kinds & listed} == set()
    assert len(found) > 80
    assert len(files) > 50


def selecting(folder: Path, zeros: str, **fields: Any) -> tuple[np.ndarray, np.ndarray, Any]:
    """Return the logits of a model with an indexer, their tokens, and transformers' model.

    Args:
        zeros: ends of the names of tensors that are zero.
    """
    make_checkpoint(folder / "checkpoint", "glm_moe_dsa", **fields)
    tensors = load_file(folder / "checkpoint" / "model.safetensors")
    for name in tensors:
        tensors[name] *= not name.endswith(zeros)
    save_file(tensors, folder / "checkpoint" / "model.safetensors", {"format": "pt"})
    floats: dict[str, Any] = {"quantize": "none", "activations": "float", "cache": "f32", "logits": "all"}
    export(folder / "checkpoint", folder / "onnx", **floats)
    ids = np.random.default_rng(0).integers(3, SIZES["vocab_size"], (2, 14))
    model = AutoModelForCausalLM.from_pretrained(folder / "checkpoint", dtype=torch.float32).eval()
    return logits_of(folder / "onnx", ids), ids, model


def attend_to(model: Any, first: int, ids: np.ndarray) -> np.ndarray:
    """Return the logits of transformers' model whose tokens attend to the first ones alone."""

    def indices(hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return torch.arange(first).expand(*hidden_states.shape[:2], first)

    for layer in model.model.layers:
        if layer.self_attn.indexer is not None:
            layer.self_attn.indexer.forward = indices
    with torch.no_grad():
        return np.asarray(model(torch.from_numpy(ids)).logits)


def test_all_tokens_are_selected_where_there_are_no_more(tmp_path: Path) -> None:
    """14 of 14: dense attention. Six of them are another thing."""
    found, ids, model = selecting(tmp_path, ".none", index_topk=14)
    dense = attend_to(model, 14, ids)
    assert np.abs(found - dense).max() < 2e-5 * np.abs(dense).max()
    assert np.abs(attend_to(model, 6, ids) - dense).max() > 0.01 * np.abs(dense).max()


#: types with lists of tokens, or of blocks of tokens -> how many tokens a list has; all but two attend in latents
LISTS = {"deepseek_v32": 6, "minimax_m3_vl_text": 6, "glm5_next": 7, "qwen4_exp_text": 7}
LISTS |= dict.fromkeys(("axk2", "dots3_note_text", "glm_moe_dsa", "hy_v4", "mistral_large4"), 6)


@pytest.mark.parametrize("model_type", every(LISTS))
def test_a_list_of_all_tokens_is_dense_attention_bit_for_bit(model_type: str, tmp_path: Path) -> None:
    """Logits of an export and of its nodes without their lists: equal up to a list's size, and different behind it."""
    make_checkpoint(tmp_path / "checkpoint", model_type)
    export(tmp_path / "checkpoint", tmp_path / "onnx", quantize="none", activations="float", cache="f32")
    shutil.copytree(tmp_path / "onnx", tmp_path / "dense")
    model = onnx.load(tmp_path / "onnx" / "model.onnx", load_external_data=False)
    at = [name for name, _ in (*inputs("CachedAttention"), *optional_inputs("CachedAttention"))].index("selected")
    readers = [node for node in model.graph.node if node.op_type == "CachedAttention" and len(node.input) > at]
    assert readers
    for node in readers:
        del node.input[at:]
    onnx.save(model, tmp_path / "dense" / "model.onnx")
    ids, size = np.random.default_rng(0).integers(3, SIZES["vocab_size"], (2, 14)), LISTS[model_type]
    for pieces in ((14,), (3, 4, 2, 5), (size, 1, 13 - size), (1,) * 14):
        found, dense = (logits_of(tmp_path / name, ids, pieces) for name in ("onnx", "dense"))
        assert found[:, :size].tobytes() == dense[:, :size].tobytes()
        assert (found[:, size:] != dense[:, size:]).any(2).all()


def test_a_target_without_a_kernel_of_indexers_has_standard_nodes(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "checkpoint", "glm_moe_dsa", indexer_types=["full"] * 4)
    dry = plan(tmp_path / "checkpoint", tmp_path / "onnx", quantize="int4", target="cuda")
    assert len(dry.plain_attention) == SIZES["num_hidden_layers"]
    assert {*dry.plain_attention.values()} == {"head_size is 24, the CUDA kernels take 64 and 128"}
    assert dry.indexers == []
    make_checkpoint(tmp_path / "heads", "minimax_m3_vl_text", head_dim=64, index_head_dim=64)
    dry = plan(tmp_path / "heads", tmp_path / "onnx", quantize="int4", target="cuda")
    said = "head_size is 64 and v_head_size 64, with the input selected the CUDA kernels take 128 and 256 of both"
    assert {*dry.plain_attention.values()} == {said}
    (own,) = plan(tmp_path / "checkpoint", tmp_path / "onnx", quantize="int4").indexers[:1]
    assert selection(own) == "6 tokens"
    blocks = IndexerSpec(num_heads=4, head_size=128, top_k=2048, num_groups=4, block_size=128, local_blocks=1)
    assert selection(blocks.attributes()) == "16 blocks of 128 tokens for each of 4 groups of heads"


@pytest.mark.parametrize(("model_type", "leaf"), [("deepseek_v4", "scale"), ("mistral_large4", "qscale_weight")])
def test_scales_of_blocks_have_their_published_names(tmp_path, model_type, leaf):
    """Names that transformers 5.24's quantizer_finegrained_fp8.py renames give the experts of the usual name."""
    experts = []
    for name in (leaf, "weight_scale_inv"):
        folder = tmp_path / name
        make_checkpoint(folder, model_type)
        tensors = load_file(next(folder.glob("*.safetensors")))
        others = {key.removesuffix(".weight") for key in tensors if key.endswith(".weight") and ".experts." not in key}
        left = rewrite_linears(
            folder,
            lambda weight, name=name: {
                "weight": weight.to(torch.float8_e4m3fn),
                name: torch.ones(-(-weight.shape[0] // 128), -(-weight.shape[1] // 128)),
            },
            ignore=sorted(others),
        )
        fields = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": left}
        add_quantization(folder, fields)
        experts.append(plan(folder, tmp_path / "onnx").layers)
    assert experts[0] == experts[1]
    assert "fp8_e4m3" in str(experts[0])


@pytest.mark.every
def test_deepseek_v4_has_standard_nodes_where_its_node_gives_something_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(tmp_path / "checkpoint", "deepseek_v4")
    assert plan(tmp_path / "checkpoint", tmp_path / "onnx", quantize="none", dtype="f16").plain_attention == {}
    rates = {"compressed_sparse_attention": 2, "heavily_compressed_attention": 129}
    make_checkpoint(tmp_path / "long", "deepseek_v4", compress_rates=rates)
    long = plan(tmp_path / "long", tmp_path / "onnx", quantize="none")
    width = "width is 129, expected 2 to 128"
    assert long.plain_attention == {f"model.layers.{i}.self_attn": width for i in (0, 3)}
    monkeypatch.setattr(modeling_deepseek_v4.DeepseekV4RMSNorm, "forward", lambda self, x: 1.01 * x * self.weight)
    other = plan(tmp_path / "checkpoint", tmp_path / "onnx", quantize="none")
    assert len(other.plain_attention) == SIZES["num_hidden_layers"]
    assert {*other.plain_attention.values()} == {"it computes something else than CachedAttention with compressed keys"}


@pytest.mark.every
def test_deepseek_v4_verifies_drafts(tmp_path: Path) -> None:
    """Compressed keys have a state after each token that may be the last one accepted."""
    make_checkpoint(tmp_path / "checkpoint", "deepseek_v4")
    export(tmp_path / "checkpoint", tmp_path / "onnx", quantize="none", logits=5, state_window=5)
    ids = [*range(10, 17)] * 3
    want = Generator(tmp_path / "onnx").generate(ids, 30)
    found = Generator(tmp_path / "onnx", speculate="ngram").generate(ids, 30)
    assert found.tokens == want.tokens
    assert found.speculation is not None
    assert found.speculation.drafted > found.speculation.accepted  # some were taken back


@pytest.mark.parametrize("model_type", every(sorted(INDEXERS), 0))
def test_standard_nodes_select(model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What targets without a kernel of indexers have, on the CPU."""

    def refusal(spec: Any) -> str:
        return "no kernel" if isinstance(spec, IndexerSpec) else CPU.refusal(spec)

    monkeypatch.setitem(TARGETS, "cpu", replace(CPU, refusal=refusal))
    assert difference(model_type, "none", tmp_path) < 2e-5
    assert {*inspect(tmp_path / "onnx")["plain_attention"].values()} == {"no kernel"}


@pytest.mark.every
def test_of_equal_scores_the_lower_positions_are_selected(tmp_path: Path) -> None:
    """All scores are zero."""
    found, ids, model = selecting(tmp_path, ".indexer.weights_proj.weight")
    want = attend_to(model, 6, ids)
    assert np.abs(found - want).max() < 2e-5 * np.abs(want).max()


JOINED = {
    "sarvam_moe": ("model.layers.1.attention.query_key_value", 128),
    "lara_mini": ("model.layers.0.linear_attn.in_proj", 200),
}


@pytest.mark.parametrize("model_type", every(JOINED))
def test_joined_projections_are_floats_of_the_rows_that_config_json_says(model_type: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, model_type)
    stored, rows = JOINED[model_type]
    tensors = load_file(tmp_path / "model.safetensors")
    weight = tensors[f"{stored}.weight"]
    assert len(weight) == rows
    for changed, reason in (
        ({f"{stored}.weight": weight[1:]}, rf"{stored}\.weight is BF16 \[{rows - 1}, 64\], expected {rows} rows"),
        (
            {f"{stored}.weight_packed": weight.clone()},
            rf"{stored}\.weight_packed: .* is quantized, expected a weight of floats",
        ),
    ):
        save_file(tensors | changed, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match=rf"model\.safetensors: {reason}"):
            plan(tmp_path, tmp_path / "onnx", quantize="none")
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    save_file(tensors, tmp_path / "model.safetensors")
    for name in ("head_dim", "linear_key_head_dim"):
        config.pop(name, None)
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"config\.json: .*head_dim.*: expected the sizes that divide the rows"):
        plan(tmp_path, tmp_path / "onnx", quantize="none")


def test_rows_of_gate_and_up_that_alternate(tmp_path: Path) -> None:
    """Each has its own name in the reader, whole and expert by expert."""
    make_checkpoint(tmp_path, "inkling_mm_model")
    tensors, experts = load_file(tmp_path / "model.safetensors"), "model.llm.layers.1.mlp.experts"
    stored, ckpt = tensors[f"{experts}.w13_weight"].float().numpy(), open_checkpoint(tmp_path)
    for first, leaf in enumerate(("gate_proj", "up_proj")):
        name, want = f"{experts}.{leaf}", stored[:, first::2]
        assert np.array_equal(ckpt.tensor(name).astype(np.float32), want)
        assert np.array_equal(ckpt.element(name, 3).astype(np.float32), want[3])
        assert ckpt.sample(name, 6) in ckpt.tensor(name).tobytes()
    odd = tensors | {f"{experts}.w13_weight": tensors[f"{experts}.w13_weight"][:, 1:].contiguous()}
    save_file(odd, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"w13_weight is BF16 \[8, 127, 64\], expected an even number of rows"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("caps", [(0.0, 2.0), (1.0, -2.0)])
def test_caps_of_a_gate_are_positive(caps: tuple[float, float], tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "inkling2_text", mlp_gate_softcap=caps[0], mlp_up_softcap=caps[1])
    found = f"mlp_gate_softcap and mlp_up_softcap are {caps[0]:g} and {caps[1]:g}, expected positive numbers"
    with pytest.raises(CheckpointError, match=rf"config\.json: {found}"):
        plan(tmp_path, tmp_path / "onnx", quantize="none")


@pytest.mark.every
def test_mimos_values_are_scaled_behind_the_node(tmp_path: Path) -> None:
    """One node with its published widths on both engines. It caches values before attention_value_scale, so that codes
    of them have a scale as much larger."""
    make_checkpoint(tmp_path / "checkpoint", "mimo_v2_flash", head_dim=192, v_head_dim=128)
    dry = plan(tmp_path / "checkpoint", tmp_path / "onnx", quantize="none", target="cuda")
    assert dry.plain_attention == {}
    export(tmp_path / "checkpoint", tmp_path / "onnx", quantize="none", cache="fp8")
    nodes = inspect(tmp_path / "onnx")["attention"]
    assert len(nodes) == 4
    assert [node["attributes"]["v_scale"] * 0.707 for node in nodes] == pytest.approx([1.0] * 4)
    assert {node["attributes"]["k_scale"] for node in nodes} == {1.0}
    assert not (tmp_path / "onnx" / "genai_config.json").exists()  # which has one width for keys and values


def test_kimis_layers(tmp_path: Path) -> None:
    """Counted as they are published, one of full attention at least; --quantize rounds nothing that stays float."""
    make_checkpoint(tmp_path / "kimi", "kimi_linear")
    dry = plan(tmp_path / "kimi", tmp_path / "onnx", quantize="int4", group_size=32)
    assert dry.dequantized == {}
    path = tmp_path / "kimi" / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    kinds = config.pop("layer_types")
    lists = {
        name: [i + 1 for i, own in enumerate(kinds) if own == kind]
        for name, kind in (("kda_layers", "linear_attention"), ("full_attn_layers", "full_attention"))
    }
    counted = ", ".join(f"{len(lists[name])} layers of {kind}" for name, kind in
                        (("kda_layers", "linear attention"), ("full_attn_layers", "full attention")))  # fmt: skip
    path.write_text(json.dumps(config | {"linear_attn_config": lists}), encoding="utf-8")
    found = survey(tmp_path / "kimi")
    assert found["attention"] == counted
    assert {layer["shared_size"] for layer in found["layers"]} == {SIZES["moe_intermediate_size"]}
    path.write_text(json.dumps(config | {"layer_types": ["linear_attention"] * len(kinds)}), encoding="utf-8")
    with pytest.raises(
        CheckpointError, match=r"4 layers of linear attention alone; expected one of full attention among"
    ):
        plan(tmp_path / "kimi", tmp_path / "onnx", quantize="int4", group_size=32)


def test_messages_name_the_tensors_of_the_file(tmp_path: Path) -> None:
    """Granite's experts have other names than every other family's, which the exporter uses."""
    make_checkpoint(tmp_path, "granitemoe")
    stored = "model.layers.3.block_sparse_moe.output_linear.weight"
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {stored: tensors[stored][:, :, 1:].contiguous()}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: {stored} is BF16 \[8, 64, 63\], expected"):
        plan(tmp_path, tmp_path / "onnx", quantize="none")


def test_the_thinker_of_a_model_that_also_speaks(tmp_path: Path) -> None:
    """Qwen3-Omni is published whole; its text model is under ``thinker``."""
    make_checkpoint(tmp_path / "thinker", "qwen3_omni_moe_thinker")
    config = json.loads((tmp_path / "thinker" / "config.json").read_text(encoding="utf-8"))
    tensors = load_file(tmp_path / "thinker" / "model.safetensors")
    (tmp_path / "omni").mkdir()
    whole = {"model_type": "qwen3_omni_moe", "enable_audio_output": False, "thinker_config": config}
    (tmp_path / "omni" / "config.json").write_text(json.dumps(whole), encoding="utf-8")
    named = {f"thinker.{name}": tensor for name, tensor in tensors.items()}
    named["talker.model.norm.weight"] = torch.ones(4, dtype=torch.bfloat16)
    save_file(named, tmp_path / "omni" / "model.safetensors")
    found = {}
    for name in ("thinker", "omni"):
        report = export(tmp_path / name, tmp_path / f"{name}.onnx", quantize="none", activations="float", cache="f32")
        generator = Generator(tmp_path / f"{name}.onnx")
        found[name] = generator.step(np.arange(3, 9)[None], generator.start(1))[0]
    assert np.array_equal(found["omni"], found["thinker"])
    assert "parts that hear and speak (talker.model.norm.weight and" in report.left_out
    assert survey(tmp_path / "omni")["left_out"] == report.left_out


@pytest.mark.parametrize("outer", every(INSIDE))
def test_the_text_model_inside_a_model_that_sees(outer: str, tmp_path: Path) -> None:
    """The dry run of both has the same nodes."""
    text, part, prefix = INSIDE[outer]
    make_checkpoint(tmp_path / "text", text)
    config = json.loads((tmp_path / "text" / "config.json").read_text(encoding="utf-8"))
    tensors = load_file(tmp_path / "text" / "model.safetensors")
    (tmp_path / "whole").mkdir()
    towers = {"vision_config": {"adapter_out_dim": 64}, "audio_config": {"adapter_out_dim": 64}}
    whole = {"model_type": outer, "tie_word_embeddings": False, part: config}
    whole |= towers if outer == "dots3_note" else {}
    (tmp_path / "whole" / "config.json").write_text(json.dumps(whole), encoding="utf-8")
    named = {re.sub("^(model|backbone)[.]", prefix, name): tensor for name, tensor in tensors.items()}
    save_file(named, tmp_path / "whole" / "model.safetensors")
    dry = {
        name: plan(tmp_path / name, tmp_path / "onnx", quantize="none", activations="float")
        for name in ("text", "whole")
    }
    for name in ("layers", "linears", "shared", "plain_attention"):  # whose keys are the checkpoint's names
        whole_rows, text_rows = (getattr(dry[part], name) for part in ("whole", "text"))
        assert [*whole_rows.values()] == [*text_rows.values()], name
    for name in ("dense", "indexers", "cache", "states"):
        assert getattr(dry["whole"], name) == getattr(dry["text"], name), name
    assert len(dry["text"].layers) > 0


@pytest.mark.parametrize("alone", ALONE)
def test_a_text_model_that_is_published_alone(alone: str, tmp_path: Path) -> None:
    """Its logits are those of the text model inside the other."""
    make_checkpoint(tmp_path / "whole", ALONE[alone])
    config = json.loads((tmp_path / "whole" / "config.json").read_text(encoding="utf-8"))["text_config"]
    assert config["model_type"] == alone
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tensors = load_file(tmp_path / "whole" / "model.safetensors")
    text = {name: tensor for name, tensor in tensors.items() if name.startswith(("model.", "lm_head."))}
    save_file(text, tmp_path / "text" / "model.safetensors", {"format": "pt"})
    ids, found = np.random.default_rng(0).integers(3, SIZES["vocab_size"], (2, 14)), {}
    for name in ("whole", "text"):
        export(tmp_path / name, tmp_path / f"{name}.onnx", quantize="none", activations="float", cache="f32")
        found[name] = logits_of(tmp_path / f"{name}.onnx", ids).tobytes()
    assert found["whole"] == found["text"]


def prune(folder: Path, name: str, keep: dict[int, int], dense: int | None = None, **fields: Any) -> Any:
    """Write a checkpoint whose layers have other numbers of experts than config.json, and return transformers' model
    with the same layers."""
    make_checkpoint(folder, name, **fields)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tensors = load_file(folder / "model.safetensors")
    for i, layer in enumerate(model.model.layers):
        experts = getattr(layer.mlp, "experts", None)
        if experts is None or i not in keep:
            continue
        count, old = keep[i], experts.num_experts
        router = getattr(layer.mlp, "gate", None) or layer.mlp.router
        for module in (experts, router):
            module.num_experts = count
            for own in (module._parameters, module._buffers):
                for leaf, tensor in own.items():
                    if tensor is not None and tensor.shape[:1] == (old,):
                        made = tensor.data[:count]
                        own[leaf] = torch.nn.Parameter(made) if own is module._parameters else made
        for tensor in [tensor for tensor in tensors if f".layers.{i}.mlp." in tensor]:
            if expert := re.search(r"\.experts\.(\d+)\.", tensor):
                if int(expert[1]) >= count:
                    del tensors[tensor]
            elif tensors[tensor].shape[:1] == (old,):
                tensors[tensor] = tensors[tensor][:count].clone()
    if dense is not None:
        layer, source = model.model.layers[dense], model.model.layers[0].mlp
        layer.mlp = copy.deepcopy(source)
        prefix = f"model.layers.{dense}.mlp."
        tensors = {key: value for key, value in tensors.items() if not key.startswith(prefix)}
        tensors |= {prefix + key: value.bfloat16().clone() for key, value in source.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return model


def logits_of(folder: Path, ids: np.ndarray, pieces: tuple[int, ...] = (10, 1, 1, 2)) -> np.ndarray:
    """Return the logits of a prompt, then of the next tokens."""
    generator, found, at = Generator(folder, num_logits=max(pieces)), [], 0
    past = generator.start(len(ids))
    for piece in pieces:
        logits, past = generator.step(ids[:, at : at + piece], past)
        found.append(logits)
        at += piece
    return np.concatenate(found, axis=1)


PRUNED: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"keep": {0: 5, 2: 6}},
    "deepseek_v3": {"keep": {1: 12, 3: 6}, "n_group": 2, "topk_group": 1},
    "gpt_oss": {"keep": {1: 5, 2: 3}},
    "glm4_moe_lite": {"keep": {1: 5}, "dense": 2},
}


@pytest.mark.parametrize("name", every(PRUNED, 2))
def test_experts_pruned_layer_by_layer(name: str, tmp_path: Path) -> None:
    """config.json has one number; the tensors have the layers'."""
    model = prune(tmp_path / "checkpoint", name, **PRUNED[name])
    keep = PRUNED[name]["keep"]
    found = {
        int(layer["module"].split(".")[2]): layer["experts"] for layer in survey(tmp_path / "checkpoint")["layers"]
    }
    assert {i: found[i] for i in keep} == keep
    floats: dict[str, Any] = {"quantize": "none", "activations": "float", "cache": "f32", "logits": "all"}
    dry = plan(tmp_path / "checkpoint", tmp_path / "onnx", **floats)
    report = export(tmp_path / "checkpoint", tmp_path / "onnx", **floats)
    assert {module: layer[:2] for module, layer in dry.layers.items()} == report.layers
    assert len(report.layers) == len(found)
    ids = np.random.default_rng(0).integers(3, SIZES["vocab_size"], (2, 14))
    with torch.no_grad():
        want = model(torch.from_numpy(ids)).logits.numpy()
    assert np.abs(logits_of(tmp_path / "onnx", ids) - want).max() < 2e-5 * np.abs(want).max()


def test_experts_of_a_token_by_layer(tmp_path: Path) -> None:
    """``per_layer_config`` of transformers."""
    make_checkpoint(tmp_path / "checkpoint", "qwen3_moe")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint", dtype=torch.float32).eval()
    path = tmp_path / "checkpoint" / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    own = {"1": {"num_experts_per_tok": 3}, "3": {"num_experts_per_tok": 1}}
    path.write_text(json.dumps(config | {"per_layer_config": own}), encoding="utf-8")
    for i, fields in own.items():
        model.model.layers[int(i)].mlp.gate.top_k = fields["num_experts_per_tok"]
    export(tmp_path / "checkpoint", tmp_path / "onnx", quantize="none", activations="float", logits="all", cache="f32")
    ids = np.random.default_rng(0).integers(3, SIZES["vocab_size"], (2, 14))
    with torch.no_grad():
        want = model(torch.from_numpy(ids)).logits.numpy()
    assert np.abs(logits_of(tmp_path / "onnx", ids) - want).max() < 2e-5 * np.abs(want).max()
