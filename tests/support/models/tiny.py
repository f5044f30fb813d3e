"""Makes a small but real checkpoint for tests: a transformers architecture with random weights, a tokenizer, and
weights that the compressed-tensors library's own compressor quantizes and stores.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.format import infer_module_format
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

#: sizes of the checkpoint, by the name of the architecture's field
SIZES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 256,
        "norm_topk_prob": True,
        "head_dim": 64,
    },
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 64},
    "olmoe": {"num_experts": 16, "num_experts_per_tok": 4, "intermediate_size": 256},
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 64, "sliding_window": 4},
    "deepseek_v3": {
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "n_group": 4,
        "topk_group": 2,
        "moe_intermediate_size": 256,
        "first_k_dense_replace": 1,
        "q_lora_rank": 96,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "num_key_value_heads": 8,
    },
    "glm4_moe": {
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 256,
        "first_k_dense_replace": 1,
        "head_dim": 64,
        "use_qk_norm": True,
    },
    "mimo_v2_flash": {
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 256,
        "head_dim": 64,
        "v_head_dim": 32,
        "sliding_window": 4,
    },
    "llama4_text": {
        "num_local_experts": 8,
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 512,
        "interleave_moe_layer_step": 2,
        "no_rope_layer_interval": 2,
        "attention_chunk_size": 4,
        "floor_scale": 4,
        "head_dim": 64,
    },
}
#: hybrid models: three layers of linear attention, one of full attention
_HYBRID = {
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
SIZES |= {"qwen3_next": _HYBRID, "qwen3_5_moe_text": _HYBRID}
COMMON = {
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
#: linears that quantizers leave alone
IGNORE = ("lm_head", "mlp.gate", "shared_expert_gate", "block_sparse_moe.gate", "mlp.router", "feed_forward.router",
          "feed_forward.gate")  # fmt: skip


def make_checkpoint(
    folder: str | Path,
    architecture: str = "qwen3_moe",
    scheme: str = "W4A16",
    group_size: int | None = 32,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    symmetric: bool = True,
    **sizes: Any,
) -> Path:
    """Writes a checkpoint folder as llm-compressor would, experts under the architecture's own unfused names.

    Args:
        folder: created if missing.
        architecture: transformers model_type: one of SIZES, or another that stores experts one by one.
        scheme: a compressed-tensors preset (W4A16, W8A16, W8A8, W4A8, NVFP4A16, ...).
        group_size: replaces the preset's; -1 is one scale a row; None keeps the preset's.
        seed: of the weights.
        dtype: of weights and scales.
        symmetric: False stores zero points.
        sizes: fields of the architecture's configuration.

    Returns:
        The folder.
    """
    folder = make_float_checkpoint(folder, architecture, seed, dtype, **sizes)
    group = make_scheme(scheme, group_size, symmetric)
    compressor = BaseCompressor.get_value_from_registry(group.format)

    def compress(weight: torch.Tensor) -> dict[str, torch.Tensor]:
        return compressor.compress({"weight": weight} | qparams(weight, group), group)

    quantization = QuantizationConfig(
        config_groups={"group_0": group},
        format=group.format,
        quantization_status="compressed",
        ignore=rewrite_linears(folder, compress),
    )
    add_quantization(folder, json.loads(quantization.model_dump_json()))
    return folder


def make_float_checkpoint(
    folder: str | Path, architecture: str, seed: int = 0, dtype: torch.dtype = torch.bfloat16, **sizes: Any
) -> Path:
    """Writes the same checkpoint folder before quantization."""
    folder = Path(folder)
    tokenizer = make_tokenizer()
    fields = COMMON | SIZES.get(architecture, {}) | {"vocab_size": -(-len(tokenizer) // 64) * 64} | sizes
    config = AutoConfig.for_model(
        architecture,
        **fields,
        initializer_range=fields["hidden_size"] ** -0.5,  # keeps activations and router logits near unit variance
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.uniform_(-0.1, 0.1)
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or name.endswith("sinks"):
                torch.nn.init.normal_(parameter, std=0.1)
    model.generation_config.do_sample = False
    model.save_pretrained(folder, max_shard_size="20MB")  # several shards, as real ones have
    tokenizer.save_pretrained(folder)
    return folder


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE that encodes any text, with a few merges."""
    text = (
        "A mixture of experts routes each token to a few experts; a router scores them, the best are kept, and their "
        "outputs are added with the router's weights. Quantized weights are small integers and a scale for each group. "
    )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=384,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text] * 4, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>")


