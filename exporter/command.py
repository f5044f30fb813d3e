"""The entry point of the ``quantmoe`` command. It imports nothing before Ctrl-C is looked after."""

from __future__ import annotations

import signal
import sys

TYPE_CHECKING = False  # the module typing is not imported, which takes as long as all of these
if TYPE_CHECKING:
    from types import FrameType, TracebackType
    from typing import NoReturn

#: exit status of a command that Ctrl-C ended, as shells have it
INTERRUPTED = 130


def main() -> None:
    """Run the command. Ctrl-C ends it without a traceback, also while modules are imported."""
    while_importing = False

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        nonlocal while_importing
        while frame is not None and not while_importing:
            while_importing = frame.f_code.co_filename.startswith("<frozen importlib")
            frame = frame.f_back
        raise KeyboardInterrupt

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not issubclass(kind, KeyboardInterrupt):
            sys.__excepthook__(kind, error, trace)

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # nohup and others ignore it
        signal.signal(signal.SIGINT, interrupt)
    sys.excepthook = hook  # NumPy's C code prints what interrupts its import, and raises an ImportError in its place
    try:
        from quantmoe.exporter.cli import main as command

        command()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except BaseException:
        if while_importing:
            sys.exit(INTERRUPTED)
        raise


if __name__ == "__main__":
    main()
