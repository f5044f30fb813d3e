"""Common parts of families of GGUF files: names of tensors, fields of configurations, and changes that are undone.

Names and keys are llama.cpp's (gguf-py's constants.py). What its converters changed of the numbers stands in
``conversion`` of its sources.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from quantmoe.exporter.reading.checkpoint import CheckpointError
from quantmoe.exporter.reading.gguf.changed_tensors import ChangedTensors
from quantmoe.exporter.reading.gguf.header import shown
from quantmoe.exporter.reading.gguf.metadata import Metadata

Config = dict[str, Any]


@dataclass(frozen=True)
class Join:
    """A matrix of transformers that the file has as several.

    Attributes:
        parts: GGUF's names of the parts.
        how: it makes the matrix from a configuration and the parts in f32; None: it has the rows of all parts.
    """

    parts: tuple[str, ...]
    how: Callable[[Config, list[np.ndarray]], np.ndarray] | None = None


@dataclass(frozen=True, kw_only=True)
class GgufFamily:
    """Rules for the files of one architecture.

    Attributes:
        names: GGUF's name without ``blk.<layer>.`` and ``.weight`` or ``.bias`` -> transformers' module, {} being an
            expert's number. A name with its end -> a tensor that is no module's weight or bias. "" -> left out.
        config: makes the text model's config.json.
        layer: how transformers' names of a layer's modules begin.
        undo: registers which changes of the numbers are to be undone.
        joined: transformers' module -> the parts that the file has.
    """

    names: Mapping[str, str]
    config: Callable[[Metadata], Config]
    undo: Callable[[ChangedTensors], None] = lambda ckpt: None
    joined: Mapping[str, Join] = field(default_factory=dict)
    layer: str = "model.layers.{}."
    models: str = field(kw_only=True)


ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
DECODER = ATTENTION | {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
QK_NORM = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
#: three projections, by their names in an MLP
MLP = ("gate_proj", "up_proj", "down_proj")


def mlp(name: str, end: str = "", projections: tuple[str, ...] = MLP) -> dict[str, str]:
    """Return the names of gate, up and down.

    Args:
        name: the module of transformers.
        end: how GGUF's names end: "" for a dense MLP, "_exps" for experts, "_shexp" for shared ones.
    """
    return {f"ffn_{part}{end}": f"{name}.{own}" for part, own in zip(("gate", "up", "down"), projections, strict=True)}


def experts(name: str, router: str = "gate", projections: tuple[str, ...] = MLP) -> dict[str, str]:
    """Return the names of experts and their router.

    Args:
        name: the module of transformers that has both.
    """
    return {"ffn_gate_inp": f"{name}.{router}"} | mlp(f"{name}.experts.{{}}", "_exps", projections)


def common(m: Metadata, kind: str, activation: str = "hidden_act", function: str = "silu") -> Config:
    """Return the fields of a configuration that most families have.

    Args:
        activation: the field that names the experts' function.
    """
    hidden, heads = m.integer("embedding_length"), max(m.by_layer("attention.head_count"))
    embeddings = m.shapes.get("token_embd.weight", (0, 0))
    if len(embeddings) != 2 or embeddings[1] != hidden:
        raise CheckpointError(f"{m.path}: token_embd.weight is {list(embeddings)}, expected [tokens, {hidden}]")
    return {
        "model_type": kind,
        "vocab_size": embeddings[0],
        "hidden_size": hidden,
        activation: function,
        "num_hidden_layers": m.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": max(m.by_layer("attention.head_count_kv", heads)),
        "head_dim": m.integer("attention.key_length", hidden // heads),
        "max_position_embeddings": m.integer("context_length"),
        "rms_norm_eps": m.number("attention.layer_norm_rms_epsilon", m.get("attention.layer_norm_epsilon")),
        "rope_parameters": rope(m),
        "num_experts_per_tok": m.integer("expert_used_count"),
        "tie_word_embeddings": "output.weight" not in m.shapes,
        **{f"{key}_token_id": m.token(name) for key, name in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))},
    }


def rope(m: Metadata, base: str = "rope.freq_base") -> Config:
    """Return ``rope_parameters``."""
    found: Config = {"rope_type": "default", "rope_theta": m.number(base, 10000.0)}
    kind = m.get("rope.scaling.type", "none")
    if isinstance(kind, str) and kind == "none":
        return found
    if not isinstance(kind, str) or kind not in ("linear", "yarn"):
        raise CheckpointError(
            f"{m.path}: {m.architecture}.rope.scaling.type is {shown(kind)}; supported: none, linear, yarn"
        )
    found |= {"rope_type": kind, "factor": m.number("rope.scaling.factor")}
    if kind == "yarn":
        found["original_max_position_embeddings"] = m.integer("rope.scaling.original_context_length")
        for key, usual in (("beta_fast", 32.0), ("beta_slow", 1.0)):
            found[key] = m.number(f"rope.scaling.yarn_{key}", usual)
        if m.get("rope.scaling.yarn_attn_factor") is not None:
            found["attention_factor"] = m.number("rope.scaling.yarn_attn_factor")
    return found


def with_partial_rope(m: Metadata, config: Config) -> Config:
    """Add which part of a head rotates to a configuration."""
    rotating = m.integer("rope.dimension_count", config["head_dim"])
    config["rope_parameters"]["partial_rotary_factor"] = rotating / config["head_dim"]
    return config


def sparse(m: Metadata) -> Config:
    """Return the fields of experts that DeepSeek's and GLM's configurations have."""
    groups = m.integer("expert_group_count", 1) or 1
    return {
        "n_routed_experts": m.integer("expert_count"),
        "n_shared_experts": m.integer("expert_shared_count", 0),
        "moe_intermediate_size": m.integer("expert_feed_forward_length"),
        "intermediate_size": max(m.by_layer("feed_forward_length", m.integer("expert_feed_forward_length"))),
        "first_k_dense_replace": dense_layers(m),
        "routed_scaling_factor": m.number("expert_weights_scale", 1.0),
        "norm_topk_prob": m.flag("expert_weights_norm"),
        "n_group": groups,
        "topk_group": m.integer("expert_group_used_count", groups) or groups,
    }


def dense_layers(m: Metadata) -> int:
    """Return how many layers at the beginning have a dense MLP, as the tensors show."""
    return [*m.layer_has("ffn_gate_inp"), True].index(True)


def kinds(m: Metadata, stem: str, there: str, other: str) -> list[str]:
    """Return a kind of each layer: ``there`` where it has a tensor of this name."""
    return [there if has else other for has in m.layer_has(stem)]


def sliding(m: Metadata, usual: int = 0) -> Config:
    """Return the fields of layers with a sliding window.

    Args:
        usual: every so many layers one has no window, in files without a pattern.
    """
    if m.get("attention.sliding_window_pattern") is None and usual:
        slides = [bool((i + 1) % usual) for i in range(m.layers)]
    else:
        slides = [bool(slides) for slides in m.by_layer("attention.sliding_window_pattern")]
    return {
        "sliding_window": m.integer("attention.sliding_window"),
        "layer_types": ["sliding_attention" if slides else "full_attention" for slides in slides],
    }


def gating(m: Metadata) -> str:
    """Return the function of the router's logits; files without the key have a bias where it is sigmoid."""
    kinds = {0: "sigmoid" if m.has("exp_probs_b.bias") else "softmax", 1: "softmax", 2: "sigmoid"}
    found = m.get("expert_gating_func", 0)
    if type(found) is not int or found not in kinds:
        raise CheckpointError(
            f"{m.path}: {m.architecture}.expert_gating_func is {shown(found)}; supported: 1 (softmax), 2 (sigmoid)"
        )
    return kinds[found]


def undo_pairs(ckpt: ChangedTensors, name: str = "self_attn") -> None:
    """Undo the order of a head's features: a pair that rotates is two neighbours there, and half a head apart here."""
    config, width = ckpt.config, ckpt.config["head_dim"]
    for module, heads in (("q_proj", config["num_attention_heads"]), ("k_proj", config["num_key_value_heads"])):
        rows = np.arange(heads * width).reshape(heads, width // 2, 2).swapaxes(1, 2).reshape(-1)
        for layer in ckpt.layers:
            ckpt.reorder(f"{layer}.{name}.{module}", rows)


def less_one(array: np.ndarray) -> np.ndarray:
    """Undo an addition of 1 to a norm's weight."""
    return array.astype(np.float32) - np.float32(1)


def a_log(array: np.ndarray) -> np.ndarray:
    """Undo -exp of a decay's logarithm."""
    return np.log(-array.astype(np.float64)).astype(np.float32)
