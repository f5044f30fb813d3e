"""run.py without a GPU: a runner that answers with right logits, with one token's wrong, or ends."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

RUN = Path(__file__).with_name("run.py")
#: run.cc's protocol; logits are the file's, of which the seventh token's are negated where asked
RUNNER = """#!{python}
import sys
import numpy as np
if sys.argv[1] == "crash":
    sys.exit(3)
for line in sys.stdin:
    command, *words = line.split()
    if command == "run":
        tokens, rows, _, output, *steps = words
        kind = "padded-" if np.fromfile(tokens, np.int64).min() < 0 else ""
        logits = np.load("{folder}/" + kind + "logits.npy")[: int(rows)]
        if sys.argv[1] == "wrong":
            logits[:, 6:10] *= -1
        with open(output, "wb") as file:
            at = 0
            for step in steps:
                length = int(step.split("/")[2])
                bits = np.ascontiguousarray(logits[:, at : at + length]).view(np.uint32) >> 16
                file.write(bits.astype(np.uint16).tobytes())
                at += length
    print("ok", flush=True)
"""


@pytest.mark.parametrize(
    ("behaviour", "failed"), [("right", "0 failed"), ("wrong", "16 failed"), ("crash", "16 failed")]
)
def test_run(tmp_path, behaviour, failed):
    folder = tmp_path / "models" / "any-W4A16"
    (folder / "bf16").mkdir(parents=True)
    random = np.random.default_rng(0)
    for name, tokens in (("", random.integers(0, 9, (2, 20))), ("padded-", random.integers(0, 9, (2, 20)))):
        if name:
            tokens[1, :3] = -1
        np.save(folder / f"{name}tokens.npy", tokens)
        np.save(folder / f"{name}logits.npy", random.standard_normal((2, 20, 32), np.float32))
    (folder / "noise.json").write_text(
        json.dumps({"bf16": 0.01, "f16": 0.001, "files": ["model.onnx"], "in_place": True}), encoding="utf-8"
    )
    runner = tmp_path / "runner"
    runner.write_text(RUNNER.format(python=sys.executable, folder=folder), encoding="utf-8")
    runner.chmod(0o755)
    found = subprocess.run(
        [sys.executable, RUN, tmp_path / "models", runner, behaviour], capture_output=True, text=True, check=False
    )
    assert found.stdout.splitlines()[-1] == f"8 engines, 16 runs, {failed}", found.stdout + found.stderr
    assert found.returncode == (behaviour != "right")
