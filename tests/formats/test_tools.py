"""Checkpoints that the tools themselves wrote (tests/fixtures/make.py): weights equal what the tool dequantizes, and a
layer of them runs."""

from __future__ import annotations

import dataclasses
import re
from fnmatch import fnmatch
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from support.models.checkpoints import check_layer, write_checkpoint
from support.models.encoders import CASES

from quantmoe.exporter.reading.formats import FORMATS, CheckpointError, Format, find_format, moe_layers, open_checkpoint
from quantmoe.exporter.reading.weights.unquantized import Unquantized
from quantmoe.exporter.surveying.survey import survey
from quantmoe.exporter.writing.plan import plan

FIXTURES = Path(__file__).parent.parent / "fixtures"
#: fixture -> weights, group size and activations of gate and up
TABLE = {
    "llmcompressor-0.9-gptq-group": ("int4", 32, "none"),
    "llmcompressor-gptq-weight": ("int4", 32, "none"),
    "llmcompressor-w4a16-asym": ("int4", 32, "none"),
    "llmcompressor-w8a16": ("int8", 32, "none"),
    "llmcompressor-w8a8": ("int8", -1, "int8_token"),
    "llmcompressor-w4a8": ("int4", 32, "int8_token"),
    "llmcompressor-fp8": ("fp8_e4m3", -1, "fp8_tensor"),
    "llmcompressor-fp8-dynamic": ("fp8_e4m3", -1, "fp8_token"),
    "llmcompressor-fp8-block": ("fp8_e4m3", 128, "fp8_group128"),
    "llmcompressor-fp8-kv": ("fp8_e4m3", 128, "fp8_group128"),
    "llmcompressor-nvfp4": ("nvfp4", 16, "nvfp4"),
    "llmcompressor-nvfp4a16": ("nvfp4", 16, "none"),
    "llmcompressor-mxfp4": ("mxfp4", 32, "none"),
    "compressed-tensors-0.20-w4a16-kv_head": ("int4", -1, "none"),
    "compressed-tensors-0.20-w2_w3": ("int4", 32, "none"),
    "compressed-tensors-0.20-w5_w6": ("int8", 32, "none"),
    "compressed-tensors-0.20-w2a8-kv_int8": ("int4", 32, "int8_token"),
    "compressed-tensors-0.20-w4afp8": ("int4", 32, "fp8_token"),
    "compressed-tensors-0.20-fp8-rows_static": ("fp8_e4m3", -1, "fp8_tensor"),
    "compressed-tensors-0.20-mxfp4": ("mxfp4", 32, "fp8_group128"),
    "compressed-tensors-0.20-mxfp6": ("fp8_e4m3", 32, "mxfp8"),
    "compressed-tensors-0.20-mxfp8": ("fp8_e4m3", 32, "mxfp8"),
    "compressed-tensors-0.20-embedding": ("int8", 32, "none"),
    "compressed-tensors-0.20-quip-nvfp4": ("nvfp4", 16, "nvfp4"),
    "compressed-tensors-0.20-spinquant": ("int4", 32, "none"),
    "gptqmodel-gptq-desc_act": ("int4", 32, "none"),
    "gptqmodel-gptq-asym": ("int4", 32, "none"),
    "gptqmodel-gptq8-asym-desc_act": ("int8", 32, "none"),
    "gptqmodel-gptq3": ("int4", 32, "none"),
    "gptqmodel-gptq3-asym": ("int4", 32, "none"),
    "gptqmodel-gptq2-asym-v2": ("int4", 32, "none"),
    "gptqmodel-gptq_v2": ("int4", 32, "none"),
    "gptqmodel-gptq_p": ("int8", 32, "none"),
    "gptqmodel-gptq-dynamic": ("int4", 32, "none"),
    "gptqmodel-awq": ("int4", 32, "none"),
    "gptqmodel-fp8-row": ("fp8_e4m3", -1, "none"),
    "gptqmodel-fp8-tensor": ("fp8_e4m3", -1, "none"),
    "gptqmodel-fp8-block": ("fp8_e4m3", 64, "none"),
    "modelopt-nvfp4": ("nvfp4", 16, "nvfp4"),
    "modelopt-w4a16_nvfp4": ("nvfp4", 16, "none"),
    "modelopt-fp8": ("fp8_e4m3", -1, "fp8_tensor"),
    "modelopt-fp8_pc_pt": ("fp8_e4m3", -1, "fp8_token"),
    "modelopt-fp8_pb_wo": ("fp8_e4m3", 128, "none"),
    "modelopt-mxfp4": ("mxfp4", 32, "mxfp4"),
    "modelopt-mxfp8": ("fp8_e4m3", 32, "mxfp8"),
    "modelopt-w4a16_awq": ("int4", 32, "none"),
    "modelopt-int8_wo": ("int8", -1, "none"),
    "modelopt-w4a8_mxfp4_fp8": ("mxfp4", 32, "fp8_tensor"),
    "modelopt-w4a8_nvfp4_fp8": ("nvfp4", 32, "fp8_tensor"),
    "modelopt-nvfp4-llama4": ("nvfp4", 16, "nvfp4"),
    "modelopt-nvfp4-gpt_oss": ("nvfp4", 16, "nvfp4"),
    "modelopt-fp8-llama4": ("fp8_e4m3", -1, "fp8_tensor"),
    "modelopt-fp8_pc_pt-gpt_oss": ("fp8_e4m3", -1, "fp8_token"),
    "modelopt-fp8-kv": ("fp8_e4m3", -1, "fp8_tensor"),
    "modelopt-nvfp4-kv": ("nvfp4", 16, "nvfp4"),
    "modelopt-nvfp4-experts_only": ("nvfp4", 16, "nvfp4"),
    "quark-int4": ("int4", 32, "none"),
    "quark-int4-rows": ("int4", -1, "none"),
    "quark-uint4": ("int4", 32, "none"),
    "quark-int8": ("int8", -1, "none"),
    "quark-fp8": ("fp8_e4m3", -1, "fp8_tensor"),
    "quark-fp8-kv": ("fp8_e4m3", -1, "fp8_tensor"),
    "quark-fp8-rows": ("fp8_e4m3", -1, "fp8_token"),
    "quark-mxfp4": ("mxfp4", 32, "none"),
    "quark-mxfp4-mxfp4": ("mxfp4", 32, "mxfp4"),
    "quark-mxfp6_e2m3": ("fp8_e4m3", 32, "none"),
    "quark-mxfp6_e3m2": ("fp8_e4m3", 32, "none"),
    "quark-int8-int8": ("int8", -1, "int8_token"),
    "quark-mxfp4-by_layer": ("mxfp4", 32, "fp8_tensor"),
    "autoround-gptqmodel": ("int4", 32, "none"),
    "autoround-gptqmodel-sym": ("int4", 32, "none"),
    "autoround-auto_gptq": ("int4", 32, "none"),
    "autoround-bits": ("int8", 32, "none"),
    "autoround-bits-asym": ("int8", 32, "none"),
    "autoround-awq": ("int4", 32, "none"),
    "autoround-awq6": ("int8", 32, "none"),
    "autoround-as_gptq": ("int4", 32, "none"),
    "autoround-as_awq": ("int4", 32, "none"),
    "autoround-mxfp4": ("mxfp4", 32, "mxfp4"),
    "autoround-mxfp8": ("fp8_e4m3", 32, "mxfp8"),
    "autoround-nvfp4": ("nvfp4", 16, "nvfp4"),
    "autoround-fp8_static": ("fp8_e4m3", -1, "fp8_tensor"),
    "autoround-fp8_block": ("fp8_e4m3", 128, "fp8_group128"),
    "autoround-fpw8a16": ("fp8_e4m3", -1, "none"),
    "autoround-as_ct-nvfp4": ("nvfp4", 16, "nvfp4"),
    "autoround-as_ct-fp8_static": ("fp8_e4m3", -1, "fp8_tensor"),
    "autoround-0.8-gptqmodel": ("int4", 32, "none"),
    "autoround-0.8-gptqmodel-sym": ("int4", 32, "none"),
    "autoround-0.8-auto_gptq": ("int4", 32, "none"),
    "autoawq-gemm": ("int4", 32, "none"),
    "bitsandbytes-nf4-double": ("nf4", 64, "none"),
    "bitsandbytes-fp4": ("bnb_fp4", 64, "none"),
    "bitsandbytes-int8": ("int8", -1, "none"),
    "hqq-int4": ("q4_1", 64, "none"),
    "hqq-int3": ("q4_1", 32, "none"),
    "hqq-int2": ("q4_1", 64, "none"),
    "hqq-int8": ("q8_min", 64, "none"),
    "mlx-int4": ("q4_1", 64, "none"),
    "mlx-int3": ("q4_1", 32, "none"),
    "mlx-int6": ("q8_min", 64, "none"),
    "mlx-mxfp4": ("mxfp4", 32, "none"),
    "mlx-nvfp4": ("nvfp4", 16, "none"),
    "mlx-mxfp8": ("fp8_e4m3", 32, "none"),
    "torchao-int8": ("int8", -1, "none"),
    "torchao-int8-dynamic": ("int8", -1, "int8_token"),
    "torchao-fp8": ("fp8_e4m3", -1, "none"),
    "torchao-fp8-rows": ("fp8_e4m3", -1, "fp8_token"),
    "torchao-intx4": ("int4", 32, "none"),
    "torchao-int4": ("q4_1", 32, "none"),
}
#: fixture -> bits of gate and up that operators for other widths keep
OWN_WIDTHS = {
    "gptqmodel-gptq2-asym-v2": 2,
    "gptqmodel-gptq3": 3,
    "gptqmodel-gptq3-asym": 3,
    "gptqmodel-gptq_p": 5,
    "compressed-tensors-0.20-w2_w3": 3,
    "compressed-tensors-0.20-w2a8-kv_int8": 2,
    "compressed-tensors-0.20-w5_w6": 5,
    "autoround-bits": 5,
    "autoround-bits-asym": 5,
    "autoround-awq6": 6,
}


