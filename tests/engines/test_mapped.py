"""What a session's weights take of memory: pages read in at load when asked for, and shared between processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.harness.children import PYTHONPATH
from support.models.one_layer import session, write_model
from support.operators.specs import moe_spec, projection

from quantmoe.custom_ops.layouts import cpu_panel

pytestmark = pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux")

CHILD = """
import sys
from pathlib import Path
from support.models.one_layer import session
s = session(Path(sys.argv[1]), entries={"quantmoe.prefault": v for v in sys.argv[2:]})
print("ready", flush=True)
sys.stdin.read()
"""

TRUNCATED = """
import os, sys
from pathlib import Path
import numpy as np
from support.models.one_layer import run, session
model = Path(sys.argv[1])
s = session(model, entries={"quantmoe.prefault": v for v in sys.argv[2:]})
rng = np.random.default_rng(1)
tokens = (rng.standard_normal((40, 1024), np.float32), rng.integers(0, 16, (40, 2)), np.ones((40, 2), np.float32))
before = run(s, *tokens)
os.truncate(model.with_suffix(".bin"), 0)
np.testing.assert_array_equal(run(s, *tokens), before)
assert before.any()
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """17 MB of weights."""
    packed = projection("int4", 128, "bf16", "int8_token_asym")
    spec = moe_spec(16, 1024, 512, packed, packed)
    rows = [cpu_panel.row_bytes(spec, p) // 4 for p in ("w13", "w2")]
    path = write_model(tmp_path / "m.onnx", spec, (16, rows[0]), (16, rows[1]))
    with path.with_suffix(".bin").open("r+b") as file:
        file.write(np.random.default_rng(0).bytes(64 * sum(rows) + 65536))
    return path


def environment(prefault: str = "") -> dict[str, str]:
    return os.environ | {"PYTHONPATH": PYTHONPATH, "QUANTMOE_PREFAULT": prefault}


def start(model: Path, prefault: str = "") -> subprocess.Popen[str]:
    """A process with a session, whose weights the environment or a session entry wants in memory."""
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(model), *(["1"] if prefault == "entry" else [])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment(str(int(prefault == "environment"))),
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    return child


def mapping(child: subprocess.Popen[str], file: Path) -> dict[str, int]:
    """Bytes by field of /proc/<pid>/smaps, summed over the process's mappings of the file."""
    found: dict[str, int] = {}
    mine = False
    for line in Path(f"/proc/{child.pid}/smaps").read_text(encoding="utf-8").splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            mine = line.endswith(str(file))
        elif mine and (match := re.match(r"(\w+):\s+(\d+) kB", line)):
            found[match[1]] = found.get(match[1], 0) + int(match[2]) * 1024
    return found


def test_prefault_and_sharing(model: Path) -> None:
    """A session maps without reading; one that prefaults reads all; a second process adds no pages of its own."""
    data = model.with_suffix(".bin")
    size = data.stat().st_size
    children = []
    try:
        children.append(start(model))
        assert mapping(children[0], data)["Rss"] < 0.2 * size
        children.append(start(model, "entry"))
        alone = mapping(children[1], data)
        assert alone["Rss"] > 0.99 * (size - 2 * 65536)
        children.append(start(model, "environment"))
        for child in children[1:]:
            both = mapping(child, data)
            assert both["Rss"] > 0.99 * (size - 2 * 65536)
            assert both["Pss"] < 0.55 * both["Rss"]  # each page counts half
            assert both.get("Anonymous", 0) == both.get("Private_Dirty", 0) == 0
    finally:
        for child in children:
            child.communicate("")


@pytest.mark.parametrize(("entry", "variable"), [("copy", ""), ("", "copy"), ("1", ""), ("", "")])
def test_a_file_truncated_in_place(model: Path, entry: str, variable: str) -> None:
    """Weights that were copied do not change; the system ends a process that reads mapped ones."""
    done = subprocess.run(
        [sys.executable, "-c", TRUNCATED, str(model), *filter(None, [entry])],
        capture_output=True, text=True, env=environment(variable),
    )  # fmt: skip
    assert done.returncode == (0 if "copy" in (entry, variable) else -signal.SIGBUS), done.stderr[-3000:]


def test_a_prefault_that_is_none_of_them(model: Path) -> None:
    with pytest.raises(Exception, match=r'quantmoe\.prefault \(or QUANTMOE_PREFAULT\) is "yes", expected 0, 1 or copy'):
        session(model, entries={"quantmoe.prefault": "yes"})
