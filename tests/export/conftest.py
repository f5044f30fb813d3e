"""One small checkpoint and export per architecture and option, made once a session: tracing takes seconds."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from tiny import SIZES as SIZES_OF
from tiny import make_checkpoint
from transformers import PreTrainedModel

from quantmoe.exporter.graph.model import Skeleton, dequantized
from quantmoe.exporter.reading.formats import find_format, open_checkpoint
from quantmoe.exporter.writing.convert import export

#: large enough that weights are external, small enough to trace and run quickly
SIZES = {"hidden_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 48, "num_hidden_layers": 2}
HYBRID = ("qwen3_next", "qwen3_5_moe_text")
INTERMEDIATE = dict.fromkeys(SIZES_OF, "intermediate_size") | dict.fromkeys(
    ("qwen3_moe", "deepseek_v3", "glm4_moe", *HYBRID), "moe_intermediate_size"
)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """checkpoint(architecture, scheme="W4A16", **sizes) -> folder. Schemes: presets; _ASYM has zero points."""

    @cache
    def make(architecture: str = "qwen3_moe", scheme: str = "W4A16", **sizes: object) -> Path:
        fields = SIZES | {INTERMEDIATE[architecture]: 96} | sizes
        if architecture == "deepseek_v3":  # latent attention
            fields = {name: value for name, value in fields.items() if name != "head_dim"} | {"num_key_value_heads": 4}
        if architecture in HYBRID:  # a layer of each kind
            fields = {"full_attention_interval": 2, "shared_expert_intermediate_size": 96} | fields
        if "FP" in scheme:
            fields["group_size"] = None  # the preset's
        preset = scheme.removesuffix("_ASYM")
        folder = tmp_path_factory.mktemp(architecture)
        return make_checkpoint(folder, architecture, preset, symmetric=preset == scheme, **fields)

    return make


@pytest.fixture(scope="session")
def plain(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen3-MoE's export if its attention were not CachedAttention: standard nodes."""
    out = tmp_path_factory.mktemp("plain") / "model"

    def none(model: torch.nn.Module, *_: object) -> tuple[dict[str, object], dict[str, str]]:
        return {}, {name: "not tried" for name, _ in model.named_modules() if name.endswith(".self_attn")}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("quantmoe.exporter.graph.model.recognise", none)
        export(checkpoint(), out, activations="float", cache="f16")
    return out


@pytest.fixture(scope="session")
def exported(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """exported(architecture, scheme="W4A16", **options of export) -> folder; with the logits of all tokens and, on
    the CPU, a cache of float32."""

    @cache
    def make(architecture: str = "qwen3_moe", scheme: str = "W4A16", **options: object) -> Path:
        out = tmp_path_factory.mktemp("exported") / architecture
        cache = {"cache": "f32"} if options.get("target") != "cuda" else {}
        export(checkpoint(architecture, scheme), out, **{"logits": "all"} | cache | options)
        return out

    return make


@pytest.fixture(scope="session")
def reference(checkpoint: Callable[..., Path]) -> Callable[..., PreTrainedModel]:
    """reference(architecture, scheme) -> the float32 PyTorch model with the same dequantized weights."""

    @cache
    def make(architecture: str = "qwen3_moe", scheme: str = "W4A16") -> PreTrainedModel:
        return dequantized(Skeleton(find_format(open_checkpoint(checkpoint(architecture, scheme)))))

    return make