def test_every_fixture_has_a_row() -> None:
    assert {path.parent.name for path in FIXTURES.glob("*/config.json")} == TABLE.keys()


def test_what_formats_read() -> None:
    """``reads`` of formats names tests that exist, and every fixture, and says which fixtures CUDA refuses."""
    tests = {case.id for case in CASES}
    for path in FIXTURES.parent.rglob("test_*.py"):
        tests |= {path.stem, *re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)}
    seen = set()
    for format in (*FORMATS, Unquantized):
        assert format.reads, format
        for read in format.reads:
            for name in read.tests:
                fixtures = {fixture for fixture in TABLE if fnmatch(fixture, name)}
                assert fixtures or name in tests, (format, name)
                seen |= fixtures
                for fixture in fixtures:
                    why = survey(FIXTURES / fixture)["refused"]["cuda"]
                    if "group_size is 16," in why:  # as docs/reference/formats.md says below the table
                        continue
                    found = "yes *" if why.endswith("--scales bf16") else "no" if why else "yes"
                    (layer,) = moe_layers(find_format(open_checkpoint(FIXTURES / fixture)))
                    (own,) = moe_layers(layer.format.with_widths(True))
                    if own.scheme.format != layer.scheme.format:
                        found = f"wider: {layer.scheme.format[3:]} bits"
                    assert found == read.cuda, (format, fixture, why)
    assert seen == TABLE.keys()


