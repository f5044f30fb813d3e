"""Calls of the C ABI. Importing this takes no time: it knows no operator."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, Self

#: bytes of a message, as in quantmoe.h
ERROR_SIZE = 512


def checked(function: Callable[..., int], *given: Any) -> None:
    """Call a function of the C ABI whose last argument is where it says why it failed.

    Raises:
        ValueError: with its message.
    """
    err = ctypes.create_string_buffer(ERROR_SIZE)
    if function(*given, err):
        raise ValueError(err.value.decode())


class Description(ctypes.Structure):
    """qm_library: what a library says of itself and its kernels."""

    _fields_ = [
        *((name, ctypes.c_char_p) for name in ("version", "compiler", "kernel")),
        ("kernels", ctypes.c_char_p * 8),
        ("usable", ctypes.c_int32 * 8),
        ("cpus", ctypes.c_int32),
    ]
    #: why no kernel is selected; "": one is
    refusal = ""

    @classmethod
    def of(cls, library: ctypes.CDLL) -> Self:
        """Ask a library, which has ``qm_describe``."""
        found, err = cls(), ctypes.create_string_buffer(ERROR_SIZE)
        if library.qm_describe(ctypes.byref(found), err):
            found.refusal = err.value.decode()
        return found

    def found(self) -> dict[str, bool]:
        """Return the kernels, best first: name -> usable on this machine."""
        return {name.decode(): bool(usable) for name, usable in zip(self.kernels, self.usable, strict=True) if name}
