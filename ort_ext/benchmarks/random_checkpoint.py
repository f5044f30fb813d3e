"""Checkpoints at real models' sizes with random weights, written in bounded memory: for benches and tests of size.

python -m quantmoe.benchmarks.random_checkpoint FOLDER --model qwen3-30b-a3b --layers 4
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from quantmoe.exporter.folder.files import CONFIG

#: of hybrid models: three layers of linear attention, one of full attention
_HYBRID: dict[str, Any] = {
    "hidden_size": 2048,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "partial_rotary_factor": 0.25,
    "max_position_embeddings": 262144,
    "rope_theta": 1e7,
    "rms_norm_eps": 1e-6,
}
#: Nemotron's pattern
_BLOCKS = {"M": "linear_attention", "E": "moe", "*": "full_attention"}
#: config.json of each model's Hugging Face repository, without what no size depends on
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
        "vocab_size": 151936,
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss",
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "max_position_embeddings": 131072,
        "rope_theta": 150000.0,
        "rms_norm_eps": 1e-5,
        "vocab_size": 201088,
    },
    "mixtral-8x7b": {
        "model_type": "mixtral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "sliding_window": None,
        "max_position_embeddings": 32768,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-5,
        "vocab_size": 32000,
    },
    "deepseek-v3": {
        "model_type": "deepseek_v3",
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 3,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "max_position_embeddings": 163840,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "vocab_size": 129280,
    },
    "qwen3.6-35b-a3b": _HYBRID
    | {
        "model_type": "qwen3_5_moe_text",
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 40,
        "layer_types": [*["linear_attention"] * 3, "full_attention"] * 10,
        "vocab_size": 248320,
    },
    "qwen3-next-80b-a3b": _HYBRID
    | {
        "model_type": "qwen3_next",
        "intermediate_size": 5120,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "norm_topk_prob": True,
        "num_hidden_layers": 48,
        "layer_types": [*["linear_attention"] * 3, "full_attention"] * 12,
        "vocab_size": 151936,
    },
    "nemotron-3-nano-30b-a3b": {
        "model_type": "nemotron_h",
        "hidden_size": 2688,
        "hidden_act": "relu2",
        "mlp_hidden_act": "relu2",
        "intermediate_size": 1856,
        "moe_intermediate_size": 1856,
        "moe_shared_expert_intermediate_size": 3712,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 6,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "num_hidden_layers": 52,
        "layer_types": [_BLOCKS[kind] for kind in "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"],
        "mamba_num_heads": 64,
        "mamba_head_dim": 64,
        "n_groups": 8,
        "ssm_state_size": 128,
        "conv_kernel": 4,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 262144,
        "layer_norm_epsilon": 1e-5,
        "vocab_size": 131072,
    },
    "glm-4.5-air": {
        "model_type": "glm4_moe",
        "hidden_size": 4096,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 1,
        "use_qk_norm": False,
        "attention_bias": True,
        "num_hidden_layers": 46,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "partial_rotary_factor": 0.5,
        "max_position_embeddings": 131072,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-5,
        "vocab_size": 151552,
    },
}
#: the same in all
COMMON = {"hidden_act": "silu", "eos_token_id": 2, "tie_word_embeddings": False, "torch_dtype": "bfloat16"}
GROUP_SIZE = 32
#: (safetensors dtype, shape, values: "codes", ("scales", mean), a standard deviation, or an array)
Declared = tuple[str, tuple[int, ...], Any]
BYTES = {"I32": 4, "I64": 8, "BF16": 2}
EXPERTS = re.compile(r"(.*\.experts)\.(gate_up_proj|up_proj|down_proj)(_bias|)")


def cut(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Return a configuration of only the first ``layers`` layers; of leading dense ones at most the first stays."""
    found = dict(config) | {"num_hidden_layers": layers}
    if "layer_types" in found:
        found["layer_types"] = found["layer_types"][:layers]
    if layers < config["num_hidden_layers"] and "first_k_dense_replace" in found:
        found["first_k_dense_replace"] = min(1, found["first_k_dense_replace"])
    return found


def model_config(config: Mapping[str, Any]) -> Any:
    """Return a config.json as transformers' configuration, without what a quantizer wrote into it."""
    import transformers

    from quantmoe.exporter.graph.config import check_implementations, with_own_code

    check_implementations(config, Path(CONFIG))
    given = {name: value for name, value in config.items() if name not in ("model_type", "quantization_config")}
    return with_own_code(transformers.AutoConfig.for_model(config["model_type"], **given))


