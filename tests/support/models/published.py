"""What config.json of published models says of mechanisms: facts, by transformers' model_type.

test_architectures.py makes a tiny model of each type from these fields and small sizes. So "runs" in the page of
architectures means the published mechanisms, not the defaults of a configuration class.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Published:
    """A published model.

    Attributes:
        model: its name on the hub.
        seen: how its config.json is known; "": not, ``fields`` are the defaults of transformers 5.24's configuration
            class, which names this model.
        fields: of config.json, in transformers' words, without sizes. Lists of layers are sets of their kinds.
    """

    model: str
    seen: str
    fields: dict[str, Any]


#: the published file as it is known in November 2026; the hub could not be read to check it
_KNOWN = "recalled"
_QUOTED = "quoted in other projects' tests"
_DEFAULTS = ""


def _rope(kind: str = "default", **own: Any) -> dict[str, Any]:
    return {"rope_type": kind, **own}


def _yarn(factor: float, original: int, **own: Any) -> dict[str, Any]:
    return _rope("yarn", factor=factor, original_max_position_embeddings=original, beta_fast=32.0, beta_slow=1.0, **own)


#: Phi-3.5-MoE's lists have 64 factors, of a head of 128; a tiny head of 16 has the first, the last and some between
_SHORT = [1.0, 1.04, 1.04, 1.05, 1.05, 1.05, 1.1, 2.8]
_LONG = [1.02, 1.03, 1.05, 1.06, 1.36, 4.24, 31.32, 64.4]
_MLA = {"norm_topk_prob": True, "rope_interleave": True, "attention_bias": False}

_MISTRAL4 = {
    "norm_topk_prob": True,
    "rope_interleave": True,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "rope_parameters": _rope("yarn", factor=128.0, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.1),
}
_INKLING = {
    "layer_types": {"hybrid", "hybrid_sliding"},
    "mlp_layer_types": {"dense", "sparse"},
    "conv_kernel_size": 4,
    "n_shared_experts": 2,
    "route_scale": 8.0,
    "logits_mup_width_multiplier": 24.0,
}
_INKLING2 = {
    "layer_types": {"hybrid", "hybrid_sliding"},
    "conv_kernel_size": 4,
    "route_scale": 8.0,
    "scoring_func": "sigmoid",
}

#: model_type -> the published model; where there are others of other mechanisms, with a word behind it
PUBLISHED: dict[str, Published] = {
    "qwen3_moe": Published(
        "Qwen/Qwen3-30B-A3B", _KNOWN, {"norm_topk_prob": True, "attention_bias": False, "rope_parameters": _rope()}
    ),
    "mixtral": Published(
        "mistralai/Mixtral-8x7B-Instruct-v0.1", _KNOWN, {"sliding_window": None, "rope_parameters": _rope()}
    ),
    "olmoe": Published(
        "allenai/OLMoE-1B-7B-0924", _KNOWN, {"norm_topk_prob": False, "clip_qkv": None, "rope_parameters": _rope()}
    ),
    "gpt_oss": Published(
        "openai/gpt-oss-20b",
        _KNOWN,
        {
            "layer_types": {"sliding_attention", "full_attention"},
            "rope_parameters": _yarn(32.0, 4096, truncate=False),
            "attention_bias": True,
            "swiglu_limit": 7.0,
        },
    ),
    "deepseek_v3": Published(
        "deepseek-ai/DeepSeek-V3",
        _KNOWN,
        _MLA
        | {"rope_parameters": _yarn(40.0, 4096, mscale=1.0, mscale_all_dim=1.0)}
        | {"n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5},
    ),
    "glm4_moe": Published(
        "zai-org/GLM-4.5",
        _KNOWN,
        {
            "use_qk_norm": True,
            "attention_bias": True,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "rope_parameters": _rope(partial_rotary_factor=0.5),
        },
    ),
    "llama4_text": Published(
        "meta-llama/Llama-4-Scout-17B-16E",
        _KNOWN,
        {
            "layer_types": {"chunked_attention", "full_attention"},
            "use_qk_norm": True,
            "attn_temperature_tuning": True,
            "rope_parameters": _rope(
                "llama3",
                rope_theta=5e5,
                factor=16.0,
                low_freq_factor=1.0,
                high_freq_factor=1.0,
                original_max_position_embeddings=8192,
            ),
        },
    ),
    "llama4_text interleaved": Published(
        "meta-llama/Llama-4-Maverick-17B-128E",
        _KNOWN,
        {
            "layer_types": {"chunked_attention", "full_attention"},
            "use_qk_norm": False,
            "attn_temperature_tuning": True,
            "interleave_moe_layer_step": 2,
            "rope_parameters": _rope(rope_theta=5e5),
        },
    ),
    "qwen3_next": Published(
        "Qwen/Qwen3-Next-80B-A3B-Instruct",
        _KNOWN,
        {
            "layer_types": {"linear_attention", "full_attention"},
            "norm_topk_prob": True,
            "rope_parameters": _rope(partial_rotary_factor=0.25),
        },
    ),
    "qwen3_5_moe_text": Published(
        "Qwen/Qwen3.5-35B-A3B",
        _KNOWN,
        {
            "layer_types": {"linear_attention", "full_attention"},
            "rope_parameters": _rope(partial_rotary_factor=0.25, mrope_interleaved=True),
        },
    ),
    "kimi_linear": Published(
        "moonshotai/Kimi-Linear-48B-A3B-Instruct",
        _KNOWN,
        {
            "layer_types": {"linear_attention", "full_attention"},
            "q_lora_rank": None,
            "routed_scaling_factor": 2.446,
            "moe_renormalize": True,
            "num_expert_group": 1,
        },
    ),
    "lfm2_moe": Published(
        "LiquidAI/LFM2-8B-A1B",
        _KNOWN,
        {
            "layer_types": {"conv", "full_attention"},
            "conv_bias": False,
            "conv_L_cache": 3,
            "use_expert_bias": True,
            "norm_topk_prob": True,
            "tie_word_embeddings": True,
            "rope_parameters": _rope(),
        },
    ),
    "lara_mini": Published(
        "translated/Lara-4-Mini-Base",
        _DEFAULTS,
        {
            "layer_types": {"linear_attention", "sliding_attention", "full_attention"},
            "norm_topk_prob": True,
            "tie_word_embeddings": True,
            "rope_parameters": _rope(),
        },
    ),
    "gemma4_text": Published(
        "google/gemma-4-26B-A4B-it",
        _KNOWN,
        {
            "layer_types": {"sliding_attention", "full_attention"},
            "enable_moe_block": True,
            "attention_k_eq_v": True,
            "final_logit_softcapping": 30.0,
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "full_attention": _rope("proportional", partial_rotary_factor=0.25, rope_theta=1e6),
                "sliding_attention": _rope(rope_theta=1e4),
            },
        },
    ),
    "qwen2_moe": Published(
        "Qwen/Qwen1.5-MoE-A2.7B",
        _KNOWN,
        {"norm_topk_prob": False, "qkv_bias": True, "use_sliding_window": False, "rope_parameters": _rope()},
    ),
    "deepseek_v2": Published(
        "deepseek-ai/DeepSeek-V2-Lite",
        _KNOWN,
        {
            "q_lora_rank": None,
            "topk_method": "greedy",
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.0,
            "rope_parameters": _yarn(40.0, 4096, mscale=0.707, mscale_all_dim=0.707),
        },
    ),
    "deepseek_v2 group_limited_greedy": Published(
        "deepseek-ai/DeepSeek-V2",
        _KNOWN,
        {
            "topk_method": "group_limited_greedy",
            "n_group": 8,
            "topk_group": 3,
            "norm_topk_prob": False,
            "routed_scaling_factor": 16.0,
            "rope_parameters": _yarn(40.0, 4096, mscale=0.707, mscale_all_dim=0.707),
        },
    ),
    "glm4_moe_lite": Published(
        "zai-org/GLM-4.7-Flash",
        _KNOWN,
        _MLA | {"n_group": 1, "routed_scaling_factor": 1.8, "rope_parameters": _rope()},
    ),
    "axk1": Published(
        "skt/A.X-K1",
        _DEFAULTS,
        _MLA | {"n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5, "rope_parameters": _rope()},
    ),
    "sarvam_mla": Published(
        "sarvamai/sarvam-105b",
        _DEFAULTS,
        _MLA | {"q_lora_rank": None, "routed_scaling_factor": 2.5, "rope_parameters": _rope()},
    ),
    "granitemoe": Published(
        "ibm-granite/granite-3.1-3b-a800m-instruct",
        _KNOWN,
        {
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.015625,
            "residual_multiplier": 0.22,
            "logits_scaling": 6.0,
            "tie_word_embeddings": True,
            "rope_parameters": _rope(),
        },
    ),
    "granitemoeshared": Published(
        "ibm-research/moe-7b-1b-active-shared-experts",
        _KNOWN,
        {
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.0078125,
            "residual_multiplier": 0.22,
            "logits_scaling": 6.0,
            "tie_word_embeddings": True,
            "rope_parameters": _rope(),
        },
    ),
    "granitemoe_swa": Published(
        "ibm-granite/granite-swash-3b-a600m",
        _DEFAULTS,
        {"layer_types": {"sliding_attention", "full_attention"}, "rope_parameters": _rope()},
    ),
    "granitemoehybrid": Published(
        "ibm-granite/granite-4.0-h-tiny",
        _KNOWN,
        {
            "layer_types": {"linear_attention", "full_attention"},
            "position_embedding_type": "nope",
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.0078125,
            "residual_multiplier": 0.22,
            "logits_scaling": 6.0,
            "tie_word_embeddings": True,
            "mamba_conv_bias": True,
            "mamba_proj_bias": False,
        },
    ),
    "ernie4_5_moe": Published(
        "baidu/ERNIE-4.5-21B-A3B-PT",
        _KNOWN,
        {
            "use_bias": False,
            "moe_num_shared_experts": 2,
            "tie_word_embeddings": True,
            "rope_parameters": _rope(),
        },
    ),
    "hy_v3": Published(
        "tencent/Hy3-preview",
        _DEFAULTS,
        {
            "router_scaling_factor": 2.826,
            "num_shared_experts": 1,
            "enable_moe_fp32_combine": True,
            "rope_parameters": _rope(rope_theta=11158840.0),
        },
    ),
    "dots1": Published(
        "rednote-hilab/dots.llm1.base",
        _KNOWN,
        {
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "n_group": 1,
            "n_shared_experts": 2,
            "attention_bias": False,
            "rope_parameters": _rope(),
        },
    ),
    "minimax_m2": Published("MiniMaxAI/MiniMax-M2", _KNOWN, {"rope_parameters": _rope(partial_rotary_factor=0.5)}),
    "minimax": Published(
        "MiniMaxAI/MiniMax-Text-01-hf",
        _KNOWN,
        {
            "layer_types": {"linear_attention", "full_attention"},
            "full_attn_alpha_factor": 3.5565588200778455,
            "linear_attn_alpha_factor": 3.5565588200778455,
            "mlp_alpha_factor": 3.5565588200778455,
            "full_attn_beta_factor": 1.0,
            "linear_attn_beta_factor": 1.0,
            "mlp_beta_factor": 1.0,
            "rope_parameters": _rope(),
        },
    ),
    "nemotron_h": Published(
        "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
        _KNOWN,
        {
            "layers_block_type": {"linear_attention", "moe", "full_attention"},
            "mlp_hidden_act": "relu2",
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "n_shared_experts": 1,
            "use_conv_bias": True,
            "attention_bias": False,
            "mlp_bias": False,
            "moe_latent_size": None,
        },
    ),
    "mimo_v2_flash": Published(
        "XiaomiMiMo/MiMo-V2-Flash",
        _KNOWN,
        {
            "layer_types": {"sliding_attention", "full_attention"},
            "attention_value_scale": 0.707,
            "norm_topk_prob": True,
            "rope_parameters": {
                "full_attention": _rope(rope_theta=5e6, partial_rotary_factor=0.334),
                "sliding_attention": _rope(rope_theta=1e4, partial_rotary_factor=0.334),
            },
        },
    ),
    "phimoe": Published(
        "microsoft/Phi-3.5-MoE-instruct",
        _KNOWN,
        {
            "attention_bias": True,
            "lm_head_bias": True,
            "rope_parameters": _rope(
                "longrope",
                rope_theta=1e4,
                original_max_position_embeddings=4096,
                short_factor=_SHORT,
                long_factor=_LONG,
                short_mscale=1.243163121016122,
                long_mscale=1.243163121016122,
            ),
        },
    ),
    "cohere2_moe": Published(
        "CohereLabs/North-Mini-Code-1.0",
        _QUOTED,
        {
            "layer_types": {"sliding_attention", "full_attention"},
            "expert_selection_fn": "sigmoid",
            "norm_topk_prob": False,
            "num_shared_experts": 0,
            "rms_norm_eps": 1e-6,
            "rope_parameters": _rope(rope_theta=5e4),
        },
    ),
    "exaone_moe": Published(
        "LGAI-EXAONE/K-EXAONE-236B-A23B",
        _QUOTED,
        {
            "layer_types": {"sliding_attention", "full_attention"},
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "n_group": 1,
            "num_shared_experts": 1,
            "rope_parameters": _rope(),
        },
    ),
    "flex_olmo": Published(
        "allenai/FlexOlmo-7x7B-1T", _KNOWN, {"norm_topk_prob": False, "rope_parameters": _rope(rope_theta=5e5)}
    ),
    "solar_open": Published(
        "upstage/Solar-Open-100B",
        _QUOTED,
        {
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
            "n_shared_experts": 1,
            "rope_parameters": _rope(
                "yarn", factor=2.0, original_max_position_embeddings=65536, partial_rotary_factor=1.0
            ),
        },
    ),
    "mellum": Published(
        "JetBrains/Mellum2-12B-A2.5B-Base",
        _QUOTED,
        {
            "layer_types": {"sliding_attention", "full_attention"},
            "norm_topk_prob": True,
            "rope_parameters": {
                "full_attention": _yarn(16.0, 8192, rope_theta=5e5, attention_factor=1.2772588722239782),
                "sliding_attention": _rope(rope_theta=5e5),
            },
        },
    ),
    "sarvam_moe": Published(
        "sarvamai/sarvam-30b",
        _DEFAULTS,
        {
            "use_qk_norm": True,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "rope_parameters": _rope(rope_theta=8e6, partial_rotary_factor=1.0),
        },
    ),
    "aria_text": Published("rhymes-ai/Aria", _KNOWN, {"moe_num_shared_experts": 2, "rope_parameters": _rope()}),
    "aria": Published("rhymes-ai/Aria", _KNOWN, {"moe_num_shared_experts": 2, "rope_parameters": _rope()}),
    "flint": Published(
        "RecursiveSI/flint",
        _DEFAULTS,
        {
            "layer_types": {"sliding_attention", "full_attention"},
            "norm_topk_prob": True,
            "rope_parameters": _rope(),
        },
    ),
    "kolibri1": Published(
        "Aleph-Alpha/Kolibri-1",
        _DEFAULTS,
        {
            "layer_types": {"sliding_attention", "full_attention"},
            "norm_topk_prob": False,
            "rope_parameters": _rope(),
        },
    ),
    "afmoe": Published(
        "arcee-ai/Trinity-Mini",
        _QUOTED,
        {
            "layer_types": {"sliding_attention", "full_attention"},
            "mup_enabled": True,
            "route_scale": 2.826,
            "num_shared_experts": 1,
            "rope_parameters": _rope(),
        },
    ),
    "beam": Published(
        "reflection/Beam-1.0-501B-A23B",
        _DEFAULTS,
        {
            "layer_types": {"sliding_attention", "full_attention"},
            "final_logit_softcapping": 30.0,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "n_group": 8,
            "topk_group": 4,
            "rope_parameters": {"sliding_attention": _rope(rope_theta=1e4), "full_attention": None},
        },
    ),
    "hunyuan_v1_moe": Published(
        "tencent/Hunyuan-A13B-Instruct",
        _KNOWN,
        {"tie_word_embeddings": True, "rope_parameters": _rope("dynamic", rope_theta=1e4, alpha=1000.0, factor=1.0)},
    ),
    "laguna": Published(
        "poolside/Laguna-XS.2",
        _QUOTED,
        {
            "layer_types": {"sliding_attention", "full_attention"},
            "gating": "per-head",
            "moe_routed_scaling_factor": 2.5,
            "num_attention_heads_per_layer": {48, 64},
            "rope_parameters": {
                "full_attention": _yarn(32.0, 8192, rope_theta=5e5, partial_rotary_factor=0.5),
                "sliding_attention": _rope(rope_theta=1e4, partial_rotary_factor=1.0),
            },
        },
    ),
    "deepseek_v32": Published(
        "deepseek-ai/DeepSeek-V3.2",
        _DEFAULTS,
        {"norm_topk_prob": True, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5}
        | {"rope_parameters": _yarn(40.0, 4096, mscale=1.0, mscale_all_dim=1.0)},
    ),
    "glm_moe_dsa": Published(
        "zai-org/GLM-5",
        _DEFAULTS,
        {"norm_topk_prob": True, "routed_scaling_factor": 2.5, "n_group": 1, "rope_parameters": _rope()},
    ),
    "axk2": Published(
        "skt/A.X-K2",
        _DEFAULTS,
        {"norm_topk_prob": True, "routed_scaling_factor": 2.5, "n_group": None, "rope_parameters": _rope()},
    ),
    "axk2 groups": Published(
        "skt/A.X-K2",
        _DEFAULTS,
        {"norm_topk_prob": True, "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4},
    ),
    "dots3_note_text": Published(
        "dots-studio/dots3-note-prev",
        _DEFAULTS,
        {
            "layer_types": {"sliding_attention", "indexed_attention"},
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
            "n_group": 1,
        },
    ),
    "mistral_large4": Published(
        "mistralai/Mistral-Large-4-1T-A52B",
        _DEFAULTS,
        {
            "routed_scaling_factor": 1.0,
            "n_group": 1,
            "final_logit_softcapping": 30.0,
            "rope_parameters": _yarn(2048.0, 512, rope_theta=1e4, attention_factor=1.0),
        },
    ),
    "qwen4_exp_text": Published(
        "Qwen/Qwen4-Exp",
        _DEFAULTS,
        {
            "layer_types": {"linear_attention", "indexed_attention"},
            "norm_topk_prob": True,
            "hc_count": 4,
            "ngram_size": 3,
            "ple_conv_kernel_size": 4,
            "output_gate_type": None,
            "rope_parameters": _rope(partial_rotary_factor=0.25, mrope_interleaved=True),
        },
    ),
    "hy_v4": Published(
        "tencent/Hy4-preview",
        _DEFAULTS,
        {"norm_topk_prob": True, "routed_scaling_factor": 2.827, "n_group": 1, "hc_mult": 4, "hc_magnitude": 2.0}
        | {"rope_parameters": _rope()},
    ),
    "hy_v4_vl": Published(
        "tencent/Hy4",
        _DEFAULTS,
        {"norm_topk_prob": True, "routed_scaling_factor": 2.827, "n_group": 1, "hc_mult": 4, "hc_magnitude": 2.0}
        | {"rope_parameters": _rope()},
    ),
    "deepseek_v4": Published(
        "deepseek-ai/DeepSeek-V4-Flash-Base",
        _DEFAULTS,
        {
            "layer_types": {
                "sliding_attention",
                "compressed_sparse_attention",
                "heavily_compressed_attention",
            },
            "mlp_layer_types": {"hash_moe", "moe"},
            "scoring_func": "sqrtsoftplus",
            "routed_scaling_factor": 1.5,
            "hc_mult": 4,
            "hc_sinkhorn_iters": 20,
            "rope_parameters": {
                "main": _rope(rope_theta=1e4, partial_rotary_factor=0.125),
                "compress": _yarn(16.0, 65536, rope_theta=1.6e5, partial_rotary_factor=0.125, attention_factor=1.0),
            },
        },
    ),
    "glm5_next": Published(
        "zai-org/GLM-5.3-Flash",
        _DEFAULTS,
        {
            "layer_types": {"linear_attention", "indexed_attention"},
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "n_group": 1,
            "hc_mult": 4,
            "hc_sinkhorn_iters": 20,
            "linear_lower_bound": -5.0,
            "index_kpool_always_select_tail": True,
        },
    ),
    "longcat_flash": Published(
        "meituan-longcat/LongCat-Flash-Chat",
        _DEFAULTS,
        {"attention_bias": False, "routed_scaling_factor": 6.0, "rope_parameters": _rope(rope_theta=1e7)},
    ),
    "dbrx": Published(
        "databricks/dbrx-instruct",
        _KNOWN,
        {"tie_word_embeddings": False, "rope_parameters": _rope(rope_theta=5e5)},
    ),
    "doge": Published(
        "SmallDoge/Doge-120M-MoE-Instruct",
        _DEFAULTS,
        {"is_moe": True, "attention_bias": False, "norm_topk_prob": False, "rope_parameters": _rope()},
    ),
    "jetmoe": Published(
        "jetmoe/jetmoe-8b",
        _KNOWN,
        {"activation_function": "silu", "tie_word_embeddings": True, "rope_parameters": _rope()},
    ),
    "zaya": Published(
        "Zyphra/ZAYA1-8B",
        _DEFAULTS,
        {
            "layer_types": {"hybrid"},
            "cca_time0": 2,
            "cca_time1": 2,
            "num_experts_per_tok": 1,
            "attention_bias": False,
            "tie_word_embeddings": True,
            "rope_parameters": {"hybrid": _rope(rope_theta=5e6, partial_rotary_factor=0.5)},
        },
    ),
    "inkling_mm_model": Published("thinkingmachines/Inkling", _DEFAULTS, _INKLING),
    "inkling_text": Published("thinkingmachines/Inkling", _DEFAULTS, _INKLING),
    **{
        name: Published("thinkingmachines/Inkling-2-Small-MXFP8", _DEFAULTS, _INKLING2)
        for name in ("inkling2", "inkling2_text")
    },
    **{
        name: Published("thinkingmachines/Inkling-2-Mini", _DEFAULTS, _INKLING2 | {"loop_num_passes": 3})
        for name in ("inkling2_loop", "inkling2_loop_text")
    },
    "jamba": Published(
        "ai21labs/Jamba-v0.1",
        _KNOWN,
        {
            "layer_types": {"linear_attention", "full_attention"},
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_conv_bias": True,
            "mamba_proj_bias": False,
        },
    ),
    "bailing_hybrid": Published(
        "inclusionAI/Ling-3.0-Flash",
        _DEFAULTS,
        {
            "layer_types": {"linear_attention", "full_attention"},
            "kda_safe_gate": True,
            "kda_lower_bound": -5.0,
            "q_lora_rank": None,
            "norm_topk_prob": True,
            "n_group": 8,
            "topk_group": 4,
            "routed_scaling_factor": 2.5,
            "rope_parameters": _rope(rope_theta=6e6),
        },
    ),
    "mistral4": Published("mistralai/Mistral-Small-4-119B-2603", _DEFAULTS, _MISTRAL4),
    "mistral3 mistral4": Published("mistralai/Mistral-Small-4-119B-2603", _DEFAULTS, _MISTRAL4),
    "qwen3_vl_moe": Published(
        "Qwen/Qwen3-VL-30B-A3B-Instruct",
        _KNOWN,
        {"norm_topk_prob": True, "attention_bias": False, "rope_parameters": _rope(mrope_interleaved=True)},
    ),
    "qwen3_omni_moe_thinker": Published(
        "Qwen/Qwen3-Omni-30B-A3B-Instruct",
        _KNOWN,
        {"norm_topk_prob": True, "attention_bias": False, "rope_parameters": _rope(mrope_interleaved=True)},
    ),
    "glm4v_moe": Published(
        "zai-org/GLM-4.5V",
        _KNOWN,
        {
            "attention_bias": True,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
            "n_shared_experts": 1,
            "rope_parameters": _rope(partial_rotary_factor=0.5),
        },
    ),
    "kimi_k25": Published(
        "moonshotai/Kimi-K2.5",
        _KNOWN,
        _MLA
        | {"rope_parameters": _yarn(64.0, 4096, mscale=1.0, mscale_all_dim=1.0)}
        | {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827},
    ),
    "deepseek_ocr2": Published(
        "deepseek-ai/DeepSeek-OCR-2",
        _DEFAULTS,
        {"topk_method": "greedy", "norm_topk_prob": False, "n_shared_experts": 2, "rope_parameters": _rope()},
    ),
    "ernie4_5_vl_moe": Published(
        "baidu/ERNIE-4.5-VL-28B-A3B-PT",
        _DEFAULTS,
        {"use_bias": False, "moe_num_shared_experts": 2, "rope_parameters": _rope(rope_theta=5e5)},
    ),
    "step3p7": Published(
        "stepfun-ai/Step-3.7-Flash",
        _DEFAULTS,
        {
            "layer_types": {"sliding_attention", "full_attention"},
            "gating": True,
            "moe_router_scaling_factor": 3.0,
            "rope_parameters": {
                "full_attention": _rope(
                    "llama3",
                    rope_theta=5e6,
                    partial_rotary_factor=0.5,
                    factor=2.0,
                    low_freq_factor=1.0,
                    high_freq_factor=32.0,
                    original_max_position_embeddings=131072,
                ),
                "sliding_attention": _rope(rope_theta=1e4, partial_rotary_factor=1.0),
            },
        },
    ),
    "muse_spark": Published(
        "meta-models/Muse-Spark-Open-816B-A42B",
        _DEFAULTS,
        {
            "layer_types": {"sliding_attention", "full_attention"},
            "qk_scale_factor": 5.4730064863875,
            "output_multiplier": 0.1767766952966369,
            "final_logit_softcapping": 20.0,
            "residual_gate_temperature": 0.3,
            "rope_parameters": _rope(rope_theta=5e5),
        },
    ),
    "minimax_m3_vl_text": Published(
        "MiniMaxAI/MiniMax-M3",
        _QUOTED,
        {
            "layer_types": {"full_attention", "minimax_m3_sparse"},
            "routed_scaling_factor": 2.0,
            "swiglu_limit": 7.0,
            "swiglu_alpha": 1.702,
            "rope_parameters": _rope(partial_rotary_factor=0.5),
        },
    ),
}


def kept(published: Published) -> str:
    """Return the mechanisms of a published model in the words of docs/lab/published-models.md."""
    words = []
    for name, value in published.fields.items():
        if name == "rope_parameters":
            parts = value if any(isinstance(part, dict) for part in value.values()) else {"": value}
            for layers, part in parts.items():
                where = f"{layers}: " if layers else ""
                words.append(f"{where}{'no rope' if part is None else 'rope ' + part['rope_type']}")
        elif isinstance(value, set):
            words.append(f"{name} {', '.join(map(str, sorted(value)))}")
        else:
            words.append(f"{name} {value}")
    return "; ".join(words)
