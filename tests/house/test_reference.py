"""Pages that docs/generate.py makes name each option, public function, operator and attribute."""

from __future__ import annotations

import re
from pathlib import Path

import typer
from support.harness.pages import DOCS, generate

import quantmoe
from quantmoe.benchmarks.bench import app as benches
from quantmoe.custom_ops.op_def.schema import parse, read
from quantmoe.exporter.cli import app

ROOT = Path(__file__).parents[2]


def test_commands() -> None:
    page = generate().commands()
    found = dict(typer.main.get_command(app).commands)
    del found["bench"]
    found |= {f"bench {name}": one for name, one in typer.main.get_command(benches).commands.items()}
    for name, command in found.items():
        section = page.partition(f"## {name}\n")[2].partition("\n## ")[0]
        assert command.help in section
        for parameter in command.params:
            typed = parameter.opts if parameter.opts[0].startswith("-") else [parameter.name.upper()]
            assert all(f"`{option}`" in section for option in typed), (name, parameter.opts)


def test_python() -> None:
    assert all(f"quantmoe.{name}\n" in generate().python() for name in quantmoe.__all__)


def test_operators() -> None:
    page, schema = generate().operators(), parse(read(ROOT / "custom_ops"))
    for name, operator in schema.operators.items():
        section = page.partition(f"## {name}\n")[2].partition("\n## ")[0]
        assert f"op_version {operator.version}." in section
        named = [*operator.own, *operator.inputs, *operator.optional_inputs, *operator.outputs]
        for part in named:
            assert f"| `{part[0] if isinstance(part, tuple) else part.name}` |" in section, name
        assert all(f"`{prefix}_..`" in section for prefix in operator.projections)
        *_, last = (ROOT / f"custom_ops/ops/{operator.snake}.def").read_text(encoding="utf-8").splitlines()
        assert last.startswith("QM_END") or generate().linked(last.removeprefix("// ")) in section, name
    for kind, values in schema.enums.items():
        section = page.partition(f"## {kind}\n")[2].partition("\n## ")[0]
        assert all(f"| `{value}` | {code} |" in section for value, code in values.items()), kind
    assert all(f"| `{attribute.name}` |" in page for attribute in schema.projection)


def test_notes() -> None:
    notes = {name: generate().note(module) for name, module in generate().NOTES.items()}
    assert all(len(note) > 100 for note in notes.values())
    assert "`keep_window_size` tokens by their values" in notes["doge"]


def test_each_table_is_in_a_page() -> None:
    texts = (page.read_text(encoding="utf-8") for page in DOCS.rglob("*.md"))
    included = [name for text in texts for name in re.findall(r"{include} (?:../reference/)?tables/(.+).md", text)]
    assert sorted(included) == sorted([*generate().TABLES, *generate().NOTES])
    for make in generate().TABLES.values():
        header, _, *rows = (line.count(" | ") for line in make().strip().splitlines())
        assert {*rows} == {header}
