"""What clients need to know of an exported folder: onnxruntime-genai's ``genai_config.json``, and where to stop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: transformers' model_type -> onnxruntime-genai's name of the same plain decoder
TYPES = {"qwen3_moe": "qwen3", "mixtral": "mistral", "olmoe": "olmo"}

#: metadata of a model whose cache may be written in place: past and present are one buffer; onnxruntime-genai's word
SHARE_BUFFER = "past_present_share_buffer"


def genai_config(config: Mapping[str, Any], generation: Mapping[str, Any], library: str) -> dict[str, Any]:
    """The contents of genai_config.json.

    Args:
        config: config.json. generation: generation_config.json, {} when there is none.
        library: file name of the custom operators; onnxruntime-genai loads it from the model's own folder only.

    Raises:
        KeyError: a field that plain decoders have is not there.
    """
    text = config.get("text_config") or config
    if "kv_lora_rank" in text:
        raise KeyError("head_dim")  # latent attention: keys and values differ in width, onnxruntime-genai knows one
    tokens = {
        name: value
        for name in ("bos_token_id", "eos_token_id", "pad_token_id")
        if (value := generation.get(name, text.get(name))) is not None
    }
    heads = text["num_attention_heads"]
    cache = {f"{way}_{kind}_names": f"{prefix}.%d.{kind}"
             for way, prefix in (("past", "past_key_values"), ("present", "present"))
             for kind in ("key", "value")}  # fmt: skip
    return {
        "model": tokens
        | {
            "type": TYPES.get(text["model_type"], "llama"),
            "vocab_size": text["vocab_size"],
            "context_length": text["max_position_embeddings"],
            "decoder": {
                "filename": "model.onnx",
                "session_options": {"custom_ops_library": library},
                "hidden_size": text["hidden_size"],
                "head_size": text.get("head_dim") or text["hidden_size"] // heads,
                "num_attention_heads": heads,
                "num_key_value_heads": text.get("num_key_value_heads") or heads,
                "num_hidden_layers": text["num_hidden_layers"],
                "inputs": {name: name for name in ("input_ids", "attention_mask", "position_ids")}
                | {key: value for key, value in cache.items() if key.startswith("past")},
                "outputs": {"logits": "logits"}
                | {key: value for key, value in cache.items() if key.startswith("present")},
            },
        },
        "search": {
            "do_sample": False,
            "max_length": text["max_position_embeddings"],
            "past_present_share_buffer": False,
        },
    }


def eos_tokens(config: Mapping[str, Any]) -> list[int] | None:
    """A configuration's eos_token_id, or its text_config's; None where it has none.

    Raises:
        ValueError: neither a token id nor a list of them.
    """
    text = config.get("text_config")
    for part in (config, text if isinstance(text, dict) else {}):
        if (found := part.get("eos_token_id")) is not None:
            stop = found if isinstance(found, list) else [found]
            if not all(type(id) is int for id in stop):
                raise ValueError(f"eos_token_id is {found!r}, expected a token id or a list of them")
            return stop
    return None
