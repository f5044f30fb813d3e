"""export --external-experts: the nodes say where their experts are; everything else is as it is without."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import onnx
import onnx_ir as ir
import pytest
from support.models.tiny import make_checkpoint

import quantmoe
from quantmoe.custom_ops.op import DOMAIN
from quantmoe.exporter.errors import ModelError, OptionError
from quantmoe.exporter.inspecting.fit import fit
from quantmoe.exporter.inspecting.inspect import inspect
from quantmoe.exporter.inspecting.unpack import unpack
from quantmoe.exporter.report import print_fit

SIZES = {"hidden_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
SIZES |= {"num_hidden_layers": 2, "moe_intermediate_size": 96}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("made"), "qwen3_moe", **SIZES)


@pytest.fixture(scope="module")
def folders(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    out = tmp_path_factory.mktemp("exported")
    for name in ("inputs", "external"):  # each projection in a file of its own
        outside = name == "external"
        quantmoe.export(checkpoint, out / name, target="cuda", external_experts=outside, max_file_size=100_000)
    return {path.name: path for path in out.iterdir()}


def layers_of(path: Path) -> list[onnx.NodeProto]:
    return [node for node in onnx.load(path, load_external_data=False).graph.node if node.op_type == "QuantMoE"]


def test_the_nodes_say_where_the_bytes_are(folders):
    """The data files are equal, and what the inputs were is where the attributes say."""
    data = {kind: {f.name: f.read_bytes() for f in folder.glob("*.data*")} for kind, folder in folders.items()}
    assert data["inputs"] == data["external"]
    places = set()
    weights = {
        i.name: i for i in onnx.load(folders["inputs"] / "model.onnx", load_external_data=False).graph.initializer
    }
    left = {i.name: i for i in onnx.load(folders["external"] / "model.onnx").graph.initializer}
    for node in layers_of(folders["external"] / "model.onnx"):
        strings = {a.name: a.s.decode() for a in node.attribute if a.type == onnx.AttributeProto.STRING}
        for name, tensor in zip(("w13", "w2"), node.input[3:5], strict=True):
            entries = {e.key: e.value for e in weights[tensor].external_data}
            assert strings[f"{name}_external"] == f"{entries['offset']} {entries['length']} {entries['location']}"
            places.add(entries["location"])
            assert len(strings[f"{name}_identity"]) > 97
            assert (list(left[tensor].dims), left[tensor].raw_data) == ([0], b"")
    assert len(places) == 4
    assert not any("_external" in a.name for n in layers_of(folders["inputs"] / "model.onnx") for a in n.attribute)


def test_what_onnx_runtime_has_is_left_out(folders):
    extra = {"genai_config.json"} | {path.name for path in folders["inputs"].glob("*.so")}
    names = {kind: {path.name for path in folder.iterdir()} for kind, folder in folders.items()}
    assert names["inputs"] - names["external"] == extra
    assert not names["external"] - names["inputs"]


def test_it_is_inspected_and_unpacked_as_the_other(folders, tmp_path):
    found = {kind: inspect(folder, verify=True) for kind, folder in folders.items()}
    for kind, of_kind in found.items():
        assert [layer.pop("external") for layer in of_kind["layers"]] == 2 * [kind == "external"]
    for part in ("layers", "linears", "dense", "verified"):
        assert found["external"][part] == found["inputs"][part]
    for kind, folder in folders.items():
        unpack(folder, 1, tmp_path / kind)
    assert (tmp_path / "external").read_bytes() == (tmp_path / "inputs").read_bytes()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("model.onnx.data", "w13_external is 'model.onnx.data', expected first byte, bytes, and the name of a file"),
        ("0 {bytes} ../model.onnx.data", "is in '../model.onnx.data', expected the name of a file beside the model"),
        ("0 4096 model.onnx.data", "w13_external has 4096 bytes, expected a multiple of the"),
        ("64 {bytes} gone", "gone: missing; model.onnx keeps"),
        ("999999999936 {bytes} model.onnx.data", "truncated"),
    ],
)
def test_a_node_that_is_wrong(folders, tmp_path, value, message):
    model = ir.load(folders["external"] / "model.onnx")
    node = next(node for node in model.graph if (node.domain, node.op_type) == (DOMAIN, "QuantMoE"))
    own = node.attributes["w13_external"].as_string().split()[1]
    node.attributes["w13_external"] = ir.AttrString("w13_external", value.format(bytes=own))
    for file in folders["external"].glob("*.data*"):
        (tmp_path / file.name).hardlink_to(file)
    ir.save(model, tmp_path / "model.onnx")
    with pytest.raises(ModelError, match=re.escape(message)):
        inspect(tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "external_experts is for target cuda"),
        ({"target": "ort"}, "external_experts is for target cuda"),
        ({"target": "cuda", "paged": True}, "external_experts does not go with paged"),
        ({"target": "cuda", "vision": True}, "external_experts does not go with vision"),
    ],
    ids=str,
)
def test_what_it_does_not_go_with(checkpoint, tmp_path, options, message):
    with pytest.raises(OptionError, match=message):
        quantmoe.export(checkpoint, tmp_path / "out", external_experts=True, **options)


def test_what_fits(folders, capsys):
    """The slots of the same budget, and what sets it."""
    found = {kind: inspect(folder) for kind, folder in folders.items()}
    fits = {kind: fit(of_kind, 1_400_000_000, 64) for kind, of_kind in found.items()}
    assert replace(fits["external"], external=False) == fits["inputs"]
    print_fit(fits["external"], Path("model"), "as --memory-speed says")
    assert f"QUANTMOE_GPU_MEMORY={fits['external'].budget}, which TensorRT's plug-in reads" in capsys.readouterr().out
