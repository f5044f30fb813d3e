"""Facts of model types that other types lack: a row of :data:`FAMILIES` for each, and functions of config.json.

A new type needs a row if its checkpoints or its arithmetic differ from what :class:`Family` has without arguments.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

#: gates of experts with numbers of their own -> swiglu_alpha and swiglu_limit of the node: what config.json calls them,
#: and what they are where it does not; "": the node reads none. They are gpt-oss's, DeepSeek-V4's, whose linear part is
#: clamped before SiLU, and Inkling 2's, whose linear part tanh limits.
GATES = {
    "swiglu_oai": (("swiglu_alpha", 1.702), ("swiglu_limit", 7.0)),
    "swiglu_clamp": (("", 0.0), ("swiglu_limit", 7.0)),
    "swiglu_tanh": (("mlp_gate_softcap", 4.0), ("mlp_up_softcap", 25.0)),
}


@dataclass(frozen=True, kw_only=True)
class Family:
    """Facts of one model type that others lack.

    Attributes:
        names: ends of its tensors' names -> what every other family calls these tensors.
        divided: a linear that joins several of transformers' model, and a function of the text model's configuration:
            their names and numbers of rows.
        alternating: ends of tensors whose rows alternate between gate and up -> what transformers calls these two.
        alternating_experts: rows of gate and up alternate in the experts' one tensor, here and in transformers.
        experts_format: quant_method of experts that have scales of their own, whatever config.json says.
        transposed: the fused tensors of experts that are [E, in, out]: all, one by its name, or those whose shape says
            so.
        experts_as_rows: part of the names of experts' tensors that are stored as [E rows, columns].
        fields: fields of config.json under the names of other families.
        gate: what the gate of its experts is, whatever config.json calls it: a key of :data:`GATES`.
        hidden_act: what config.json does not name.
        counts_some: experts beyond the counted ones are for images, or have no weights.
        norm_after_expert: each expert of a token is a token of one expert to the node.
        weighs_inputs: a router's weights are factors of the experts' inputs.
        unsupported: what no operator computes of it; "" where all is computed.
        text_class: folder of transformers.models and class of the text model, where transformers has it without a
            language model's head; () where it has both.
        named_outside: its tensors have names of the model around it, also without a text_class.
        genai: onnxruntime-genai's name of the same decoder.
        row_experts: experts are rows of tables, which no node of experts has, where config.json says is_moe.
        encoder: it reads all tokens of a text at once and writes none.
    """

    names: Mapping[str, str] = field(default_factory=dict)
    divided: tuple[str, Callable[[Mapping[str, int]], dict[str, int]]] | None = None
    alternating: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    alternating_experts: bool = False
    experts_format: str = ""
    transposed: Literal["", "all", "down_proj", "by shape"] = ""
    experts_as_rows: str = ""
    fields: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None
    gate: str = ""
    hidden_act: str = ""
    counts_some: bool = False
    norm_after_expert: bool = False
    weighs_inputs: bool = False
    unsupported: str = ""
    text_class: tuple[str, str] | tuple[()] = ()
    named_outside: bool = False
    genai: str = "llama"
    row_experts: bool = False
    encoder: bool = False


def _attention_rows(config: Mapping[str, int]) -> dict[str, int]:
    size = config["head_dim"]
    heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"], "v": config["num_key_value_heads"]}
    return {f"{name}_proj": count * size for name, count in heads.items()}


def _delta_rows(config: Mapping[str, int]) -> dict[str, int]:
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = config["linear_num_value_heads"]
    z = values * config["linear_value_head_dim"]
    return {"in_proj_qkv": 2 * keys + z, "in_proj_z": z, "in_proj_b": values, "in_proj_a": values}


def _dbrx_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    own = config.get("ffn_config")
    inner: Mapping[str, Any] = own if isinstance(own, dict) else {}
    activation = inner.get("ffn_act_fn")
    return {
        "hidden_size": config.get("d_model"),
        "num_hidden_layers": config.get("n_layers"),
        "num_attention_heads": config.get("n_heads"),
        "max_position_embeddings": config.get("max_seq_len"),
        "intermediate_size": inner.get("ffn_hidden_size"),
        "num_experts": inner.get("moe_num_experts"),
        "num_experts_per_tok": inner.get("moe_top_k"),
        "hidden_act": activation.get("name", "silu") if isinstance(activation, dict) else "silu",
    }


#: of an encoder and a decoder; the encoder alone has this router, too
_DROPS = "a router that drops tokens beyond an expert's capacity"
_W13 = {".mlp.experts.w13_weight": (".mlp.experts.gate_proj", ".mlp.experts.up_proj")}
_W13_SCALES = {
    ".mlp.experts.w13_weight_scale": (".mlp.experts.gate_proj_scale", ".mlp.experts.up_proj_scale"),
}
_INKLING2 = Family(
    gate="swiglu_tanh",
    names={
        ".mlp.experts.w2_weight": ".mlp.experts.down_proj",
        ".mlp.experts.w2_weight_scale": ".mlp.experts.down_proj_scale",
        **{
            f".mlp.experts.{ours}_weight_{leaf}": f".mlp.experts.{theirs}_{leaf}"
            for ours, theirs in (("w13", "gate_up_proj"), ("w2", "down_proj"))
            for leaf in ("amax", "outer_scale_denominator")
        },
        "_sconv.weight_proj": "_sconv.weight_proj.weight",
        ".down_weight": ".down_proj.weight",
        ".gain_weight": ".message_gate_proj.weight",
        ".forget_weight": ".forget_gate_proj.weight",
    },
    alternating=_W13 | _W13_SCALES,
    experts_format="inkling2",
)
_GRANITE = Family(
    names={
        ".block_sparse_moe.input_linear.weight": ".block_sparse_moe.experts.gate_up_proj",
        ".block_sparse_moe.output_linear.weight": ".block_sparse_moe.experts.down_proj",
    }
)
#: model_type of the text model, without _text
FAMILIES = {
    "aria": Family(
        names={
            ".mlp.experts.fc1.weight": ".mlp.experts.gate_up_proj",
            ".mlp.experts.fc2.weight": ".mlp.experts.down_proj",
        },
        transposed="all",
    ),
    "dbrx": Family(
        names={
            ".ffn.experts.mlp.w1": ".ffn.experts.gate_proj",
            ".ffn.experts.mlp.v1": ".ffn.experts.up_proj",
            ".ffn.experts.mlp.w2": ".ffn.experts.down_proj",
        },
        transposed="down_proj",
        experts_as_rows=".ffn.experts.",
        fields=_dbrx_fields,
    ),
    "deepseek_ocr2": Family(text_class=("deepseek_ocr2", "DeepseekOcr2TextModel")),
    "deepseek_v4": Family(names={".scale": ".weight_scale_inv"}, gate="swiglu_clamp"),
    "diffusion_gemma": Family(unsupported="diffusion, which writes many tokens at once"),
    "doge": Family(row_experts=True),
    "dots3_note_vision_encoder": Family(unsupported="a vision tower alone"),
    "ernie4_5_vl_moe": Family(text_class=("ernie4_5_vl_moe", "Ernie4_5_VLMoeTextModel"), counts_some=True),
    "glm4v_moe": Family(text_class=("glm4v_moe", "Glm4vMoeTextModel")),
    "glm5_next": Family(text_class=("glm5_next", "Glm5NextTextModel"), gate="swiglu_clamp"),
    "gpt_oss": Family(gate="swiglu_oai", alternating_experts=True, transposed="all"),
    "granitemoe": _GRANITE,
    "granitemoehybrid": _GRANITE,
    "granitemoeshared": _GRANITE,
    "hy_v4": Family(gate="swiglu_clamp"),
    "hy_v4_vl": Family(text_class=("hy_v4_vl", "HYV4VLTextModel"), gate="swiglu_clamp"),
    "inkling": Family(
        named_outside=True,
        hidden_act="silu",
        names={
            ".attn.wq_du.weight": ".self_attn.q_proj.weight",
            ".attn.wk_dv.weight": ".self_attn.k_proj.weight",
            ".attn.wv_dv.weight": ".self_attn.v_proj.weight",
            ".attn.wr_du.weight": ".self_attn.r_proj.weight",
            ".attn.wo_ud.weight": ".self_attn.o_proj.weight",
            ".mlp.w2_md.weight": ".mlp.down_proj.weight",
            ".mlp.experts.w2_weight": ".mlp.experts.down_proj",
            ".mlp.shared_experts.shared_w2_weight": ".mlp.shared_experts.down_proj",
        },
        alternating=_W13
        | {
            ".mlp.w13_dn.weight": (".mlp.gate_proj.weight", ".mlp.up_proj.weight"),
            ".mlp.shared_experts.shared_w13_weight": (".mlp.shared_experts.gate_proj", ".mlp.shared_experts.up_proj"),
        },
    ),
    "inkling2": _INKLING2,
    "inkling2_loop": _INKLING2,
    "jetmoe": Family(
        names={
            ".mlp.input_linear.weight": ".mlp.experts.gate_up_proj",
            ".mlp.output_linear.weight": ".mlp.experts.down_proj",
            ".self_attention.experts.bias": ".self_attention.mixture.bias",
        },
    ),
    "lara_mini": Family(divided=("in_proj", _delta_rows)),
    "lfm2_moe": Family(hidden_act="silu"),
    "llama4": Family(transposed="all", weighs_inputs=True),
    "longcat_flash": Family(hidden_act="silu", counts_some=True),
    "minimax_m3_vl": Family(gate="swiglu_oai"),
    "mistral4": Family(text_class=("mistral4", "Mistral4Model")),
    "mistral_large4": Family(
        names={".qscale_weight": ".weight_scale_inv"}, text_class=("mistral_large4", "MistralLarge4TextModel")
    ),
    "mixtral": Family(genai="mistral"),
    "muse_spark": Family(text_class=("muse_spark", "MuseSparkTextModel"), norm_after_expert=True),
    "nemo_speechlm": Family(unsupported="a text model that writes what an encoder hears"),
    "nllb-moe": Family(unsupported=_DROPS),
    "olmoe": Family(genai="olmo"),
    "openai_privacy_filter": Family(gate="swiglu_oai", hidden_act="silu", transposed="all", encoder=True),
    "qwen3_5_moe": Family(genai="qwen3_5_moe_text"),
    "qwen3_moe": Family(genai="qwen3"),
    "qwen3_omni_moe": Family(text_class=("qwen3_omni_moe", "Qwen3OmniMoeThinkerTextModel")),
    "qwen3_omni_moe_talker": Family(unsupported="a model of codes of speech"),
    "qwen3_vl_moe": Family(text_class=("qwen3_vl_moe", "Qwen3VLMoeTextModel"), transposed="by shape"),
    "sarvam_moe": Family(divided=("query_key_value", _attention_rows)),
    "step3p5": Family(
        text_class=("step3p7", "Step3p7TextModel"),
        names={f".moe.{name}_proj.weight": f".mlp.experts.{name}_proj" for name in ("gate", "up", "down")},
        hidden_act="silu",
    ),
    "switch_transformers": Family(unsupported=_DROPS),
    "unlimited_ocr": Family(unsupported="attention that sees the whole prompt and a window of the answer"),
    "vitpose": Family(unsupported="a model of images alone"),
    "vitpose_backbone": Family(unsupported="a model of images alone"),
}
_PLAIN = Family()
#: the types of FAMILIES that are refused, and why
UNSUPPORTED = {name: one.unsupported for name, one in FAMILIES.items() if one.unsupported}


def family_named(model_type: Any) -> Family:
    """Return what a model type of config.json has of its own: nothing, where it has no row."""
    return FAMILIES.get(model_type.removesuffix("_text"), _PLAIN) if isinstance(model_type, str) else _PLAIN


#: how the names of the layers begin that draft in MiMo
MIMO = "model.mtp.layers."
#: what the names of an EAGLE-3 head's tensors begin with, and of the matrix by which the model makes its features
EAGLE3, FEATURES = "eagle3.", "features."
#: what a layer that drafts has beside a decoder layer's tensors: one of DeepSeek-V3's and GLM-4.5's, one of MiMo's
_DRAFTS = "eh_proj|enorm|hnorm"
_MIMO_DRAFTS = f"{_DRAFTS}|pre_mlp_layernorm|final_layernorm"


def drafting_prefixes(config: Mapping[str, Any]) -> tuple[str, str]:
    """Return how the names of layers that draft may begin: MiMo's, and a layer's after the last one."""
    return MIMO, f"model.layers.{config.get('num_hidden_layers')}."


def drafting_layer(config: Mapping[str, Any], names: Iterable[str]) -> str:
    """Return the prefix of the first layer that drafts, as the tensors' names show it; "" without one."""
    names, (_, after) = list(names), drafting_prefixes(config)
    if any(name.startswith(EAGLE3) for name in names):
        return EAGLE3
    marks = {after: rf"{re.escape(after)}({_DRAFTS})\.", f"{MIMO}0.": rf"{re.escape(MIMO)}\d+\.({_MIMO_DRAFTS})\."}
    return next((prefix for prefix, mark in marks.items() if any(re.match(mark, name) for name in names)), "")


