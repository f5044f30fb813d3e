"""A GGUF file of a model's sizes with random weights, for llama.cpp as a peer of ``quantmoe bench model``.

Names come from the ``gguf`` package's map of transformers' names. A field is written if llama.cpp's loaders read it
(its src/models/*.cpp) and a size or a speed depends on it. There is no tokenizer: prompts are token ids.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from quantmoe.benchmarks.random_checkpoint import embedding_deviation, model_config, parameters, quantized

#: transformers' model_type -> gguf.MODEL_ARCH
ARCHITECTURES = {
    "qwen3_moe": "QWEN3MOE",
    "gpt_oss": "GPT_OSS",
    "mixtral": "LLAMA",
    "deepseek_v3": "DEEPSEEK2",
    "glm4_moe": "GLM4_MOE",
    "qwen3_5_moe_text": "QWEN35MOE",
    "qwen3_next": "QWEN3NEXT",
}
#: vectors that are parameters of their own -> what stands for the module in the map of names, and the leaf
VECTORS = {"e_score_correction_bias": ("e_score_correction", "bias"), "dt_bias": ("dt_proj", "bias")}
#: rows of random weights; a matrix repeats them
ROWS = 256
#: llama.cpp's file types (llama-quant.cpp): the type of most linears and of embeddings, of v and down in some layers
MIXED = {"Q4_0": ("Q4_0", "Q4_0"), "Q4_K_M": ("Q4_K", "Q6_K"), "Q5_K_M": ("Q5_K", "Q6_K")}
#: types as Unsloth's files of Qwen's hybrids mix them: which names, and their type; the first that fits
UNSLOTH = {
    "UD-Q4_K_XL": {"lm_head|embed": "Q6_K", r"experts\.down": "Q5_K", r"experts\.": "Q4_K", "shared|attn": "Q8_0"},
    "UD-Q3_K_XL": {"lm_head|embed": "Q6_K", r"experts\.down": "IQ4_XS", r"experts\.": "Q3_K", "shared|attn": "Q8_0"},
}
#: types that gguf-py does not quantize to: where their f16 are, and those of random blocks of deviation 1
RANDOM = {
    "Q4_K": ((0, 1 / 190), (2, 7.5 / 190)),
    "Q5_K": ((0, 1 / 380), (2, 15.5 / 380)),
    "Q6_K": ((208, 1 / 1400),),
    "Q3_K": ((108, 1 / 43),),
    "IQ4_XS": ((0, 1 / 1246),),
}


def write_gguf(path: Path, config: Mapping[str, Any], weights: str = "Q4_0", head: str = "") -> int:
    """Write the file; return its bytes.

    Args:
        config: a Hugging Face configuration.
        weights: one of MIXED, UNSLOTH, Q8_0, MXFP4, or with ``head`` the GGMLQuantizationType of experts and other
            linears.
        head: of lm_head and embeddings, whose linears then have one type; without it, the file type's.

    Raises:
        ValueError: an architecture or a tensor that llama.cpp has no name for.
    """
    import gguf

    if config["model_type"] not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ValueError(f"no GGUF of model_type {config['model_type']}; expected one of {known}")
    arch = gguf.MODEL_ARCH[ARCHITECTURES[config["model_type"]]]
    tensors = dict(_tensors(config, arch, weights, head))
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    try:
        _fields(writer, config, tensors)
        for name, (shape, kind) in tensors.items():
            block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
            if shape[-1] % block:
                raise ValueError(f"{name} has rows of {shape[-1]}, {kind} has blocks of {block}")
            kind_of = gguf.GGMLQuantizationType[kind]
            writer.add_tensor_info(name, shape, np.dtype(np.float32), prod(shape) // block * size, kind_of)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        pools: dict[tuple[str, int, float], np.ndarray] = {}
        for name, (shape, kind) in tensors.items():
            if len(shape) == 1:  # ssm_a: what gates are multiplied by, the logarithm of a decay
                writer.write_tensor_data(np.full(shape, -1 if name.endswith("ssm_a") else 1, np.float32))
                continue
            deviation = shape[-1] ** -0.5
            if name.startswith("token_embd"):
                deviation = embedding_deviation(config["num_hidden_layers"])
            key = kind, shape[-1], deviation
            if key not in pools:
                pools[key] = _rows(*key)
            pool = pools[key]
            writer.write_tensor_data(np.resize(pool, (prod(shape[:-1]), pool.shape[1])))
    finally:
        writer.close()
    return path.stat().st_size


def _rows(kind: str, columns: int, deviation: float) -> np.ndarray:
    """Return ROWS rows of random weights, uint8 [ROWS, bytes], or floats."""
    import gguf

    rng = np.random.default_rng(0)
    if kind not in RANDOM:
        normal = rng.normal(0, deviation, (ROWS, columns)).astype(np.float32)
        return np.asarray(gguf.quants.quantize(normal, gguf.GGMLQuantizationType[kind]))
    weights, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = rng.integers(0, 256, (ROWS, columns // weights, size), np.uint8)
    for at, scale in RANDOM[kind]:
        blocks[..., at : at + 2] = np.array([scale * deviation], "<f2").view(np.uint8)
    return blocks.reshape(ROWS, -1)


def _mixed(name: str, columns: int, layers: int, weights: str) -> str:
    """Return the type that llama.cpp's quantizer gives a matrix.

    More bits are for lm_head, and for v and down in the first and last eighth of the layers and in every third between.
    MXFP4 is for experts.
    """
    if weights in UNSLOTH:
        return next(kind for names, kind in UNSLOTH[weights].items() if re.search(names, name))
    if weights in ("Q8_0", "MXFP4"):
        return weights if ".experts." in name else "Q8_0"
    most, more = MIXED.get(weights, (weights, weights))
    if "lm_head" in name:
        return "Q8_0" if columns % 256 else "Q6_K"
    if not name.endswith(("v_proj.weight", "down_proj.weight", "down_proj")):
        return most
    i = int(name.split(".layers.")[1].split(".")[0])
    return more if i < layers // 8 or i >= 7 * layers // 8 or (i - layers // 8) % 3 == 2 else most


def _tensors(
    config: Mapping[str, Any], arch: Any, weights: str, head: str
) -> Iterator[tuple[str, tuple[tuple[int, ...], str]]]:
    """llama.cpp's name -> shape, type."""
    import gguf

    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    for name, shape in parameters(config).items():
        stem, _, leaf = name.rpartition(".")
        if leaf in VECTORS:
            module, leaf = VECTORS[leaf]
            stem = f"{stem}.{module}"
        elif leaf == "sinks":
            stem, leaf = name, "weight"
        elif stem.endswith(("conv1d", "shared_expert_gate")):
            shape = tuple(n for n in shape if n > 1)
        kind = "F32"
        if not head and (quantized(name) or "lm_head" in name or "embed" in name):
            kind = _mixed(name, shape[-1], config["num_hidden_layers"], weights)
        elif quantized(name):
            kind = weights
        elif "lm_head" in name or "embed" in name:
            kind = head
        if stem.endswith("kv_b_proj"):  # llama.cpp multiplies the latent by its halves, one a head
            made = model_config(config)
            heads, rank, key, value = (
                getattr(made, field)
                for field in ("num_attention_heads", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim")
            )
            at = str(names.get_name(stem)).removesuffix("_kv_b")
            yield f"{at}_k_b.weight", ((heads, rank, key), kind)
            yield f"{at}_v_b.weight", ((heads, value, rank), kind)
        elif leaf == "A_log":
            yield str(names.get_name(name)), (shape, kind)
        elif found := names.get_name(stem):
            yield f"{found}.{leaf}", (shape, kind)
        else:
            raise ValueError(f"llama.cpp has no name for {name}")


def _fields(writer: Any, config: Mapping[str, Any], tensors: Mapping[str, tuple[tuple[int, ...], str]]) -> None:
    import gguf

    c = model_config(config)
    experts, width = next(shape[:2] for name, (shape, _) in tensors.items() if name.endswith("ffn_gate_exps.weight"))
    writer.add_tokenizer_model("none")
    writer.add_vocab_size(c.vocab_size)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_block_count(c.num_hidden_layers)
    if getattr(c, "intermediate_size", None):
        writer.add_feed_forward_length(c.intermediate_size)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_expert_count(experts)
    writer.add_expert_used_count(c.num_experts_per_tok)
    writer.add_expert_feed_forward_length(width)
    writer.add_head_count(c.num_attention_heads)
    if getattr(c, "n_shared_experts", None):
        writer.add_expert_shared_count(c.n_shared_experts)
        writer.add_leading_dense_block_count(c.first_k_dense_replace)
        writer.add_expert_weights_scale(c.routed_scaling_factor)
        writer.add_expert_weights_norm(c.norm_topk_prob)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        if c.n_group > 1:
            writer.add_expert_group_count(c.n_group)
            writer.add_expert_group_used_count(c.topk_group)
    if getattr(c, "kv_lora_rank", None):  # a single head as wide as the latent
        writer.add_head_count_kv(1)
        writer.add_q_lora_rank(c.q_lora_rank)
        writer.add_kv_lora_rank(c.kv_lora_rank)
        writer.add_key_length(c.kv_lora_rank + c.qk_rope_head_dim)
        writer.add_value_length(c.kv_lora_rank)
        writer.add_key_length_mla(c.qk_nope_head_dim + c.qk_rope_head_dim)
        writer.add_value_length_mla(c.v_head_dim)
        writer.add_rope_dimension_count(c.qk_rope_head_dim)
        return
    width = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    rope = getattr(c, "rope_parameters", None) or {}
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_key_length(width)
    writer.add_value_length(width)
    turned = int(width * rope.get("partial_rotary_factor", 1))
    writer.add_rope_dimension_count(turned)
    kinds = getattr(c, "layer_types", None) or ()
    if "sliding_attention" in kinds:
        writer.add_sliding_window(c.sliding_window)
    if "linear_attention" in kinds:
        writer.add_expert_shared_feed_forward_length(c.shared_expert_intermediate_size)
        writer.add_full_attention_interval([*kinds, "full_attention"].index("full_attention") + 1)
        writer.add_rope_dimension_sections([turned // 2, 0, 0, 0])  # text positions alone
        writer.add_ssm_conv_kernel(c.linear_conv_kernel_dim)
        writer.add_ssm_state_size(c.linear_key_head_dim)
        writer.add_ssm_group_count(c.linear_num_key_heads)
        writer.add_ssm_time_step_rank(c.linear_num_value_heads)
        writer.add_ssm_inner_size(c.linear_num_value_heads * c.linear_value_head_dim)
