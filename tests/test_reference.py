"""Pages that docs/generate.py makes name each option, public function, operator and attribute."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
import typer

import quantmoe
from quantmoe.benchmarks.bench import app as bench_app
from quantmoe.custom_ops.schema import parse, read
from quantmoe.exporter.cli import app

ROOT = Path(__file__).parents[1]


@pytest.fixture
def generate(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    monkeypatch.delitem(sys.modules, "generate", raising=False)
    import generate

    return generate


def test_commands(generate: ModuleType) -> None:
    page = generate.commands()
    found = dict(typer.main.get_command(app).commands)
    del found["bench"]
    found |= {f"bench {name}": one for name, one in typer.main.get_command(bench_app()).commands.items()}
    for name, command in found.items():
        section = page.partition(f"## {name}\n")[2].partition("\n## ")[0]
        assert command.help in section
        for parameter in command.params:
            typed = parameter.opts if parameter.opts[0].startswith("-") else [parameter.name.upper()]
            assert all(f"`{option}`" in section for option in typed), (name, parameter.opts)


def test_python(generate: ModuleType) -> None:
    assert all(f"quantmoe.{name}\n" in generate.python() for name in quantmoe.__all__)


def test_operators(generate: ModuleType) -> None:
    page, schema = generate.operators(), parse(read(ROOT / "custom_ops"))
    for name, operator in schema.operators.items():
        section = page.partition(f"## {name}\n")[2].partition("\n## ")[0]
        assert f"op_version {operator.version}." in section
        named = [*operator.own, *operator.inputs, *operator.optional_inputs, *operator.outputs]
        for part in named:
            assert f"| `{part[0] if isinstance(part, tuple) else part.name}` |" in section, name
        assert all(f"`{prefix}_..`" in section for prefix in operator.projections)
    for kind, values in schema.enums.items():
        section = page.partition(f"## {kind}\n")[2].partition("\n## ")[0]
        assert all(f"| `{value}` | {code} |" in section for value, code in values.items()), kind
    assert all(f"| `{attribute.name}` |" in page for attribute in schema.projection)
