"""A machine that is short of memory: an exception that says for what, never the end of the process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from engines.one_layer import NODE, write_model
from specs import moe_spec, projection

from quantmoe.custom_ops.layouts import cpu_panel

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")

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


@pytest.mark.parametrize("what", ["workspace", "copy"])
def test_no_memory(tmp_path: Path, what: str) -> None:
    packed = projection("int4", 128, "bf16", "none")
    spec = moe_spec(8, 64, 65536, packed, packed)
    words = [cpu_panel.row_bytes(spec, p) // 4 for p in ("w13", "w2")]
    path = write_model(tmp_path / "m.onnx", spec, (8, words[0]), (8, words[1]))
    os.truncate(path.with_suffix(".bin"), 32 * sum(words) + 2 * 65536)
    paths = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(path), what],
        capture_output=True, text=True, env=os.environ | {"PYTHONPATH": paths},
    )  # fmt: skip
    assert done.returncode == 1, done.stderr[-3000:]
    wanted = {"workspace": r"a workspace of (\d{8,}) bytes", "copy": rf"a copy of w13, ({32 * words[0]}) bytes"}[what]
    assert re.search(rf'QuantMoE node "{NODE}": no memory for {wanted}', done.stderr), done.stderr[-3000:]
