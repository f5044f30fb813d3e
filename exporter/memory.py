"""Running out of memory, said in terms of the model: which file, layer or tensor it was."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

#: tokens of a prompt that are run at once: memory beside the cache grows with them, not with the prompt
CHUNKS = {"cpu": 512, "cuda": 2048}
#: drafts of a run that speculation verifies, at most, unless the caller says
DRAFTS = 4


class OutOfMemoryError(MemoryError):
    """The message names what was being done."""


@contextlib.contextmanager
def doing(what: str) -> Iterator[None]:
    """Names ``what`` in an error for lack of memory, unless something more exact has a name already.

    Raises:
        OutOfMemoryError: for such an error of Python, NumPy, the system (a file cannot be mapped) or PyTorch.
    """
    try:
        yield
    except OutOfMemoryError:
        raise
    except Exception as error:
        if (cause := _of_memory(error)) is None:
            raise
        raise OutOfMemoryError(f"{what}: out of memory{f' ({cause})' if str(cause) else ''}") from error


def _of_memory(error: BaseException | None) -> BaseException | None:
    """The error, or what it was raised from, if memory lacked; PyTorch's allocator raises a RuntimeError."""
    while error is not None:
        lacked = isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
        if lacked or "DefaultCPUAllocator: can't allocate" in str(error):
            return error
        error = error.__cause__
    return None
