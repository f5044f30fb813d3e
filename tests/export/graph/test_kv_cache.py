"""Quantized KV caches: a checkpoint's scales, what is asked for without, and what cannot be is named."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from export.graph.test_model import error, expected, run, tokens
from safetensors.numpy import load_file, save_file
from support.harness.sweeps import every
from support.models.checkpoints import write_checkpoint
from transformers import DynamicCache

from quantmoe.exporter.choosing.options import Options
from quantmoe.exporter.errors import OptionError
from quantmoe.exporter.inspecting.inspect import inspect
from quantmoe.exporter.reading.checkpoint import CheckpointError
from quantmoe.exporter.reading.formats import find_format, open_checkpoint
from quantmoe.exporter.reading.weights import kv_cache
from quantmoe.exporter.writing.convert import export
from quantmoe.exporter.writing.plan import plan
from quantmoe.runtime.generate import Generator

LAYERS = 5  # of which three are traced
SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}


def fake(format: str, x: torch.Tensor, scale: float) -> torch.Tensor:
    """x [.., n] as a cache holds it, by ops/cached_attention.def."""
    if format == "fp8_e4m3":
        return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
    if format == "int8":
        return (x / scale).round().clamp(-128, 127) * scale
    own = x.abs().amax(-1, keepdim=True) / 127
    return (x / own).round() * own


class FakeCache(DynamicCache):
    """transformers' cache, whose keys and values are rounded."""

    def __init__(self, format: str, scales: list[tuple[float, float]]):
        super().__init__()
        self.format, self.by = format, scales

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        key, value = (
            fake(self.format, x, s) for x, s in zip((key_states, value_states), self.by[layer_idx], strict=True)
        )
        return super().update(key, value, layer_idx, *args, **kwargs)


def with_scales(source: Path, folder: Path, type: str, scales: list[tuple[float, float]]) -> Path:
    """A copy of a checkpoint of compressed-tensors with a kv_cache_scheme and its scales."""
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"]["kv_cache_scheme"] = SCHEME | {"type": type}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tensors = load_file(folder / "model.safetensors")
    for i, pair in enumerate(scales):
        for name, scale in zip("kv", pair, strict=True):
            tensors[f"model.layers.{i}.self_attn.{name}_scale"] = np.array([scale], np.float32)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize(("type", "format"), every([("float", "fp8_e4m3"), ("int", "int8")]))
def test_a_checkpoints_scales_are_carried(checkpoint, tmp_path, type, format):
    """Against transformers in float32 whose keys and values are rounded alike. What differs by f32 noise is rounded to
    the same code unless it lies by the middle of two: here none does."""
    from quantmoe.exporter.graph.model import Skeleton, dequantized

    source = checkpoint("qwen3_moe", num_hidden_layers=LAYERS)
    one = 1.0 if type == "float" else 3.5
    scales = [
        (np.float32(one * (0.011 + 0.002 * i)).item(), np.float32(one * (0.008 + 0.001 * i)).item())
        for i in range(LAYERS)
    ]
    folder, out = with_scales(source, tmp_path / "checkpoint", type, scales), tmp_path / "model"
    remark = f"the KV cache is {format} (kv_cache_scheme: {type}8 per tensor)"
    assert plan(folder, out).kv_cache == remark
    assert export(folder, out, activations="float", logits="all").kv_cache == remark
    kept = "TensorRT takes no codes, --cache (fp8|int8) keeps them for ONNX Runtime"
    assert re.search(
        rf"stays float: {kept}; .*not used: model\.layers\.0", plan(folder, tmp_path / "other", target="cuda").kv_cache
    )
    nodes = inspect(out)["attention"]
    found = [[n["attributes"][name] for name in ("cache_format", "k_scale", "v_scale")] for n in nodes]
    assert found == [[format, *pair] for pair in scales]
    assert [(n["cache"], n["bytes_per_token"]) for n in nodes] == [(format, 2 * 2 * 48)] * LAYERS

    generator, ids = Generator(out), tokens(2, 7)
    model = dequantized(Skeleton(find_format(open_checkpoint(source))))
    with torch.no_grad():
        rounded = model(torch.from_numpy(ids), cache=FakeCache(format, scales)).logits.double().numpy()
    assert error(run(generator, ids, (5, 1, 1)), rounded) < 2e-5
    assert error(expected(model, ids), rounded) > 1e-3

    # The cache in place, on disk, and back a few tokens.
    cache = generator.cache()
    cache.append(ids[0].tolist())
    generator.save_cache(cache, tmp_path / "cache")
    again = generator.load_cache(tmp_path / "cache")
    again.rewind(4)
    last = again.append(ids[0, 4:].tolist())
    assert error(last[-1] if last.ndim > 1 else last, rounded[0, -1]) < 2e-5


