"""The ``quantmoe`` command: its subcommands, and how errors end it."""

from __future__ import annotations

import io
import re
import signal
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Annotated, Any

import typer

from quantmoe.exporter.command_arguments import missing, one_line, outdated, run
from quantmoe.exporter.command_words import Command, Group
from quantmoe.exporter.commands.demo import demo
from quantmoe.exporter.commands.evaluate import evaluate
from quantmoe.exporter.commands.export import export
from quantmoe.exporter.commands.generate import generate
from quantmoe.exporter.commands.inspect import inspect
from quantmoe.exporter.commands.serve import serve
from quantmoe.exporter.commands.trace import trace
from quantmoe.exporter.commands.unpack import unpack
from quantmoe.exporter.errors import CheckpointError, ModelError, OptionError
from quantmoe.ort_ext import build_info

app = typer.Typer(
    cls=Group,
    help="Export and run quantized mixture-of-experts models.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"quantmoe {version('quantmoe')} ({build_info()})")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version and exit")
    ] = False,
) -> None:
    pass


for panel, commands in (
    ("Export", (export, inspect, unpack)),
    ("Run", (generate, serve)),
    ("Measure", (evaluate, trace, demo)),
):
    for command in commands:
        app.command(cls=Command, rich_help_panel=panel)(command)


class _Bench(Group):
    """The commands of ``bench``; their modules are imported when they are asked for, which takes 0.2 s."""

    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]
        from quantmoe.benchmarks.bench import app as benches

        self.commands = typer.main.get_command(benches).commands  # type: ignore[attr-defined]
        return [*self.commands]

    def get_command(self, ctx: typer.Context, name: str) -> Any:  # type: ignore[override]
        return self.commands[name] if name in self.list_commands(ctx) else None


bench = typer.Typer(cls=_Bench, help="Measure one layer or a whole model beside other engines.", no_args_is_help=True)
bench.callback()(lambda: None)
app.add_typer(bench, name="bench", rich_help_panel="Measure")


def main() -> None:
    """Entry point: errors a person can act on are one line and exit code 1."""
    arguments = sys.argv[1:] or ["--help"]
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # paths and texts may have what a pipe's encoding lacks
    try:
        _main(arguments)
    except MemoryError as error:  # without words where the modules are imported
        sys.exit(f"quantmoe: {one_line(str(error) or ' '.join(arguments[:2]) + ': out of memory')}")
    except ModuleNotFoundError as error:
        sys.exit(f"quantmoe: {missing(error, arguments[0])}")
    except ImportError as error:  # a library that does not fit into memory, or not to this machine; the text names it
        sys.exit(f"quantmoe: {outdated(arguments[0]) or one_line(str(error))}")
    except Exception:
        if old := outdated(arguments[0]):
            sys.exit(f"quantmoe: {old}")
        raise


def _main(arguments: Sequence[str]) -> None:
    for signal_ in {signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)}:  # Windows has no SIGHUP
        signal.signal(signal_, lambda number, frame: sys.exit(128 + number))  # as Ctrl-C: what was begun is removed
    try:
        run(app, arguments, "quantmoe")
    except OptionError as error:
        sys.exit(f"quantmoe: {one_line(_as_typed(str(error), arguments[0]))}")
    except (CheckpointError, ModelError, OSError) as error:
        sys.exit(f"quantmoe: {one_line(str(error))}")


def _as_typed(text: str, command: str) -> str:
    """Return an error with the command's options in the places of a function's arguments.

    An argument is the first word, a word with an underscore, or follows some words.
    """
    parameters = typer.main.get_command(app).commands[command].params  # type: ignore[attr-defined]
    options = {p.name: p.opts[0] for p in parameters if p.opts[0].startswith("--")}
    after = "|".join(f"(?<={words} )" for words in ("does not go with", "leave out", "option of", "is for", "needs"))
    places = rf"^\w+|\b[a-z]+_\w+|(?:{after})\w+"
    return re.sub(places, lambda match: options.get(match[0], match[0]), text)


if __name__ == "__main__":
    main()
