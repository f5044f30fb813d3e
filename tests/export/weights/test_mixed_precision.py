"""Qwen3.5 as ModelOpt's MIXED_PRECISION leaves it: experts, shared expert and lm_head NVFP4, projections of attention
FP8, the layer of multi-token prediction in 16 bits, an FP8 KV cache. All of it in hf_quant_config.json."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from export.architectures.test_hybrid import SIZES, multimodal, rewritten
from export.generation.test_mtp import drafting
from export.graph.test_model import error, expected, run, tokens
from export.targets.test_cuda import logits, torch_logits
from safetensors.torch import load_file
from support.harness.once import made_once
from support.models.tiny import make_float_checkpoint

from quantmoe.exporter.graph.model import Skeleton, dequantized
from quantmoe.exporter.inspecting.unpack import unpack
from quantmoe.exporter.reading.formats import find_format, moe_layers, open_checkpoint
from quantmoe.exporter.writing.convert import export
from quantmoe.exporter.writing.plan import plan
from quantmoe.exporter.writing.prepare import formats_of
from quantmoe.runtime.generate import Generator

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
FP8 = (
    *(f"self_attn.{p}_proj" for p in "qkvo"),
    *(f"linear_attn.{p}" for p in ("in_proj_qkv", "in_proj_z", "out_proj")),
)


def nvfp4(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The tensors of W4A16_NVFP4, and what they mean."""
    groups = weight.float().unflatten(1, (-1, 16))
    largest = groups.abs().amax(-1)
    whole = largest.max() / (6 * 448)
    scales = (largest / 6 / whole).to(torch.float8_e4m3fn)
    step = (scales.float() * whole)[..., None]
    codes = ((groups.abs() / step)[..., None] - E2M1).abs().argmin(-1)
    means = (E2M1[codes] * groups.sign() * step).flatten(1)
    codes = (codes + 8 * (groups < 0)).flatten(1).to(torch.uint8)
    packed = codes[:, ::2] | codes[:, 1::2] << 4
    return {"weight": packed, "weight_scale": scales, "weight_scale_2": whole}, means


def fp8(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The tensors of FP8, and what they mean."""
    scale = weight.float().abs().max() / 448
    codes = (weight.float() / scale).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor(8 / 448)}, codes.float() * scale


def algorithm(name: str) -> str:
    """quant_algo of a weight; nothing of those in 16 bits."""
    module = name.removesuffix(".weight")
    if name.startswith("mtp.") or not name.endswith(".weight"):
        return ""
    if ".experts." in name or ".shared_expert." in name or module == "lm_head":
        return "W4A16_NVFP4"
    return "FP8" if module.endswith(FP8) else ""


def published(name: str) -> str:
    return name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    layers: dict[str, dict] = {}

    def quantized(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        for own, made in drafting(name, tensor):
            module, algo = published(own.removesuffix(".weight")), algorithm(own)
            if not algo:
                yield published(own), made
                continue
            layers[module] = {"quant_algo": algo} | ({"group_size": 16} if algo != "FP8" else {})
            for leaf, value in (fp8 if algo == "FP8" else nvfp4)(made)[0].items():
                yield f"{module}.{leaf}", value.contiguous()

    def write(folder: Path) -> None:
        heads = {"hidden_size": 256, "head_dim": 64}
        floats = make_float_checkpoint(folder / "floats", "qwen3_5_moe_text", **SIZES | heads)
        made = rewritten(floats, folder / "mixed", quantized, multimodal)
        quantization = {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": "FP8", "quantized_layers": layers,
                        "exclude_modules": ["mtp*", "model.visual*"]}  # fmt: skip
        (made / "hf_quant_config.json").write_text(
            json.dumps({"producer": {"name": "modelopt", "version": "0.47.0"}, "quantization": quantization}),
            encoding="utf-8",
        )

    return made_once(tmp_path_factory, write, "mixed precision") / "mixed"


@pytest.fixture(scope="module")
def reference(source):
    return dequantized(Skeleton(find_format(open_checkpoint(source))))


def test_weights_are_what_the_tensors_mean(source):
    """Each module by its own algorithm."""
    format = find_format(open_checkpoint(source))
    floats = {n: t for f in (source.parent / "floats").glob("*.safetensors") for n, t in load_file(f).items()}
    modules = {
        "model.layers.0.mlp.experts.1.down_proj": nvfp4, "model.layers.1.mlp.shared_expert.up_proj": nvfp4,
        "lm_head": nvfp4, "model.layers.1.self_attn.o_proj": fp8, "model.layers.0.linear_attn.in_proj_qkv": fp8,
    }  # fmt: skip
    for module, quantize in modules.items():
        want = quantize(floats[f"{module}.weight"])[1].numpy()
        np.testing.assert_allclose(format.matrix_of(published(module)).dequantize(), want, rtol=1e-6, atol=0)
    assert not format.is_quantized("mtp.layers.0.self_attn.q_proj")


def test_on_the_cpu(source, reference, tmp_path):
    """With the layer that drafts, whose experts stay in their 16 bits."""
    report = export(source, tmp_path / "model", activations="float", cache="f32", logits="all", mtp=True)
    assert report.layers["mtp.layers.0.mlp.experts"][0] == "bf16, not quantized"
    ids = tokens(2, 9)
    assert error(run(Generator(tmp_path / "model"), ids, (7, 1, 1)), expected(reference, ids)) < 2e-5


def test_the_cache_that_it_names(source, tmp_path):
    """FP8 without scales."""
    text = plan(source, tmp_path / "model").kv_cache
    assert "KV cache" in text
    assert "FP8" in text


def test_for_cuda(source, reference, tmp_path):
    export(source, tmp_path / "model", target="cuda", dtype="f16", activations="float", cache="f16", logits="all")
    ids = np.random.default_rng(3).integers(0, 384, (2, 7))
    mask = np.ones_like(ids)
    found, want = logits(tmp_path / "model", ids, mask), torch_logits(reference, ids, mask)
    assert np.abs(found - want).max() / np.abs(want).max() < 1e-2


@pytest.mark.every
def test_the_layer_that_drafts_for_cuda(source, tmp_path):
    """Its experts stay in their 16 bits, of the graph's type: the bytes that the checkpoint has, or those rounded."""
    (layer,) = moe_layers(formats_of(find_format(open_checkpoint(source)), True)[-1])
    for dtype, kind in (("bf16", torch.bfloat16), ("f16", torch.float16)):
        report = export(source, tmp_path / dtype, target="cuda", dtype=dtype, mtp=True)
        assert report.layers[layer.name][0] == "bf16, not quantized"
        assert layer.name in plan(source, tmp_path / "none", target="cuda", dtype=dtype, mtp=True).layers
        unpack(tmp_path / dtype / "mtp.onnx", 0, tmp_path / f"{dtype}.safetensors")
        found = load_file(tmp_path / f"{dtype}.safetensors")
        for e in range(layer.num_experts):
            for part in ("gate", "up", "down"):
                want = torch.from_numpy(getattr(layer.expert(e), part).codes.copy()).view(torch.bfloat16).to(kind)
                assert torch.equal(found[f"{layer.name}.{e}.{part}.codes"].view(kind), want)