def parameters(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return parameters and buffers of transformers' model: name -> shape; experts' are
    ``...experts.gate_proj.weight``, ``up_proj``, ``down_proj`` [E, N, K] and ``.bias`` [E, N]."""
    import torch
    import transformers

    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(model_config(config))
    found: dict[str, tuple[int, ...]] = {}
    for name, tensor in model.state_dict().items():
        shape = tuple(tensor.shape)
        if not (match := EXPERTS.fullmatch(name)):
            found[name] = shape
            continue
        stem, projection, bias = match.groups()
        if not bias and config["model_type"] == "gpt_oss":  # [E, K, N]
            shape = (shape[0], shape[2], shape[1])
        parts = ("gate_proj", "up_proj") if projection == "gate_up_proj" else (projection,)
        for part in parts:
            found[f"{stem}.{part}.{'bias' if bias else 'weight'}"] = (shape[0], shape[1] // len(parts), *shape[2:])
    return found


def embedding_deviation(layers: int) -> float:
    """Return the standard deviation of random embeddings of a model of so many layers.

    Each sublayer adds a deviation of 1 at most. What it adds is alike in all tokens: SiLU's outputs and codes from -8
    to 7 are not centered. If the sum is no more than a token's embedding, tokens stay different, and random routers
    send them to all experts alike.
    """
    return 2.0 * layers


def quantized(name: str) -> bool:
    """Return what quantizers round: all linears but routers, the head, embeddings, and the gates of a delta rule."""
    return "_proj" in name and name.endswith(".weight") and not re.search(r"\.in_proj_(a|b|ba)\.", name)


def group_size_of(config: Mapping[str, Any]) -> int:
    """Return the group size of int4 weights where nobody asks for one: 128, or 32 where that does not divide all
    inputs."""
    shapes = parameters(config).items()
    return 32 if any(shape[-1] % 128 for name, shape in shapes if quantized(name)) else 128


def linear(name: str, n: int, k: int, group_size: int) -> dict[str, Declared]:
    """compressed-tensors pack-quantized int4; products of unit-variance activations keep unit variance."""
    return {
        f"{name}.weight_packed": ("I32", (n, k // 8), "codes"),
        f"{name}.weight_scale": ("BF16", (n, k // group_size), ("scales", 1 / (4.6 * math.sqrt(k)))),
        f"{name}.weight_shape": ("I64", (2,), np.array([n, k], np.int64)),
    }


def shards(config: Mapping[str, Any], group_size: int) -> Iterator[dict[str, Declared]]:
    """Yield the tensors of each shard: what is outside the layers, then a shard a layer."""
    layers: dict[str, dict[str, Declared]] = {}
    for name, shape in parameters(config).items():
        tensors = layers.setdefault(found[0] if (found := re.findall(r"\.layers\.(\d+)\.", name)) else "", {})
        stem, _, leaf = name.rpartition(".")
        for at in [stem] if ".experts." not in name else [_expert(stem, e) for e in range(shape[0])]:
            size = shape if at == stem else shape[1:]
            if group_size and quantized(name):
                tensors |= linear(at, size[0], size[1], group_size)
            elif len(size) == 1 and leaf == "weight":
                from_one = config["model_type"].startswith(("qwen3_next", "qwen3_5")) and "linear_attn" not in name
                tensors[f"{at}.{leaf}"] = ("BF16", size, np.zeros(size) if from_one else np.ones(size))
            else:
                deviation = 0.1 if len(size) == 1 else size[-1] ** -0.5
                if "embed" in name:
                    deviation = embedding_deviation(config["num_hidden_layers"])
                elif leaf == "e_score_correction_bias" or (leaf == "bias" and "router" in stem):
                    deviation = 0.0
                tensors[f"{at}.{leaf}"] = ("BF16", size, deviation)
    yield from layers.values()


def _expert(stem: str, e: int) -> str:
    layer, projection = stem.split(".experts.")
    return f"{layer}.experts.{e}.{projection}"


def _header(tensors: Mapping[str, tuple[str, Any, Any]]) -> tuple[bytes, int]:
    """Return a shard's header, and the bytes of its data."""
    header, offset = {}, 0
    for name, (dtype, shape, _) in tensors.items():
        end = offset + math.prod(shape) * BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    return text + b" " * (-len(text) % 8), offset


def write(folder: Path, config: Mapping[str, Any], group_size: int, data: bool = True) -> int:
    """Write config.json, the index and all shards; return their bytes.

    Args:
        config: one of CONFIGS, or :func:`cut`.
        group_size: of the int4 weights; it divides every linear's inputs. 0: bf16 weights.
        data: False leaves holes where matrices would be: headers of any size of model in a few kilobytes of disk.
    """
    folder.mkdir(parents=True, exist_ok=True)
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": group_size}
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
        "ignore": ["lm_head", "re:.*mlp.gate$", "re:.*router$"],
    }
    named = {**COMMON, **config} | ({"quantization_config": quantization} if group_size else {})
    (folder / CONFIG).write_text(json.dumps(named), encoding="utf-8")
    rng = np.random.default_rng(0)
    pool = rng.bytes(1 << 26) if data else b""
    normal = rng.normal(size=1 << 22).astype(np.float32)
    uniform = rng.uniform(0.5, 1.5, 1 << 22).astype(np.float32)

    def content(values: Any, dtype: str, count: int) -> memoryview:
        if isinstance(values, np.ndarray):
            return memoryview(values.astype({"I64": np.int64, "BF16": ml_dtypes.bfloat16}[dtype]).view(np.uint8).data)
        if isinstance(values, str):
            start = int(rng.integers(len(pool) - 4 * count + 1)) & ~3
            return memoryview(pool)[start : start + 4 * count]
        source, factor = (uniform, values[1]) if isinstance(values, tuple) else (normal, values)
        start = int(rng.integers(len(source) - count + 1))
        return memoryview((source[start : start + count] * factor).astype(ml_dtypes.bfloat16).view(np.uint8))

    weight_map: dict[str, str] = {}
    total, every = 0, config["num_hidden_layers"] + 1
    for number, tensors in enumerate(shards(config, group_size)):
        name = f"model-{number + 1:05d}-of-{every:05d}.safetensors"
        tensors = dict(sorted(tensors.items(), key=lambda item: len(item[1][1])))  # vectors next to the header
        text, size = _header(tensors)
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
            file.truncate(8 + len(text) + size)
        weight_map |= dict.fromkeys(tensors, name)
        total += 8 + len(text) + size
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map}), encoding="utf-8"
    )
    return total


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", choices=CONFIGS, default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--group-size", type=int, default=GROUP_SIZE, help="of int4 weights; 0: bf16")
    parser.add_argument("--headers-only", action="store_true")
    given = parser.parse_args()
    wanted = CONFIGS[given.model]
    wanted = cut(wanted, given.layers) if given.layers else wanted
    print(write(given.folder, wanted, given.group_size, not given.headers_only), "bytes")
