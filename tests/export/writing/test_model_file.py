"""What is read of a model before it is opened."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

from quantmoe.exporter.folder.external_tensors import external_tensors
from quantmoe.exporter.folder.model_file import load, metadata_of


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A graph with metadata before and behind other fields, one of them long."""
    made = onnx.helper.make_model(onnx.helper.make_graph([], "g" * 300, [], []), producer_name="q", ir_version=10)
    onnx.helper.set_model_props(made, {"one": "1", "past_present_share_buffer": "true", "empty": "", "ä": "é" * 200})
    path = tmp_path_factory.mktemp("model") / "model.onnx"
    path.write_bytes(made.SerializeToString() + b"\x28\x05")  # model_version, a number
    return path


def test_metadata_are_those_of_the_model(model: Path) -> None:
    assert metadata_of(model) == dict(load(model).metadata_props)
    assert len(metadata_of(model)) == 4


@pytest.mark.parametrize("contents", [b"", b"\x77", b"\x72\xff", b"\xff" * 30])
def test_a_file_that_is_no_model_has_none(tmp_path: Path, contents: bytes) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(contents)
    assert metadata_of(path) == {}
    assert metadata_of(tmp_path / "nowhere") == {}


def test_a_generator_is_imported_without_slow_packages(model: Path) -> None:
    """A GPU's first token waits for them: onnx_ir imports sympy."""
    code = (
        "import sys; from pathlib import Path; from quantmoe.runtime.generate import Generator; "
        "from quantmoe.runtime.opened_model import shares_buffer_of; "
        f"assert shares_buffer_of(Path({str(model)!r})); "
        "print({'onnx', 'onnx_ir', 'sympy', 'torch', 'quantmoe.custom_ops.op_def.schema'} & {*sys.modules})"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"


def _weights(folder: Path, **others: onnx.NodeProto) -> Path:
    """A model with tensors in a file: one of two takers, one of an operator of ours, and one in the model itself."""
    tensors = [
        onnx.numpy_helper.from_array(np.arange(count, dtype=dtype).reshape(shape), name)
        for name, count, dtype, shape in [
            ("table", 600, np.float32, (20, 30)),
            ("codes", 400, np.uint8, (400,)),
            ("inside", 3, np.int64, (3,)),
        ]
    ]
    nodes = [
        onnx.helper.make_node("Gather", ["table", "ids"], ["x"]),
        onnx.helper.make_node("MatMul", ["x", "table"], ["y"]),
        onnx.helper.make_node("QuantLinear", ["y", "codes"], ["z"], domain="quantmoe"),
        *others.values(),
    ]
    path = folder / "model.onnx"
    graph = onnx.helper.make_graph(nodes, "g", [], [], tensors)
    onnx.save(
        onnx.helper.make_model(graph), path, save_as_external_data=True, location="model.onnx.data", size_threshold=300
    )
    return path


def test_external_tensors_are_those_of_the_model(tmp_path: Path) -> None:
    path = _weights(tmp_path)
    table, codes = external_tensors(path)
    assert (table.name, table.data_type, table.shape, table.length) == ("table", 1, (20, 30), 2400)
    assert table.takers == {("", "Gather"), ("", "MatMul")}
    assert (codes.name, codes.data_type, codes.shape, codes.length) == ("codes", 2, (400,), 400)
    assert codes.takers == {("quantmoe", "QuantLinear")}
    data = (tmp_path / codes.file).read_bytes()
    assert data[codes.offset :][:400] == np.arange(400, dtype=np.uint8).tobytes()


def test_external_tensors_of_graphs_inside_are_left_out(tmp_path: Path) -> None:
    inside = onnx.helper.make_graph([onnx.helper.make_node("Identity", ["table"], ["t"])], "inside", [], [])
    assert not external_tensors(
        _weights(tmp_path, choice=onnx.helper.make_node("If", ["c"], ["r"], then_branch=inside, else_branch=inside))
    )


@pytest.mark.parametrize("contents", [b"", b"\x3a", b"\x3a\x05ab", b"\xff" * 30])
def test_a_file_that_is_no_model_has_no_external_tensors(tmp_path: Path, contents: bytes) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(contents)
    assert external_tensors(path) == external_tensors(tmp_path / "nowhere") == []