@pytest.mark.parametrize("name", TABLE)
def test_tool(name: str) -> None:
    format = find_format(open_checkpoint(FIXTURES / name))
    (layer,) = moe_layers(format)
    assert (layer.scheme.format, layer.scheme.group_size, layer.scheme.activation_format) == TABLE[name]
    check_tool(name, format)
    own = format.with_widths(True)
    if moe_layers(own)[0].scheme != layer.scheme:
        assert moe_layers(own)[0].scheme.format == f"int{OWN_WIDTHS[name]}"
        check_tool(name, own)


@pytest.mark.parametrize("name", [name for name, row in TABLE.items() if row[2] == "fp8_tensor"])
def test_static_activations_keep_their_scale(name: str) -> None:
    """All fixtures whose activations have one scale for a tensor store it."""
    (layer,) = moe_layers(find_format(open_checkpoint(FIXTURES / name)))
    for matrix in (layer.expert(0).gate, layer.expert(0).up, layer.expert(0).down):
        assert matrix is None or matrix.input_scale is not None


def check_tool(name: str, format: Format) -> None:
    """Weights are the tool's, and a layer runs."""
    (layer,) = moe_layers(format)
    # Where there is one product the tool and dequantize() both round it once; else (global scales, division by a
    # scale) each product, quotient or reciprocal adds half a unit in the last place.
    twice = name.startswith(("gptqmodel-fp8", "bitsandbytes-int8", "hqq-int2"))
    products = {"nvfp4": 2}.get(layer.scheme.format, 2 if twice else 0)
    with np.load(FIXTURES / name / "reference.npz") as reference:
        assert len(reference.files) >= 3
        for module, want in reference.items():
            role = module.rpartition(".")[2].removesuffix("_proj")
            fused = not layer.projections and ".experts.0." in module
            matrix = getattr(layer.expert(0), role) if fused else format.matrix(module)
            found = dataclasses.replace(matrix, pre_scale=None).dequantize(np.float32)
            # zero * scale of two f32 numbers is rounded to f32
            atol = 2.0**-24 * np.abs(matrix.scales["d_min"]).max() if name == "hqq-int2" else 0
            np.testing.assert_allclose(found, want, rtol=(products + 1) * 2.0**-24 if products else 0, atol=atol)
    for activations in ("int8", "int8-token", "float"):
        check_layer(layer, activations)