def drafts_without_experts(layer: str) -> bool:
    """Return whether a layer of :func:`drafting_layer` has a plain feed-forward network."""
    return layer.startswith((MIMO, EAGLE3))


def has_rows_for_experts(config: Mapping[str, Any]) -> bool:
    """Return whether a model's experts are rows of tables."""
    return family_named(config.get("model_type")).row_experts and config.get("is_moe") is True


def halves(config: Mapping[str, Any], size: int) -> tuple[slice, slice]:
    """Return the rows of gate and of up where the model keeps both in one tensor; size: rows of one."""
    if family_named(config.get("model_type")).alternating_experts:
        return slice(0, None, 2), slice(1, None, 2)
    return slice(0, size), slice(size, None)


def is_transposed(config: Mapping[str, Any], name: str, differs: bool) -> bool:
    """Return whether a fused tensor of experts is [E, in, out].

    Args:
        name: of the tensor: down_proj, .. differs: its shape is not [E, out, in].
    """
    which = family_named(config.get("model_type")).transposed
    return which in ("all", name) or (which == "by shape" and differs)


def layer_kinds(config: Mapping[str, Any]) -> list[str]:
    """Return the kind of each layer, as config.json says it; [] where it says none."""
    types = config.get("layer_types") or config.get("layers_block_type")
    if types is None:
        types = _of_pattern(config.get("hybrid_override_pattern")) or _of_lists(config.get("linear_attn_config"))
    every, count = config.get("full_attention_interval"), config.get("num_hidden_layers")
    if types is None and type(every) is int and every > 0 and type(count) is int:
        types = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(min(count, 1 << 16))]
    period, at = config.get("attn_layer_period"), config.get("attn_layer_offset")
    if types is None and type(period) is int and period > 0 and type(count) is int:  # Jamba
        types = ["full_attention" if i % period == at else "linear_attention" for i in range(min(count, 1 << 16))]
    return types if isinstance(types, list) and all(isinstance(kind, str) for kind in types) else []


def _of_pattern(pattern: Any) -> list[str] | None:
    """Return Nemotron-H's kinds: a letter for each block."""
    if not isinstance(pattern, str):
        return None
    return [{"M": "linear_attention", "*": "full_attention"}.get(block, "moe") for block in pattern]


def _of_lists(listed: Any) -> list[str] | None:
    """Return Kimi-Linear's kinds: a list of layers for each."""
    kinds = {"kda_layers": "linear_attention", "full_attn_layers": "full_attention"}
    if not isinstance(listed, dict) or not all(isinstance(listed.get(name), list) for name in kinds):
        return None
    numbered = [(i, kind) for name, kind in kinds.items() for i in listed[name] if type(i) is int]
    return [kind for _, kind in sorted(numbered)]
