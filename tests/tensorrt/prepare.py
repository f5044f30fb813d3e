"""Small exported models and what PyTorch says of them, for run.py on a machine that has a GPU but not this package.

usage: PYTHONPATH=tests python tests/tensorrt/prepare.py FOLDER [NAME...]; a name is ARCHITECTURE-SCHEME or
VARIANT-SCHEME, e.g. qwen3_moe-NVFP4A16; without names all of MODELS.

FOLDER/<name>/ gets bf16 and f16, each an exported model; tokens.npy, int64 [ROWS, LENGTH]; logits.npy, float32 of the
model with the same dequantized weights; padded-tokens.npy and padded-logits.npy, the same with a row that begins with
padding (-1); and noise.json: how far PyTorch's own logits in bf16 and in f16 are from them, the worst token's relative
distance, and whether past and present of the exported model may be the same memory. Of many random sequences those two
are taken where the distance is least: a token whose experts are nearly tied takes others in every engine, which says
nothing of the engine.
"""

from __future__ import annotations

import copy
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from tiny import SIZES, make_checkpoint
from transformers import PreTrainedModel

from quantmoe.exporter.graph.model import DTYPES, Skeleton, dequantized
from quantmoe.exporter.reading.formats import find_format, open_checkpoint
from quantmoe.exporter.writing.convert import export
from quantmoe.exporter.writing.genai import SHARE_BUFFER

SCHEMES = ("W4A16_ASYM", "W8A16", "NVFP4A16", "MXFP4A16", "FP8_BLOCK")
#: Llama-4 whose layers without positions have no temperature, that has only such layers, and both
NOPE = {"no_rope_layers": [0, 0]}
VARIANTS = {
    "llama4_text_notemp": {"attn_temperature_tuning": False},
    "llama4_text_norope": NOPE,
    "llama4_text_plain": NOPE | {"attn_temperature_tuning": False},
}
#: with states: one layer of full attention, one of another kind
HYBRID: dict[str, dict[str, Any]] = {
    "qwen3_next": {"full_attention_interval": 2},
    "qwen3_5_moe_text": {"layer_types": ["linear_attention", "full_attention"]},
    "kimi_linear": {
        "layer_types": ["linear_attention", "full_attention"],
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 128,
        "linear_num_heads": 2,
        "linear_head_dim": 64,
        "num_key_value_heads": 8,
    },
    "lfm2_moe": {
        "layer_types": ["conv", "full_attention"],
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 128,
        "num_dense_layers": 0,
    },
}
MODELS = [f"{name}-W4A16" for name in dict.fromkeys((*SIZES, *VARIANTS, *HYBRID))] + [
    f"qwen3_moe-{scheme}" for scheme in SCHEMES
]
#: a megabyte or two each; widths as in real models' heads
SMALL = {"hidden_size": 256, "num_hidden_layers": 2, "intermediate_size": 256}
ROWS, LENGTH, DRAWS, PADDING = 2, 20, 64, 3


def relative(found: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """[B, S]: each token's distance over its length, of logits [B, S, V]."""
    return (found.float() - want).norm(dim=-1) / want.norm(dim=-1)


def logits(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    """[B, S, V] of tokens [B, S], -1 being padding."""
    mask = (tokens >= 0).long()
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    return model(tokens.clamp(min=0), attention_mask=mask, position_ids=positions).logits


def rounded(model: PreTrainedModel, dtype: torch.dtype, seed: int) -> PreTrainedModel:
    """The model in 16 bits, after the first in other last bits."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            half_ulps = torch.rand(parameter.shape, generator=generator) * 2 - 1
            parameter *= 1 + half_ulps * torch.finfo(dtype).eps / 2 * (seed > 0)
            parameter.data = parameter.data.to(dtype)
    return other


def reference(checkpoint: Path, folder: Path) -> dict[str, float]:
    model = dequantized(Skeleton(find_format(open_checkpoint(checkpoint))))
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, model.config.vocab_size, (DRAWS, LENGTH)))
    padded = ids.roll(PADDING, -1)
    padded[:, :PADDING] = -1
    noise = {name: torch.zeros(DRAWS) for name in ("bf16", "f16")}
    with torch.no_grad():
        for tokens in (ids, padded):  # Llama-4's temperature counts padding: ties are elsewhere
            want = logits(model, tokens)
            for name, worst in noise.items():
                for seed in range(3):
                    distance = relative(logits(rounded(model, DTYPES[name], seed), tokens), want)
                    noise[name] = worst = torch.maximum(worst, distance.masked_fill(tokens < 0, 0).amax(-1))
    rows = (noise["bf16"] + 8 * noise["f16"]).argsort()[:ROWS]
    first, second = rows
    for name, tokens in (("", ids[rows]), ("padded-", torch.stack((ids[first], padded[second])))):
        np.save(folder / f"{name}tokens.npy", tokens.numpy())
        with torch.no_grad():
            np.save(folder / f"{name}logits.npy", logits(model, tokens).numpy())
    found = {name: float(values[rows].max()) for name, values in noise.items()}
    return found


def in_place(exported: Path) -> bool:
    """Whether past and present may be the same memory."""
    return ir.load(exported / "model.onnx").metadata_props.get(SHARE_BUFFER) == "true"


def prepare(name: str, folder: Path) -> None:
    model, scheme = name.split("-")
    architecture = "llama4_text" if model in VARIANTS else model
    folder.mkdir(parents=True, exist_ok=True)
    sizes: dict[str, Any] = SMALL | VARIANTS.get(model, {}) | HYBRID.get(model, {})
    if "moe_intermediate_size" in SIZES.get(architecture, {}):
        sizes["moe_intermediate_size"] = 128
    if architecture != "deepseek_v3":
        sizes.setdefault("num_key_value_heads", 2)
    preset = scheme.removesuffix("_ASYM")
    group_size = None if "FP" in scheme else 32
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = make_checkpoint(scratch, architecture, preset, group_size, symmetric=preset == scheme, **sizes)
        noise = reference(checkpoint, folder)
        for dtype in ("bf16", "f16"):
            export(
                checkpoint, folder / dtype, target="cuda", dtype=dtype, activations="float", logits="all", force=True
            )
    (folder / "noise.json").write_text(json.dumps(noise | {"in_place": in_place(folder / "bf16")}))
    print(name, noise, flush=True)


if __name__ == "__main__":
    for name in sys.argv[2:] or MODELS:
        prepare(name, Path(sys.argv[1]) / name)
