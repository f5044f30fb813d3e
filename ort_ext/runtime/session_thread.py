"""Which thread runs the sessions with CUDA graphs of this process.

ONNX Runtime 1.31 has one stream for a session with graphs, but graphs and 76 MB of handles for each thread that runs
it. A replay that comes between another thread's launches overwrites their intermediate results, and during a capture no
other thread of the process may allocate. So all calls are made by one thread, one after the other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class SessionThread:
    """The first thread that runs a session makes its calls itself, which is quickest. When a second one comes, all
    calls move to a thread of their own, for good."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._mine = threading.local()  # a thread's ident may be an ended thread's
        self._home: object = None
        self._own: ThreadPoolExecutor | None = None

    def thread(self) -> object:
        """Return what only the calling thread has."""
        if not hasattr(self._mine, "token"):
            self._mine.token = object()
        return self._mine.token

    def __call__(self, call: Callable[[], T], runs: bool = True) -> T:
        """Return what a call returns. Calls may be nested.

        Args:
            runs: it runs a session; False: it opens one, which another thread may be the first to run.
        """
        with self._lock:
            if self._home is None and runs:
                self._home = self.thread()
            if self._home in (None, self.thread()):
                return call()
            if self._own is None:
                self._own = ThreadPoolExecutor(1, "quantmoe-cuda-graphs")
                self._home = self._own.submit(self.thread).result()
        return self._own.submit(call).result()


#: of this process
SESSION_THREAD = SessionThread()
