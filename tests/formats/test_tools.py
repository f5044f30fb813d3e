"""Checkpoints that the tools themselves wrote (tests/fixtures/make.py): weights equal what the tool dequantizes, and a
layer of them runs."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from checkpoints import check_layer

from quantmoe.custom_ops.layouts import cpu_panel
from quantmoe.exporter.explain import moe_spec
from quantmoe.exporter.formats import find_format, open_checkpoint
from quantmoe.exporter.plan import outline

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
    "llmcompressor-nvfp4": ("nvfp4", 16, "nvfp4"),
    "llmcompressor-nvfp4a16": ("nvfp4", 16, "none"),
    "llmcompressor-mxfp4": ("mxfp4", 32, "none"),
    "gptqmodel-gptq-desc_act": ("int4", 32, "none"),
    "gptqmodel-gptq-asym": ("int4", 32, "none"),
    "gptqmodel-gptq8-asym-desc_act": ("int8", 32, "none"),
    "gptqmodel-gptq_v2": ("int4", 32, "none"),
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
    "quark-int4": ("int4", 32, "none"),
    "quark-uint4": ("int4", 32, "none"),
    "quark-int8": ("int8", -1, "none"),
    "quark-fp8": ("fp8_e4m3", -1, "fp8_tensor"),
    "quark-fp8-rows": ("fp8_e4m3", -1, "fp8_token"),
    "quark-mxfp4": ("mxfp4", 32, "none"),
    "quark-mxfp4-mxfp4": ("mxfp4", 32, "mxfp4"),
    "autoawq-gemm": ("int4", 32, "none"),
}


def test_every_fixture_has_a_row() -> None:
    assert {path.parent.name for path in FIXTURES.glob("*/config.json")} == TABLE.keys()


@pytest.mark.parametrize("name", TABLE)
def test_tool(name: str) -> None:
    format = find_format(open_checkpoint(FIXTURES / name))
    (layer,) = format.moe_layers()
    assert (layer.scheme.format, layer.scheme.group_size, layer.scheme.activation_format) == TABLE[name]
    # Where there is one product the tool and dequantize() both round it once; else (global scales, division by a
    # scale) each product, quotient or reciprocal adds half a unit in the last place.
    products = {"nvfp4": 2}.get(layer.scheme.format, 2 if name.startswith("gptqmodel-fp8") else 0)
    with np.load(FIXTURES / name / "reference.npz") as reference:
        assert len(reference.files) >= 3
        for module, want in reference.items():
            found = dataclasses.replace(format.matrix(module), pre_scale=None).dequantize(np.float32)
            np.testing.assert_allclose(found, want, rtol=(products + 1) * 2.0**-24 if products else 0, atol=0)
    for activations in ("int8", "float"):
        check_layer(layer, activations)
        found, planned = (
            moe_spec(layer, expert, cpu_panel, activations) for expert in (layer.expert(0), outline(layer))
        )
        for p in ("w13", "w2"):
            assert cpu_panel.row_bytes(planned, p) == cpu_panel.row_bytes(found, p)