def rewrite_linears(
    folder: Path, quantize: Callable[[torch.Tensor], dict[str, torch.Tensor]], ignore: Sequence[str] = ()
) -> list[str]:
    """Replaces the weight [N, K] of each linear in a folder's shards by the tensors that ``quantize`` makes of it.

    Args:
        ignore: parts of the names of linears to leave alone beside IGNORE.

    Returns:
        The linears left alone.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    skipped: list[str] = []
    weight_map: dict[str, str] = {}
    for shard in sorted(folder.glob("*.safetensors")):
        tensors: dict[str, torch.Tensor] = {}
        for name, tensor in _unfused(load_file(shard), config):
            module, _, leaf = name.rpartition(".")
            if leaf != "weight" or tensor.ndim != 2 or "embed_tokens" in module:
                tensors[name] = tensor
            elif module.endswith(IGNORE) or any(part in module for part in ignore):
                tensors[name] = tensor
                skipped.append(module)
            else:
                tensors |= {f"{module}.{key}": value.contiguous() for key, value in quantize(tensor).items()}
        save_file(tensors, shard, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, shard.name)
    index = folder / "model.safetensors.index.json"
    if index.exists():
        index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}, indent=2), encoding="utf-8")
    return sorted(skipped)


def _unfused(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors, the experts that gpt-oss and Llama-4 store as [E, in, out] one by one, as llm-compressor has them."""
    interleaved = config["model_type"] == "gpt_oss"
    for name, tensor in tensors.items():
        stem, _, leaf = name.rpartition(".")
        projection, bias = leaf.removesuffix("_bias"), leaf.endswith("_bias")
        if not stem.endswith(".experts") or projection not in ("gate_up_proj", "down_proj"):
            yield name, tensor
            continue
        rows = tensor if bias else tensor.transpose(1, 2)
        half = rows.shape[1] // 2
        split = {"down_proj": rows}
        if projection == "gate_up_proj" and interleaved:
            split = {"gate_proj": rows[:, ::2], "up_proj": rows[:, 1::2]}
        elif projection == "gate_up_proj":
            split = {"gate_proj": rows[:, :half], "up_proj": rows[:, half:]}
        for part, values in split.items():
            for e, expert in enumerate(values):
                yield f"{stem}.{e}.{part}.{'bias' if bias else 'weight'}", expert.contiguous()


def add_quantization(folder: Path, quantization: dict[str, Any]) -> None:
    """Writes the quantizer's configuration into a folder's config.json."""
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) | {"quantization_config": quantization}
    path.write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")


def make_scheme(preset: str, group_size: int | None = None, symmetric: bool = True) -> QuantizationScheme:
    """A compressed-tensors preset, with another group size (-1: one scale a row) or with zero points."""
    scheme = preset_name_to_scheme(preset, targets=["Linear"])
    weights = scheme.weights.model_dump()
    if group_size is not None:
        weights |= {"group_size": group_size, "strategy": "channel" if group_size == -1 else "group"}
    if not symmetric:
        weights |= {"symmetric": False, "zp_dtype": None}
    scheme.weights = QuantizationArgs(**weights)
    scheme.format = infer_module_format(torch.nn.Linear, scheme).value
    return scheme


def qparams(weight: torch.Tensor, scheme: QuantizationScheme) -> dict[str, torch.Tensor]:
    """The library's min-max scales and zero points of one matrix [N, K], as its observers would find them."""
    args = scheme.weights
    n, k = weight.shape
    found: dict[str, torch.Tensor] = {}
    if args.strategy == "tensor":
        parts = weight.reshape(1, -1)
    elif args.strategy == "block":
        bn, bk = args.block_structure
        padded = torch.nn.functional.pad(weight, (0, -k % bk, 0, -n % bn))
        parts = padded.reshape(-(-n // bn), bn, -(-k // bk), bk).transpose(1, 2).flatten(2)
    elif args.strategy in ("group", "tensor_group"):
        parts = weight.reshape(n, k // args.group_size, args.group_size)
    else:
        parts = weight.reshape(n, 1, k)
    if args.strategy == "tensor_group":
        found["weight_global_scale"] = generate_gparam(weight.amin().reshape(1), weight.amax().reshape(1))
        if scheme.input_activations is not None:
            found["input_global_scale"] = torch.tensor([64.0])
    low, high = parts.amin(-1), parts.amax(-1)
    scale, zero_point = calculate_qparams(low, high, args, global_scale=found.get("weight_global_scale"))
    if args.scale_dtype is None:
        scale = scale.to(weight.dtype)
    if scheme.input_activations is not None and scheme.input_activations.dynamic is False:
        found["input_scale"] = torch.tensor([1 / 64], dtype=weight.dtype)
    return found | {"weight_scale": scale, "weight_zero_point": zero_point}
