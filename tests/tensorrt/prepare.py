"""Small exported models and what PyTorch says of them, for run.py on a machine that has a GPU but not this package.

    PYTHONPATH=tests python tests/tensorrt/prepare.py FOLDER [NAME...]

A name is ARCHITECTURE-SCHEME or VARIANT-SCHEME, e.g. qwen3_moe-NVFP4A16; ARCHITECTURE+mtp-SCHEME is its layer of
multi-token prediction, +tp2 and +ep2 its slices for two GPUs, of tensors and of experts, +external with its experts in
the data file; without names all of MODELS.

FOLDER/<name>/ gets bf16 and f16, each an exported model, or rank0 and rank1 of it; tokens.npy, int64 [ROWS, LENGTH];
logits.npy, float32 of the model with the same dequantized weights; padded-tokens.npy and padded-logits.npy, the same
with a row that begins with padding (-1); of multi-token prediction hidden.npy and padded-hidden.npy, float32 [ROWS,
LENGTH, H], which 16 bits hold exactly; and noise.json: how far PyTorch's own logits in bf16 and in f16 are from them,
the worst token's relative distance, the models' files, and whether their past and present may be the same memory. Of
many random sequences those two are taken where the distance is least: a token whose experts are nearly tied takes
others in every engine, which says nothing of the engine.
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
from export.architectures.test_hybrid import rewritten
from export.generation.test_mtp import KINDS, REWRITE
from support.models.tiny import SIZES, make_checkpoint
from transformers import PreTrainedModel

from quantmoe.exporter.folder.metadata import SHARE_BUFFER
from quantmoe.exporter.graph.model import DTYPES, Skeleton, dequantized
from quantmoe.exporter.reading.formats import find_format, open_checkpoint
from quantmoe.exporter.writing.convert import export
from quantmoe.exporter.writing.prepare import formats_of

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
    "nemotron_h": {
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "moe", "full_attention"],
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "head_dim": 64,
        "moe_intermediate_size": 128,
        "moe_shared_expert_intermediate_size": 128,
        "mamba_num_heads": 8,
        "mamba_head_dim": 64,
        "ssm_state_size": 64,
        "n_groups": 2,
    },
    "minimax": {
        "layer_types": ["linear_attention", "full_attention"],
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "head_dim": 64,
        "intermediate_size": 128,
    },
}
SLICES = {"tp2": {"tensor_parallel": 2}, "ep2": {"tensor_parallel": 2, "expert_parallel": True}}
EXTERNAL = "external"
PARTS = [f"qwen3_moe+{EXTERNAL}", *(f"{kind}+mtp" for kind in KINDS)]
PARTS += [f"{kind}+{of}" for kind in ("qwen3_moe", "deepseek_v3", "qwen3_5_moe_text") for of in SLICES]
PARTS += [f"{kind}+tp2" for kind in ("qwen3_next", "kimi_linear", "lfm2_moe")]
MODELS = [f"{name}-W4A16" for name in dict.fromkeys((*SIZES, *VARIANTS, *HYBRID, *PARTS))] + [
    f"qwen3_moe-{scheme}" for scheme in SCHEMES
]
#: a megabyte or two each; widths as in real models' heads
SMALL = {"hidden_size": 256, "num_hidden_layers": 2, "intermediate_size": 256}
ROWS, LENGTH, DRAWS, PADDING = 2, 20, 64, 3


def relative(found: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """[B, S]: each token's distance over its length, of logits [B, S, V]."""
    return (found.float() - want).norm(dim=-1) / want.norm(dim=-1)


