"""The decoders against the tools' own code: what compressed-tensors and transformers dequantize, exactly."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus, QuantizationStrategy
from compressed_tensors.quantization.lifecycle.forward import dequantize, set_forward_quantized
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
from safetensors.torch import save_file
from support.models.checkpoints import (
    TINY,
    check_headers,
    make_checkpoint,
    make_gptq_checkpoint,
    same_matrix,
    write_checkpoint,
)
from support.models.tiny import make_float_checkpoint, make_scheme, qparams
from support.operators import native_kernels as native
from support.operators.cases import Case
from support.operators.specs import linear_spec

from quantmoe.custom_ops.layouts import cpu_panel
from quantmoe.exporter.reading.formats import find_format, moe_layers, open_checkpoint

# preset, group size (None: the preset's), symmetric
PRESETS = [
    ("W4A16", 32, True),
    ("W4A16", 128, True),
    ("W4A16", -1, True),
    ("W4A16", 32, False),
    ("W4A16", -1, False),
    ("W8A16", 128, True),
    ("W8A16", -1, True),
    ("W8A16", 32, False),
    ("W8A8", None, True),
    ("W4A8", 128, True),
    ("W4A8", -1, True),
    ("W4A8", 32, True),
    ("W4AFP8", None, True),
    ("FP8", None, True),
    ("FP8_DYNAMIC", None, True),
    ("FP8_BLOCK", None, True),
    ("NVFP4A16", None, True),
    ("NVFP4", None, True),
    ("MXFP4A16", None, True),
    ("MXFP8A16", None, True),
    ("MXFP8", None, True),
]


@pytest.mark.parametrize(("preset", "group_size", "symmetric"), PRESETS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "f16", "f32"])
def test_compressed_tensors(
    preset: str, group_size: int | None, symmetric: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    n, k = (200, 384)
    scheme = make_scheme(preset, group_size, symmetric)
    weight = torch.randn(n, k, dtype=dtype)
    weight[3] += 1  # rows that are far from symmetric
    weight[5] = weight[5].abs()
    compressor = BaseCompressor.get_value_from_registry(scheme.format)
    stored = compressor.compress({"weight": weight} | qparams(weight, scheme), scheme)
    save_file({f"model.m.{key}": value for key, value in stored.items()}, tmp_path / "model.safetensors")
    config = QuantizationConfig(config_groups={"g": scheme}, format=scheme.format)
    (tmp_path / "config.json").write_text(f'{{"quantization_config": {config.model_dump_json()}}}', encoding="utf-8")

    found = find_format(open_checkpoint(tmp_path)).matrix("model.m").dequantize()

    # The library multiplies in the scale's dtype (bf16 for e2m1); in f32 its product is as exact as dequantize()'s
    if scheme.format == "nvfp4-pack-quantized":
        values = unpack_fp4_from_uint8(stored["weight_packed"], n, k, torch.float32)
        scale, divisor = stored["weight_scale"].float(), stored["weight_global_scale"]
        want = dequantize(values, scale, args=scheme.weights, global_scale=divisor)
        # scale / divisor and the product are rounded to f32 there, 1 / divisor is here
        np.testing.assert_allclose(found, want.numpy(), rtol=3 * 2.0**-24, atol=0)
        return
    if stored["weight_scale"].is_floating_point():
        stored["weight_scale"] = stored["weight_scale"].float()
    want = compressor.decompress(stored, scheme)["weight"].float().numpy()
    np.testing.assert_array_equal(found.astype(np.float32), want)


@pytest.mark.parametrize("architecture", ["qwen3_moe", "mixtral", "olmoe"])
@pytest.mark.parametrize("writer", ["compressed-tensors", "gptq"])
def test_whole_model(architecture: str, writer: str, tmp_path: Path) -> None:
    """Every parameter and expert of a model that transformers itself names; decoded weights are near the originals."""
    make = make_checkpoint if writer == "compressed-tensors" else make_gptq_checkpoint
    make(tmp_path / "q", architecture, group_size=32, **TINY)
    make_float_checkpoint(tmp_path / "f", architecture, **TINY)
    original = open_checkpoint(tmp_path / "f")
    format = find_format(open_checkpoint(tmp_path / "q"))
    layers = moe_layers(format)
    assert [layer.index for layer in layers] == [0, 1]
    names = set(original.names())
    for name in format.parameters():
        want = original.tensor(name).astype(np.float32)
        found = format.parameter(name)
        assert found.shape == want.shape
        if format.is_quantized(name.removesuffix(".weight")):
            assert np.abs(found - want).max() < 0.16 * np.abs(want).max()  # half a step of 1/7.5, and rounded scales
        else:
            np.testing.assert_array_equal(found, want)
        names.remove(name)
    for layer in layers:
        assert (layer.hidden_size, layer.activation, layer.gated) == (128, "silu", True)
        for e in range(layer.num_experts):
            expert = layer.expert(e)
            for role, projection in zip(("gate", "up", "down"), layer.projections, strict=True):
                name = f"{layer.name}.{e}.{projection}.weight"
                want = original.tensor(name).astype(np.float32)
                assert np.abs(getattr(expert, role).dequantize() - want).max() < 0.16 * np.abs(want).max()
                names.remove(name)
    assert not names


def test_awq(tmp_path: Path) -> None:
    """AutoAWQ's tensors as compressed-tensors' own converter reads them."""
    from compressed_tensors.entrypoints.convert import AutoAWQConverter

    rng = np.random.default_rng(0)
    n, k, g = 64, 256, 128

    def words(*shape: int) -> np.ndarray:
        return rng.integers(-(2**31), 2**31, shape).astype(np.int32)

    tensors = {
        "m.qweight": words(k, n // 8),
        "m.qzeros": words(k // g, n // 8),
        "m.scales": rng.uniform(0.01, 1, (k // g, n)).astype(np.float16),
    }
    config = {"quant_method": "awq", "bits": 4, "group_size": g, "zero_point": True, "version": "gemm"}
    awq = find_format(open_checkpoint(write_checkpoint(tmp_path / "awq", tensors, config))).matrix("m")

    converter = AutoAWQConverter.from_autoawq_config(config)
    converted = converter.process({name: torch.from_numpy(array) for name, array in tensors.items()})
    config = converter.update_config(None).model_dump(mode="json") | {"quant_method": "compressed-tensors"}
    arrays = {name: tensor.numpy() for name, tensor in converted.items()}
    same_matrix(awq, find_format(open_checkpoint(write_checkpoint(tmp_path / "ct", arrays, config))).matrix("m"))


@pytest.mark.parametrize(("n", "k"), [(256, 384), (128, 128)])
def test_fp8_blocks(n: int, k: int, tmp_path: Path) -> None:
    """DeepSeek's layout against compressed-tensors' dequantizer, which rounds to bf16."""
    from compressed_tensors.entrypoints.convert import FP8BlockDequantizer

    torch.manual_seed(0)
    tensors = {
        "m.weight": torch.randn(n, k).to(torch.float8_e4m3fn),
        "m.weight_scale_inv": torch.rand(n // 128, k // 128),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(
        '{"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}', encoding="utf-8"
    )
    found = find_format(open_checkpoint(tmp_path)).dense("m")
    want = FP8BlockDequantizer(targets=["m"]).process(dict(tensors))["m.weight"]
    np.testing.assert_array_equal(torch.from_numpy(found).to(want.dtype).float(), want.float())


def test_gpt_oss(tmp_path: Path) -> None:
    """Against transformers' own dequantization of the published layout."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    rng = np.random.default_rng(0)
    experts, h, i = 3, 96, 64
    name = "model.layers.4.mlp.experts"
    tensors = {
        f"{name}.gate_up_proj_blocks": rng.integers(0, 256, (experts, 2 * i, h // 32, 16)).astype(np.uint8),
        f"{name}.gate_up_proj_scales": rng.integers(110, 135, (experts, 2 * i, h // 32)).astype(np.uint8),
        f"{name}.gate_up_proj_bias": rng.normal(size=(experts, 2 * i)).astype(ml_dtypes.bfloat16),
        f"{name}.down_proj_blocks": rng.integers(0, 256, (experts, h, i // 32, 16)).astype(np.uint8),
        f"{name}.down_proj_scales": rng.integers(110, 135, (experts, h, i // 32)).astype(np.uint8),
        f"{name}.down_proj_bias": rng.normal(size=(experts, h)).astype(ml_dtypes.bfloat16),
    }
    write_checkpoint(
        tmp_path,
        tensors,
        {"quant_method": "mxfp4"},
        model_type="gpt_oss",
        num_local_experts=experts,
        num_experts_per_tok=2,
        hidden_size=h,
        intermediate_size=i,
        hidden_act="silu",
        swiglu_limit=7.0,
    )
    (layer,) = moe_layers(find_format(open_checkpoint(tmp_path)))
    assert (layer.index, layer.activation, layer.swiglu_alpha, layer.swiglu_limit) == (4, "swiglu_oai", 1.702, 7.0)

    check_headers(layer)

    def dequantized(projection: str) -> np.ndarray:  # transformers gives [E, K, N]
        blocks, scales = (torch.from_numpy(tensors[f"{name}.{projection}_{part}"]) for part in ("blocks", "scales"))
        return convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(1, 2).numpy()

    gate_up, down = dequantized("gate_up_proj"), dequantized("down_proj")
    for e, expert in enumerate(layer):
        np.testing.assert_array_equal(expert.gate.dequantize(), gate_up[e, 0::2])
        np.testing.assert_array_equal(expert.up.dequantize(), gate_up[e, 1::2])
        np.testing.assert_array_equal(expert.down.dequantize(), down[e])
        np.testing.assert_array_equal(expert.up.bias, tensors[f"{name}.gate_up_proj_bias"][e, 1::2].astype(np.float32))
        np.testing.assert_array_equal(expert.down.bias, tensors[f"{name}.down_proj_bias"][e].astype(np.float32))


@pytest.mark.parametrize("preset", ["W4AFP8", "MXFP4"])
def test_act_order_of_compressed_tensors(preset: str) -> None:
    """Its forward rounds activations in groups of the input features as they come, whatever weight_g_idx says."""
    scheme = preset_name_to_scheme(preset, ["Linear"])
    args = scheme.input_activations
    formats = {"W4AFP8": "fp8_group128", "MXFP4": "mxfp4"}
    if preset == "W4AFP8":
        args = args.model_copy(update={"strategy": QuantizationStrategy.GROUP, "group_size": 128})
    case = Case(hidden=64, intermediate=256, act_order="shared")
    rng = np.random.default_rng(0)
    m = case.matrix(rng, 64, 256, rng.permutation(256).astype(np.int32))
    spec = linear_spec(256, 64, cpu_panel.describe_down(m, formats[preset]))
    row = native.aligned(cpu_panel.row_bytes(spec.moe, "w2"))
    cpu_panel.pack_down(m, spec.moe, row)
    x = rng.normal(0, 1, (9, 256)).astype(np.float32)

    module = torch.nn.Linear(256, 64, bias=False)
    module.weight.data = torch.from_numpy(m.dequantize(np.float32))
    module.quantization_scheme = scheme.model_copy(update={"weights": None, "input_activations": args})
    module.quantization_status = QuantizationStatus.FROZEN
    set_forward_quantized(module)
    with torch.no_grad():
        want = module(torch.from_numpy(x)).numpy()
    found = native.NativeLinear(spec, row[None])(x)
    # Two f32 sums of 256 products: 1e-6 of their size. Other groups: 3e-2.
    assert np.sqrt(((found - want) ** 2).mean() / (want**2).mean()) < 1e-5
