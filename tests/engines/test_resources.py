"""A machine that is short of memory: an exception that says for what, never the end of the process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from children import PYTHONPATH
from engines.one_layer import NODE, write_model
from specs import moe_spec, projection

from quantmoe.custom_ops.layouts import cpu_panel

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")

#: glibc reserves 64 MB for a thread and keeps what is freed: neither tells what a call takes. It keeps small pieces,
#: for the words of errors: ONNX Runtime's log ends the process where it finds no memory.
MALLOC = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}
CHILD = """
import re, resource, sys
from pathlib import Path
import numpy as np
from engines.one_layer import run, session

def limit(spare):
    used = int(re.search(r"VmSize:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
    resource.setrlimit(resource.RLIMIT_AS, (used + spare, used + spare))

path, what = Path(sys.argv[1]), sys.argv[2]
tokens = np.zeros((2048, 64), np.float32), np.zeros((2048, 1), np.int64), np.ones((2048, 1), np.float32)
if what == "copy":
    session(path)
    limit(150 << 20)  # the file of 117 MB can be mapped, but not be copied, too
    session(path, entries={"quantmoe.prefault": "copy"})
else:
    s = session(path)
    limit(8 << 20)
    run(s, *tokens)
"""


def child(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True, text=True, env=os.environ | MALLOC | {"PYTHONPATH": PYTHONPATH},
    )  # fmt: skip


@pytest.mark.parametrize("what", ["workspace", "copy"])
def test_no_memory(tmp_path: Path, what: str) -> None:
    packed = projection("int4", 128, "bf16", "none")
    spec = moe_spec(8, 64, 65536, packed, packed)
    words = [cpu_panel.row_bytes(spec, p) // 4 for p in ("w13", "w2")]
    path = write_model(tmp_path / "m.onnx", spec, (8, words[0]), (8, words[1]))
    os.truncate(path.with_suffix(".bin"), 32 * sum(words) + 2 * 65536)
    done = child(CHILD, path, what)
    assert done.returncode == 1, done.stderr[-3000:]
    wanted = {"workspace": r"a workspace of (\d{8,}) bytes", "copy": rf"a copy of w13, ({32 * words[0]}) bytes"}[what]
    assert re.search(rf'QuantMoE node "{NODE}": no memory for {wanted}', done.stderr), done.stderr[-3000:]


LOOP = """
import os, re, resource, sys, threading
from pathlib import Path
import numpy as np
from engines.one_layer import run, session

def used():
    return int(re.search(r"VmSize:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

s = session(Path(sys.argv[1]))
tokens = np.zeros((4000, 256), np.float32), np.zeros((4000, 1), np.int64), np.ones((4000, 1), np.float32)
said = []

def work(spare):
    [bytearray(60000) for _ in range(16)]  # small pieces, free again
    limit = used() + spare
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    try:
        run(s, *tokens)
        said.append("")
    except Exception as error:
        said.append(error)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

# In steps of 32 kB, each in a thread that has met no error before: the smallest pieces are asked for in few of them.
for spare in range(0, 64 << 20, 32 << 10):
    thread = threading.Thread(target=work, args=(spare,))
    thread.start()
    thread.join()
    if said[-1] == "":  # more is enough, too
        break
for each in said:
    print(type(each).__name__, str(each).replace("\\n", " "), flush=True)
os._exit(0)  # ONNX Runtime's pool, some of whose allocations failed, may wait for itself at exit
"""


def test_no_memory_at_any_point(tmp_path: Path) -> None:
    """4,000 tokens with ever more memory: until it is enough, each run ends in an exception, ours where it is ours."""
    packed = projection("int4", 128, "bf16", "none")
    spec = moe_spec(8, 256, 256, packed, packed)
    words = [cpu_panel.row_bytes(spec, p) // 4 for p in ("w13", "w2")]
    path = write_model(tmp_path / "m.onnx", spec, (8, words[0]), (8, words[1]))
    os.truncate(path.with_suffix(".bin"), 32 * sum(words) + 2 * 65536)
    done = child(LOOP, path)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    assert lines[-1] == "str "  # the most is enough
    assert any("no memory for a workspace of" in line for line in lines)
    # What ONNX Runtime says where its own tensors find no room, and Python where a result finds none.
    assert all(re.search("^str $|no memory|allocat|MemoryError", line) for line in lines), lines
