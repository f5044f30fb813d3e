"""One layer of every checkpoint format: decoded, described, packed, multiplied and unpacked."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from support.models import encoders
from support.models.checkpoints import check_layer, write_checkpoint

from quantmoe.custom_ops.expert import Expert
from quantmoe.exporter.choosing.choose import choose_layer
from quantmoe.exporter.reading.formats import MoELayer, find_format, moe_layers, open_checkpoint

HIDDEN, INTERMEDIATE, EXPERTS = 160, 96, 3  # 160: no multiple of 64 or 128
CONFIG = {
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "hidden_size": HIDDEN,
    "moe_intermediate_size": INTERMEDIATE,
    "hidden_act": "silu",
}


def usable(m: encoders.QuantizedMatrix) -> encoders.QuantizedMatrix:
    """Without NaN codes, and where it is free with scales that keep activations within a few units."""
    if m.kind == "fp8_e4m3":
        m = dataclasses.replace(m, codes=np.where(m.codes & 0x7F == 0x7F, 0, m.codes).astype(np.uint8))
    if m.scales.dtype.itemsize == 1:
        return m if m.global_scale is None else dataclasses.replace(m, global_scale=float(np.float32(0.01)))
    size = np.nanstd(m.dequantize()) * np.sqrt(m.shape[1])
    if m.scales.dtype.names:  # by a power of two: minima stay exact
        scales = m.scales.copy()
        for name in scales.dtype.names:
            scales[name] *= np.float32(0.5 ** np.ceil(np.log2(size)))
        return dataclasses.replace(m, scales=scales)
    return dataclasses.replace(m, scales=(m.scales.astype(np.float32) / np.float32(size)).astype(m.scales.dtype))


def layer_of(folder: Path, case: encoders.Case, group_size: int, scale: str) -> MoELayer:
    tensors = {}
    for e in range(EXPERTS):
        sizes = {
            "gate_proj": (INTERMEDIATE, HIDDEN),
            "up_proj": (INTERMEDIATE, HIDDEN),
            "down_proj": (HIDDEN, INTERMEDIATE),
        }
        for i, (name, (n, k)) in enumerate(sizes.items()):
            matrix = encoders.random_matrix(case, n, k, group_size, scale, bias=True, seed=10 * e + i)
            for suffix, tensor in case.encode(usable(matrix)).items():
                tensors[f"model.layers.0.mlp.experts.{e}.{name}.{suffix}"] = tensor
    write_checkpoint(folder, tensors, case.config(group_size), **CONFIG)
    return moe_layers(find_format(open_checkpoint(folder)))[0]


@pytest.mark.parametrize("activations", ["int8", "int8-token", "float"])
@pytest.mark.parametrize("case", encoders.CASES, ids=lambda c: c.id)
def test_layer(case: encoders.Case, activations: str, tmp_path: Path) -> None:
    for group_size in case.group_sizes[:2]:
        check_layer(layer_of(tmp_path / str(group_size), case, group_size, case.scales[0]), activations)


@pytest.mark.parametrize("activations", ["int8", "float"])
def test_gpt_oss(activations: str, tmp_path: Path) -> None:
    """Fused, interleaved, biased, clamped: OpenAI's own tensors."""
    rng = np.random.default_rng(0)
    tensors, prefix = {}, "model.layers.0.mlp.experts."
    for name, n, k in (("gate_up_proj", 2 * INTERMEDIATE, HIDDEN), ("down_proj", HIDDEN, INTERMEDIATE)):
        tensors[f"{prefix}{name}_blocks"] = rng.integers(0, 256, (EXPERTS, n, k // 32, 16), np.uint8)
        tensors[f"{prefix}{name}_scales"] = rng.integers(120, 125, (EXPERTS, n, k // 32), np.uint8)
        tensors[f"{prefix}{name}_bias"] = rng.normal(0, 1, (EXPERTS, n)).astype(np.float32)
    config = CONFIG | {"model_type": "gpt_oss", "intermediate_size": INTERMEDIATE, "swiglu_limit": 7.0}
    write_checkpoint(tmp_path, tensors, {"quant_method": "mxfp4"}, **config)
    layer = moe_layers(find_format(open_checkpoint(tmp_path)))[0]
    check_layer(layer, activations)
    spec = choose_layer(layer, "cpu_panel", activations)
    assert (spec.activation, spec.w13.format, spec.w13.bias, spec.w2.bias) == ("swiglu_oai", "mxfp4", 1, 1)
    bias = tensors[f"{prefix}gate_up_proj_bias"][1]
    expert: Expert = layer.expert(1)
    np.testing.assert_array_equal(expert.gate.bias, bias[::2])
    np.testing.assert_array_equal(expert.up.bias, bias[1::2])


def test_gate_and_up_keep_their_own_input_scales(tmp_path: Path) -> None:
    case = next(c for c in encoders.CASES if c.id == "modelopt-nvfp4")
    layer = layer_of(tmp_path, case, 16, "e4m3")
    expert = layer.expert(0)
    assert expert.gate.input_scale != expert.up.input_scale
    check_layer(layer, "int8")


@pytest.mark.parametrize("middle", [0, 2])
def test_an_expert_without_zero_points_of_its_own(middle: int, tmp_path: Path) -> None:
    """All its zero points are the midpoint; its neighbours' are not."""
    case = next(c for c in encoders.CASES if c.id == "gptq4-asym")
    layer = layer_of(tmp_path, case, 32, "f16")
    tensors = {name: np.array(layer.format.ckpt.tensor(name)) for name in layer.format.ckpt.names()}
    for name in tensors:
        if f".{middle}." in name.removeprefix(layer.name) and name.endswith("qzeros"):
            tensors[name][:] = 0x77777777  # 8, stored less one
    write_checkpoint(tmp_path / "changed", tensors, case.config(32), **CONFIG)
    check_layer(moe_layers(find_format(open_checkpoint(tmp_path / "changed")))[0], "int8")


def test_widths_that_no_layout_carries_are_refused(tmp_path: Path) -> None:
    config = {"quant_method": "gptq", "bits": 5, "group_size": 32, "sym": True, "desc_act": False}
    names = [f"{e}.{name}_proj.qweight" for e in range(EXPERTS) for name in ("gate", "up", "down")]
    tensors = {f"model.layers.0.mlp.experts.{name}": np.zeros((5, 8), np.int32) for name in names}
    write_checkpoint(tmp_path, tensors, config, **CONFIG)
    with pytest.raises(ValueError, match=r"unsupported GPTQ bits=5.*supported: 2, 3, 4 and 8 bits"):
        moe_layers(find_format(open_checkpoint(tmp_path)))
