"""Experts of one layer in several formats, as compressed-tensors' config groups and GPTQModel's ``dynamic`` store them:
a node for each."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from export.graph.test_model import error, expected, run, tokens
from export.targets.test_cuda import logits, torch_logits
from export.targets.test_parallel import run_all
from safetensors.torch import load_file
from support.harness.once import made_once

from quantmoe.exporter.errors import CheckpointError
from quantmoe.exporter.graph.model import Skeleton, dequantized
from quantmoe.exporter.inspecting.fit import fit
from quantmoe.exporter.inspecting.inspect import inspect
from quantmoe.exporter.inspecting.unpack import unpack
from quantmoe.exporter.reading.expert_map import balance, write_map
from quantmoe.exporter.reading.formats import find_format, moe_layers, open_checkpoint
from quantmoe.exporter.safetensors_file import write_safetensors
from quantmoe.exporter.surveying.explain import explain
from quantmoe.exporter.surveying.survey import survey
from quantmoe.exporter.writing.convert import export
from quantmoe.exporter.writing.plan import plan
from quantmoe.runtime.generate import Generator

EVERY_LOGIT = {"activations": "float", "logits": "all", "cache": "f32"}
SIZES = {"hidden_size": 256, "head_dim": 64, "moe_intermediate_size": 128}
#: as regular expressions: experts of 8 bits, and such whose down alone has them
WIDE = (r"re:.*experts\.(1|4|5)\..*", r"re:.*experts\.(0|7)\.down_proj.*")
IDS = {("int8", "int8"): [1, 4, 5], ("int4", "int8"): [0, 7]}

Mixed = Callable[..., Path]


def mixed(checkpoint: Callable[..., Path], folder: Path, architecture: str, scheme: str = "W8A16") -> Path:
    """A checkpoint in 4 bits with the modules of WIDE in another scheme, of the same weights."""
    four, other = (open_checkpoint(checkpoint(architecture, name, **SIZES)) for name in ("W4A16", scheme))
    groups = [ckpt.quantization["config_groups"]["group_0"] for ckpt in (four, other)]
    wide = groups[1] | {"targets": list(WIDE)}
    config = four.config | {"quantization_config": four.quantization | {"config_groups": dict(a=groups[0], b=wide)}}

    def is_wide(name: str) -> bool:
        return any(re.match(pattern.removeprefix("re:"), name) for pattern in WIDE)

    tensors = {name: four.tensor(name) for name in four.names() if not is_wide(name)}
    tensors |= {name: other.tensor(name) for name in other.names() if is_wide(name)}
    folder.mkdir(exist_ok=True)
    write_safetensors(folder / "model.safetensors", tensors)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def source(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Mixed:
    def make(architecture: str = "qwen3_moe", scheme: str = "W8A16") -> Path:
        def write(folder: Path) -> None:
            mixed(checkpoint, folder, architecture, scheme)

        return made_once(tmp_path_factory, write, f"mixed {architecture} {scheme}")

    return make


@pytest.fixture(scope="module")
def exported(source: Mixed, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_once(tmp_path_factory, lambda folder: export(source(), folder, **EVERY_LOGIT), "groups")


def reference(folder: Path) -> torch.nn.Module:
    return dequantized(Skeleton(find_format(open_checkpoint(folder))))


def experts_of(folder: Path, layer: int) -> dict[tuple[str, str], list[int]]:
    """Of a layer's nodes: formats of w13 and w2 -> ids of their experts."""
    nodes = [node for node in inspect(folder)["layers"] if f".layers.{layer}." in node["module"]]
    kinds = [(node["attributes"]["w13_format"], node["attributes"]["w2_format"]) for node in nodes]
    return dict(zip(kinds, (node["experts"]["ids"] for node in nodes), strict=True))


def test_on_the_cpu(source, exported):
    """The sums of three nodes in float32 are those of one in another order; see test_parallel.py for the bound."""
    ids = tokens(2, 9)
    assert error(run(Generator(exported), ids, (7, 1, 1)), expected(reference(source()), ids)) < 2e-5
    assert experts_of(exported, 1) == IDS | {("int4", "int4"): [2, 3, 6, *range(8, 16)]}


@pytest.mark.every
def test_a_shared_expert_is_in_the_group_of_its_kind(source, tmp_path):
    folder = source("deepseek_v3")
    report = export(folder, tmp_path / "model", **EVERY_LOGIT)
    ids = tokens(2, 9)
    assert error(run(Generator(tmp_path / "model"), ids, (7, 1, 1)), expected(reference(folder), ids)) < 2e-5
    assert experts_of(tmp_path / "model", 1) == IDS | {("int4", "int4"): [2, 3, 6, *range(8, 16), 16]}
    dry = plan(folder, tmp_path / "dry", **EVERY_LOGIT)
    assert {name: spec for name, (_, spec, _) in dry.layers.items()} == {n: s for n, (_, s) in report.layers.items()}
    assert (dry.shared, dry.packed) == (report.shared, report.packed_bytes)
    assert sorted(report.shared.values()) == [0, 0, 1]
    assert report.plain_routers == 0


def test_what_is_unpacked(source, exported, tmp_path):
    """Codes and scales of all experts under their own numbers, bit for bit."""
    unpack(exported, 0, tmp_path / "layer")
    found = load_file(tmp_path / "layer")
    (layer, _) = moe_layers(find_format(open_checkpoint(source())))
    for e, expert in enumerate(layer):
        for role in ("gate", "up", "down"):
            want = getattr(expert, role)
            np.testing.assert_array_equal(found[f"{layer.name}.{e}.{role}.codes"].numpy(), want.codes)
            scales = found[f"{layer.name}.{e}.{role}.scales"].float().numpy()
            np.testing.assert_array_equal(scales, want.scales.astype(np.float32))


