"""Makes a small but real checkpoint: a transformers architecture with random weights, a tokenizer, and weights quantized
and stored by the compressed-tensors library's own compressor. Needs torch, transformers and compressed-tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.format import infer_module_format
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams
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
}
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
IGNORE = ("lm_head", "mlp.gate", "block_sparse_moe.gate")


def make_checkpoint(
    folder: str | Path,
    architecture: str = "qwen3_moe",
    scheme: str = "W4A16",
    group_size: int | None = 32,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    max_shard_size: str = "20MB",
    symmetric: bool = True,
    **sizes: Any,
) -> Path:
    """Writes a checkpoint folder as llm-compressor would, experts under the architecture's own unfused names.

    Args:
        folder: created if missing.
        architecture: transformers model_type: qwen3_moe, mixtral, olmoe, or another with per-expert names.
        scheme: a compressed-tensors preset (W4A16, W8A16, W8A8, W4A8, NVFP4, ...).
        group_size: replaces the preset's; -1 is one scale a row; None keeps the preset's.
        seed: of the weights.
        dtype: of weights and scales.
        max_shard_size: small, so that the checkpoint has several shards.
        symmetric: False stores zero points.
        sizes: fields of the architecture's configuration.

    Returns:
        The folder.
    """
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
    model.generation_config.do_sample = False
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    tokenizer.save_pretrained(folder)

    found = preset_name_to_scheme(scheme, targets=["Linear"])
    weights = found.weights.model_dump() | {"symmetric": symmetric, "zp_dtype": None}
    if group_size is not None:
        weights |= {"group_size": group_size, "strategy": "channel" if group_size == -1 else "group"}
    found.weights = QuantizationArgs(**weights)
    quantize_folder(folder, found)
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


def quantize_folder(folder: Path, scheme: QuantizationScheme) -> None:
    """Quantizes every linear of a safetensors folder in place, round to nearest, and writes the configuration."""
    format = infer_module_format(torch.nn.Linear, scheme)
    scheme.format = format
    compressor = BaseCompressor.get_value_from_registry(format.value)
    skipped: list[str] = []
    weight_map: dict[str, str] = {}
    for shard in sorted(folder.glob("*.safetensors")):
        tensors: dict[str, torch.Tensor] = {}
        for name, tensor in load_file(shard).items():
            module, _, leaf = name.rpartition(".")
            linear = leaf == "weight" and tensor.ndim == 2 and "embed_tokens" not in module
            if linear and not module.endswith(IGNORE):
                compressed = compressor.compress({"weight": tensor} | qparams(tensor, scheme.weights), scheme)
                tensors |= {f"{module}.{key}": value.contiguous() for key, value in compressed.items()}
            else:
                tensors[name] = tensor
                skipped += [module] if linear else []
        save_file(tensors, shard, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, shard.name)
    index = folder / "model.safetensors.index.json"
    if index.exists():
        index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}, indent=2))

    quantization = QuantizationConfig(
        config_groups={"group_0": scheme},
        format=format.value,
        quantization_status="compressed",
        ignore=sorted(skipped),
    )
    path = folder / "config.json"
    config = json.loads(path.read_text()) | {"quantization_config": json.loads(quantization.model_dump_json())}
    path.write_text(json.dumps(config, indent=2, sort_keys=True))


def qparams(weight: torch.Tensor, args: QuantizationArgs) -> dict[str, torch.Tensor]:
    """The library's min-max scale and zero point of one matrix [N, K], one pair for each group of ``args``."""
    n, k = weight.shape
    if args.strategy == "tensor":
        parts = weight.reshape(1, -1)
    elif args.strategy == "group":
        parts = weight.reshape(n, k // args.group_size, args.group_size)
    else:
        parts = weight.reshape(n, 1, k)
    scale, zero_point = calculate_qparams(parts.amin(-1), parts.amax(-1), args)
    return {"weight_scale": scale.to(weight.dtype), "weight_zero_point": zero_point}
