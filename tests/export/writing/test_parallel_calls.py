"""Threads and memory of an export, on machines with more CPUs than this one."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import ml_dtypes
import numpy as np
import pytest
from support.models.checkpoints import write_checkpoint
from support.models.encoders import CASES, Case, random_matrix
from support.operators.specs import moe_spec

from quantmoe.custom_ops import native
from quantmoe.custom_ops.expert import Expert
from quantmoe.custom_ops.layouts import LAYOUTS
from quantmoe.exporter import parallel_calls
from quantmoe.exporter.choosing.choose import scaled
from quantmoe.exporter.graph.model import Skeleton
from quantmoe.exporter.reading.checkpoint import CheckpointError
from quantmoe.exporter.reading.formats import Format, find_format, open_checkpoint
from quantmoe.exporter.reading.weights.base import FLOAT_KINDS, unrounded
from quantmoe.exporter.reading.weights.rounding import PIECE
from quantmoe.exporter.reading.weights.unquantized import KINDS, Unquantized
from quantmoe.exporter.writing.convert import export
from quantmoe.exporter.writing.plan import BASE_MEMORY, dequantizing, plan

N = 512
ROLES = ("gate_proj", "up_proj", "down_proj")


@pytest.fixture
def cpus(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """cpus(256): as many CPUs."""
    return lambda count: monkeypatch.setattr(native, "cpus", lambda: count)


@pytest.mark.parametrize("size", [10**5, 10**7, 359 * 10**6, 10**9, 5 * 10**9])
@pytest.mark.parametrize("count", [1, 8, 10**4])
def test_memory_whatever_the_number_of_cpus(cpus: Callable[[int], None], size: int, count: int) -> None:
    """359 MB: an expert of Mixtral."""
    cpus(256)
    found = parallel_calls.in_flight(size, count)
    assert 1 <= found <= min(256, count)
    assert parallel_calls.memory(size, count) == (found + 1) * size
    assert found == 1 or parallel_calls.memory(size, count) <= 2 * 10**9
    assert found in (256, count) or (found + 2) * size > 2 * 10**9  # no fewer than fit


@pytest.mark.parametrize(
    ("size", "count", "running", "threads"),
    [(1, 256, 24, 10), (parallel_calls.MEMORY // 5, 256, 4, 64), (1, 4, 4, 1), (parallel_calls.MEMORY, 4, 1, 4)],
)
def test_calls_in_flight(cpus: Callable[[int], None], size: int, count: int, running: int, threads: int) -> None:
    """24 calls: in order, as many at a time as there may be, and together as many threads as there are CPUs."""
    cpus(count)
    lock, alive, most, shares = threading.Lock(), 0, 0, set()

    def call(i: int) -> int:
        nonlocal alive, most
        with lock:
            alive += 1
            most = max(most, alive)
            shares.add(native.pack_threads())
        time.sleep(0.01)
        return i

    found = []
    for i in parallel_calls.ahead([lambda i=i: call(i) for i in range(24)], size):
        found.append(i)
        time.sleep(0.02)  # a slow disk
        with lock:
            alive -= 1
    assert found == list(range(24))
    assert shares == {threads}
    assert most <= running + 1  # the one that is written
    assert most >= running


def test_an_error_ends_the_threads(cpus: Callable[[int], None]) -> None:
    cpus(256)
    before = threading.active_count()
    with pytest.raises(ZeroDivisionError):
        list(parallel_calls.ahead([lambda i=i: 1 // (i % 3) for i in range(50)], 1))
    assert threading.active_count() == before


def peak(format: Format, layout: str, scales: str) -> tuple[int, int]:
    """Bytes that decoding and packing an expert took, and what is reckoned with."""

    def decode() -> Expert:
        def matrix(module: str) -> object:
            if format.is_quantized(module):
                return format.matrix(module)
            return unrounded(format.ckpt.tensor(f"{module}.weight"), None)

        return scaled(Expert(*map(matrix, ROLES)), scales)[0]

    spec = moe_spec(1, N, N, *LAYOUTS[layout].describe(decode(), "none"))
    native.library()
    tracemalloc.start()
    try:
        expert = decode()
        rows = [native.aligned(LAYOUTS[layout].row_bytes(spec, projection)) for projection in ("w13", "w2")]
        LAYOUTS[layout].pack(expert, spec, *rows)
        return tracemalloc.get_traced_memory()[1], parallel_calls.expert_size(spec)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_what_an_expert_takes(case: Case, tmp_path: Path) -> None:
    for group_size in {min(g for g in case.group_sizes if g > 0 or len(case.group_sizes) == 1), max(case.group_sizes)}:
        tensors = {}
        for role in ROLES:  # an act-order of its own each
            seed = ROLES.index(role) if case.perm else 0
            m = random_matrix(case, N, N, group_size, case.scales[0], bias=True, seed=seed)
            if case.kind.startswith("fp8"):
                m.codes[(m.codes & 0x7F) == 0x7F] = 0  # NaN, which is refused
            tensors |= {f"{role}.{name}": array for name, array in case.encode(m).items()}
        format = find_format(open_checkpoint(write_checkpoint(tmp_path, tensors, case.config(group_size))))
        found = {}
        for layout, scales in itertools.product(LAYOUTS, ("exact", "bf16")):
            with contextlib.suppress(ValueError):  # a layout that does not carry it
                found[layout, scales] = peak(format, layout, scales)
        assert found
        for taken, size in found.values():
            assert taken <= size - 50 * PIECE, (group_size, found)  # nothing is rounded here


@pytest.mark.parametrize("case", [case for case in CASES if case.kind not in FLOAT_KINDS.values()], ids=lambda c: c.id)
def test_what_a_matrix_that_stays_float_takes(case: Case, tmp_path: Path) -> None:
    for group_size in {min(case.group_sizes), max(case.group_sizes)}:
        m = random_matrix(case, N, N, group_size, case.scales[0], bias=False, seed=0)
        tensors = {f"up.{name}": array for name, array in case.encode(m).items()}
        format = find_format(open_checkpoint(write_checkpoint(tmp_path, tensors, case.config(group_size))))
        reckoned = dequantizing(format.outline().matrix("up"))
        tracemalloc.start()
        try:
            format.stored("up.weight")
            taken = tracemalloc.get_traced_memory()[1] / N**2
            assert 0.3 * reckoned / N**2 < taken <= reckoned / N**2
        finally:
            tracemalloc.stop()


def test_a_quantized_embedding_is_reckoned_with(checkpoint, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Alone it takes more than anything else of the export."""

    def refuse(*_: object, **__: object) -> None:
        raise ValueError("stays float")

    before = plan(checkpoint("qwen3_moe"), tmp_path / "model").memory
    monkeypatch.setattr("quantmoe.exporter.choosing.choose.linear_spec", refuse)
    monkeypatch.setattr("quantmoe.exporter.writing.plan.dequantizing", lambda m: 10**12)
    assert plan(checkpoint("qwen3_moe"), tmp_path / "model").memory == BASE_MEMORY + 10**12 > before


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
def test_what_a_block_takes(dtype: type, transposed: bool) -> None:
    """Of a weight outside the experts, 1024 columns of it: all of a block's rows are one piece."""
    rows = (
        np.ones((1024, parallel_calls.BLOCK // 4096), dtype).T
        if transposed
        else np.ones((parallel_calls.BLOCK // 4096, 1024), dtype)
    )
    for wanted in (np.float32, np.float16, ml_dtypes.bfloat16):
        tracemalloc.start()
        try:
            Skeleton._converted(Mock(), "weight", np.dtype(wanted), rows)
            assert tracemalloc.get_traced_memory()[1] <= parallel_calls.BLOCK_MEMORY
        finally:
            tracemalloc.stop()


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_what_float16_cannot_hold(dtype: type) -> None:
    rows = np.ones((3, 5), dtype)
    rows[1, 2] = 65504 if dtype == np.float32 else 65280
    assert (Skeleton._converted(Mock(), "weight", np.dtype(np.float16), rows) == rows).all()
    for value, message in ((1e6, "float16 cannot hold"), (np.inf, "not finite"), (np.nan, "not finite")):
        rows[1, 2] = value
        with pytest.raises(CheckpointError, match=message):
            Skeleton._converted(Mock(), "weight", np.dtype(np.float16), rows)


@pytest.mark.parametrize("kind", KINDS)
def test_what_rounding_takes(kind: str, tmp_path: Path) -> None:
    weight = np.random.default_rng(0).standard_normal((N, N)).astype(ml_dtypes.bfloat16)
    write_checkpoint(tmp_path, {f"{role}.weight": weight for role in ROLES}, {})
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    for layout in ("cpu_panel", "marlin")[: 1 if kind == "none" else 2]:
        taken, size = peak(Unquantized(open_checkpoint(tmp_path), kind), layout, "exact")
        assert taken <= size
    if kind != "none":
        weight[-1, -1] = np.nan
        write_checkpoint(tmp_path, {"up_proj.weight": weight}, {})
        (tmp_path / "config.json").write_text("{}", encoding="utf-8")
        with pytest.raises(CheckpointError, match="up_proj has values that are NaN or infinite"):
            Unquantized(open_checkpoint(tmp_path), kind).matrix("up_proj")


def test_export_on_256_cpus(checkpoint, cpus, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The same bytes, and no more memory than is said; the dry run says the same numbers."""
    folder = checkpoint("qwen3_moe", num_experts=64, hidden_size=256, moe_intermediate_size=256, num_hidden_layers=1)
    export(folder, tmp_path / "here")
    monkeypatch.setattr(parallel_calls, "MEMORY", 30 * 10**6)
    cpus(256)
    spec = next(iter(plan(folder, tmp_path / "out").layers.values()))[1]
    size = parallel_calls.expert_size(spec)
    assert parallel_calls.in_flight(size, spec.num_experts) == 30 * 10**6 // size - 1 < 10
    planned = plan(folder, tmp_path / "out")
    assert planned.rate.startswith("256 cores;")
    assert 5 * size < planned.memory - BASE_MEMORY < 500e6
    alive, most, lock, pack = 0, 0, threading.Lock(), LAYOUTS["cpu_panel"].pack

    def counted(*arguments: object) -> None:
        nonlocal alive, most
        with lock:
            alive += 1
            most = max(most, alive)
            assert alive * native.pack_threads() <= 256
        time.sleep(0.005)
        pack(*arguments)
        with lock:
            alive -= 1

    monkeypatch.setattr(LAYOUTS["cpu_panel"], "pack", counted)
    export(folder, tmp_path / "out")
    assert 2 <= most <= parallel_calls.in_flight(size, spec.num_experts)
    assert (tmp_path / "out/model.onnx.data").read_bytes() == (tmp_path / "here/model.onnx.data").read_bytes()
    cpus(3)
    assert plan(folder, tmp_path / "other").rate.startswith("3 cores;")
