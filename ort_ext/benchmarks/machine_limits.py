"""Limits of this machine's memory and CPUs."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import numpy as np

from quantmoe.custom_ops import native
from quantmoe.exporter.errors import ModelError


def cache_bytes() -> int:
    """Last-level caches of this process's CPUs together; 64 MiB where the kernel does not say."""
    found = {}
    for cpu in os.sched_getaffinity(0):
        for index in Path(f"/sys/devices/system/cpu/cpu{cpu}/cache").glob("index*"):
            level, size, shared = (
                (index / f).read_text(encoding="utf-8").strip() for f in ("level", "size", "shared_cpu_list")
            )
            found[int(level), shared] = int(size.removesuffix("K")) * 1024
    last = max((level for level, _ in found), default=0)
    return sum(size for (level, _), size in found.items() if level == last) or 64 << 20


def probe_read(threads: int, folder: Path, passes: int = 5, window: int = 64 << 20) -> float:
    """Best bytes/s of any ``window`` in ``passes`` passes over a mapping of a file that is larger than the caches."""
    path, chunk = folder / "read.bin", np.random.default_rng(0).bytes(window)
    windows = max(4, -(-4 * cache_bytes() // window))
    with path.open("wb") as file:
        for _ in range(windows):
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
    probe = native.library().qm_probe_read
    with path.open("rb") as mapped, mmap.mmap(mapped.fileno(), 0, access=mmap.ACCESS_READ) as mapping:
        data = np.frombuffer(mapping, np.uint8)
        parts = [ctypes.c_void_p(data.ctypes.data + i * window) for i in range(windows)]
        # the first pass maps the pages
        best = max(probe(part, ctypes.c_size_t(window), threads) for _ in range(passes + 1) for part in parts)
        del data
    path.unlink()
    return best


def probe_int8(threads: int, runs: int = 20) -> float:
    """Best int8 operations/s of ``runs`` runs of the selected kernel's instructions, 10 ms each."""
    best = max(native.library().qm_probe_int8(threads) for _ in range(runs))
    if not best:
        raise ModelError("no kernel for this machine (is QUANTMOE_FORCE_KERNEL set?)")
    return best
