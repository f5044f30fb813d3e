"""Exported models that are damaged, incomplete or forged: inspect and the session say what, and nothing crashes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper
from support.models.one_layer import NODE, run, session, write_model
from support.operators.cases import Case

from quantmoe.exporter.folder.record import HASH, new_hash
from quantmoe.exporter.inspecting.inspect import ModelError, inspect
from quantmoe.exporter.inspecting.unpack import unpack
from quantmoe.exporter.safetensors_file import read_header
from quantmoe.runtime.generate import Generator

DATA = "model.bin"
CASE = Case(act_order="shared")


def one_layer_model(folder: Path) -> Path:
    """One node with the metadata that export records: hashes and attributes."""
    folder.mkdir(parents=True, exist_ok=True)
    layer = CASE.build()
    path = write_model(folder / "model.onnx", layer.spec, layer.w13, layer.w2)
    data = (folder / DATA).read_bytes()

    def record(tensor: ir.ExternalTensor) -> None:
        digest = new_hash()
        digest.update(data[tensor.offset : tensor.offset + tensor.length])
        spec = json.dumps(layer.spec.attributes())
        tensor.metadata_props.update({"hash": f"{HASH}:{digest.hexdigest()}", "spec": spec, "module": NODE})

    edit(path, lambda model: [record(model.graph.initializers[name].const_value) for name in ("w13", "w2")])
    return folder


def edit(path: Path, change: Callable[[ir.Model], object]) -> None:
    model = ir.load(path)
    change(model)
    ir.save(model, path)


def moved(name: str, **fields: object) -> Callable[[ir.Model], None]:
    """Another place for a tensor's bytes; keywords as of ExternalTensor."""

    def change(model: ir.Model) -> None:
        value = model.graph.initializers[name]
        t = value.const_value
        where = {"location": t.location, "offset": t.offset, "length": t.length} | fields
        value.const_value = ir.ExternalTensor(
            dtype=t.dtype, shape=t.shape, name=name, metadata_props=dict(t.metadata_props), **where
        )

    return change


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = one_layer_model(tmp_path / "model")
    assert inspect(folder, verify=True)["verified"] == 2
    return folder


@pytest.mark.parametrize("size", [0, 1, 100, 20_000])
def test_data_shorter_than_its_offsets(model: Path, size: int) -> None:
    with open(model / DATA, "r+b") as file:
        file.truncate(size)
    with pytest.raises(ModelError, match=rf"model\.bin: {size} bytes; w(13|2) ends at byte \d+ \(truncated\?\)"):
        inspect(model)
    with pytest.raises(Exception, match=r"model\.bin|external|length|offset"):
        session(model / "model.onnx")


def test_no_data(model: Path) -> None:
    (model / DATA).unlink()
    with pytest.raises(ModelError, match=r"model\.bin: missing; model\.onnx keeps w13 there"):
        inspect(model)
    with pytest.raises(Exception, match=r"model\.bin"):
        session(model / "model.onnx")


@pytest.mark.parametrize("position", [0, 5000, -1])
def test_one_bit_changed_after_export(model: Path, position: int) -> None:
    data = bytearray((model / DATA).read_bytes())
    data[position] ^= 4
    (model / DATA).write_bytes(data)
    inspect(model)
    with pytest.raises(ModelError, match=rf"model\.bin: w(13|2) has hash {HASH}:\w+, model\.onnx says {HASH}"):
        inspect(model, verify=True)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"location": "../secret"}, "w13 is in '../secret', expected the name of a file beside the model"),
        ({"location": "/etc/passwd"}, "w13 is in '/etc/passwd', expected the name of a file"),
        ({"location": "a/../../secret"}, "expected the name of a file beside the model"),
        ({"location": ".."}, "expected the name of a file beside the model"),
        ({"location": "absent"}, "absent: missing"),
        ({"offset": -64}, "not an ONNX model"),
        ({"offset": 2**62}, "w13 ends at byte 4611686018427422720 (truncated?)"),
        ({"length": 64}, "w13 has 64 bytes at 0, its shape and type take 34816"),
        ({"length": 2**40}, "w13 has 1099511627776 bytes at 0, its shape and type take"),
    ],
)
def test_data_elsewhere(model: Path, fields: dict, message: str) -> None:
    (model.parent / "secret").write_bytes(b"0" * 10**6)
    edit(model / "model.onnx", moved("w13", **fields))
    with pytest.raises(ModelError, match=re.escape(message)):
        inspect(model, verify=True)


