"""Ranks in ONNX Runtime's CUDA provider, where there are two GPUs: sums, sliced models, a rank that is killed."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from benchmarks.cuda.parallel_cuda import run
from engines.test_reduce import write
from support.cuda.built import torch
from support.harness.children import PYTHONPATH, TESTS

from quantmoe import ort_cuda_library_path
from quantmoe.custom_ops.op import DOMAIN, NormSpec, ReduceNormSpec
from quantmoe.custom_ops.reference import add_norm, all_gather, all_reduce, reduce_scatter
from quantmoe.runtime.ranks import nccl_id, nccl_library

PROVIDER = "CUDAExecutionProvider"
pytestmark = [
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices"),
    pytest.mark.skipif(PROVIDER not in ort.get_available_providers(), reason="this onnxruntime has no CUDA provider"),
]
#: of a model of engines/test_reduce.py: x of all ranks -> y of a rank; z is the same of y
OPERATORS: dict[str, Callable[[list[np.ndarray], int], np.ndarray]] = {
    "AllReduce": lambda xs, rank: all_reduce(xs),
    "AllGather": lambda xs, rank: all_gather(xs, -1),
    "ReduceScatter": lambda xs, rank: reduce_scatter(xs)[rank],
}
#: rows of 8: what each rank is sent whole, and more
SIZES = (8, 400_000)
#: runs of a session, of which the later ones replay a CUDA graph
RUNS = 3
EPSILON = 2.0**-10
#: of tests/tensorrt/run.py, whose models these are
TOLERANCE = 3.0


def drawn(at: int, rank: int, rows: int) -> np.ndarray:
    """x of a run: small integers, whose sums 16 bits hold."""
    return np.random.default_rng([at, rank]).integers(-9, 9, (rows, 8)).astype(np.float32)


def wanted(op: str, at: int, rank: int, rows: int) -> list[np.ndarray]:
    """y and z."""
    found, xs = [], [drawn(at, other, rows) for other in range(2)]
    for _ in range(2):
        xs = [OPERATORS[op](xs, other) for other in range(2)]
        found.append(xs[rank])
    return found


def run_rank(folder: Path, rank: int, group: str, op: str, on: bool, rows: int) -> None:
    """What a rank's process does: writes y and z of each run; on: goes on with the last run until it fails."""
    ort.preload_dlls()
    options = ort.SessionOptions()
    options.add_session_config_entry("quantmoe.group", group)
    options.register_custom_ops_library(ort_cuda_library_path())
    providers = [(PROVIDER, {"enable_cuda_graph": "1"})]
    session = ort.InferenceSession(str(folder / f"{rank}.onnx"), options, providers=providers)
    binding = session.io_binding()
    x, *outputs = (
        ort.OrtValue.ortvalue_from_numpy(np.zeros_like(array), "cuda", 0)
        for array in (drawn(0, rank, rows), *wanted(op, 0, rank, rows))
    )
    binding.bind_ortvalue_input("x", x)
    for name, value in zip("yz", outputs, strict=True):
        binding.bind_ortvalue_output(name, value)
    for at in range(RUNS):
        x.update_inplace(drawn(at, rank, rows))
        session.run_with_iobinding(binding)
        for name, value in zip("yz", outputs, strict=True):
            np.save(folder / f"{at}.{rank}.{name}.npy", value.numpy())
    (folder / f"ran{rank}").touch()
    while on:
        session.run_with_iobinding(binding)


