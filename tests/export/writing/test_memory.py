"""Too little memory is one line that says what for, exit code 1, and nothing half-written."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from support.harness.sweeps import every
from transformers.exporters import exporter_onnx

from quantmoe.benchmarks import bench
from quantmoe.benchmarks.bench_engines import Process
from quantmoe.custom_ops.layouts import LAYOUTS
from quantmoe.exporter import cli
from quantmoe.exporter.errors import ModelError
from quantmoe.exporter.graph.model import Skeleton
from quantmoe.exporter.memory import naming
from quantmoe.exporter.writing import graph_writer
from quantmoe.exporter.writing.convert import export

#: bytes of files that do not fit, and of what a process may take more than it has
LARGE, ROOM = 8 << 30, 4 << 30


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return what runs the command in this process, as importing torch anew takes seconds, and gives its one line."""

    def run(*arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", ["quantmoe", *map(str, arguments)])
        handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
        with pytest.raises(SystemExit) as done:
            cli.main()
        for number, handler in handlers.items():
            signal.signal(number, handler)
        assert isinstance(done.value.code, str), done.value.code  # Python prints it and exits with 1
        assert "\n" not in done.value.code
        assert "Traceback" not in capsys.readouterr().err
        return done.value.code

    return run


def limited(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run the command in a process that can take ROOM bytes more than it has once everything is imported."""
    code = (
        "import re, resource, sys\n"
        "from pathlib import Path\n"
        f"import quantmoe.exporter.{'writing.convert' if arguments[0] == 'export' else 'inspecting.unpack'}\n"
        "from quantmoe.exporter.cli import main\n"
        "size = int(re.search(r'VmSize:\\s+(\\d+) kB', Path('/proc/self/status').read_text())[1]) * 1024\n"
        f"resource.setrlimit(resource.RLIMIT_AS, (size + {ROOM}, size + {ROOM}))\n"
        "main()"
    )
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.parametrize("command", [("inspect",), ("unpack", "--layer", "0", "--output")])
def test_weights_that_cannot_be_mapped(exported, tmp_path, command):
    folder = shutil.copytree(exported("qwen3_moe", activations="float"), tmp_path / "model")
    os.truncate(folder / "model.onnx.data", LARGE)
    output = [tmp_path / "layer.safetensors"] if len(command) > 1 else []
    done = limited(command[0], folder, *command[1:], *output)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"quantmoe: {folder / 'model.onnx.data'}: out of memory")
    assert done.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def lacking(*_: object, **__: object) -> None:
    raise MemoryError


def torch_lacking(*_: object, **__: object) -> None:
    """Fail in the words of torch's CPU allocator, wrapped as torch.onnx wraps what stops it."""
    try:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory")
    except RuntimeError as error:
        raise RuntimeError("Failed to export the model") from error


@pytest.mark.parametrize(
    ("owner", "name", "raises", "what"),
    every(
        [
            (LAYOUTS["cpu_panel"], "pack", lacking, "model.layers.0.mlp.experts.0: out of memory"),
            (LAYOUTS["cpu_panel"], "pack_down", lacking, "model.layers.0.self_attn.o_proj: out of memory"),
            (Skeleton, "_converted", lacking, "model.embed_tokens.weight: out of memory"),
            (exporter_onnx.OnnxExporter, "export", torch_lacking, "tracing Qwen3MoeForCausalLM: out of memory"),
            (graph_writer.ir, "save", lacking, "model.onnx: out of memory"),
            (graph_writer, "place_weights", lacking, "out of memory"),
        ],
        2,
    ),
)
def test_export_names_what_did_not_fit(refused, checkpoint, tmp_path, monkeypatch, owner, name, raises, what):
    monkeypatch.setattr(owner, name, raises)
    line = refused("export", checkpoint("qwen3_moe"), tmp_path / "out", "--layers", 1)
    assert str(checkpoint("qwen3_moe")) in line or str(tmp_path / "out") in line
    assert what in line
    assert not (tmp_path / "out").exists()


def test_unpack_and_generate_name_what_did_not_fit(refused, exported, tmp_path, monkeypatch):
    folder = exported("qwen3_moe", activations="float")
    with monkeypatch.context() as patch:
        patch.setattr(LAYOUTS["cpu_panel"], "unpack", lacking)
        line = refused("unpack", folder, "--layer", 1, "--output", tmp_path / "layer.safetensors")
    assert line == f"quantmoe: {folder / 'model.onnx'}: model.layers.1.mlp.experts: out of memory"
    assert not list(tmp_path.iterdir())

    import onnxruntime

    with monkeypatch.context() as patch:
        patch.setattr(onnxruntime, "InferenceSession", lacking)
        assert refused("generate", folder, "--ids", 1) == f"quantmoe: {folder / 'model.onnx'}: out of memory"
    with monkeypatch.context() as patch:
        for run in ("run", "run_with_iobinding"):
            patch.setattr(onnxruntime.InferenceSession, run, lacking)
        line = refused("generate", folder, "--ids", "1,2,3")
    assert line == f"quantmoe: {folder / 'model.onnx'}: 3 tokens after 0: out of memory"


def test_words_where_the_error_has_none(refused, exported, monkeypatch):
    monkeypatch.setattr(cli, "app", lacking)
    folder = exported("qwen3_moe", activations="float")
    assert refused("inspect", folder) == f"quantmoe: inspect {folder}: out of memory"


def test_other_errors_stay_what_they_are(refused, checkpoint, tmp_path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(LAYOUTS["cpu_panel"], "pack", full)
    assert "the disk is full" in refused("export", checkpoint("qwen3_moe"), tmp_path / "out", "--layers", 1)


def test_a_disk_without_room_is_named_before_the_packing(refused, checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    monkeypatch.setattr(LAYOUTS["cpu_panel"], "pack", lambda *_: pytest.fail("packed"))
    line = refused("export", checkpoint("qwen3_moe"), out := tmp_path / "out", "--layers", 1)
    assert re.search(rf"{out}: [0-9]{{5,}} bytes are to be written, 1000 bytes of the disk are free; make room", line)
    assert not out.exists()


def test_the_room_asked_for_is_more_than_what_is_written(checkpoint, tmp_path, monkeypatch):
    """The library and copied files too: a disk that has it never fills up."""
    asked = []
    monkeypatch.setattr("quantmoe.exporter.writing.convert.check_space", lambda _, needed: asked.append(needed))
    export(checkpoint("qwen3_moe"), tmp_path / "out", layers=1)
    written = sum(path.stat().st_size for path in (tmp_path / "out").iterdir() if path.name != "model.onnx")
    assert written <= asked[0] <= 2 * written + (8 << 20)


def test_a_copy_that_fills_the_disk_is_named(checkpoint, tmp_path, monkeypatch):
    def full(source: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(source), None, str(target))

    monkeypatch.setattr("quantmoe.exporter.writing.convert.shutil.copyfile", full)
    with pytest.raises(OSError, match=r"out/.*: the disk is full, \d+ bytes are free; make room"):
        export(checkpoint("qwen3_moe"), tmp_path / "out", layers=1)


def test_a_disk_that_fills_up_is_named(tmp_path):
    for path in (Path("/a"), tmp_path):
        expected = rf"^{path}: the disk is full, \d+ bytes are free; make room or write to another disk$"
        with pytest.raises(OSError, match=expected), naming(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_other_errors_of_writing_name_the_file(tmp_path):
    """A folder names no other error: it may come from a file elsewhere, such as a checkpoint that cannot be read."""
    file = str(tmp_path / "a")
    for path, stated, named in ((file, None, file), (file, "/b", "/b"), (tmp_path, None, None)):
        with pytest.raises(OSError) as raised, naming(Path(path)):  # noqa: PT011  its file is looked at
            raise OSError(errno.EIO, os.strerror(errno.EIO), stated)
        assert raised.value.filename == named


def killed(*_: object) -> None:
    """End this process as the system does when memory runs out."""
    os.kill(os.getpid(), signal.SIGKILL)


def aborted(*_: object) -> None:
    """End this process as a failed assertion of a library does."""
    os.kill(os.getpid(), signal.SIGABRT)


def left(*_: object) -> None:
    os._exit(3)


def refusing(*_: object) -> None:
    raise ModelError("a reason of its own")


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (killed, "layer.onnx: its process was ended by SIGKILL (out of memory?)"),
        (aborted, "layer.onnx: its process was ended by SIGABRT"),
        (left, "layer.onnx: its process ended with exit status 3"),
        (refusing, "a reason of its own"),
    ],
)
def test_a_child_that_fails_says_why(monkeypatch, how, said):
    """Only one that the system killed may have lacked memory."""
    monkeypatch.setattr(bench, "_session_cost", how)
    with pytest.raises(ModelError) as raised:
        bench.session_cost(Path("layer.onnx"), bench.Shape(*np.full(4, 1)), 1)
    assert str(raised.value) == said


@pytest.mark.parametrize("how", [aborted, left])
def test_a_side_that_fails_says_why(how):
    with pytest.raises(ModelError, match=r"^ours: its process (was ended by SIGABRT|ended with exit status 3)$"):
        Process("ours", how)
