"""Qwen3.6-35B-A3B as onnxruntime-genai's own builder has it, with random weights, in the memory of a few layers.

    python tests/benchmarks/genai_qwen.py checkpoint CHECKPOINT --layers 8
    python -m onnxruntime_genai.models.builder -i CHECKPOINT -o GRAPH -p int4 -e cpu
    python tests/benchmarks/genai_qwen.py grow GRAPH FOLDER
    quantmoe bench model qwen3.6-35b-a3b --layers 8 --lm-head int4 --against FOLDER

The builder takes a checkpoint in bf16, 65 GB of it. So it gets one with 8 experts and a small vocabulary, and ``grow``
gives its graph all of them: shapes of weights, the routers' and the head's sizes, nothing else. Their numbers are then
random, a layer's are those of all.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import torch
import transformers
from onnx import numpy_helper
from safetensors.torch import save_file

from quantmoe.benchmarks.random_checkpoint import COMMON, CONFIGS, cut, embedding_deviation

EXPERTS, VOCABULARY = 8, 4096
SIZES = CONFIGS["qwen3.6-35b-a3b"]
DEVIATION = embedding_deviation(SIZES["num_hidden_layers"])
#: of a tower that the text model does not have
VISION = {"depth": 1, "hidden_size": 64, "intermediate_size": 64, "num_heads": 2, "num_position_embeddings": 16}
DATA = "model.onnx.data"
BLOCK = 32  # of the scales; how large weights are, no time depends on
ALIGNMENT = 256


def write_checkpoint(folder: Path, layers: int) -> None:
    """As published: a multimodal configuration with rotary positions of three axes, bf16, a shard a layer."""
    text = cut(SIZES, layers) | COMMON | {"num_experts": EXPERTS, "vocab_size": VOCABULARY}
    rope = {"rope_type": "default", "mrope_section": [11, 11, 10], "mrope_interleaved": True}
    rope |= {name: text.pop(name) for name in ("rope_theta", "partial_rotary_factor")}
    for name in ("model_type", "torch_dtype"):
        del text[name]
    config = transformers.Qwen3_5MoeConfig(
        text_config=transformers.Qwen3_5MoeTextConfig(**text, rope_parameters=rope).to_dict(),
        vision_config=VISION | {"out_hidden_size": text["hidden_size"]},
        architectures=["Qwen3_5MoeForConditionalGeneration"],
        dtype="bfloat16",
    )
    with torch.device("meta"):
        tensors = transformers.Qwen3_5MoeForConditionalGeneration(config).state_dict()
    config.save_pretrained(folder)
    torch.manual_seed(0)
    shards: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        layer = name.partition(".language_model.layers.")[2].partition(".")[0] or "rest"
        scale = DEVIATION if "embed" in name else tensor.shape[-1] ** -0.5
        shards.setdefault(f"model-{layer}.safetensors", {})[name] = (torch.randn(tensor.shape) * scale).bfloat16()
    for file, part in shards.items():
        save_file(part, folder / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, part in shards.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def numbers(name: str, dtype: np.dtype, shape: Sequence[int]) -> np.ndarray:
    """Of an initializer of the builder's graph."""
    rng, size = np.random.default_rng(0), math.prod(shape)
    if name in ("cos_cache", "sin_cache"):
        angles = np.arange(shape[0])[:, None] * SIZES["rope_theta"] ** (-np.arange(shape[1]) / shape[1])
        return (np.cos(angles) if name == "cos_cache" else np.sin(angles)).astype(dtype)
    if dtype.kind in "iu":
        return np.resize(rng.integers(0, 256, 1 << 24, np.uint8), size)
    if "scales" in name:
        return np.resize((1 + rng.random(1 << 16)) / (7 * (shape[-1] * BLOCK) ** 0.5), size).astype(dtype)
    if "norm" in name or ("bias" in name and "dt_" not in name):
        return np.full(size, "norm" in name, dtype)
    scale = DEVIATION if "embed" in name else 0.1 if len(shape) == 1 else max(shape) ** -0.5
    return np.resize(rng.normal(0, scale, 1 << 20), size).astype(dtype)


def grow(graph: Path, folder: Path) -> None:
    """Write a graph of the builder, made of :func:`write_checkpoint`'s, with all experts and tokens.

    Raises:
        SystemExit: it is none.
    """
    config = json.loads((graph / "genai_config.json").read_text(encoding="utf-8"))
    if (found := config["model"]["vocab_size"]) != VOCABULARY:
        raise SystemExit(f"{graph}: a vocabulary of {found}, expected {VOCABULARY}, as `checkpoint` has it")
    model = onnx.load(graph / "model.onnx", load_external_data=False)
    sizes = {".moe.": (EXPERTS, SIZES["num_experts"]), "lm_head.": (VOCABULARY, SIZES["vocab_size"])}
    sizes["model.embed_tokens."] = sizes["lm_head."]
    folder.mkdir(parents=True, exist_ok=True)
    del model.graph.value_info[:]  # ONNX Runtime infers shapes
    made: dict[tuple[str, tuple[int, ...]], bytes] = {}
    with (folder / DATA).open("wb") as file:
        for tensor in model.graph.initializer:
            if tensor.data_location != onnx.TensorProto.EXTERNAL:
                continue
            for part, (before, after) in sizes.items():
                if part in tensor.name and tensor.dims[0] == before:
                    tensor.dims[0] = after
            dtype, shape = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type), tuple(tensor.dims)
            key = tensor.name.partition(".layers.")[2].partition(".")[2] or tensor.name, shape
            if key not in made:
                made[key] = numbers(tensor.name, dtype, shape).tobytes()
            file.write(bytes(-file.tell() % ALIGNMENT))
            begin = file.tell()
            file.write(made[key])
            del tensor.external_data[:]
            for entry, value in (("location", DATA), ("offset", begin), ("length", len(made[key]))):
                tensor.external_data.add(key=entry, value=str(value))
    for node in model.graph.node:
        for attribute in node.attribute:
            if node.op_type == "Constant" and attribute.HasField("t"):
                if numpy_helper.to_array(attribute.t).tolist() == [-1, EXPERTS]:
                    attribute.t.CopyFrom(numpy_helper.from_array(np.array([-1, SIZES["num_experts"]])))
            elif attribute.name == "N" and "/moe/router/" in node.name:
                attribute.i = SIZES["num_experts"]
            elif attribute.name == "N" and "/lm_head/" in node.name:
                attribute.i = SIZES["vocab_size"]
    (logits,) = (value for value in model.graph.output if value.name == "logits")
    logits.type.tensor_type.shape.dim[-1].dim_value = SIZES["vocab_size"]
    onnx.save(model, folder / "model.onnx")
    config["model"]["vocab_size"] = SIZES["vocab_size"]
    (folder / "genai_config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    for path in graph.glob("tokenizer*"):
        shutil.copy(path, folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    made_ = commands.add_parser("checkpoint")
    made_.add_argument("folder", type=Path)
    made_.add_argument("--layers", type=int, default=8)
    grown_ = commands.add_parser("grow")
    grown_.add_argument("graph", type=Path)
    grown_.add_argument("folder", type=Path)
    given = parser.parse_args()
    if given.command == "checkpoint":
        write_checkpoint(given.folder, given.layers)
    else:
        grow(given.graph, given.folder)
