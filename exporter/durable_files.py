"""Files that are on the disk when a function returns, also if the power fails then."""

from __future__ import annotations

import errno
import os
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


def sync(path: Path) -> None:
    """Return when a file's bytes, or a folder's names, are on the disk.

    Raises:
        OSError: with the file's name.
    """
    if path.is_dir() and fcntl is None:  # Windows opens no folder
        return
    descriptor = os.open(path, os.O_RDONLY if fcntl else os.O_RDWR)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems sync no folders
            raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        os.close(descriptor)


def replace(source: Path, target: Path) -> None:
    """Give a written file its final name; both are on the disk when this returns."""
    sync(source)
    source.replace(target)
    sync(target.absolute().parent)