@pytest.mark.parametrize(("cache", "format"), [("int8", "int8_token"), ("fp8", "fp8_e4m3")])
def test_caches_without_scales(checkpoint, reference, tmp_path, cache, format):
    out = tmp_path / "model"
    report = export(checkpoint(), out, activations="float", logits="all", cache=cache)
    what = "scales of each token" if cache == "int8" else "the scale 1"
    assert report.kv_cache == f"the KV cache is {format} with {what}, the checkpoint has none"
    ids = tokens(2, 7, seed=1)  # of which no key or value lies by the middle of two codes
    with torch.no_grad():
        rounded = reference()(torch.from_numpy(ids), cache=FakeCache(format, [(1.0, 1.0)] * 2))
    assert error(run(Generator(out), ids, (5, 1, 1)), rounded.logits.double().numpy()) < 2e-5
    width = 48 + (4 if cache == "int8" else 0)
    assert [n["bytes_per_token"] for n in inspect(out)["attention"]] == [2 * 2 * width] * 2
    assert json.loads((out / "genai_config.json").read_text(encoding="utf-8"))["model"]["decoder"]["head_size"] == width


@pytest.mark.parametrize("cache", every(["int8", "fp8"]))
def test_onnxruntime_genai_gives_the_same_tokens(checkpoint, tmp_path, cache):
    import onnxruntime_genai as og

    out, prompt = tmp_path / "model", tokens(1, 6, seed=1)[0].tolist()
    export(checkpoint(), out, activations="float", cache=cache)
    want = Generator(out).greedy(prompt, 12).tokens
    model = og.Model(str(out))
    for shared in (True, False):
        options = og.GeneratorParams(model)
        options.set_search_options(max_length=18, do_sample=False, past_present_share_buffer=shared)
        generator = og.Generator(model, options)
        generator.append_tokens(np.array([prompt], np.int32))
        for at in (18, 9):
            generator.rewind_to(min(at, 9)) if at == 9 else None
            while not generator.is_done():
                generator.generate_next_token()
            assert generator.get_sequence(0)[6:].tolist() == want


def made(
    folder: Path, fields: dict[str, Any], tensors: dict[str, np.ndarray], method: str = "compressed-tensors"
) -> Any:
    """A checkpoint's headers."""
    return open_checkpoint(write_checkpoint(folder, tensors, {"quant_method": method} | fields))


def names(**values: Any) -> dict[str, np.ndarray]:
    return {f"m.0.self_attn.{name}": np.asarray(value) for name, value in values.items()}


ONE = np.ones(1, np.float32)


@pytest.mark.parametrize(
    ("fields", "tensors", "method", "want"),
    [
        ({"kv_cache_scheme": SCHEME}, {"k_scale": ONE / 2, "v_scale": ONE}, "compressed-tensors", (0.5, 1.0)),
        ({"quantization": {"kv_cache_quant_algo": "FP8"}}, {}, "modelopt", (1.0, 1.0)),
        (
            {"kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False}},
            {"k_proj.k_scale": np.float32(0.25), "v_proj.v_scale": np.float32(2)},
            "modelopt",
            (0.25, 2.0),
        ),
        ({}, {"attn.k_scale": ONE, "attn.v_scale": ONE * 3}, "fp8", (1.0, 3.0)),
        ({}, {"qkv_proj.k_scale": ONE, "qkv_proj.v_scale": ONE * 3}, "fp8", (1.0, 3.0)),
        ({}, {"qkqkv_proj.k_scale": ONE, "qkqkv_proj.v_scale": ONE * 3}, "fp8", (1.0, 3.0)),
        ({"kv_cache_scheme": SCHEME}, {"kv_scale": ONE * 2}, "compressed-tensors", (2.0, 2.0)),
    ],
)
def test_scales_of_tools(tmp_path, fields, tensors, method, want):
    ckpt = made(tmp_path, fields, names(**tensors), method)
    found = kv_cache.find(ckpt)
    assert found.format == "fp8_e4m3"
    assert kv_cache.scales(ckpt, found, "m.0.self_attn") == want


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"k_scale": ONE}, r"m.0.self_attn.v_scale is missing \(kv_cache_scheme: float8 per tensor\)"),
        ({}, "m.0.self_attn.k_scale is missing .*found no scale; --cache f16"),
        (
            {"v_scale": ONE},
            r"k_scale is missing .*; found m.0.self_attn.v_scale; --cache f16 \(.*auto\) needs no scales",
        ),
        ({"k_proj.k_scale": ONE}, "v_scale is missing .*; found m.0.self_attn.k_proj.k_scale; --cache f16"),
        (
            {"k_cache_scale": ONE, "q_proj.weight_scale": ONE},
            "k_scale is missing .*; found m.0.self_attn.k_cache_scale; --cache f16",
        ),
        ({"kv_scale": -ONE}, "kv_scale is -1, expected"),
        ({"k_scale": ONE, "v_scale": 0 * ONE}, "v_scale.* is 0, expected a number from 2.-64 to 2.64"),
        ({"k_scale": -ONE, "v_scale": ONE}, "k_scale.* is -1, expected"),
        ({"k_scale": ONE * np.float32(np.nan), "v_scale": ONE}, "k_scale.* is nan, expected"),
        ({"k_scale": ONE * np.float32(np.inf), "v_scale": ONE}, "k_scale.* is inf, expected"),
        (
            {"k_scale": np.ones((2, 1, 1), np.float32), "v_scale": ONE},
            r"k_scale.* is F32 \[2, 1, 1\], expected one number",
        ),
        ({"k_scale": np.ones(0, np.float32), "v_scale": ONE}, r"k_scale.* is F32 \[0\], expected one number"),
        ({"k_scale": np.ones(1, np.int32), "v_scale": ONE}, r"k_scale.* is I32 \[1\], expected one number of F32"),
    ],
)
def test_damaged_scales_are_named(tmp_path, tensors, message):
    ckpt = made(tmp_path, {"kv_cache_scheme": SCHEME}, names(**tensors))
    with pytest.raises(CheckpointError, match=message):
        kv_cache.scales(ckpt, kv_cache.find(ckpt), "m.0.self_attn")


