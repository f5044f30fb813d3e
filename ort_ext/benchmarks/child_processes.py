"""Child processes of the benchmarks: what they return, and how they ended when they return nothing."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

from quantmoe.exporter.errors import ModelError


def how_ended(exitcode: int | None) -> str:
    """Say how a process ended. Only SIGKILL, which the system sends, may mean that memory ran out."""
    if exitcode is None or exitcode >= 0:
        return f"ended with exit status {exitcode}"
    try:
        name = signal.Signals(-exitcode).name
    except ValueError:
        name = f"signal {-exitcode}"
    return f"was ended by {name}{' (out of memory?)' if name == 'SIGKILL' else ''}"


@contextlib.contextmanager
def unheard_interrupts() -> Iterator[None]:
    """Start processes that Ctrl-C does not reach: it goes to all of a terminal, and their parent ends them."""
    if threading.current_thread() is not threading.main_thread():  # which alone may set handlers
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def in_process(name: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a function returns in a new process, which takes its memory along.

    Args:
        name: of the process, in errors.

    Raises:
        ModelError: the process ended before the function returned. What the function raises is raised here, too.
    """
    context = multiprocessing.get_context("spawn")
    ours, its = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(its, function, arguments), daemon=True)
    with unheard_interrupts():
        process.start()
    its.close()
    try:
        failed, found = ours.recv()
    except EOFError:
        process.join()
        raise ModelError(f"{name}: its process {how_ended(process.exitcode)}") from None
    finally:
        ours.close()
    process.join()
    if failed:
        raise found
    return found


def _answer(pipe: Any, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        answer = False, function(*arguments)
    except Exception as error:
        answer = True, error
    pipe.send(answer)
