"""What is read of a model before it is opened."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import onnx
import pytest

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
        "print({'onnx', 'onnx_ir', 'sympy', 'torch', 'quantmoe.custom_ops.schema'} & {*sys.modules})"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"
