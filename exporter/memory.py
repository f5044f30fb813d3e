"""Running out of memory or disk, said in terms of the model: which file, layer or tensor it was."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from quantmoe.exporter import gpu

#: drafts of a run that speculation verifies, at most, unless the caller says
DRAFTS = 4


#: what errors say for lack of memory: PyTorch's allocator, ONNX Runtime's arena (of a GPU, too), CUDA, cuBLAS
_LACKED = re.compile(
    r"DefaultCPUAllocator: can't allocate|Failed to allocate memory for requested buffer"
    r"|is smaller than requested bytes|out of memory|CUBLAS_STATUS_ALLOC_FAILED"
)


class OutOfMemoryError(MemoryError):
    """The message names what was being done."""


@dataclasses.dataclass(frozen=True)
class OnGpu:
    """Text of an error for lack of a GPU's memory.

    Attributes:
        taken: what took how much, with ", " at its end; or "". less: options and measures that need less.
    """

    taken: str
    less: Sequence[str]

    def __str__(self) -> str:
        free = gpu.free_memory()
        there = "" if free is None else f"{free:,} bytes are free; "
        return f"{self.taken}{there}less is needed with {', or '.join(self.less)}"


@contextlib.contextmanager
def doing(what: str, on_gpu: OnGpu | None = None) -> Iterator[None]:
    """Name ``what`` in an error for lack of memory, unless something more exact has a name already.

    Args:
        on_gpu: of what takes a GPU's memory, too.

    Raises:
        OutOfMemoryError: for such an error of Python, NumPy, the system (a file cannot be mapped), PyTorch, CUDA or
            ONNX Runtime.
    """
    try:
        yield
    except OutOfMemoryError:
        raise
    except Exception as error:
        if (cause := _of_memory(error)) is None:
            raise
        if on_gpu is not None and not isinstance(cause, MemoryError | OSError):
            raise OutOfMemoryError(f"{what}: out of GPU memory: {on_gpu}") from error
        raise OutOfMemoryError(f"{what}: out of memory{f' ({cause})' if str(cause) else ''}") from error


def check_space(folder: Path, needed: int) -> None:
    """Refuse to begin what the disk does not hold.

    Raises:
        OSError: saying how many bytes are needed and how many are free.
    """
    if (free := shutil.disk_usage(folder).free) < needed:
        raise OSError(
            f"{folder}: {needed} bytes are to be written, {free} bytes of the disk are free; make room or write to "
            "another disk"
        )


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name the file in errors of writing, which Python's file objects do not, and the free bytes of a full disk.

    Args:
        path: what is written; of a folder only a full disk is named, as other errors may be of files elsewhere.

    Raises:
        OSError: with the file's name.
    """
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOSPC:
            file, there = error.filename2 or error.filename or path, path if path.is_dir() else path.absolute().parent
            free = f"{shutil.disk_usage(there).free} bytes are free"
            raise OSError(f"{file}: the disk is full, {free}; make room or write to another disk") from None
        if error.errno is None or error.filename or path.is_dir():  # it says all, or is of another file
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None


def _of_memory(error: BaseException | None) -> BaseException | None:
    """Return the error, or what it was raised from, if memory lacked; allocators of libraries raise other errors."""
    while error is not None:
        lacked = isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
        if lacked or _LACKED.search(str(error)):
            return error
        error = error.__cause__
    return None