def logits(model: PreTrainedModel, tokens: torch.Tensor, hidden: torch.Tensor | None) -> torch.Tensor:
    """[B, S, V] of tokens [B, S], -1 being padding, and what multi-token prediction reads beside them, [B, S, H]."""
    mask = (tokens >= 0).long()
    given = {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    if hidden is not None:
        given |= {"hidden_states": hidden.to(model.dtype), "cache": None}
    return model(tokens.clamp(min=0), **given).logits


def rounded(model: PreTrainedModel, dtype: torch.dtype, seed: int) -> PreTrainedModel:
    """The model in 16 bits, after the first in other last bits."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            half_ulps = torch.rand(parameter.shape, generator=generator) * 2 - 1
            parameter *= 1 + half_ulps * torch.finfo(dtype).eps / 2 * (seed > 0)
            parameter.data = parameter.data.to(dtype)
    for module in other.modules():
        if hasattr(module, "slope_rate"):  # lightning attention, whose tables of decays have the weights' type
            module.to(dtype)
    return other


def reference(model: PreTrainedModel, folder: Path, drafts: bool) -> dict[str, float]:
    """Writes tokens and logits of a model in float32; how far it is from itself in 16 bits."""
    random = np.random.default_rng(0)
    ids = torch.from_numpy(random.integers(0, model.config.vocab_size, (DRAWS, LENGTH)))
    hidden = None
    if drafts:  # of few bits
        drawn = random.standard_normal((DRAWS, LENGTH, model.config.hidden_size), np.float32)
        hidden = torch.from_numpy(drawn.clip(-3, 3) * 32).round() / 32
    padded = ids.roll(PADDING, -1)
    padded[:, :PADDING] = -1
    noise = {name: torch.zeros(DRAWS) for name in ("bf16", "f16")}
    with torch.no_grad():
        for tokens in (ids, padded):  # Llama-4's temperature counts padding: ties are elsewhere
            want = logits(model, tokens, hidden)
            for name, worst in noise.items():
                for seed in range(3):
                    distance = relative(logits(rounded(model, DTYPES[name], seed), tokens, hidden), want)
                    noise[name] = worst = torch.maximum(worst, distance.masked_fill(tokens < 0, 0).amax(-1))
    rows = (noise["bf16"] + 8 * noise["f16"]).argsort()[:ROWS]
    first, second = rows
    for name, tokens in (("", ids[rows]), ("padded-", torch.stack((ids[first], padded[second])))):
        np.save(folder / f"{name}tokens.npy", tokens.numpy())
        read = None if hidden is None else hidden[rows]
        if read is not None:
            np.save(folder / f"{name}hidden.npy", read.numpy())
        with torch.no_grad():
            np.save(folder / f"{name}logits.npy", logits(model, tokens, read).numpy())
    found = {name: float(values[rows].max()) for name, values in noise.items()}
    return found


def in_place(exported: Path) -> bool:
    """Whether past and present may be the same memory."""
    return ir.load(exported).metadata_props.get(SHARE_BUFFER) == "true"


def prepare(name: str, folder: Path) -> None:
    model, scheme = name.split("-")
    kind, _, part = model.partition("+")
    drafts, slices = part == "mtp", SLICES.get(part, {})
    architecture = "llama4_text" if kind in VARIANTS else kind
    folder.mkdir(parents=True, exist_ok=True)
    sizes: dict[str, Any] = SMALL | VARIANTS.get(kind, {}) | HYBRID.get(kind, {})
    if "moe_intermediate_size" in SIZES.get(architecture, {}):
        sizes["moe_intermediate_size"] = 128
    if architecture == "mimo_v2_flash":  # layers of a sliding window have twice as many
        sizes["num_key_value_heads"] = 1
    elif architecture != "deepseek_v3":
        sizes.setdefault("num_key_value_heads", 2)
    preset = scheme.removesuffix("_ASYM")
    group_size = None if "FP" in scheme else 32
    files = [f"rank{rank}/model.onnx" for rank in range(2)] if slices else ["mtp.onnx" if drafts else "model.onnx"]
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = make_checkpoint(
            f"{scratch}/made", architecture, preset, group_size, symmetric=preset == scheme, **sizes
        )
        if drafts:
            checkpoint = rewritten(checkpoint, Path(scratch) / "drafting", REWRITE[kind], lambda config: config)
        *_, format = formats_of(find_format(open_checkpoint(checkpoint)), drafts)
        noise = reference(dequantized(Skeleton(format)), folder, drafts)
        options = {"activations": "float", "logits": "all", "mtp": drafts, "force": True} | slices
        if part == EXTERNAL:
            options["external_experts"] = True
        for dtype in ("bf16", "f16"):
            export(checkpoint, folder / dtype, target="cuda", dtype=dtype, **options)
    facts = {"files": files, "in_place": in_place(folder / "bf16" / files[0])}
    (folder / "noise.json").write_text(json.dumps(noise | facts), encoding="utf-8")
    print(name, noise, flush=True)


if __name__ == "__main__":
    for name in sys.argv[2:] or MODELS:
        prepare(name, Path(sys.argv[1]) / name)
