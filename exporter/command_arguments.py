"""Arguments of the commands: lists, options of a dataclass, and one line for what is wrong."""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from functools import wraps
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

import typer
from rich.console import Console

#: command -> the extra of pyproject.toml with the packages that it needs beyond the package's own
EXTRAS = {"export": "export", "generate": "run", "serve": "serve", "demo": "demo", "bench": "bench", "evaluate": "demo"}
#: of a wrong argument; typer exports only some of the classes below it
UsageError: type[Exception] = typer.BadParameter.__bases__[0]


def terminal(markup: bool = False) -> Console:
    """Return a console of the terminal's width, or COLUMNS; wide in a file. No markup where names come from files."""
    wide = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(width=150 if wide else None, markup=markup)


def need(*modules: str) -> None:
    """Say at once what would be missing after minutes.

    Raises:
        ModuleNotFoundError: naming the first that is not installed.
    """
    for module in modules:
        if find_spec(module) is None:
            raise ModuleNotFoundError(name=module)


def missing(error: ModuleNotFoundError, command: str) -> str:
    """Return what to install."""
    package = (error.name or str(error)).partition(".")[0]
    if find_spec(package):  # a module of it is missing
        return outdated(command) or str(error)
    wanted = "bench" if package == "matplotlib" else EXTRAS.get(command, "")  # what --plot asks for, of any command
    extra = f"[{wanted}]" if wanted else ""
    return f"{package} is not installed; pip install 'quantmoe{extra}'"


def outdated(command: str) -> str:
    """Return what to install if packages of a command have versions that pyproject.toml excludes, or an empty text."""
    pattern = re.compile(r'([\w-]+)(?:\[(.*)\])?([^;]*)(?:; extra == "(.*)")?')
    lines = [line.groups() for line in map(pattern.fullmatch, requires("quantmoe") or ()) if line]
    extras = {None, EXTRAS.get(command)}
    for name, brought, _, extra in lines:
        if name == "quantmoe" and extra in extras:
            extras |= set(brought.split(","))
    wrong = {}  # what to install: what stands
    for name, _, bounds, extra in lines:
        with suppress(PackageNotFoundError):  # what missing() says
            found = version(name)
            if extra in extras and not all(_holds(found, bound) for bound in bounds.split(",")):
                wrong[f"'{name}{bounds}'"] = f"{name} is {found}, expected {bounds}"
    return f"{'; '.join(wrong.values())}; pip install {' '.join(wrong)}" if wrong else ""


def _holds(found: str, bound: str) -> bool:
    """Return whether a version keeps a bound: >= or <, and numbers; an empty bound holds."""
    numbers, wanted = ([int(part) for part in re.findall(r"\d+", text)] for text in (found, bound))
    return (numbers < wanted) == bound.startswith("<")


def steps(text: str) -> list[int]:
    """Return a number, or of a range as 1..8192 its ends and 2^i and 3 2^i between them."""
    first, dots, end = text.partition("..")
    low, high = int(first), int(end if dots else first)
    between = {low, high, *(of << i for of in (2, 3) for i in range(max(high, 0).bit_length()))}
    return sorted(step for step in between if low <= step <= high)


def listed(kind: type = str, least: int | None = None, ranges: bool = False) -> dict[str, Any]:
    """Return the settings of an option of list[kind] that takes a,b,c and is repeated; numbers are not below ``least``.

    Args:
        ranges: of numbers, too; see :func:`steps`.
    """

    def parse(text: str) -> list[Any]:
        items = re.split(r"\s*,\s*|\s+", text.strip(" ,"))
        try:
            found = [step for item in items for step in steps(item)] if ranges else [kind(item) for item in items]
        except ValueError:
            or_ranges = ", or ranges as 1..8" if ranges else ""
            raise typer.BadParameter(f"{text!r}; expected numbers separated by commas{or_ranges}") from None
        if "" in found:
            raise typer.BadParameter(f"{text!r}; expected names separated by commas")
        if not found:
            raise typer.BadParameter(f"{text!r}; expected ranges that end where they begin or later")
        if least is not None and min(found) < least:
            raise typer.BadParameter(f"{min(found)}; expected numbers greater than or equal to {least}")
        return found

    def joined(values: Sequence[Sequence[Any]] | None) -> list[Any] | None:
        return [item for value in values for item in value] if values else None

    return {"parser": parse, "callback": joined, "metavar": "A,B,.."}