@pytest.mark.parametrize("name", ["llmcompressor-w4a8", "modelopt-w4a8_nvfp4_fp8"])
def test_codes_of_four_bits_in_bytes_are_planned(name: str, tmp_path: Path) -> None:
    assert plan(FIXTURES / name, tmp_path / "model").packed


@pytest.mark.parametrize("name", ["modelopt-nvfp4-gpt_oss", "modelopt-fp8_pc_pt-gpt_oss"])
def test_damage_of_fused_experts_is_named(name: str, tmp_path: Path) -> None:
    """Each tensor in turn missing, of another shape, of another type; a bias may be missing."""
    ckpt = open_checkpoint(FIXTURES / name)
    tensors = {tensor: ckpt.tensor(tensor) for tensor in ckpt.names() if ".experts." in tensor}
    config = {key: value for key, value in ckpt.config.items() if key != "quantization_config"}
    for damaged, array in tensors.items():
        changes = {"shape": np.concatenate([np.atleast_1d(array)] * 2), "type": np.zeros(array.shape, np.int16)}
        if not damaged.endswith("bias"):
            changes["missing"] = None
        for change, changed in changes.items():
            kept = {k: v for k, v in (tensors | {damaged: changed}).items() if v is not None}
            folder = write_checkpoint(tmp_path / f"{change}-{damaged}", kept, ckpt.quantization, **config)
            with pytest.raises(CheckpointError, match=f"{damaged}.*expected"):
                moe_layers(find_format(open_checkpoint(folder)))[0].expert(0)


@pytest.mark.parametrize("algorithm", ["mxfp4", "W4A8_NVFP4_FP8"])
def test_fused_experts_grouped_along_their_outputs(algorithm: str, tmp_path: Path) -> None:
    """ModelOpt transposes fused experts only in the algorithms that it names; what 0.47 wrote of gpt-oss."""
    ckpt, name = open_checkpoint(FIXTURES / "modelopt-nvfp4-gpt_oss"), "model.layers.0.mlp.experts"
    config = {key: value for key, value in ckpt.config.items() if key != "quantization_config"}
    shapes = {
        "gate_up_proj": (2, 64, 96),
        "gate_up_proj_weight_scale": (2, 64, 6),
        "down_proj_weight_scale": (2, 96, 2),
    }
    tensors = {f"{name}.{leaf}": np.zeros(shape, np.uint8) for leaf, shape in shapes.items()}
    write_checkpoint(tmp_path, tensors, {"quant_method": "modelopt", "quant_algo": algorithm}, **config)
    with pytest.raises(CheckpointError) as refused:
        moe_layers(find_format(open_checkpoint(tmp_path)))
    for part in (
        f"{name}: ModelOpt {algorithm.upper()} of fused experts",
        f"{name}.gate_up_proj U8 [2, 64, 96] and {name}.gate_up_proj_weight_scale U8 [2, 64, 6]: groups of output",
    ):
        assert part in str(refused.value)


@pytest.mark.parametrize("name", ["modelopt-nvfp4-gpt_oss", "modelopt-nvfp4-llama4"])
def test_fused_experts_left_alone(name: str, tmp_path: Path) -> None:
    ckpt, rng = open_checkpoint(FIXTURES / name), np.random.default_rng(0)
    config = {key: value for key, value in ckpt.config.items() if key != "quantization_config"}
    gate_up, down = (rng.normal(size=shape).astype(ml_dtypes.bfloat16) for shape in ((2, 64, 192), (2, 96, 64)))
    tensors = {"model.layers.0.mlp.experts.gate_up_proj": gate_up, "model.layers.0.mlp.experts.down_proj": down}
    write_checkpoint(tmp_path, tensors, ckpt.quantization, **config)
    (layer,) = moe_layers(find_format(open_checkpoint(tmp_path)))
    assert layer.scheme.format == layer.down_scheme.format == "bf16"
    for e, expert in enumerate(layer):
        columns = [gate_up[e, :, ::2], gate_up[e, :, 1::2]] if "gpt_oss" in name else np.split(gate_up[e], 2, axis=1)
        for matrix, want in zip((expert.gate, expert.up, expert.down), (*columns, down[e]), strict=True):
            np.testing.assert_array_equal(matrix.dequantize(np.float32), want.T.astype(np.float32))