def start(folder: Path, op: str, rows: int, on: bool = False, more: int = 0) -> list[subprocess.Popen[str]]:
    """Both ranks; more: rows that the second one has besides."""
    os.environ.setdefault("QUANTMOE_NCCL", nccl_library())
    group = nccl_id(os.environ["QUANTMOE_NCCL"])
    options = {"cwd": TESTS, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    command = [sys.executable, "-m", "cuda.test_ranks_cuda", str(folder), group, op, str(int(on))]
    found = []
    for rank in range(2):
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": str(rank), "PYTHONPATH": PYTHONPATH}
        own = [*command, str(rows + rank * more), str(rank)]
        found.append(subprocess.Popen(own, env=environment, **options))
    return found


@pytest.mark.parametrize("float_type", ["FLOAT16", "BFLOAT16"])
@pytest.mark.parametrize("op", OPERATORS)
@pytest.mark.parametrize("rows", SIZES)
def test_collectives(tmp_path: Path, op: str, float_type: str, rows: int) -> None:
    for rank in range(2):
        write(tmp_path / f"{rank}.onnx", rank, 2, float_type, op=op)
    processes = start(tmp_path, op, rows)
    said = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    for at, rank in itertools.product(range(RUNS), range(2)):
        for name, want in zip("yz", wanted(op, at, rank, rows), strict=True):
            np.testing.assert_array_equal(np.load(tmp_path / f"{at}.{rank}.{name}.npy"), want)


def write_norms(path: Path, rank: int, float_type: str) -> None:
    """y: the norm of the ranks' sum of x; z: that of this sum plus the ranks' sum of y."""
    dtype, wide = ir.DataType[float_type], ir.TensorType(ir.DataType.FLOAT)
    x = ir.Value(name="x", type=wide, shape=ir.Shape(["rows", 8]))
    given = ir.node("Cast", [x], {"to": int(dtype)})
    zeros = ir.node("Sub", [given.outputs[0]] * 2)
    weight = ir.Value(name="w", type=ir.TensorType(dtype), shape=ir.Shape([8]))
    weight.const_value = ir.tensor(np.arange(1, 9).astype(dtype.numpy()), name="w")
    attributes = ReduceNormSpec(norm_epsilon=EPSILON, rank=rank, world=2, export_id=0).attributes()
    first, second = (
        ir.node("AllReduceAddRMSNorm", [None] * 3, attributes, domain=DOMAIN, num_outputs=2) for _ in range(2)
    )
    for node, inputs in ((first, (given.outputs[0], zeros.outputs[0])), (second, first.outputs)):
        for at, value in enumerate([*inputs, weight]):
            node.replace_input_with(at, value)
        for value in node.outputs:
            value.type = ir.TensorType(dtype)
    outputs = [ir.node("Cast", node.outputs[:1], {"to": int(ir.DataType.FLOAT)}) for node in (first, second)]
    for node, name in zip(outputs, "yz", strict=True):
        node.outputs[0].name, node.outputs[0].type = name, wide
    graph = ir.Graph(
        [x], [node.outputs[0] for node in outputs], nodes=[given, zeros, first, second, *outputs],
        initializers=[weight], opset_imports={"": 20, DOMAIN: 1}, name="norms",
    )  # fmt: skip
    ir.save(ir.Model(graph, ir_version=10), path)


@pytest.mark.parametrize(("float_type", "unit"), [("FLOAT16", 2.0**-11), ("BFLOAT16", 2.0**-8)])
@pytest.mark.parametrize("rows", SIZES)
def test_norms_of_sums(tmp_path: Path, float_type: str, unit: float, rows: int) -> None:
    """y and z are rounded once; all ranks have the same bytes."""
    for rank in range(2):
        write_norms(tmp_path / f"{rank}.onnx", rank, float_type)
    processes = start(tmp_path, "AllReduce", rows)
    said = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    spec, weight = NormSpec(norm_epsilon=EPSILON), np.arange(1, 9)
    for at in range(RUNS):
        (y, z), other = ([np.load(tmp_path / f"{at}.{rank}.{name}.npy") for name in "yz"] for rank in range(2))
        np.testing.assert_array_equal([y, z], other)
        total = all_reduce([drawn(at, rank, rows) for rank in range(2)])
        want, _ = add_norm(spec, total, np.zeros_like(total), weight)
        np.testing.assert_allclose(y, want, rtol=unit + 2.0**-20)
        dtype = ir.DataType[float_type].numpy()
        want, _ = add_norm(spec, (y + y).astype(dtype), total.astype(dtype), weight)
        np.testing.assert_allclose(z, want, rtol=unit + 2.0**-20)


@pytest.mark.parametrize("rows", SIZES)
def test_ranks_whose_shapes_differ(tmp_path: Path, rows: int) -> None:
    for rank in range(2):
        write(tmp_path / f"{rank}.onnx", rank, 2, "FLOAT16")
    processes = start(tmp_path, "AllReduce", rows, more=1)
    said = [process.communicate(timeout=60)[0] for process in processes]
    for rank, (process, text) in enumerate(zip(processes, said, strict=True)):
        assert process.returncode != 0
        other = 1 - rank
        shapes = [f'AllReduce node "sum.0" x [{count}, 8]' for count in (rows, rows + 1)]
        assert f"rank {other} is at {shapes[other]}, rank {rank} at {shapes[rank]}: expected files" in text


@pytest.mark.parametrize("rows", SIZES)
def test_a_rank_that_is_killed_while_a_graph_waits_for_it(tmp_path: Path, rows: int) -> None:
    """The larger sums have all of the GPU, and nothing else begins there."""
    for rank in range(2):
        write(tmp_path / f"{rank}.onnx", rank, 2, "FLOAT16")
    processes = start(tmp_path, "AllReduce", rows, on=True)
    while not all((tmp_path / f"ran{rank}").exists() for rank in range(2)):
        assert all(process.poll() is None for process in processes)
        time.sleep(0.01)
    processes[1].send_signal(signal.SIGKILL)
    said = processes[0].communicate(timeout=30)[0]
    assert processes[0].returncode != 0
    assert "rank 1 is gone" in said


@pytest.mark.parametrize("name", ["qwen3_moe+tp2-W4A16", "deepseek_v3+ep2-W4A16", "gpt_oss+tp2-MXFP4A16"])
def test_slices(tmp_path: Path, name: str) -> None:
    """f16 beside PyTorch in float32: within TOLERANCE of what PyTorch itself is off in f16."""
    command = [sys.executable, TESTS / "tensorrt" / "prepare.py", tmp_path, name]
    subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": PYTHONPATH})
    noise = json.loads((tmp_path / name / "noise.json").read_text(encoding="utf-8"))["f16"]
    ids, logits = (np.load(tmp_path / name / f"{what}.npy")[0] for what in ("tokens", "logits"))
    folders = [tmp_path / name / "f16" / f"rank{rank}" for rank in range(2)]
    os.environ.setdefault("QUANTMOE_NCCL", nccl_library())
    found = run(folders, nccl_id(os.environ["QUANTMOE_NCCL"]), ids[:12].tolist(), ids[12:].tolist())
    want = logits[11:-1]  # after the prompt, and after each token but the last
    for _, _, own, *_ in found:
        np.testing.assert_array_equal(own, found[0][2])  # every rank has the same
        assert (np.linalg.norm(own - want, axis=-1) / np.linalg.norm(want, axis=-1)).max() < TOLERANCE * noise


if __name__ == "__main__":
    folder, group, op, on, rows, rank = sys.argv[1:]
    run_rank(Path(folder), int(rank), group, op, on == "1", int(rows))
