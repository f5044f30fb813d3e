"""Commands as a stranger types them: words of other tools, near misses, and help without names of types."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any

import typer

from quantmoe.exporter.command_arguments import UsageError

_GPU = "--device cuda, which runs all layers on the GPU; --experts host leaves experts in RAM"
#: commands and options of Ollama, llama.cpp and vLLM -> what to type
ELSEWHERE = {
    "run": "generate",
    "chat": "generate",
    "complete": "generate",
    "convert": "export",
    "pull": "export",
    "quantize": "export with --quantize",
    "show": "inspect",
    "-ngl": _GPU,
    "--gpu-layers": _GPU,
    "--n-gpu-layers": _GPU,
    "--n-cpu-moe": _GPU,
    "-ncmoe": _GPU,
    "-cmoe": _GPU,
    "--temp": "--temperature",
    "--n-predict": "--max-new-tokens",
    "--predict": "--max-new-tokens",
    "--max-tokens": "--max-new-tokens",
    "--ctx-size": "--context",
    "--max-model-len": "--context",
    "--num-ctx": "--context",
    "--repeat-penalty": "--repetition-penalty",
    "--parallel": "--batch",
    "-np": "--batch",
    "--max-num-seqs": "--batch",
    "-tb": "--threads",
    "-ub": "--chunk",
    "--ubatch-size": "--chunk",
    "-cnv": "--chat",
    "-m": "the model's folder without an option",
    "--model": "the model's folder without an option",
}


def no_such(what: str, name: str, known: Iterable[str], before: str = "") -> str:
    """Return the error of a name that a command does not have, with the nearest one that it has.

    Args:
        what: "command" or "option".
        before: what is typed before the name.
    """
    names, plain = sorted(known), name.replace("_", "-")
    instead = ELSEWHERE.get(name, "")
    if instead.startswith("-") and re.split("[ ,]", instead)[0] not in names:
        instead = ""
    near = [one for one in names if one.startswith(plain)] or get_close_matches(plain, names, 1, cutoff=0.7)
    instead = instead or " or ".join(near)
    return f"no such {what}: {name}{f'; type {before}{instead}' if instead else ''}"


class _PlainHelp:
    """Help without a type after flags."""

    def get_params(self, ctx: Any) -> list[Any]:
        parameters: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for flag in parameters:
            if getattr(flag, "is_flag", False):
                flag.metavar = ""
        return parameters


class Command(_PlainHelp, typer.core.TyperCommand):
    """A command that names the nearest option instead of an unknown one."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        typed = [*args]
        try:
            return super().parse_args(ctx, args)
        except UsageError as error:
            known = {name: option for option in self.get_params(ctx) for name in (*option.opts, *option.secondary_opts)}
            if (name := _unknown(typed, known, error)) is not None:
                options = [name for name in known if name.startswith("-") and not getattr(known[name], "hidden", False)]
                ctx.fail(no_such("option", name, options))
            raise


def _unknown(typed: Sequence[str], known: dict[str, Any], error: Exception) -> str | None:
    """Return an option among what was typed that a command does not have; None: there is none.

    The parser reads ``-ngl`` as ``-n`` with the value "gl".
    """
    names = [text.partition("=")[0] for text in typed]
    for name in names:
        letters = re.fullmatch(r"-[a-z]{2,}", name) and getattr(known.get(name[:2]), "metavar", "") == "N"
        if name not in known and (letters or (name.startswith("-") and name in ELSEWHERE)):
            return name
    return getattr(error, "option_name", None) if hasattr(error, "possibilities") else None


class Group(_PlainHelp, typer.core.TyperGroup):
    """A group of commands that names the nearest command instead of an unknown one."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        known = self.list_commands(ctx)
        if not (ctx.resilient_parsing or args[0].startswith("-") or args[0] in known):
            ctx.fail(no_such("command", args[0], known, before=f"{ctx.command_path} "))
        return super().resolve_command(ctx, args)
