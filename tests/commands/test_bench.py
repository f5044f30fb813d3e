"""quantmoe bench layer on tiny layers: what it writes and that both sides compute the same; nothing about time."""

import contextlib
import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from quantmoe.benchmarks import bench
from quantmoe.benchmarks.bench import Cycle, LayerCell, Side, difference, route
from quantmoe.benchmarks.bench_layer import BITS, FORMATS, Layer
from quantmoe.benchmarks.ggml_layer import Ggml
from quantmoe.benchmarks.layer_sizes import Shape
from quantmoe.exporter.command_arguments import steps

KEYS = ["shape", "weight_format", "group_size", "tokens", "threads", "ms", "gbps", "gops", "peer", "peer_ms"]
KEYS += ["read_gbps", "vnni_gops", "floor_ms", "target_ms"]
TINY = Shape(128, 256, 8, 2)


def run(*arguments: str) -> str:
    """In a process of its own: ONNX Runtime's global pool is made once in a process, before any session."""
    command = [sys.executable, "-m", "quantmoe.exporter.cli", "bench", "layer", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_cells(tmp_path: Path) -> None:
    # group 96 does not divide 128: no peer there
    files = ["--output", str(tmp_path / "cells.json"), "--plot", str(tmp_path / "cells.png")]
    options = "--shape 128/256/8/2 --group-size 32 --group-size 96 --tokens 1 --tokens 5 --against ort-qmoe"
    out = run(*options.split(), "--repeat", "2", "--threads", "2", *files)
    cells = json.loads((tmp_path / "cells.json").read_text(encoding="utf-8"))
    assert [(c["weight_format"], c["group_size"], c["tokens"]) for c in cells] == [
        (f, g, n) for f in ("int4", "int8") for g in (32, 96) for n in (1, 5)
    ]
    for c in cells:
        assert list(c) == KEYS
        assert (c["shape"], c["threads"]) == ("128/256/8/2", 2)
        assert c["peer"] == ("ort-qmoe" if c["group_size"] == 32 else None)
        assert (c["peer_ms"] is None) == (c["peer"] is None)
        assert 0 < c["floor_ms"] < c["target_ms"]
        assert c["ms"] > 0
        assert c["gops"] * c["ms"] == pytest.approx(2e-6 * 3 * 128 * 256 * 2 * c["tokens"])
    assert "block_size must divide" in " ".join(out.split())
    assert (tmp_path / "cells.png").read_bytes().startswith(b"\x89PNG")


def test_packing() -> None:
    out = run("--packing", "--shape", "128/256/8/2", "--format", "int4", "--group-size", "32")
    assert "cpu_panel" in out
    assert "marlin" in out


def test_session() -> None:
    out = run("--session", "--shape", "128/256/8/2", "--group-size", "32", "--against", "ort-qmoe")
    assert "ours" in out
    assert "ort-qmoe" in out


@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_runs(tmp_path: Path, kind: str) -> None:
    layer = Layer.random(TINY, kind, 16)
    ids, x = route(TINY, 5, False, 0), np.random.default_rng(0).normal(0, 1, (5, TINY.hidden)).astype(np.float32)
    call, output = Side(layer.write(tmp_path), TINY.experts, threads=1).bind(x, ids, np.ones(ids.shape, np.float32))
    call()
    assert 0.01 < np.std(output()) < 100  # unit variance in, near it out
    with pytest.raises(ValueError, match="QMoE") if kind not in BITS else contextlib.nullcontext():
        layer.write_qmoe(tmp_path)


@pytest.mark.parametrize("kind", ["int4", "int8"])
@pytest.mark.parametrize("activation", ["silu", "swiglu_oai"])
def test_ggml_agrees(tmp_path: Path, kind: str, activation: str) -> None:
    shape = dataclasses.replace(TINY, activation=activation)
    layer, rng = Layer.random(shape, kind, 32), np.random.default_rng(0)
    try:
        ggml = Ggml(shape, kind, 32, layer.experts, 2)
    except OSError as error:
        pytest.skip(str(error))
    ours = Side(layer.write(tmp_path), TINY.experts, threads=1)
    for tokens in (1, 9):
        ids, x = route(shape, tokens, False, 0), rng.normal(0, 1, (tokens, shape.hidden)).astype(np.float32)
        weights = rng.uniform(0.1, 1, ids.shape).astype(np.float32)
        outputs = []
        for side in (ours, ggml):
            call, output = side.bind(x, ids, weights)
            call()
            outputs.append(output())
        assert difference(*outputs) < 0.05  # int8 activations, a step a token against one a block


@pytest.mark.parametrize("kind", ["int4", "int8"])
@pytest.mark.parametrize("group_size", [32, 128, -1])
@pytest.mark.parametrize("activation", ["silu", "swiglu_oai"])
def test_sides_agree(tmp_path: Path, kind: str, group_size: int, activation: str) -> None:
    shape = dataclasses.replace(TINY, activation=activation)
    layer = Layer.random(shape, kind, group_size)
    rng = np.random.default_rng(0)
    ids = route(shape, 9, False, 0)
    x, weights = (
        rng.normal(0, 1, (9, shape.hidden)).astype(np.float32),
        rng.uniform(0.1, 1, ids.shape).astype(np.float32),
    )
    outputs = []
    for path in (layer.write(tmp_path), layer.write_qmoe(tmp_path)):
        call, output = Side(path, shape.experts, threads=1).bind(x, ids, weights)
        call()
        outputs.append(output())
    # activations (x, then h) are rounded to 1/255 of a row's range or 1/127 of a block's: about 1 % a side
    assert difference(*outputs) < 0.04


def test_touched_bytes_are_the_packed_tensors(tmp_path: Path) -> None:
    layer = Layer.random(TINY, "int4", 32)
    packed = 3 * 128 * 256 * (4 + 16 / 32) / 8  # codes and bf16 scales
    tails = 8 * (2 * 256 + 128)  # row sums and biases
    assert layer.expert_bytes == packed + tails
    assert layer.write(tmp_path).with_suffix(".bin").stat().st_size >= TINY.experts * layer.expert_bytes


def test_routing() -> None:
    shape = Shape(1, 1, 32, 4)
    uniform, skewed = (route(shape, 4000, skew, 0) for skew in (False, True))
    for ids in (uniform, skewed):
        assert all(len(set(row)) == 4 for row in ids)
    first = {name: (ids == 0).any(1).mean() for name, ids in (("uniform", uniform), ("skewed", skewed))}
    assert first["uniform"] == pytest.approx(4 / 32, abs=0.03)  # 5 standard deviations
    assert first["skewed"] > 0.5
    assert np.array_equal(uniform, route(shape, 4000, False, 0))


def test_cycle_keeps_the_distribution_and_touches_everything_before_again() -> None:
    cycle, ids = Cycle(32, 0), route(Shape(1, 1, 32, 4), 2, True, 3)
    touched = len(np.unique(ids))
    seen: list[int] = []
    for _ in range(5):
        named = cycle.rename(ids)
        assert sorted(np.unique(named, return_counts=True)[1]) == sorted(np.unique(ids, return_counts=True)[1])
        assert [len(set(row)) for row in named] == [4, 4]
        seen += np.unique(named).tolist()
    whole = 32 // touched * touched
    assert len(set(seen[:whole])) == min(whole, len(seen))


def test_target_and_floor() -> None:
    timing = bench.Timing(
        shape="s",
        weight_format="int4",
        group_size=32,
        tokens=1,
        touched_bytes=10**9,
        operations=10**12,
        ms=1.0,
        peers={},
    )
    (memory,) = timing.cells(2, read=10e9, peak=1e15)
    assert (memory.floor_ms, memory.target_ms) == (pytest.approx(100), pytest.approx(100 / 0.85))
    assert (memory.peer, memory.peer_ms) == (None, None)
    (compute,) = timing.cells(2, read=1e15, peak=1e12)
    assert (compute.floor_ms, compute.target_ms) == (pytest.approx(1000), pytest.approx(1000 / 0.45))
    both = dataclasses.replace(timing, peers={"a": 2.0, "b": 3.0}).cells(2, read=10e9, peak=1e15)
    assert [(c.peer, c.peer_ms, c.ms) for c in both] == [("a", 2.0, 1.0), ("b", 3.0, 1.0)]
    assert [bench.peak_share(*c) for c in (("int4", 32), ("int4", 128), ("int8", 32))] == [0.45, 0.60, 0.55]
    assert [f.name for f in dataclasses.fields(LayerCell)] == KEYS


def test_ranges_of_tokens() -> None:
    assert [steps(text) for text in ("5", "1..8", "5..40", "7..7", "3..1")] == [
        [5],
        [1, 2, 3, 4, 6, 8],
        [5, 6, 8, 12, 16, 24, 32, 40],
        [7],
        [],
    ]


def test_the_worst_cell() -> None:
    cell = LayerCell(
        shape="a",
        weight_format="int4",
        group_size=32,
        tokens=4,
        threads=1,
        ms=1.0,
        gbps=1.0,
        gops=1.0,
        peer=None,
        peer_ms=None,
        read_gbps=1.0,
        vnni_gops=1.0,
        floor_ms=0.5,
        target_ms=0.6,
    )
    slow = dataclasses.replace(cell, ms=2.0, tokens=8)
    assert bench.worst([slow, cell]) == "worst: 25% of the floor, a int4 group 32, 8 tokens"
    beside = [dataclasses.replace(c, peer="p", peer_ms=ms) for c, ms in ((slow, 3.0), (cell, 1.25))]
    assert bench.worst([*beside, slow]) == "worst: 1.25x p, a int4 group 32, 4 tokens"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--shape mixtrl", "expected one of qwen3-30b-a3b"),
        ("--shape 64/64/8", "64/64/8; 3 sizes, H/I/E/k are 4; expected one of"),
        ("--shape 64/64/8/9", "64/64/8/9; k is 9, E 8; expected one of"),
        ("--format int3", "expected int4 or int8"),
        ("--tokens 8..1", "expected ranges that end where they begin or later"),
        ("--tokens 1..x", "expected numbers separated by commas, or ranges as 1..8"),
        ("--tokens 0..4", "greater than or equal to 1"),
        ("--group-size 48", "a multiple of 32"),
        ("--against mlas", "expected ort-qmoe"),
        ("--repeat 0", "greater than or equal to 1"),
        ("--tokens 0", "greater than or equal to 1"),
        ("--threads -1", "greater than or equal to 0"),
        ("--output /nowhere/cells.json", "no such folder"),
        ("--plot cells.doc", "expected .png"),
        ("--session --output cells.json", "has no cells to write"),
    ],
)
def test_bad_options(arguments: str, message: str) -> None:
    app = typer.Typer()
    app.command()(bench.bench)
    result = CliRunner().invoke(app, arguments.split())
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())