def test_data_that_is_a_link(model: Path) -> None:
    """A link to elsewhere is refused, as ONNX Runtime does; a folder of links, as a hub's cache is, is not."""
    (model / DATA).rename(model.parent / "secret")
    (model / DATA).symlink_to("../secret")
    with pytest.raises(ModelError, match=r"model\.bin: a link to .*/secret, expected a file beside the model"):
        inspect(model)
    blobs = model.parent / "blobs"
    blobs.mkdir()
    for name, blob in (("model.onnx", model / "model.onnx"), (DATA, model.parent / "secret")):
        blob.rename(blobs / name)
        (model / name).unlink(missing_ok=True)
        (model / name).symlink_to(blobs / name)
    assert inspect(model, verify=True)["verified"] == 2


def test_a_hash_of_another_kind(model: Path) -> None:
    def change(graph: ir.Model) -> None:
        tensor = graph.graph.initializers["w13"].const_value
        tensor.metadata_props["hash"] = "blake2b-256:00"

    edit(model / "model.onnx", change)
    with pytest.raises(ModelError, match=f"w13 has a hash 'blake2b-256:00', this release compares {HASH}"):
        inspect(model, verify=True)


def test_an_onnx_file_beyond_protobuf(model: Path) -> None:
    with open(model / "model.onnx", "r+b") as file:
        file.truncate(1 << 33)
    with pytest.raises(ModelError, match=r"8589934592 bytes, expected less than protobuf's 2 GiB"):
        inspect(model)


def test_unpack_never_writes_over_the_model(model: Path) -> None:
    before = (model / DATA).read_bytes()
    for name in (DATA, "model.onnx"):
        with pytest.raises(FileExistsError, match=f"{name} is the model's own file"):
            unpack(model, 0, model / name)
    assert (model / DATA).read_bytes() == before


@pytest.mark.parametrize("end", ["", ".partial"])
def test_unpack_replaces_a_file_only_by_force(end: str, tmp_path: Path) -> None:
    model = one_layer_model(tmp_path / "model")
    layer, output, there = int(NODE.split(".")[2]), tmp_path / "layer", tmp_path / f"layer{end}"
    there.write_text("mine", encoding="utf-8")
    with pytest.raises(FileExistsError, match=f"{there} exists; --force replaces it"):
        unpack(model, layer, output)
    assert there.read_text(encoding="utf-8") == "mine"
    unpack(model, layer, output, force=True)
    assert read_header(output)


def test_unpack_needs_room_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = one_layer_model(tmp_path / "model")
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=9))
    with pytest.raises(OSError, match=rf"^{tmp_path}: \d+ bytes are to be written, 9 bytes of the disk are free; make"):
        unpack(model, int(NODE.split(".")[2]), tmp_path / "layer")
    assert not list(tmp_path.glob("layer*"))


def test_models_that_are_no_language_models(model: Path) -> None:
    with pytest.raises(ModelError, match=r"expected the output logits \[batch, sequence, vocabulary\]"):
        Generator(model)


def test_an_act_order_that_is_none(model: Path) -> None:
    """Columns out of range would be read from other memory."""
    s = session(model / "model.onnx")
    layer = CASE.build()
    x, ids, weights = CASE.tokens(5)
    np.testing.assert_array_equal(run(s, x, ids, weights), layer.native()(x, ids, weights))
    perm = layer.w13[1, -4 * CASE.hidden :].view(np.int32)
    for value in (CASE.hidden, -1, 2**31 - 1, -(2**31)):
        perm[7] = value
        write_model(model / "model.onnx", layer.spec, layer.w13, layer.w2)
        s = session(model / "model.onnx")
        with pytest.raises(Exception, match=f'"{NODE}": w13\'s act-order of expert 1 has columns outside 0 to 63'):
            run(s, x, ids, weights)
        assert np.isfinite(run(s, x, np.full_like(ids, 0), weights)).all()  # an expert that is whole


