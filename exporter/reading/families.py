"""Facts of model families that only their own checkpoints have, from config.json and tensor names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

#: model_type of families that read all tokens of a text at once and write none
ENCODERS = ("openai_privacy_filter",)
#: model_type of families whose experts are rows of tables, which no node of experts has
_ROWS = ("doge",)
#: how the names of the layers begin that draft in MiMo
MIMO = "model.mtp.layers."
#: what the names of an EAGLE-3 head's tensors begin with, and of the matrix by which the model makes its features
EAGLE3, FEATURES = "eagle3.", "features."
#: what a layer that drafts has beside a decoder layer's tensors: one of DeepSeek-V3's and GLM-4.5's, one of MiMo's
_DRAFTS = "eh_proj|enorm|hnorm"
_MIMO_DRAFTS = f"{_DRAFTS}|pre_mlp_layernorm|final_layernorm"
#: model_type of families whose rows of gate and up alternate in one tensor
_ALTERNATING = ("gpt_oss",)
#: model_type of families whose fused experts are [E, in, out]
_TRANSPOSED = ("gpt_oss", "llama4", "llama4_text", "aria_text", "openai_privacy_filter")
#: model_type of families whose fused experts are [E, in, out] unless their shape says otherwise
_EITHER = ("qwen3_vl_moe_text",)


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
    return config.get("model_type") in _ROWS and config.get("is_moe") is True


def halves(config: Mapping[str, Any], size: int) -> tuple[slice, slice]:
    """Return the rows of gate and of up where the model keeps both in one tensor; size: rows of one."""
    if config.get("model_type") in _ALTERNATING:
        return slice(0, None, 2), slice(1, None, 2)
    return slice(0, size), slice(size, None)


def is_transposed(config: Mapping[str, Any], name: str, differs: bool) -> bool:
    """Return whether a fused tensor of experts is [E, in, out].

    Args:
        name: of the tensor: down_proj, .. differs: its shape is not [E, out, in].
    """
    family = config.get("model_type")
    if family == "dbrx":
        return name == "down_proj"
    return family in _TRANSPOSED or (family in _EITHER and differs)


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