def with_options(kind: Any, parsers: Mapping[str, Callable[[str], Any]]) -> Callable[[Any], Any]:
    """Return what gives a command the fields of a dataclass as options; its argument ``options`` is then the object.

    Args:
        kind: each field has ``help``, ``group`` and maybe more as metadata (choosing/options.py).
        parsers: metavar -> what reads such a value.
    """

    def one(field: Any, hint: Any) -> inspect.Parameter:
        said = field.metadata
        settings: dict[str, Any] = {"help": said["help"], "rich_help_panel": said["group"], "hidden": "hidden" in said}
        settings["show_default"] = said.get("shown", field.default not in (None, False))
        settings |= {"metavar": said["metavar"]} if "metavar" in said else {}
        settings |= {click: said[name] for click, name in (("min", "least"), ("max", "most")) if name in said}
        types = [one for one in (get_args(hint) or (hint,)) if one is not type(None)]
        of: Any = said.get("kind", types[0])
        if "values" in said:
            of = Literal[tuple(said["values"])]
        elif said.get("metavar") in parsers:
            of, settings["parser"] = Any, parsers[said["metavar"]]
        names = [f"--{field.name.replace('_', '-')}"] if of is bool else []
        typed: Any = Annotated[of if field.default is not None else of | None, typer.Option(*names, **settings)]
        return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=typed)

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        hints, signature = get_type_hints(kind), inspect.signature(command, eval_str=True)
        made = [one(field, hints[field.name]) for field in fields(kind)]

        @wraps(command)
        def with_them(**given: Any) -> Any:
            options = kind(**{option.name: given.pop(option.name) for option in made})
            return command(**given, options=options)

        whole = [made if one.name == "options" else [one] for one in signature.parameters.values()]
        parameters = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for some in whole for one in some]
        with_them.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        with_them.__annotations__ = {one.name: one.annotation for one in parameters}
        return with_them

    return decorate


def check_files(json_file: Path | None, plot: Path | None) -> None:
    """Say now, not after minutes, what could not be written.

    Raises:
        typer.BadParameter: no folder, or no type of picture. ModuleNotFoundError: matplotlib, to plot.
    """
    for file in filter(None, (json_file, plot)):
        if not file.resolve().parent.is_dir():
            raise typer.BadParameter(f"{file}: no such folder", param_hint="--output or --plot")
    if plot:
        if plot.suffix.lower() not in (".png", ".pdf", ".svg"):
            raise typer.BadParameter(f"{plot}; expected .png, .pdf or .svg", param_hint="--plot")
        need("matplotlib")


def run(app: typer.Typer, arguments: Sequence[str], name: str) -> None:
    """Run a command: a wrong argument is one line and exit code 2."""
    try:
        code = app(arguments, prog_name=name, standalone_mode=False)
    except typer.Abort:  # typer's older releases for Ctrl-C
        raise KeyboardInterrupt from None
    except UsageError as error:
        command = context.command_path if (context := getattr(error, "ctx", None)) else name
        text = " ".join(error.format_message().split()).rstrip(".")  # type: ignore[attr-defined]
        if not text:  # a group of commands without one, whose help typer has printed
            sys.exit(2)
        text = re.sub(r"('--[\w-]+') / '-\w'", r"\1", text)  # the long name of an option with two
        text = text.removeprefix("Invalid value: ").replace("Value error, ", "")  # pydantic's
        print(f"{command}: {text[0].lower()}{text[1:]}; {command} --help lists what there is", file=sys.stderr)
        sys.exit(2)
    sys.exit(code if isinstance(code, int) else 0)


def one_line(text: str) -> str:
    """Return an error on one line: files choose parts of it, which may be long, many lines or a terminal's commands."""
    text = "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))
    return text if len(text) <= 2000 else f"{text[:1600]} ... {text[-300:]}"