def test_unpack_names_a_file_that_cannot_be(tmp_path: Path) -> None:
    model = one_layer_model(tmp_path / "model")
    layer = int(NODE.split(".")[2])
    for output, text in ((tmp_path, f"{tmp_path} is a folder"), (tmp_path / "a" / "b", f"{tmp_path}/a is no folder")):
        with pytest.raises(FileNotFoundError, match=f"{text}, expected a file to write to"):
            unpack(model, layer, output)


def language_model(path: Path, shapes: dict[str, list[int | str]], hidden: list[int | str] | None = None) -> Path:
    """A model whose logits are rows of a table, and whose caches stay as they are; all that it declares is given."""
    table = helper.make_tensor("table", TensorProto.FLOAT, [8, 8], np.eye(8, dtype=np.float32).ravel())
    ids = helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "sequence"])
    nodes = [helper.make_node("Gather", ["table", "input_ids"], ["logits"])]
    inputs, outputs = [ids], [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", "sequence", 8])]
    for name, shape in shapes.items():
        inputs.append(helper.make_tensor_value_info(f"past_key_values.{name}", TensorProto.FLOAT, shape))
        outputs.append(helper.make_tensor_value_info(f"present.{name}", TensorProto.FLOAT, shape))
        nodes.append(helper.make_node("Identity", [f"past_key_values.{name}"], [f"present.{name}"]))
    if hidden is not None:
        nodes.append(helper.make_node("ReduceMax", ["logits"], ["hidden_states"], keepdims=int(len(hidden) == 3)))
        outputs.append(helper.make_tensor_value_info("hidden_states", TensorProto.FLOAT, hidden))
    graph = helper.make_graph(nodes, "model", inputs, outputs, [table])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path / "model.onnx")
    return path


KEYS: dict[str, list[int | str]] = {f"0.{kind}": ["batch", 2, "past", 4] for kind in ("key", "value")}
STATE = "1.recurrent_state"


@pytest.mark.parametrize(
    ("shapes", "hidden", "text"),
    [
        (
            KEYS | {STATE: ["batch", 2, 4, 4], "2.recurrent_state": ["batch", 2, 4, 4, "more"]},
            None,
            "one window of all",
        ),
        (KEYS | {STATE: ["batch", 2, 4, 4], "2.recurrent_state": [3, "batch", 2, 4, 4]}, None, "one window of all"),
        (KEYS | {STATE: ["window", "batch", 2, 4, 4]}, None, "expected the output logits"),
        (KEYS | {STATE: ["batch", 2, "key", 4]}, None, "expected the output logits"),
        (KEYS | {STATE: ["batch", 2, 4]}, None, "expected the output logits"),
        (KEYS | {"0.key": ["batch", "heads", "past", 4]}, None, "expected the output logits"),
        (KEYS | {"0.value": ["batch", 2, "past", ""]}, None, "expected the output logits"),
        (KEYS, ["batch", "sequence"], r"hidden_states is tensor\(float\) .*, expected \[batch, sequence, width\] of"),
    ],
)
def test_shapes_of_caches_that_cannot_be(shapes: Any, hidden: Any, text: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=text):
        Generator(language_model(tmp_path, shapes, hidden))


@pytest.mark.parametrize("front", [[], [3]])
def test_shapes_of_caches_that_can_be(front: list[int | str], tmp_path: Path) -> None:
    states = {f"{i}.recurrent_state": [*front, "batch", 2, 4, 4] for i in (1, 2)}
    assert Generator(language_model(tmp_path, KEYS | states, ["batch", "sequence", 1])).window == (front or [1])[0]
