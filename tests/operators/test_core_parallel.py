"""Functions of src/core/parallel.h, which no library exports: how many threads there may be, and starting them."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from quantmoe.custom_ops.op_def.schema import read

SOURCES = Path(__file__).parents[2] / "custom_ops"
INTERNAL = """#include "core/parallel.h"
extern "C" int cpus(int allowed, const char* root) { return quantmoe::cpus(allowed, root); }
extern "C" void start_threads(qm_task task, size_t count) { quantmoe::start_threads(nullptr, task, nullptr, count); }
"""
V2, V1 = "0::{}\n", "5:memory:/other\n3:cpu,cpuacct:{}\n0::/\n"


@pytest.fixture(scope="module")
def internal(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("internal")
    source, library = folder / "internal.cc", folder / "libinternal.so"
    source.write_text(INTERNAL, encoding="utf-8")
    (folder / "op.def").write_text(read(SOURCES), encoding="utf-8")
    folders = [f"-I{f}" for f in (folder, SOURCES / "include", SOURCES / "src")]
    sources = [source, SOURCES / "src/core/parallel.cc"]
    subprocess.run(["c++", "-std=c++20", "-shared", "-fPIC", "-pthread", *folders, *sources, "-o", library], check=True)
    return ctypes.CDLL(str(library))


@pytest.mark.skipif(sys.platform != "linux", reason="control groups are Linux's")
@pytest.mark.parametrize(
    ("group", "files", "expected"),
    [
        pytest.param(V2.format("/"), {}, 256, id="none"),
        pytest.param(V2.format("/"), {"cpu.max": "max 100000"}, 256, id="no-quota"),
        pytest.param(V2.format("/"), {"cpu.max": "800000 100000"}, 8, id="container"),
        pytest.param(V2.format("/a/b"), {"a/b/cpu.max": "250000 100000"}, 3, id="rounded-up"),
        pytest.param(V2.format("/a/b"), {"a/cpu.max": "1200000 50000", "a/b/cpu.max": "max 100000"}, 24, id="parent"),
        pytest.param(V2.format("/a"), {"a/cpu.max": "10000 100000"}, 1, id="part-of-one"),
        pytest.param(V2.format("/a"), {"a/cpu.max": "99900000 100000"}, 256, id="more-than-there-are"),
        pytest.param(V2.format("/../.."), {"cpu.max": "400000 100000"}, 4, id="outside-the-namespace"),
        pytest.param(V2.format("/a"), {"a/cpu.max": "no number"}, 256, id="unreadable"),
        pytest.param(V1.format("/"), {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 256, id="v1"),
        pytest.param(
            V1.format("/docker/1"), {"cpu/cpu.cfs_quota_us": "600000", "cpu/cpu.cfs_period_us": "100000"}, 6,
            id="v1-container",
        ),
        pytest.param(
            V1.format("/a"), {"cpu/a/cpu.cfs_quota_us": "150000", "cpu/a/cpu.cfs_period_us": "100000"}, 2,
            id="v1-rounded-up",
        ),
        pytest.param("not a line of it\n0:\n::\n", {}, 256, id="malformed"),
    ],
)  # fmt: skip
def test_quota(internal: ctypes.CDLL, tmp_path: Path, group: str, files: dict[str, str], expected: int) -> None:
    """256 CPUs, and the control group's part of their time."""
    found = {"proc/self/cgroup": group} | {f"sys/fs/cgroup/{name}": f"{content}\n" for name, content in files.items()}
    for name, content in found.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content, encoding="utf-8")
    assert internal.cpus(256, os.fsencode(tmp_path)) == expected


def test_no_files_of_control_groups(internal: ctypes.CDLL, tmp_path: Path) -> None:
    assert internal.cpus(256, os.fsencode(tmp_path)) == 256


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
@pytest.mark.parametrize("spare", [4, 20])
def test_threads_that_cannot_start(internal: ctypes.CDLL, spare: int) -> None:
    """The calling thread does what is left: every task runs once. A thread's stack takes 8 MiB of addresses."""
    code = f"""
import ctypes, re, resource, time
from pathlib import Path
internal, ran = ctypes.CDLL({internal._name!r}), []
resource.setrlimit(resource.RLIMIT_STACK, (8 << 20, resource.getrlimit(resource.RLIMIT_STACK)[1]))

@ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t)
def task(_, index):
    time.sleep(0.05)
    ran.append(index)

used = int(re.search(r"VmSize:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
resource.setrlimit(resource.RLIMIT_AS, (used + ({spare} << 20), used + ({spare} << 20)))
internal.start_threads(task, ctypes.c_size_t(16))
assert sorted(ran) == list(range(16)), ran
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, (done.returncode, done.stderr[-3000:])
