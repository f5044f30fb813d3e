"""Folders that many tests read, made once for all processes of a run."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest


def made_once(factory: pytest.TempPathFactory, make: Callable[[Path], object], name: str, **key: object) -> Path:
    """A folder called ``name`` that ``make(folder)`` fills in the first process that asks for this name and key.

    Raises:
        AssertionError: a test has changed one of its files; it should change a copy.
    """
    root = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    digest = hashlib.blake2b(repr((name, sorted(key.items()))).encode(), digest_size=8).hexdigest()
    around = root / f"once-{name}-{digest}"
    around.mkdir(exist_ok=True)
    folder, written = around / name, around / "written.json"
    with open(around / "lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not written.exists():
            make(folder)
            written.write_text(json.dumps(_state(folder)), encoding="utf-8")
        before = json.loads(written.read_text(encoding="utf-8"))
    now = _state(folder)
    assert {file: now.get(file) for file in before} == before, f"a test has changed {folder}"
    return folder


def _state(folder: Path) -> dict[str, list[int]]:
    return {path.name: [path.stat().st_size, path.stat().st_mtime_ns] for path in folder.iterdir()}
