"""Shared experts as some of the routed ones: recognised by what a mixture computes, packed losslessly, the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from export.graph.test_model import error, expected, run, tokens
from safetensors.numpy import load_file
from support.harness.sweeps import every
from support.models.tiny import SIZES
from support.models.tiny import make_checkpoint as make_quantized
from transformers.models.qwen3_next import modeling_qwen3_next as of

from quantmoe.custom_ops.matrix import QuantizedMatrix, portion
from quantmoe.exporter.choosing.choose import choose, choose_experts
from quantmoe.exporter.graph.model import Skeleton, dequantized
from quantmoe.exporter.graph.modules.shared_experts import recognise
from quantmoe.exporter.inspecting.inspect import inspect
from quantmoe.exporter.inspecting.unpack import unpack
from quantmoe.exporter.reading.formats import find_format, open_checkpoint
from quantmoe.exporter.writing.convert import export
from quantmoe.exporter.writing.plan import plan
from quantmoe.runtime.generate import Generator

SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
#: architecture -> fields, where the shared expert is how many of the routed ones and whether it has a gate
MIXTURES: dict[str, tuple[dict[str, Any], int, int]] = {
    "qwen3_next": ({"full_attention_interval": 2, "shared_expert_intermediate_size": 32}, 1, 1),
    "deepseek_v3": ({"n_shared_experts": 1, "kv_lora_rank": 32, "q_lora_rank": 32}, 1, 0),
    "glm4_moe": ({"n_shared_experts": 3}, 3, 0),
    "llama4_text": ({"intermediate_size": 32, "interleave_moe_layer_step": 1}, 1, 0),
}


def checkpoint(folder: Path, architecture: str, scheme: str = "W4A16", **others: Any) -> Path:
    fields = SMALL | {"moe_intermediate_size": 32} | MIXTURES[architecture][0] | others
    if architecture == "deepseek_v3":  # latent attention
        fields = {name: value for name, value in fields.items() if name != "head_dim"}
    if architecture == "llama4_text":
        fields = {name: value for name, value in fields.items() if name != "moe_intermediate_size"}
    group_size = fields.pop("group_size", None if "FP" in scheme else 32)
    return make_quantized(folder, architecture, scheme, group_size, **fields)


def routers(folder: Path) -> set[tuple[int, int]]:
    found = inspect(folder)["routers"]
    return {(node["attributes"]["shared_experts"], node["attributes"]["shared_gate"]) for node in found}


@pytest.mark.parametrize("architecture", every(MIXTURES, 2))
def test_a_shared_expert_is_some_of_the_routed_ones(architecture: str, tmp_path: Path) -> None:
    """The logits are PyTorch's with the same weights, to sums in f32 in another order; no shared expert is left."""
    folder, (_, count, gate) = checkpoint(tmp_path / "c", architecture), MIXTURES[architecture]
    report = export(folder, tmp_path / "o", activations="float", logits="all", cache="f32")
    routed = next(SIZES[architecture][name] for name in SIZES[architecture] if name.endswith("_experts"))
    assert {spec.num_experts for _, spec in report.layers.values()} == {routed + count}
    assert set(report.shared.values()) == {count}
    assert not report.apart
    assert not [name for name in report.linears if "shared" in name]
    assert routers(tmp_path / "o") == {(count, gate)}
    ids = tokens(2, 9)
    want = expected(dequantized(Skeleton(find_format(open_checkpoint(folder)))), ids)
    assert error(run(Generator(tmp_path / "o"), ids, (6, 1, 2)), want) < 2e-5


@pytest.mark.parametrize("architecture", every(["qwen3_next", "glm4_moe"]))
@pytest.mark.parametrize("target", every(["cpu", "cuda"]))
def test_its_bytes(architecture: str, target: str, tmp_path: Path) -> None:
    """unpack gives the checkpoint's codes and scales; inspect and the plan say how many."""
    folder, count = checkpoint(tmp_path / "c", architecture, group_size=32), MIXTURES[architecture][1]
    planned = plan(folder, tmp_path / "o", target=target)
    report = export(folder, tmp_path / "o", target=target)
    assert planned.shared == report.shared
    assert {name: spec for name, (_, spec, _) in planned.layers.items()} == {
        n: s for n, (_, s) in report.layers.items()
    }
    assert planned.linears.keys() == report.linears.keys()
    (layer, *_) = inspect(tmp_path / "o", verify=True)["layers"]
    assert len(layer["shared"]) == count
    number = int(layer["module"].split(".layers.")[1].split(".")[0])
    unpack(tmp_path / "o", number, tmp_path / "u.safetensors")
    found, format = load_file(tmp_path / "u.safetensors"), find_format(open_checkpoint(folder))
    shared = layer["shared"][0] if count == 1 else layer["shared"][0].rpartition(".")[0]
    for role, axis in (("gate", 0), ("up", 0), ("down", 1)):
        matrix = format.matrix(f"{shared}.{role}_proj")
        for field in ("codes", "scales"):
            parts = [found[f"{name}.{role}.{field}"] for name in layer["shared"]]
            np.testing.assert_array_equal(np.concatenate(parts, axis), getattr(matrix, field))


