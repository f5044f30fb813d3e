"""Calls of the C ABI. Importing this takes no time: it knows no operator."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

#: bytes of a message, as in quantmoe.h
ERROR_SIZE = 512


def check_status(status: int, err: ctypes.Array[ctypes.c_char]) -> None:
    """Raise ValueError with the message of a call that failed."""
    if status:
        raise ValueError(err.value.decode())


def checked(function: Callable[..., int], *given: Any) -> None:
    """Call a function of the C ABI whose last argument is where it says why it failed.

    Raises:
        ValueError: with its message.
    """
    err = ctypes.create_string_buffer(ERROR_SIZE)
    check_status(function(*given, err), err)