@pytest.mark.every
def test_for_cuda(source, tmp_path):
    """Each node's sum is rounded to float16 once, and so is what they add up to: 2^-11 of a sum each, as everywhere."""
    export(source(), tmp_path, target="cuda", dtype="f16", logits="all")
    assert experts_of(tmp_path, 0).keys() == {("int4", "int4"), ("int8", "int8"), ("int4", "int8")}
    graph = ir.load(tmp_path / "model.onnx").graph
    assert {node.domain for node in graph} == {"", "quantmoe"}
    ids = np.random.default_rng(3).integers(0, 384, (2, 7))
    mask = np.ones_like(ids)
    found, want = logits(tmp_path, ids, mask), torch_logits(reference(source()), ids, mask)
    assert np.abs(found - want).max() / np.abs(want).max() < 1e-2


@pytest.mark.every
@pytest.mark.parametrize(("whole_experts", "mapped"), [(0, 0), (1, 0), (1, 1)])
def test_ranks(source, tmp_path, whole_experts, mapped):
    """A rank has its experts of each group, of some groups none."""
    folder, options = source(), {"tensor_parallel": 2, "expert_parallel": bool(whole_experts)}
    if mapped:
        layers = moe_layers(find_format(open_checkpoint(folder)))
        write_map(tmp_path / "map.json", [balance([9, *[1] * 15], 2, 2) for _ in layers])
        options["expert_map"] = tmp_path / "map.json"
    export(folder, tmp_path / "slices", **EVERY_LOGIT, **options)
    ids = tokens(2, 9)
    want = expected(reference(folder), ids)
    for found in run_all(tmp_path / "slices", ids, (7, 1, 1)):
        assert error(found, want) < 2e-5
    if whole_experts and not mapped:  # all that differ are in the first half
        assert len(experts_of(tmp_path / "slices/rank0", 0)) == 3
        assert experts_of(tmp_path / "slices/rank1", 0) == {("int4", "int4"): [*range(8, 16)]}


def test_activations_of_each_group(source, tmp_path):
    """Those that are quantized in the checkpoint stay so: W8A8 beside W4A16."""
    dry = plan(source(scheme="W8A8"), tmp_path, target="cpu")
    formats = {name.rpartition(" (")[2]: spec.w13.activation_format for name, (_, spec, _) in dry.layers.items()}
    assert formats == {"0, 7)": "int8_group", "1, 4-5)": "int8_token", "2-3, 6, 8-15)": "int8_group"}


def test_what_is_said_of_the_checkpoint(source):
    """Each group as the others see it."""
    found = survey(source())
    assert [(layer["experts"], "8" in layer["scheme"].split(";")[0]) for layer in found["layers"][:3]] == [
        (2, False),
        (3, True),
        (11, False),
    ]
    assert "are of different formats" in found["refused"]["ort"]
    assert not found["refused"]["cpu"]
    modules = [module for entry in explain(source()) for module in entry["modules"]]
    assert {
        f"model.layers.{i}.mlp.experts ({ids})" for i in range(2) for ids in ("0, 7", "1, 4-5", "2-3, 6, 8-15")
    } <= {*modules}


def test_a_token_asks_all_nodes_of_a_layer_for_its_experts(exported):
    """Each node for as many as it has of them, not each for top_k."""
    found = inspect(exported)
    shared = fit(found, 1 << 40, 16)
    each = fit(found | {"layers": [node | {"module": None} for node in found["layers"]]}, 1 << 40, 16)
    asked = [
        (4 * node["bytes"] // len(node["experts"]["ids"]), len(node["experts"]["ids"])) for node in found["layers"]
    ]
    assert each.read - shared.read == sum(size - size * count // 16 for size, count in asked)


def test_refusals(source, tmp_path):
    reason = r"experts\.1 \(.*\) and model\.layers\.0\.mlp\.experts\.0 \(.*\) are of different formats; .*{}"
    ranks = {"tensor_parallel": 2, "expert_parallel": True, "data_parallel": True}
    for options, why in (({"target": "ort"}, "QMoE"), (ranks, "--data-parallel")):
        for call in (plan, export):
            with pytest.raises(CheckpointError, match=reason.format(why)):
                call(source(), tmp_path / "out", **options)


def test_gate_and_up_of_two_formats_are_refused(source, tmp_path):
    """They are rows of one tensor of the node."""
    folder = tmp_path / "checkpoint"
    ckpt = open_checkpoint(source())
    tensors = {name: ckpt.tensor(name) for name in ckpt.names()}
    for name in [name for name in tensors if ".layers.0.mlp.experts.3.up_proj." in name]:
        tensors[name] = tensors[name.replace("experts.3", "experts.4")]
    groups = ckpt.quantization["config_groups"]
    groups["b"]["targets"].append(r"re:.*layers\.0\.mlp\.experts\.3\.up_proj")
    folder.mkdir()
    write_safetensors(folder / "model.safetensors", tensors)
    (folder / "config.json").write_text(json.dumps(ckpt.config), encoding="utf-8")
    for call in (plan, export):
        with pytest.raises(CheckpointError, match=r"model\.layers\.0\.mlp\.experts\.3: gate .* up"):
            call(folder, tmp_path / "out")