@pytest.mark.parametrize(
    ("fields", "scheme", "reason"),
    [
        ({"shared_expert_intermediate_size": 48, "group_size": 16}, "W4A16", None),  # no multiple
        ({"shared_expert_intermediate_size": 64}, "W8A8", "int8_token rounds rows of it, not of 2 experts"),
        ({"shared_expert_intermediate_size": 64}, "FP8_DYNAMIC", "fp8_token rounds rows of it"),
    ],
)
def test_it_stays_apart(fields: dict[str, int], scheme: str, reason: str | None, tmp_path: Path) -> None:
    """Where a node of the routed experts would not compute the same, or would not be as exact."""
    folder = checkpoint(tmp_path / "c", "qwen3_next", scheme, **{"group_size": None} | fields)
    planned = plan(folder, tmp_path / "o")
    assert set(planned.shared.values()) == {0}
    assert [name for name in planned.linears if "shared_expert." in name]
    if reason is None:
        assert not planned.apart
    else:
        assert planned.apart.keys() == {f"model.layers.{i}.mlp.shared_expert" for i in range(2)}
        assert all(reason in text for text in planned.apart.values())


def test_one_of_another_format_stays_apart(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "c", "qwen3_next")
    skeleton = Skeleton(find_format(open_checkpoint(folder)))
    for name in list(skeleton.linears):
        if "shared_expert.up_proj" in name:
            skeleton.linears[name] = "lm_head"
    chosen = choose(
        skeleton,
        choose_experts(skeleton.format, "cpu_panel", "int8", scales="exact"),
        "cpu_panel",
        activations="int8",
        scales="exact",
    )
    assert not chosen.shared
    assert set(chosen.apart) == {f"model.layers.{i}.mlp.shared_expert" for i in range(2)}


@pytest.mark.parametrize(
    "broken",
    [
        "scaled",
        "other activation",
        "tanh for a sigmoid",
        "weights twice",
        "half of the sum",
        "a norm before the experts",
    ],
)
def test_a_mixture_that_is_another_is_left_alone(broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = checkpoint(tmp_path / "c", "qwen3_next")
    format = find_format(open_checkpoint(folder))
    skeleton = Skeleton(format)
    chosen = choose_experts(format, "cpu_panel", "int8", scales="exact")
    specs = {name: chosen[layer.name][0][1] for name, layer in skeleton.experts.items()}
    assert len(recognise(skeleton.model, specs)) == 2

    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        x = hidden_states.view(-1, hidden_states.shape[-1])
        shared = self.shared_expert(x) * (2 if broken == "scaled" else 1)
        _, weights, ids = self.gate(x)
        weights = weights * 2 if broken == "weights twice" else weights
        own = x / x.norm() if broken == "a norm before the experts" else x
        gate = self.shared_expert_gate(x)
        gate = gate.tanh() if broken == "tanh for a sigmoid" else gate.sigmoid()
        made = self.experts(own, ids, weights) + gate * shared
        return (made / 2 if broken == "half of the sum" else made).reshape(hidden_states.shape)

    monkeypatch.setattr(of.Qwen3NextSparseMoeBlock, "forward", forward)
    if broken == "other activation":
        for module in skeleton.model.modules():
            if type(module).__name__ == "Qwen3NextMLP":
                module.act_fn = torch.nn.GELU()
    assert not recognise(skeleton.model, specs)


@pytest.mark.parametrize(
    ("axis", "block_n", "group_size"), [(0, 1, 32), (0, 16, -1), (1, 1, 32), (1, 1, -1), (1, 16, 8)]
)
def test_portions(axis: int, block_n: int, group_size: int) -> None:
    """Rows below each other, or columns whose products add up, are the matrix; what would be divided is refused."""
    rng = np.random.default_rng(0)
    groups = 1 if group_size == -1 else 96 // group_size
    m = QuantizedMatrix(
        kind="int8",
        codes=rng.integers(0, 256, (48, 96), np.uint8),
        scales=rng.uniform(0.5, 1, (48 // block_n, groups)).astype(np.float32),
        group_size=group_size,
        block_n=block_n,
        zero_points=rng.integers(0, 256, (48 // block_n, groups), np.uint8),
        bias=rng.normal(size=48).astype(np.float32) if axis == 0 else None,
        pre_scale=rng.uniform(0.5, 2, 96).astype(np.float32),
    )
    parts = [portion(m, i, 3, axis) for i in range(3)]
    np.testing.assert_array_equal(np.concatenate([p.dequantize() for p in parts], axis), m.dequantize())
    if axis == 0:
        np.testing.assert_array_equal(np.concatenate([p.bias for p in parts]), m.bias)
    with pytest.raises(ValueError, match="are not 5 parts"):
        portion(m, 0, 5, axis)
    if block_n == 16 and axis == 0:
        with pytest.raises(ValueError, match="48 rows in blocks of 16 are not 2 parts"):
            portion(m, 0, 2, axis)


def test_portions_in_act_order() -> None:
    """Columns go to the part that has their features, if a whole group does."""
    rng = np.random.default_rng(0)
    groups = [rng.permutation(32 * part + np.arange(32)).reshape(4, 8) for part in range(3)]
    perm = rng.permutation(np.concatenate(groups)).reshape(-1).astype(np.int32)
    codes, scales = rng.integers(0, 16, (48, 96), np.uint8), rng.uniform(0.5, 1, (48, 12)).astype(np.float32)
    zero_points, pre_scale = rng.integers(0, 16, (48, 12), np.uint8), rng.uniform(0.5, 2, 96).astype(np.float32)
    m = QuantizedMatrix(
        kind="int4", codes=codes, scales=scales, group_size=8, zero_points=zero_points, pre_scale=pre_scale, perm=perm
    )
    parts = [portion(m, i, 3, 1) for i in range(3)]
    assert all(part.perm is not None for part in parts)
    np.testing.assert_array_equal(np.concatenate([part.dequantize() for part in parts], 1), m.dequantize())
    said = "columns in act-order are not divided: a group has features of several parts"
    with pytest.raises(ValueError, match=said):
        portion(replace(m, perm=rng.permutation(96).astype(np.int32)), 0, 3, 1)
