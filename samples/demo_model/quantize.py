"""Rounds a trained model's linears to int4 by GPTQ: quantize.py BF16_FOLDER TEXT_FOLDER OUTPUT_FOLDER.

    pip install llmcompressor     # in an environment of its own
    python quantize.py bf16 text checkpoint

Groups of 32 along K, symmetric, the columns of largest activations first; calibrated on 32,768 tokens of the King James
Version that it was trained on. Embeddings (also the head), routers, gates of few outputs and the layer of multi-token
prediction stay in bf16.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modeling.moe.linearize import load_quantizable_moe
from llmcompressor.modifiers.gptq import GPTQModifier
from safetensors.torch import load_file, save_file
from train import delta_rule
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as qwen3_5

SAMPLES, LENGTH = 16, 2048


def main() -> None:
    source, text, output = map(Path, sys.argv[1:])
    tokens = np.fromfile(text / "train-kjv.bin", np.uint16).astype(np.int64)
    starts = np.random.default_rng(0).integers(0, len(tokens) - LENGTH, SAMPLES)
    rows = [tokens[s : s + LENGTH].tolist() for s in starts]
    data = Dataset.from_dict({"input_ids": rows, "attention_mask": [[1] * LENGTH] * SAMPLES})

    scheme = preset_name_to_scheme("W4A16", targets=["Linear"]).model_dump()
    scheme["weights"] |= {"group_size": 32, "actorder": "weight"}
    recipe = GPTQModifier(
        config_groups={"group_0": QuantizationScheme.model_validate(scheme)},
        ignore=["lm_head", "re:.*mlp.gate$", "re:.*shared_expert_gate$", "re:.*in_proj_[ab]$"],
    )
    qwen3_5.torch_chunk_gated_delta_rule = delta_rule  # transformers' own takes minutes a layer on the CPU
    with load_quantizable_moe():
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    oneshot(model=model, dataset=data, recipe=recipe, num_calibration_samples=SAMPLES, max_seq_length=LENGTH)
    model.to(torch.bfloat16)  # the values of weights that GPTQ has rounded stay next to their codes
    model.save_pretrained(output, save_compressed=True)
    AutoTokenizer.from_pretrained(source).save_pretrained(output)
    drafts = {name: x for name, x in load_file(source / "model.safetensors").items() if name.startswith("mtp.")}
    if drafts:  # transformers leaves them out
        save_file(load_file(output / "model.safetensors") | drafts, output / "model.safetensors", {"format": "pt"})
        config = json.loads((output / "config.json").read_text(encoding="utf-8"))
        config["quantization_config"]["ignore"].append("re:^mtp.*")
        (output / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
