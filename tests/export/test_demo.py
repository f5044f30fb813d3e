"""`quantmoe demo` with checkpoints that the tools themselves wrote."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from export.test_output import contents
from typer.testing import CliRunner

from quantmoe.exporter import cli, compare
from quantmoe.exporter.cli import app
from quantmoe.exporter.convert import export
from quantmoe.exporter.formats import find_format, open_checkpoint
from quantmoe.exporter.inspect import inspect

FIXTURES = Path(__file__).parent.parent / "fixtures"


def fixtures() -> list[object]:
    """Every fixture; those whose nodes are like an earlier one's are for `make test-long`."""
    found, seen = [], set()
    for path in sorted(FIXTURES.glob("*/config.json")):
        format = find_format(open_checkpoint(path.parent))
        schemes = [s for layer in format.moe_layers() for s in (layer.scheme, layer.down_scheme)]
        kind = (format.ckpt.config["model_type"], *((s.format, s.activation_format) for s in schemes))
        found.append(pytest.param(path.parent, id=path.parent.name, marks=[pytest.mark.long] if kind in seen else []))
        seen.add(kind)
    return found


@pytest.mark.parametrize("folder", fixtures())
def test_every_fixture_is_exported_run_and_compared(folder, tmp_path, monkeypatch):
    found = []

    def recorded(*arguments: object) -> compare.Comparison:
        found.append(original(*arguments))
        return found[-1]

    original = compare.compare
    monkeypatch.setattr(compare, "compare", recorded)
    out = tmp_path / "model"
    done = CliRunner().invoke(
        app,
        ["demo", "--checkpoint", str(folder), "--output", str(out), "--max-new-tokens", "4"],
        catch_exceptions=False,
    )
    assert done.exit_code == 0
    (compared,) = found
    assert len(compared.tokens) == len(compared.expected_tokens) == 4
    exact = compared.difference if compared.float_difference is None else compared.float_difference
    assert exact < 1e-4
    assert not list(out.glob("*.partial"))


def test_an_earlier_export_is_replaced_when_asked_only(exported, tmp_path, monkeypatch):
    """In the words of export, before any work."""
    out = shutil.copytree(exported("qwen3_moe", activations="float"), tmp_path / "demo-model")
    before = contents(out)
    with pytest.raises(FileExistsError, match=r"model\.onnx exists; --force replaces an earlier export") as refused:
        export(FIXTURES / "quark-int4", out)
    monkeypatch.chdir(tmp_path)
    demo = ["demo", "--checkpoint", str(FIXTURES / "quark-int4"), "--max-new-tokens", "2"]
    with monkeypatch.context() as patch:
        patch.setattr(cli, "_export", None)
        done = CliRunner().invoke(app, demo)
    assert str(done.exception) == str(refused.value).replace(f"{tmp_path}/", "")
    assert contents(out) == before
    assert CliRunner().invoke(app, [*demo, "--force"], catch_exceptions=False).exit_code == 0
    assert inspect(out)["metadata"]["checkpoint"] == "quark-int4"
