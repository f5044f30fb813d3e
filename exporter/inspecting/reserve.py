"""Memory that experts leave for the rest of a model, and for its cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quantmoe.exporter.folder.metadata import TARGET
from quantmoe.exporter.targets import CPU, TARGETS


def cache_bytes(found: Mapping[str, Any], length: int) -> int:
    """Return the bytes of the keys, values and states of one sequence of so many tokens; found: of ``inspect``.

    Each state of a window takes as much.
    """
    keys = sum(node["bytes_per_token"] for node in found["attention"])
    states = (int(n["state_bytes"]) * n["attributes"].get("state_window", 1) for n in found["linear_attention"])
    return length * int(keys) + sum(states)


def reserve(found: Mapping[str, Any], length: int, drafts: bool = False, rows: int = 1) -> int:
    """Return the bytes of what is free at a session's first run that experts are to leave for sequences of ``length``
    tokens.

    The library leaves as much by itself, except the cache (guides/large-models). On the CPU, other weights of the
    data files are still to be read then; on a GPU they are there.

    Args:
        found: of ``inspect``.
        drafts: the model's layer of multi-token prediction has a cache, too.
        rows: sequences at once.
    """
    target = TARGETS.get(found["metadata"].get(TARGET), CPU)
    caches = sum(cache_bytes(part, length) for part in (found, found.get("mtp") if drafts else None) if part)
    others = sum(file["bytes"] for file in found["files"]) - sum(layer["bytes"] for layer in found["layers"])
    return target.reserve + (0 if target.on_gpu else max(others, 0)) + rows * caches
