"""A checkpoint at the real shapes of Qwen3-30B-A3B, random weights, written one layer at a time in bounded memory.

python tests/large.py FOLDER --layers 4
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

#: config.json of Qwen/Qwen3-30B-A3B
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "eos_token_id": 2,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
}
#: (safetensors dtype, shape, values: "codes", a standard deviation, or numbers that are all the same)
Declared = tuple[str, tuple[int, ...], Any]
BYTES = {"I32": 4, "I64": 8, "BF16": 2}


def linear(name: str, n: int, k: int, group_size: int) -> dict[str, Declared]:
    """compressed-tensors pack-quantized int4; products of unit-variance activations keep unit variance."""
    return {
        f"{name}.weight_packed": ("I32", (n, k // 8), "codes"),
        f"{name}.weight_scale": ("BF16", (n, k // group_size), ("scales", 1 / (4.6 * math.sqrt(k)))),
        f"{name}.weight_shape": ("I64", (2,), np.array([n, k], np.int64)),
    }


def shards(config: dict[str, Any], group_size: int) -> Iterator[dict[str, Declared]]:
    """The tensors of each shard: embeddings, then a shard a layer."""
    h, i, heads = config["hidden_size"], config["moe_intermediate_size"], config["head_dim"]
    vocabulary = config["vocab_size"]
    yield {
        "model.embed_tokens.weight": ("BF16", (vocabulary, h), 1.0),
        "model.norm.weight": ("BF16", (h,), np.ones(h)),
        "lm_head.weight": ("BF16", (vocabulary, h), h**-0.5),
    }
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        q, kv = config["num_attention_heads"] * heads, config["num_key_value_heads"] * heads
        tensors: dict[str, Declared] = {
            f"{at}.{name}.weight": ("BF16", (size,), np.ones(size))
            for name, size in (
                ("input_layernorm", h),
                ("post_attention_layernorm", h),
                ("self_attn.q_norm", heads),
                ("self_attn.k_norm", heads),
            )
        }
        tensors[f"{at}.mlp.gate.weight"] = ("BF16", (config["num_experts"], h), h**-0.5)
        for name, n, k in (("q", q, h), ("k", kv, h), ("v", kv, h), ("o", h, q)):
            tensors |= linear(f"{at}.self_attn.{name}_proj", n, k, group_size)
        for e in range(config["num_experts"]):
            for name, n, k in (("gate", i, h), ("up", i, h), ("down", h, i)):
                tensors |= linear(f"{at}.mlp.experts.{e}.{name}_proj", n, k, group_size)
        yield tensors


def write(folder: Path, config: dict[str, Any], group_size: int, data: bool = True) -> int:
    """Writes config.json, the index and all shards; returns their bytes.

    Args:
        data: False leaves holes where matrices would be: headers of any size of model in a few kilobytes of disk.
    """
    folder.mkdir(parents=True, exist_ok=True)
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": group_size}
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
    }
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    rng = np.random.default_rng(0)
    pool = rng.bytes(1 << 26) if data else b""
    normal = rng.normal(size=1 << 22).astype(np.float32)
    uniform = rng.uniform(0.5, 1.5, 1 << 22).astype(np.float32)

    def content(values: Any, dtype: str, count: int) -> memoryview:
        if isinstance(values, np.ndarray):
            return memoryview(values.astype({"I64": np.int64, "BF16": ml_dtypes.bfloat16}[dtype]).view(np.uint8))
        if isinstance(values, str):
            start = int(rng.integers(len(pool) - 4 * count + 1)) & ~3
            return memoryview(pool)[start : start + 4 * count]
        source, factor = (uniform, values[1]) if isinstance(values, tuple) else (normal, values)
        start = int(rng.integers(len(source) - count + 1))
        return memoryview((source[start : start + count] * factor).astype(ml_dtypes.bfloat16).view(np.uint8))

    weight_map, total, every = {}, 0, config["num_hidden_layers"] + 1
    for number, tensors in enumerate(shards(config, group_size)):
        name = f"model-{number + 1:05d}-of-{every:05d}.safetensors"
        tensors = dict(sorted(tensors.items(), key=lambda item: len(item[1][1])))  # vectors next to the header
        header, offset = {}, 0
        for tensor, (dtype, shape, _) in tensors.items():
            end = offset + math.prod(shape) * BYTES[dtype]
            header[tensor] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
            offset = end
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with open(folder / name, "wb", buffering=1 << 20) as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for dtype, shape, values in tensors.values():
                left = math.prod(shape)
                if not data and len(shape) > 1:
                    file.seek(left * BYTES[dtype], 1)
                    continue
                while left:
                    count = min(left, 1 << 21)
                    file.write(content(values, dtype, count))
                    left -= count
            file.truncate(8 + len(text) + offset)
        weight_map |= dict.fromkeys(tensors, name)
        total += 8 + len(text) + offset
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return total


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--group-size", type=int, default=32)
    parser.add_argument("--headers-only", action="store_true")
    given = parser.parse_args()
    layers = CONFIG | {"num_hidden_layers": given.layers}
    print(write(given.folder, layers, given.group_size, not given.headers_only), "bytes")
