"""Architectures of GGUF files: names, configuration, and what llama.cpp's convert_hf_to_gguf.py changed of the numbers.

A configuration is transformers' for the family, from the keys that gguf-py's constants.py documents. What no key says,
as whether top-k weights are renormalized, is the family's own and the same in all of its published models.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quantmoe.exporter.reading.checkpoint import CheckpointError
from quantmoe.exporter.reading.gguf.changed_tensors import ChangedTensors
from quantmoe.exporter.reading.gguf.header import Strings, shown

#: tokens after which llama.cpp ends a text, whatever the metadata says
END_TEXTS = frozenset(
    ("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
     "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>",
     "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~[")
)  # fmt: skip
#: the same of tokens that fill in the middle of code: where the metadata lacks the key, one of these texts
FILL_TEXTS = {
    "fim_pad": {"<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"},
    "fim_rep": {"<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"},
    "fim_sep": {"<|file_sep|>"},
}
#: a token that ends no text beside certain others that do: of gpt-oss and Solar a message's end, of Gemma 4 a tag
NO_ENDS = (
    ("<|end|>", ("<|return|>", "<|call|>")),
    ("<|end|>", ("<|return|>", "<|calls|>")),
    ("<|end|>", ("<|flush|>", "<|call|>")),
    ("<|end|>", ("<|flush|>", "<|calls|>")),
    ("</s>", ("<|tool_response>",)),
    ("</s>", ("<|plamo:eos|>",)),
)


@dataclass(frozen=True)
class Metadata:
    """A file's fields, of which those of its architecture are asked for by their ends, and its tensors' shapes."""

    path: Path
    architecture: str
    fields: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]

    def integer(self, key: str, default: int | None = None) -> int:
        """Return a field that is positive, or may be 0 where the default is.

        Raises:
            CheckpointError: it is missing without a default, or something else.
        """
        found = self.fields.get(f"{self.architecture}.{key}", default)
        if type(found) is not int or found < (1 if default is None else 0):
            raise self._error(key, found, "a positive integer")
        return found

    def number(self, key: str, default: float | None = None) -> float:
        found = self.fields.get(f"{self.architecture}.{key}", default)
        if type(found) not in (int, float) or not found > 0:
            raise self._error(key, found, "a positive number")
        # f32's shortest decimal: 1e-6 and not 9.999999974752427e-07
        return float(str(np.float32(found))) if type(found) is float else float(found)

    def integers(self, key: str) -> list[int]:
        found = self.fields.get(f"{self.architecture}.{key}")
        if not isinstance(found, np.ndarray) or found.dtype.kind not in "iu" or (found < 0).any():
            raise self._error(key, found, "a list of integers")
        return [int(n) for n in found]

    def token(self, key: str) -> int | None:
        """Return a token of the vocabulary; None where the file names none, or as llama.cpp has it a number beyond.

        Raises:
            CheckpointError: it is not a number.
        """
        name = f"tokenizer.ggml.{key}_token_id"
        found = self.fields.get(name, -1)
        if type(found) is not int:
            raise CheckpointError(f"{self.path}: {name} is {shown(found)}, expected a token's number")
        return found if 0 <= found < self.shapes["token_embd.weight"][0] else None

    def ends(self) -> list[int]:
        """Return the tokens after which llama.cpp ends a text: those of the metadata, the first being eos, and those
        that it knows by their text (llama-vocab.cpp's special_eog_ids).
        """
        texts = self.fields.get("tokenizer.ggml.tokens")
        known = END_TEXTS.union(*FILL_TEXTS.values(), *(others for _, others in NO_ENDS))
        by_text = {text: i for i, text in enumerate(texts) if text in known} if isinstance(texts, Strings) else {}
        named = [token for key in ("eos", "eot", "eom") if (token := self.token(key)) is not None]
        for key, other in FILL_TEXTS.items():
            token = self.token(key)
            named += sorted(by_text[text] for text in other & by_text.keys())[:1] if token is None else [token]
        found = dict.fromkeys([*named, *sorted(by_text[text] for text in END_TEXTS & by_text.keys())])
        for text, others in NO_ENDS:
            if text in by_text and all(by_text.get(other) in found for other in others):
                found.pop(by_text[text], None)
        return list(found)

    def _error(self, key: str, found: object, want: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {self.architecture}.{key} is {shown(found)}, expected {want}")


@dataclass(frozen=True)
class GgufFamily:
    """Attributes:
    names: GGUF's name without ``blk.<layer>.`` and ``.weight`` or ``.bias`` -> transformers' module, {} being an
        expert's number; or a name with its end -> a tensor that is no module's weight or bias.
    config: the text model's config.json.
    undo: registers what is to be undone of the numbers.
    """

    names: dict[str, str]
    config: Callable[[Metadata], dict[str, Any]]
    undo: Callable[[ChangedTensors], None] = lambda ckpt: None


_DECODER = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
}
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
#: name of a tensor with the rows of several for each expert (convert_hf_to_gguf.py --fuse-gate-up-exps) -> theirs
JOINED = {"ffn_gate_up_exps": ("ffn_gate_exps", "ffn_up_exps")}
#: one expert's tensor, as llama.cpp wrote Mixtral's until 2024
_ONE_EXPERT = re.compile(r"ffn_(gate|up|down)\.([0-9]{1,6})")
#: MLX's names of all experts' tensors; mlx_lm's GGUF writer replaces half of the name of Mixtral's
_SWITCH = re.compile(r"(?:mlp|block_sparse_moe)\.switch_(?:mlp\.(gate|up|down)_proj|ffn_(gate|up|down))")
_SHARED = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}


def common_name(stem: str) -> tuple[str, int | None]:
    """Return a tensor's name without its layer and end, as current files of llama.cpp have it; and the expert's number,
    of a tensor of one expert."""
    if match := _ONE_EXPERT.fullmatch(stem):
        return f"ffn_{match[1]}_exps", int(match[2])
    if match := _SWITCH.fullmatch(stem):
        return f"ffn_{match[1] or match[2]}_exps", None
    return stem, None


_QK_NORM = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}


def _common(m: Metadata, kind: str) -> dict[str, Any]:
    hidden, heads = m.integer("embedding_length"), m.integer("attention.head_count")
    embeddings = m.shapes.get("token_embd.weight", (0, 0))
    if len(embeddings) != 2 or embeddings[1] != hidden:
        raise CheckpointError(f"{m.path}: token_embd.weight is {list(embeddings)}, expected [tokens, {hidden}]")
    return {
        "model_type": kind,
        "vocab_size": embeddings[0],
        "hidden_size": hidden,
        "hidden_act": "silu",
        "num_hidden_layers": m.integer("block_count") - m.integer("nextn_predict_layers", 0),
        "num_attention_heads": heads,
        "num_key_value_heads": m.integer("attention.head_count_kv", heads),
        "head_dim": m.integer("attention.key_length", hidden // heads),
        "max_position_embeddings": m.integer("context_length"),
        "rms_norm_eps": m.number("attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(m),
        "num_experts_per_tok": m.integer("expert_used_count"),
        "tie_word_embeddings": "output.weight" not in m.shapes,
        **{f"{key}_token_id": m.token(name) for key, name in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))},
    }


def _rope(m: Metadata) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": m.number("rope.freq_base", 10000.0)}
    kind = m.fields.get(f"{m.architecture}.rope.scaling.type", "none")
    if isinstance(kind, str) and kind == "none":
        return rope
    if not isinstance(kind, str) or kind not in ("linear", "yarn"):
        raise CheckpointError(
            f"{m.path}: {m.architecture}.rope.scaling.type is {shown(kind)}; supported: none, linear, yarn"
        )
    rope |= {"rope_type": kind, "factor": m.number("rope.scaling.factor")}
    if kind == "yarn":
        rope["original_max_position_embeddings"] = m.integer("rope.scaling.original_context_length")
        for key, usual in (("beta_fast", 32.0), ("beta_slow", 1.0)):
            rope[key] = m.number(f"rope.scaling.yarn_{key}", usual)
    return rope


def _gpt_oss(m: Metadata) -> dict[str, Any]:
    config = _common(m, "gpt_oss")
    if config["rope_parameters"]["rope_type"] == "yarn":
        config["rope_parameters"]["truncate"] = False  # as OpenAI's own code
    return config | {
        "num_local_experts": m.integer("expert_count"),
        "intermediate_size": m.integer("expert_feed_forward_length"),
        "sliding_window": m.integer("attention.sliding_window"),
        "attention_bias": True,
    }


def _qwen(m: Metadata, kind: str) -> dict[str, Any]:
    return _common(m, kind) | {
        "num_experts": m.integer("expert_count"),
        "moe_intermediate_size": m.integer("expert_feed_forward_length"),
    }


def _qwen2_moe(m: Metadata) -> dict[str, Any]:
    return _qwen(m, "qwen2_moe") | {
        "shared_expert_intermediate_size": m.integer("expert_shared_feed_forward_length"),
        "intermediate_size": m.integer("feed_forward_length"),
        "norm_topk_prob": False,
    }


def _qwen3_moe(m: Metadata) -> dict[str, Any]:
    return _qwen(m, "qwen3_moe") | {
        "intermediate_size": m.integer("feed_forward_length", m.integer("expert_feed_forward_length")),
        "norm_topk_prob": True,
    }


def _qwen35_moe(m: Metadata) -> dict[str, Any]:
    config = _qwen(m, "qwen3_5_moe_text")
    values = m.integer("ssm.time_step_rank")
    config["rope_parameters"] |= {
        "partial_rotary_factor": m.integer("rope.dimension_count") / config["head_dim"],
        "mrope_section": [n for n in m.integers("rope.dimension_sections") if n],
        "mrope_interleaved": True,
    }
    return config | {
        "shared_expert_intermediate_size": m.integer("expert_shared_feed_forward_length"),
        "linear_conv_kernel_dim": m.integer("ssm.conv_kernel"),
        "linear_key_head_dim": m.integer("ssm.state_size"),
        "linear_num_key_heads": m.integer("ssm.group_count"),
        "linear_num_value_heads": values,
        "linear_value_head_dim": m.integer("ssm.inner_size") // values,
        "full_attention_interval": m.integer("full_attention_interval", 4),
    }


def _mixtral(m: Metadata) -> dict[str, Any]:
    return _common(m, "mixtral") | {
        "num_local_experts": m.integer("expert_count"),
        "intermediate_size": m.integer("feed_forward_length"),
        "sliding_window": None,
    }


def _undo_mixtral(ckpt: ChangedTensors) -> None:
    """Pairs of a head's features that rotate together are neighbours there, and half a head apart in transformers."""
    config, width = ckpt.config, ckpt.config["head_dim"]
    for module, heads in (("q_proj", config["num_attention_heads"]), ("k_proj", config["num_key_value_heads"])):
        rows = np.arange(heads * width).reshape(heads, width // 2, 2).swapaxes(1, 2).reshape(-1)
        for layer in ckpt.layers:
            ckpt.reorder(f"{layer}.self_attn.{module}", rows)


def _undo_shared(ckpt: ChangedTensors) -> None:
    for layer in ckpt.layers:
        ckpt.reshape(f"{layer}.mlp.shared_expert_gate.weight", (1, ckpt.config["hidden_size"]))


def _less_one(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float32) - np.float32(1)


def _a_log(array: np.ndarray) -> np.ndarray:
    return np.log(-array.astype(np.float64)).astype(np.float32)


def _undo_qwen35(ckpt: ChangedTensors) -> None:
    """Norms are stored with 1 added, the decay as -exp(A_log), and value heads by their number within a key head."""
    _undo_shared(ckpt)
    config = ckpt.config
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    width = config["linear_value_head_dim"]
    heads = np.arange(values).reshape(-1, keys).T.reshape(-1)
    features = (heads[:, None] * width + np.arange(width)).reshape(-1)
    first = 2 * keys * config["linear_key_head_dim"]
    joined = np.concatenate([np.arange(first), first + features])
    ckpt.change("model.norm.weight", _less_one)
    for layer in ckpt.layers:
        for name in ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"):
            ckpt.change(f"{layer}.{name}.weight", _less_one)
        linear = f"{layer}.linear_attn"
        ckpt.change(f"{linear}.A_log", _a_log)
        ckpt.reshape(f"{linear}.conv1d.weight", (len(joined), 1, config["linear_conv_kernel_dim"]))
        for name, order in (("A_log", heads), ("dt_bias", heads), ("conv1d.weight", joined)):
            ckpt.order(f"{linear}.{name}", order)
        for name, order in (
            ("in_proj_a", heads),
            ("in_proj_b", heads),
            ("in_proj_z", features),
            ("in_proj_qkv", joined),
        ):
            ckpt.reorder(f"{linear}.{name}", order)
        ckpt.reorder_columns(f"{linear}.out_proj", features)


#: general.architecture -> family
FAMILIES = {
    "qwen2moe": GgufFamily(_DECODER | _EXPERTS | _SHARED, _qwen2_moe, _undo_shared),
    "qwen3moe": GgufFamily(_DECODER | _EXPERTS | _QK_NORM, _qwen3_moe),
    "qwen35moe": GgufFamily(
        _DECODER
        | _EXPERTS
        | _SHARED
        | _QK_NORM
        | {
            "post_attention_norm": "post_attention_layernorm",
            "attn_qkv": "linear_attn.in_proj_qkv",
            "attn_gate": "linear_attn.in_proj_z",
            "ssm_alpha": "linear_attn.in_proj_a",
            "ssm_beta": "linear_attn.in_proj_b",
            "ssm_conv1d": "linear_attn.conv1d",
            "ssm_norm": "linear_attn.norm",
            "ssm_out": "linear_attn.out_proj",
            "ssm_a.None": "linear_attn.A_log",
            "ssm_dt.bias": "linear_attn.dt_bias",
        },
        _qwen35_moe,
        _undo_qwen35,
    ),
    "gpt-oss": GgufFamily(
        _DECODER
        | _EXPERTS
        | {
            "ffn_gate_inp": "mlp.router",
            "post_attention_norm": "post_attention_layernorm",
            "attn_sinks.weight": "self_attn.sinks",
        },
        _gpt_oss,
    ),
    "llama": GgufFamily(
        _DECODER
        | {
            "ffn_gate_inp": "block_sparse_moe.gate",
            "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
            "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
            "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
        },
        _mixtral,
        _undo_mixtral,
    ),
}
