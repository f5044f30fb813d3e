"""The command as a stranger types it: what it says, on how many lines, and what it imports before it says so."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

#: the command, and then the names of the packages that it imported as the last line of stdout
COMMAND = """
import sys
from quantmoe.exporter.cli import main
try:
    main()
finally:
    sys.stdout.flush()
    print(*sorted({name.partition(".")[0] for name in sys.modules}))
"""


@dataclasses.dataclass
class Done:
    code: int
    out: str
    err: str
    imported: set[str]

    @property
    def line(self) -> str:
        """All that was printed: one line of stderr."""
        assert not self.out, self.out
        assert self.err.count("\n") == 1, self.err
        assert self.err.startswith("quantmoe"), self.err
        return self.err.rstrip("\n")


def quantmoe(*arguments: object, cwd: Path | None = None, **environment: str) -> Done:
    """The command in a process of its own, whose imports count."""
    command = [sys.executable, "-c", COMMAND, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=os.environ | environment)
    out, _, imported = done.stdout.rstrip("\n").rpartition("\n")
    return Done(done.returncode, out, done.stderr, set(imported.split()))


@pytest.mark.parametrize("arguments", ["--version", "--help", "export --help", "inspect --help", "generate --help"])
def test_what_needs_no_model_imports_nothing_large(arguments: str) -> None:
    done = quantmoe(*arguments.split())
    assert (done.code, done.err) == (0, "")
    assert done.out
    assert not done.imported & {"numpy", "onnx_ir", "torch", "transformers", "onnxruntime"}
