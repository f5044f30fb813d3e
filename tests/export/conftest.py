"""One small checkpoint and export per architecture and option, made once a run: tracing takes seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import cache, reduce
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._export.utils
from support.harness.once import made_once
from support.models.tiny import SIZES as SIZES_OF
from support.models.tiny import make_checkpoint
from torch.onnx._internal.exporter import _registration, _schemas
from transformers import PreTrainedModel

from quantmoe.exporter.choosing.options import Options
from quantmoe.exporter.graph.model import Skeleton, dequantized
from quantmoe.exporter.reading.formats import find_format, open_checkpoint
from quantmoe.exporter.writing.convert import export

#: large enough that weights are external, small enough to trace and run quickly
SIZES = {"hidden_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 48, "num_hidden_layers": 2}
HYBRID = ("qwen3_next", "qwen3_5_moe_text")
INTERMEDIATE = dict.fromkeys(SIZES_OF, "intermediate_size") | dict.fromkeys(
    ("qwen3_moe", "deepseek_v3", "glm4_moe", "mimo_v2_flash", *HYBRID), "moe_intermediate_size"
)


#: what an export asks of torch each time and is the same each time, four tenths of a small one: onnxscript's library of
#: operators parsed, the signature of each, and their registration for torch.export
SAME = ((_registration, "onnxscript_apis.get_torchlib_ops"), (_schemas, "op_signature_from_function"),
        (torch._export.utils, "_materialize_cpp_cia_ops"))  # fmt: skip


@pytest.fixture(scope="session", autouse=True)
def asked_once() -> Iterator[None]:
    """These names are not public; a torch without one asks each time here, too."""
    with pytest.MonkeyPatch.context() as patch:
        for module, path in SAME:
            *owners, name = path.split(".")
            owner = reduce(lambda found, part: getattr(found, part, None), owners, module)
            if ask := getattr(owner, name, None):
                patch.setattr(owner, name, cache(ask))
        yield


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """checkpoint(architecture, scheme="W4A16", **sizes) -> folder. Schemes: presets; _ASYM has zero points."""

    @cache
    def make(architecture: str = "qwen3_moe", scheme: str = "W4A16", **sizes: object) -> Path:
        fields = SIZES | {INTERMEDIATE[architecture]: 96} | sizes
        if architecture == "deepseek_v3":  # latent attention
            fields = {name: value for name, value in fields.items() if name != "head_dim"} | {"num_key_value_heads": 4}
        if architecture == "mimo_v2_flash":  # layers of a sliding window have twice as many
            fields |= {"num_key_value_heads": 1}
        if architecture in HYBRID:  # a layer of each kind
            fields = {"full_attention_interval": 2, "shared_expert_intermediate_size": 96} | fields
        if "FP" in scheme:
            fields["group_size"] = None  # the preset's
        preset = scheme.removesuffix("_ASYM")

        def write(folder: Path) -> Path:
            return make_checkpoint(folder, architecture, preset, symmetric=preset == scheme, **fields)

        return made_once(tmp_path_factory, write, architecture, scheme=scheme, **fields)

    return make


@pytest.fixture(scope="session")
def plain_of(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """plain_of(**options) -> Qwen3-MoE's export if its attention were not CachedAttention: standard nodes."""

    def none(model: torch.nn.Module, *_: object, **__: object) -> tuple[dict[str, object], dict[str, str]]:
        return {}, {name: "not tried" for name, _ in model.named_modules() if name.endswith(".self_attn")}

    def make(**options: Any) -> Path:
        def write(folder: Path) -> None:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("quantmoe.exporter.graph.trace.recognise", none)
                export(checkpoint(), folder, activations="float", **options)

        return made_once(tmp_path_factory, write, "plain", **options)

    return make


@pytest.fixture(scope="session")
def plain(plain_of: Callable[..., Path]) -> Path:
    return plain_of(cache="f16")


@pytest.fixture(scope="session")
def exported(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """exported(architecture, scheme="W4A16", **options of export) -> folder; with the logits of all tokens and, on
    the CPU, a cache of float32."""

    defaults = {field.name: field.default for field in fields(Options)}

    @cache
    def make(architecture: str = "qwen3_moe", scheme: str = "W4A16", **options: object) -> Path:
        cache = {"cache": "f32"} if options.get("target") != "cuda" else {}
        given = {"logits": "all"} | cache | options
        given = {name: value for name, value in given.items() if value != defaults[name]}  # one export, however asked

        def write(folder: Path) -> None:
            export(checkpoint(architecture, scheme), folder, **given)

        return made_once(tmp_path_factory, write, architecture, export=scheme, **given)

    return make


@pytest.fixture(scope="session")
def cached(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """cached(architecture, **options of export) -> folder for CUDA, with heads that the kernels take."""

    @cache
    def make(architecture: str, **options: object) -> Path:
        given = {"target": "cuda", "dtype": "f16", "logits": "all"} | options

        def write(folder: Path) -> None:
            export(checkpoint(architecture, hidden_size=256, head_dim=64), folder, **given)

        return made_once(tmp_path_factory, write, architecture, head_dim=64, **given)

    return make


@pytest.fixture(scope="session")
def reference(checkpoint: Callable[..., Path]) -> Callable[..., PreTrainedModel]:
    """reference(architecture, scheme, **sizes) -> the float32 PyTorch model with the same dequantized weights."""

    @cache
    def make(architecture: str = "qwen3_moe", scheme: str = "W4A16", **sizes: object) -> PreTrainedModel:
        return dequantized(Skeleton(find_format(open_checkpoint(checkpoint(architecture, scheme, **sizes)))))

    return make
