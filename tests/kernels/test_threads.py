"""CPUs that the library counts, and its calls where the system has fewer threads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif(sys.platform != "linux", reason="needs sched_setaffinity")
def test_affinity() -> None:
    """Of all threads: one that OpenMP bound to a CPU, say, does not speak for an engine's pool."""
    code = """
import os, threading
every = os.sched_getaffinity(0)
os.sched_setaffinity(0, [max(every)])
from quantmoe.custom_ops import native
assert native.cpus() == 1
free, done = threading.Event(), threading.Event()
def unbound():
    os.sched_setaffinity(0, every)
    free.set()
    done.wait()
thread = threading.Thread(target=unbound)
thread.start()
free.wait()
assert native.cpus() == len(every)
done.set()
thread.join()
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
@pytest.mark.parametrize("spare", [4, 20])
def test_threads_that_cannot_start(spare: int) -> None:
    """The calling thread does what is left. A thread's stack takes 8 MiB of addresses."""
    code = f"""
import re, resource
from pathlib import Path
import numpy as np
from quantmoe.custom_ops import native
resource.setrlimit(resource.RLIMIT_STACK, (8 << 20, resource.getrlimit(resource.RLIMIT_STACK)[1]))
weight, found = np.random.default_rng(0).standard_normal((2048, 256), np.float32), []
for native.cpus in (lambda: 1), (lambda: 16):
    if found:
        used = int(re.search(r"VmSize:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
        resource.setrlimit(resource.RLIMIT_AS, (used + ({spare} << 20), used + ({spare} << 20)))
    found.append(native.quantize(weight, "int4", 32, scale_type="f32").codes.tobytes())
assert found[0] == found[1]
assert native.library().qm_probe_int8(16) >= 0  # its lanes do not wait for one that never starts
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, (done.returncode, done.stderr[-3000:])
