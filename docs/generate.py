"""Reference pages made from the code at each ``make docs``: the command line, the Python API and the operators."""

from __future__ import annotations

import inspect
import re
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import typer

import quantmoe
from quantmoe.custom_ops.schema import read
from quantmoe.exporter.cli import app

HERE = Path(__file__).resolve().parent
MADE = "<!-- made by docs/generate.py -->\n"
OPERATORS = """# Operators

The operators of the domain `quantmoe`. [FORMAT.md](../../custom_ops/FORMAT.md) has their bytes and their arithmetic.

- An attribute is required, unless the table says what its absence means.
- T is float, float16 or bfloat16. I is int32 or int64.
- C is the type of a cache: float, float16 or bfloat16. By `cache_format` it can also be int8 or uint8.
- In a shape, "[..] or [0]" allows an empty tensor, and "n ? [..] : [..]" is the second shape if n is 0.
- A shape is a list of sizes. `..` is any number of dimensions. A capital letter is a size that the call decides.
- Other names in a shape are attributes or sizes of the operator.
- An output whose shape is the name of an input may use the memory of that input.
- Attributes of type i are integers, of type f floats. Others are strings of the enum with that name.
"""


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |\n" for row in lines) + "\n"


def code(text: str) -> str:
    """Return help text with options and commands in code, as Markdown would join their dashes."""
    return re.sub(r"(?<![\w`-])--?[a-z][\w-]*", r"`\g<0>`", text)


def option(parameter: Any) -> list[str]:
    """Return the cells of a parameter: how it is typed, and its help, values and default."""
    if is_argument(parameter):
        return [f"`{parameter.name.upper()}`", parameter.help or ""]
    kinds = [kind for kind in get_args(parameter.type_descriptor.annotation) if get_origin(kind) is Literal]
    kind = kinds[0] if kinds else parameter.type_descriptor.annotation
    names = ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
    said = [code(parameter.help or "")]
    if parameter.is_flag:
        return [names, said[0]]
    if get_origin(kind) is Literal:
        said.append("Values: " + ", ".join(f"`{value}`" for value in get_args(kind)) + ".")
    else:
        names += f" `{parameter.metavar or kind.__name__.upper()}`"
    if parameter.default not in (None, "", ()):
        said.append(f"Default: `{parameter.default}`.")
    return [
        names,
        " ".join([f"{said[0]}." if said[1:] else said[0], *said[1:], *(["Required."] if parameter.required else [])]),
    ]


def is_argument(parameter: Any) -> bool:
    return not parameter.opts[0].startswith("-")


def commands() -> str:
    """Return the page of all commands and their options, by group."""
    page = [f"{MADE}# Command line\n\n`quantmoe COMMAND --help` shows these options in a terminal.\n"]
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        usage = [p.name.upper() if p.required else f"[{p.name.upper()}]" for p in command.params if is_argument(p)]
        page.append(f"## {name}\n\n{command.help}\n\n```\nquantmoe {' '.join([name, *usage])} [OPTIONS]\n```\n")
        groups: dict[str, list[list[str]]] = {}
        for parameter in command.params:
            group = "Arguments" if is_argument(parameter) else parameter.rich_help_panel or "Options"
            groups.setdefault(group, []).append(option(parameter))
        for group, rows in groups.items():
            page.append(f"**{group}**\n\n" + table(["argument" if group == "Arguments" else "option", ""], rows))
    return "\n".join(page)


def python() -> str:
    """Return the page of the public names, which autodoc fills."""
    page = [f"{MADE}# Python API\n\n`import quantmoe` gives these names. Everything else may change in any release.\n"]
    for name in quantmoe.__all__:
        kind = "autoclass" if inspect.isclass(getattr(quantmoe, name)) else "autofunction"
        members = "   :members:\n" if kind == "autoclass" else ""
        page.append(f"## {name}\n\n```{{eval-rst}}\n.. {kind}:: quantmoe.{name}\n{members}```\n")
    return "\n".join(page)


def text(comment: str) -> str:
    """Return a comment of op.def as Markdown."""
    escaped = re.sub(r"([*\[\]_])", r"\\\1", comment).replace("<", "&lt;")
    return re.sub(r"FORMAT\.md(?: [\d.]*\d)?", r"[\g<0>](../../custom_ops/FORMAT.md)", escaped)


LINE = re.compile(r'QM_(\w+)\(((?:[^")]|"[^"]*")*)\)\s*(?://\s*(.*))?$')


def operators() -> str:
    """Return the page of op.def's operators, packed weights and enums."""
    page, comment, rows = [f"{MADE}{OPERATORS}"], [], {}
    for line in read(files("quantmoe.custom_ops")).splitlines():
        if not (found := LINE.match(line)):
            comment = [*comment, line[2:].strip()] if line.startswith("//") else []
            continue
        macro, said, about = found[1], text(found[3] or ""), text(" ".join(comment))
        values = [value.strip(' "') for value in re.findall(r'"[^"]*"|[^,"]*[^,"\s][^,"]*', found[2])]
        comment = []
        if macro == "OP":
            page.append(f"## {values[0]}\n\nop_version {values[2]}. {about}\n")
            rows = {"size": [], "input": [], "output": [], "attribute": []}
        elif macro == "SIZE":
            rows["size"].append([f"`{values[1]}`", f"`{values[2]}`", said])
        elif macro in ("INPUT", "INPUT_OPTIONAL", "OUTPUT"):
            rows["output" if macro == "OUTPUT" else "input"].append(
                [f"`{values[1]}`", f"{values[2]} `{values[3]}`", said]
            )
        elif macro in ("ATTR", "ATTR_SINCE"):
            kind, name = values[-3:-1] if macro == "ATTR_SINCE" else values[1:]
            since = f" Since op_version {values[1]}; absent: `{values[4]}`." if macro == "ATTR_SINCE" else ""
            rows["attribute"].append([f"`{name}`", kind, f"{said}.{since}" if said and since else said + since.strip()])
        elif macro == "PROJECTION":
            rows["attribute"].append([f"`{values[1]}_..`", "", "[packed weights](#packed-weights)"])
        elif macro == "STRING":
            rows["attribute"].append([f"`{values[1]}`", "string", f"{said} May be absent."])
        elif macro == "END":
            columns = {"size": "value", "input": "type and shape", "output": "type and shape", "attribute": "type"}
            page += [table([what, columns[what], ""], found) for what, found in rows.items() if found]
            rows = {}
        elif macro in ("PROJECTION_ATTR", "PROJECTION_OPTIONAL"):
            rows.setdefault("packed", []).append([f"`{values[1]}`", values[0], said])
        elif macro == "ENUM":
            page += [
                table(["value", "code", ""] if what == "value" else ["attribute", "type", ""], rows[what])
                for what in rows
            ]
            rows = {"value": []}
            page.append(f"## {values[0]}\n\n{about}\n")
        elif macro == "VALUE":
            rows["value"].append([f"`{values[1]}`", values[2], said])
        if macro.startswith("PROJECTION_") and len(rows["packed"]) == 1:
            page.append(
                "## Packed weights\n\nThe packed weights of an operator have these attributes, as `w13_format`.\n"
            )
    page += [table(["value", "code", ""], found) for found in rows.values()]
    return "\n".join(page)


def write() -> None:
    for name, make in (("commands", commands), ("python", python), ("operators", operators)):
        path, made = HERE / "reference" / f"{name}.md", make()
        if not path.exists() or path.read_text(encoding="utf-8") != made:
            path.write_text(made, encoding="utf-8")
