"""Targets are data: one file says all that a target differs in, and no other module compares its name."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import onnx_ir as ir
import pytest

from quantmoe.custom_ops.layouts import LAYOUTS
from quantmoe.exporter.choosing.options import Options
from quantmoe.exporter.errors import OptionError
from quantmoe.exporter.surveying.survey import survey
from quantmoe.exporter.targets import CPU, TARGETS, Target, by_name, of_layout
from quantmoe.exporter.writing.convert import export

ROOT = Path(__file__).parents[3]
NAMES = {*TARGETS, *LAYOUTS}


def test_every_layout_has_a_target_and_every_pass_is_there() -> None:
    assert {of_layout(layout).layout for layout in LAYOUTS} == {*LAYOUTS}
    for target in TARGETS.values():
        for name in (*target.passes, *target.final_passes):
            module, _, function = name.partition(".")
            assert callable(getattr(import_module(f"quantmoe.exporter.graph.passes.{module}"), function)), name


def test_a_target_is_one_object(checkpoint, tmp_path, monkeypatch):
    """Everything else reads it from the registry."""
    own = {"graph_types": ("f16",), "caches": (), "default_activations": None, "package": "the wheel acme"}
    acme = dataclasses.replace(CPU, name="acme", **own)
    monkeypatch.setitem(TARGETS, "acme", by_name(*TARGETS.values(), acme)["acme"])
    report = export(checkpoint("qwen3_moe"), tmp_path, target="acme")
    graph = ir.load(tmp_path / "model.onnx")
    assert graph.metadata_props["target"] == "acme"
    cache = {value.dtype for value in graph.graph.inputs if str(value.name).startswith("past_key_values")}
    assert cache == {ir.DataType.FLOAT16}
    assert {spec.w13.activation_format for _, spec in report.layers.values()} == {"none"}
    readme = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "--target acme" in readme
    assert "the wheel acme" in readme
    assert survey(checkpoint("qwen3_moe"))["refused"]["acme"] == ""
    with pytest.raises(OptionError, match=r"dtype is 'f32', expected one of: f16 \(target acme\)"):
        Options(target="acme", dtype="f32")


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (dataclasses.replace(CPU, own_floats=True), "own_floats is True, .* target cpu .* layout than cpu_panel"),
        (dataclasses.replace(CPU, layout="acme", chunk=64), "chunk is 64, .* target cpu .* device than cpu"),
        (dataclasses.replace(CPU, layout="acme", library="libacme.so"), "library is 'libacme.so', .* device than cpu"),
    ],
)
def test_a_fact_that_modules_take_from_another_target_is_refused(target: Target, message: str) -> None:
    with pytest.raises(ValueError, match=f"target acme: {message}"):
        by_name(*TARGETS.values(), dataclasses.replace(target, name="acme"))


def compared(path: Path) -> Iterator[str]:
    """Yield the lines that compare a target's or a layout's name."""
    text = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            if any(isinstance(side, ast.Constant) and side.value in NAMES for side in sides):
                yield f"{path.relative_to(ROOT)}: {ast.get_source_segment(text, node)}"


def test_no_module_compares_a_target() -> None:
    folders = ("choosing", "graph", "inspecting", "reading", "writing")
    files = [path for folder in folders for path in (ROOT / "exporter" / folder).rglob("*.py")]
    found = [line for path in (*files, *(ROOT / "exporter").glob("*.py")) for line in compared(path)]
    assert found == ['exporter/choosing/choose.py: dense == "ort"']  # an operator of --dense


def test_what_runs_a_model_compares_no_device() -> None:
    names = ("cache", "generate", "opened_model", "ranks", "buffer")
    files = [ROOT / "ort_ext" / "runtime" / f"{name}.py" for name in names]
    found = [line for path in (*files, ROOT / "ort_ext" / "benchmarks" / "bench_model.py") for line in compared(path)]
    assert found == [
        f"ort_ext/runtime/buffer.py: {one}" for one in ('device == "cpu"', 'self.value.device_name() == "cpu"')
    ]
