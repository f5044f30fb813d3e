"""AllReduce of a sliced model's file in ONNX Runtime beside torch.distributed's, which is NCCL's, both in CUDA graphs.

    torchrun --nproc-per-node 2 tests/benchmarks/all_reduce.py [--columns 7168] [--rows 1,8,64,512,4096]
    torchrun --nproc-per-node 2 tests/benchmarks/all_reduce.py --op AllGather --columns 37984 --rows 1,8,64
    torchrun --nproc-per-node 2 tests/benchmarks/all_reduce.py --op ReduceScatter --rows 8,64,512,4096

Needs onnxruntime-gpu, PyTorch with CUDA, and this checkout's CUDA library (QUANTMOE_ORT_CUDA_LIBRARY). A graph has 50
calls of bf16 [rows, columns]; replays of both take turns, and times are of one call, medians of 30. An AllGather is of
the last axis here, and of the first in torch, where nothing is brought into another order. Rows of a ReduceScatter are
those of all ranks.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime as ort
import torch
import torch.distributed as dist
from onnx import TensorProto, helper, save

from quantmoe.ort_ext import cuda_library_path

CHAIN = 50


def model(path: Path, op: str, rank: int, world: int) -> None:
    """x, summed over the ranks CHAIN times; or CHAIN times gathered, or scattered."""
    ends = [f"y.{i}" for i in range(CHAIN)]
    begins = ["x", *ends[:-1]] if op == "AllReduce" else ["x"] * CHAIN
    place: dict[str, Any] = {"domain": "quantmoe", "op_version": 1, "rank": rank, "world": world}
    place |= {"axis": -1} if op == "AllGather" else {}
    nodes = [helper.make_node(op, [x], [y], name=y, **place) for x, y in zip(begins, ends, strict=True)]
    values = {
        name: helper.make_tensor_value_info(name, TensorProto.BFLOAT16, [f"{name[0]}_rows", f"{name[0]}_columns"])
        for name in ("x", *ends)
    }
    outputs = [values[name] for name in ends if op != "AllReduce" or name == ends[-1]]
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("quantmoe", 1)]
    graph = helper.make_graph(nodes, "calls", [values["x"]], outputs)
    save(helper.make_model(graph, opset_imports=opsets, ir_version=10), str(path))


def session(path: Path, group: str) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.add_session_config_entry("quantmoe.group", group)
    options.register_custom_ops_library(cuda_library_path())
    device = torch.cuda.current_device()
    cuda = {"device_id": device, "enable_cuda_graph": 1}
    return ort.InferenceSession(str(path), options, providers=[("CUDAExecutionProvider", cuda)])


def tensors(op: str, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x and y: zeros."""
    world = dist.get_world_size()
    of_y = {"AllGather": (rows, columns * world), "ReduceScatter": (rows // world, columns)}.get(op, (rows, columns))
    return tuple(torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for shape in ((rows, columns), of_y))


def bound(calls: ort.InferenceSession, op: str, rows: int, columns: int) -> Callable[[], None]:
    """Return a run on zeros, captured in a graph of its own."""
    x, y = tensors(op, rows, columns)
    binding, options = calls.io_binding(), ort.RunOptions()
    options.add_run_config_entry("gpu_graph_id", str(rows))
    binding.bind_input("x", "cuda", x.device.index, TensorProto.BFLOAT16, list(x.shape), x.data_ptr())
    for output in calls.get_outputs():
        binding.bind_output(output.name, "cuda", y.device.index, TensorProto.BFLOAT16, list(y.shape), y.data_ptr())

    def run(kept: tuple[torch.Tensor, ...] = (x, y)) -> None:
        calls.run_with_iobinding(binding, options)

    return run


def torch_graph(op: str, rows: int, columns: int) -> Callable[[], None]:
    x, y = tensors(op, rows, columns)

    def call() -> None:
        if op == "AllReduce":
            dist.all_reduce(x)
        elif op == "AllGather":
            dist.all_gather_into_tensor(y.view(-1), x.view(-1))
        else:
            dist.reduce_scatter_tensor(y, x)

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CHAIN):
            call()

    def run(kept: tuple[torch.Tensor, ...] = (x, y)) -> None:
        graph.replay()
        torch.cuda.synchronize()

    return run


def seconds(run: Callable[[], None]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", choices=["AllReduce", "AllGather", "ReduceScatter"], default="AllReduce")
    parser.add_argument("--columns", type=int, default=7168)
    parser.add_argument("--rows", default="1,8,64,512,4096")
    options = parser.parse_args()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    group = [torch.cuda.nccl.unique_id().hex() if rank == 0 else ""]
    dist.broadcast_object_list(group, 0)
    with tempfile.TemporaryDirectory() as folder:
        model(Path(folder, "calls.onnx"), options.op, rank, world)
        calls = session(Path(folder, "calls.onnx"), group[0])
    for rows in map(int, options.rows.split(",")):
        runs = bound(calls, options.op, rows, options.columns), torch_graph(options.op, rows, options.columns)
        taken = [[seconds(run) for run in runs] for _ in range(35)][5:]
        ours, theirs = (1e6 * sorted(column)[len(taken) // 2] / CHAIN for column in zip(*taken, strict=True))
        if rank == 0:
            print(f"{rows:5d} rows: ours {ours:.2f} us, torch {theirs:.2f} us, ratio {theirs / ours:.2f}", flush=True)
    os._exit(0)  # torch's graphs hold its communicator, whose end waits for them


if __name__ == "__main__":
    main()
