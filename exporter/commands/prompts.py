"""Texts of users: prompts in files and on standard input."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import typer


def read_prompt(path: Path | None, option: str | None = "--file") -> str:
    """Return a file's text, None: standard input's, without the line break at its end."""
    path = None if path == Path("-") else path
    name, option = (str(path), option) if path else ("standard input", None)
    given = b"" if path or sys.stdin is None else sys.stdin.buffer.read()  # None: it is closed
    try:
        text = (path.read_bytes() if path else given).decode("utf-8-sig")
    except OSError as error:
        raise typer.BadParameter(f"{name}: {error.strerror}", param_hint=option) from None
    except UnicodeDecodeError:
        raise typer.BadParameter(f"{name}: expected text in UTF-8", param_hint=option) from None
    if not text.strip():
        others = "" if path else "; give --prompt, --file or --ids, or --chat for a conversation"
        what = "text" if option == "--text" else "a prompt"
        raise typer.BadParameter(f"{name}: expected {what}, found no text{others}", param_hint=option)
    return text.removesuffix("\n").removesuffix("\r")


def read_prompts(path: Path) -> list[str]:
    """Return its lines, of a file .jsonl the strings that they are, prompt N on line N. Empty lines at the end
    aside."""
    of_json, found = path.suffix == ".jsonl", []
    try:
        lines = path.read_text("utf-8-sig").split("\n")
    except OSError as error:
        raise typer.BadParameter(f"{path}: {error.strerror}", param_hint="--prompts") from None
    except UnicodeDecodeError:
        raise typer.BadParameter(f"{path}: expected text in UTF-8", param_hint="--prompts") from None
    while lines and not lines[-1].strip():
        lines.pop()
    if not lines:
        raise typer.BadParameter(f"{path}: expected a prompt a line, there is none", param_hint="--prompts")
    for number, line in enumerate(lines, 1):
        try:
            prompt = json.loads(line) if of_json else line
        except (ValueError, RecursionError):
            prompt = None
        if not isinstance(prompt, str) or not (prompt if of_json else prompt.strip()):
            what = "a JSON string that is not empty" if of_json else "a prompt, the line is empty"
            raise typer.BadParameter(f"{path}, line {number}: expected {what}", param_hint="--prompts")
        if not is_text(prompt):
            what = r"text, found half of a pair \ud800 to \udfff"
            raise typer.BadParameter(f"{path}, line {number}: expected {what}", param_hint="--prompts")
        found.append(prompt)
    return found


def is_text(message: str) -> bool:
    """Return whether it has no halves of surrogate pairs, which Python reads from JSON and from bytes that are no
    text."""
    return message.encode(errors="ignore").decode() == message


def check_text(message: str) -> None:
    if not is_text(message):
        raise typer.BadParameter("the prompt: expected text in UTF-8")
