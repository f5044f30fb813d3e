"""Terminals: progress, Ctrl-C while the engine runs, and typed lines."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text

#: seconds of work before its progress is shown
PATIENCE = 2.0
#: typed lines that are kept
LINES = 1000
#: signals that end a run
ENDS = {int(getattr(signal, name)) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)}


class TokensColumn(ProgressColumn):
    """Tokens so far, and tokens per second since the task began."""

    def render(self, task: Task) -> Text:
        total = "" if task.total is None else f" of {task.total:.0f}"
        return Text(f"{task.completed:.0f}{total} tokens, {task.completed / max(task.elapsed or 0, 1e-9):.1f} tokens/s")


@contextlib.contextmanager
def progress(what: str, *columns: ProgressColumn) -> Iterator[Callable[[int, int], None]]:
    """Show on standard error how far something is, if that is a terminal and it takes longer than ``PATIENCE``.

    Yields:
        A function that takes how much is done, and of how much. When all is done, nothing is shown any more.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda done, total: None
        return
    shown = TextColumn("{task.description}", markup=False), BarColumn(), *columns, TimeElapsedColumn()
    bar = Progress(*shown, console=console, transient=True)
    task, begin = bar.add_task(what, total=None), threading.Timer(PATIENCE, bar.start)
    begin.daemon = True

    def end() -> None:
        begin.cancel()
        begin.join()
        bar.stop()

    def update(done: int, total: int) -> None:
        if begin.finished.is_set() and not bar.live.is_started:
            return  # it has ended
        bar.update(task, completed=done, total=total)
        if done >= total:
            end()

    begin.start()
    try:
        yield update
    finally:
        end()


@contextlib.contextmanager
def ended_by_signals(interrupt: Callable[[], Any]) -> Iterator[None]:
    """Call a function as soon as a signal such as Ctrl-C comes.

    Python's own handlers wait until the engine's run has returned, which takes seconds for a long prompt. This ends the
    run, and then Python's handler raises as always.
    """
    read, write = socket.socketpair()
    write.settimeout(0)

    def watch() -> None:
        while numbers := read.recv(64):
            if ENDS & {*numbers}:
                interrupt()

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    before = signal.set_wakeup_fd(write.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        write.close()
        watcher.join()
        read.close()


def edit_lines() -> None:
    """Let ``input`` take editing keys, earlier lines, and pasted lines as one message where Python has GNU readline."""
    with contextlib.suppress(ImportError, OSError):
        import readline

        readline.parse_and_bind("set enable-bracketed-paste on")
        readline.set_history_length(LINES)
        readline.read_history_file(history_file())


def keep_lines() -> None:
    """Write the typed lines to their file, if that can be."""
    with contextlib.suppress(ImportError, OSError):
        import readline

        path = history_file()
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.touch(mode=0o600)  # messages are its owner's
        readline.write_history_file(path)


def remember_lines(on: bool) -> None:
    """Take the typed lines that follow for the arrow keys and the file, or leave them out."""
    with contextlib.suppress(ImportError):
        import readline

        readline.set_auto_history(on)


def history_file() -> Path:
    """Return the file of typed lines, in the place for a program's state."""
    usual = Path.home() / ("Library/Application Support" if sys.platform == "darwin" else ".local/state")
    return Path(os.environ.get("XDG_STATE_HOME") or usual) / "quantmoe" / "history"
