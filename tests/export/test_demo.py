"""`quantmoe demo` with checkpoints that the tools themselves wrote."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from quantmoe.exporter import compare
from quantmoe.exporter.cli import app
from quantmoe.exporter.formats import find_format, open_checkpoint

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