@pytest.mark.parametrize(
    ("scheme", "reason"),
    [
        ({"strategy": "attn_head"}, "strategy attn_head, supported: tensor"),
        ({"strategy": "token", "dynamic": True}, "strategy token, supported: tensor"),
        ({"dynamic": True}, r"scales of each run \(dynamic\)"),
        ({"symmetric": False}, "zero points"),
        ({"num_bits": 4}, "neither float8 nor int8"),
        ({"type": ["float"]}, "neither float8 nor int8"),
    ],
)
def test_schemes_that_are_not_carried_are_named(tmp_path, scheme, reason):
    format = find_format(made(tmp_path, {"kv_cache_scheme": SCHEME | scheme}, names(k_scale=ONE, v_scale=ONE)))
    assert format.kv_cache().startswith("the KV cache stays float: " + reason.replace("\\", ""))
    assert "not used: m.0.self_attn.k_scale and 1 more" in format.kv_cache()


def test_a_scale_that_one_layer_lacks_is_named(checkpoint, tmp_path):
    folder = with_scales(checkpoint(), tmp_path / "checkpoint", "float", [(0.01, 0.01)])
    for cache in ("auto", "fp8"):
        with pytest.raises(CheckpointError, match=r"model.layers.1.self_attn.k_scale is missing"):
            plan(folder, tmp_path / "model", cache=cache)
    assert "stays float: asked for" in plan(folder, tmp_path / "model", cache="f16").kv_cache
    assert "int8_token with scales of each token in place of" in plan(folder, tmp_path / "model", cache="int8").kv_cache


def test_latent_attention_and_standard_nodes_have_no_codes(checkpoint, tmp_path):
    with pytest.raises(OptionError, match=r"cache is int8: .*self_attn: key_split is 40, expected 0"):
        plan(checkpoint("deepseek_v3"), tmp_path / "model", cache="int8")
    with pytest.raises(OptionError, match=r"cache is fp8: .*self_attn is standard nodes: head_size is 48"):
        plan(checkpoint("qwen3_moe"), tmp_path / "model", target="cuda", cache="fp8")


@pytest.mark.parametrize(
    ("target", "cache", "message"),
    [
        ("cpu", "int4", "cache is 'int4', expected one of: auto, f16, f32, bf16, int8, fp8"),
        ("cpu", "bf16", "cache is bf16: for target cpu the kernels take f16 and f32"),
        ("cuda", "f32", "cache is f32: for target cuda floats have the graph's type, bf16"),
    ],
)
def test_options(target, cache, message):
    with pytest.raises(OptionError, match=message):
        Options(target=target, cache=cache)


def test_int8_without_scales_names_the_way_out_on_cuda(checkpoint, tmp_path):
    with pytest.raises(OptionError, match=r"^cache is int8: .* the checkpoint has none; cache fp8 needs no scales"):
        plan(checkpoint("qwen3_moe", hidden_size=256, head_dim=64), tmp_path, target="cuda", cache="int8")


@pytest.mark.parametrize("cache", every(["int8", "fp8"]))
def test_the_sample_takes_codes(exported, cache):
    folder = exported("qwen3_moe", cache=cache)
    sample = Path(__file__).parents[3] / "samples" / "python" / "generate.py"
    done = subprocess.run([sys.executable, sample, folder, "6", "1", "2", "3"], capture_output=True, text=True)
    assert done.stdout.split() == [str(id) for id in Generator(folder).greedy([1, 2, 3], 6).tokens], done.stderr
