"""The process of a rank in plugin/test_plugin_ranks.py: nodes of the TensorRT plug-in as an engine runs them."""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from support.cuda.trt import RUNTIME, Driver, attributes_of, tensor

from quantmoe.custom_ops.op import GatherSpec, ReduceNormSpec, ReduceSpec, ScatterSpec

SPECS = {"AllReduce": ReduceSpec, "AllGather": GatherSpec, "ReduceScatter": ScatterSpec}
SPECS |= {"AllReduceAddRMSNorm": ReduceNormSpec}
#: operator, its own attributes, and the shape of its x
NODES = [
    ("AllReduce", {}, (5, 8)),
    ("AllGather", {}, (5, 8)),
    ("AllGather", {}, (1, 8)),
    ("AllGather", {"axis": 0}, (5, 8)),
    ("ReduceScatter", {}, (6, 8)),
    ("ReduceScatter", {}, (0, 8)),
    ("AllReduceAddRMSNorm", {"norm_epsilon": 2.0**-10}, (5, 8)),
]


def drawn(at: int, rank: int) -> np.ndarray:
    """Small integers, whose sums 16 bits hold."""
    return np.random.default_rng([at, rank]).integers(-9, 9, NODES[at][2]).astype(np.float32)


def bits(x: np.ndarray, dtype: str) -> np.ndarray:
    return x.astype(np.float16).view(np.uint16) if dtype == "f16" else (x.view(np.uint32) >> 16).astype(np.uint16)


def floats(x: np.ndarray, dtype: str) -> np.ndarray:
    return x.view(np.float16).astype(np.float32) if dtype == "f16" else (x.astype(np.uint32) << 16).view(np.float32)


class Node:
    """A node of NODES in an engine that runs."""

    def __init__(
        self,
        driver: Driver,
        at: int,
        rank: int,
        world: int,
        layer: str = "sum",
        phase: int = RUNTIME,
        export_id: int = 0,
    ):
        op, own, self.shape = NODES[at]
        driver.select(op)
        self.driver = driver
        self.inputs = 3 if op == "AllReduceAddRMSNorm" else 1
        spec = SPECS[op](rank=rank, world=world, export_id=export_id, **own)
        plugin = driver.create(attributes_of(spec), phase, layer)
        assert plugin is not None, driver.log()
        self.plugin = plugin.attach() if plugin else None
        self.runs = bool(self.plugin.handle)

    def __call__(self, x: np.ndarray, dtype: str) -> np.ndarray | None:
        """y; None where the call fails. A norm's residual is zeros, its weight ones."""
        given = [x, np.zeros_like(x), np.ones(x.shape[-1:], x.dtype)][: self.inputs]
        shapes = [array.shape for array in given]
        made = self.plugin.outputs([tensor(dtype, shape) for shape in [*shapes, *shapes[:2]]])
        self.tensors = [tensor(dtype, shape) for shape in [*shapes, *(shape for _, shape in made)]]
        memory = [np.ascontiguousarray(bits(array, dtype)) for array in given]
        memory += [np.full(shape, 0x7FFF, np.uint16) for _, shape in made]
        workspace = np.empty(max(1, self.plugin.call("workspace", self.tensors)), np.uint8)
        return self.run([*memory, workspace], dtype)

    def run(self, memory: list[np.ndarray], dtype: str) -> np.ndarray | None:
        """Of inputs, outputs and the workspace."""
        return floats(memory[self.inputs], dtype) if self.enqueue([m.ctypes.data for m in memory]) else None

    def enqueue(self, memory: list[int], stream: int | None = None) -> bool:
        *tensors, workspace = map(ctypes.c_void_p, memory)
        given, made = tensors[: self.inputs], tensors[self.inputs :]
        pointers = [(ctypes.c_void_p * len(part))(*part) for part in (given, made)]
        return not self.plugin.call("enqueue", self.tensors, *pointers, workspace, ctypes.c_void_p(stream))


class GpuNode(Node):
    """The same on a GPU: y is a CUDA graph's, after a call that gave the same."""

    def run(self, memory: list[np.ndarray], dtype: str) -> np.ndarray:
        import torch

        self.torch, self.stream, self.graph = torch, torch.cuda.Stream(), torch.cuda.CUDAGraph()
        views = [array.view(np.int16) for array in memory[:-1]]
        self.memory = [torch.from_numpy(array).cuda() for array in [*views, memory[-1]]]
        y, addresses = self.memory[self.inputs], [array.data_ptr() for array in self.memory]
        torch.cuda.synchronize()
        assert self.enqueue(addresses, self.stream.cuda_stream), self.driver.log()
        torch.cuda.synchronize()
        first = y.cpu().numpy()
        with torch.cuda.graph(self.graph, stream=self.stream, capture_error_mode="thread_local"):
            assert self.enqueue(addresses, self.stream.cuda_stream), self.driver.log()
        y.fill_(0x7FFF)
        torch.cuda.synchronize()
        self.replay()
        np.testing.assert_array_equal(y.cpu().numpy(), first)
        return floats(first.view(np.uint16), dtype)

    def replay(self) -> None:
        with self.torch.cuda.stream(self.stream):
            self.graph.replay()
        self.torch.cuda.synchronize()


def outlive(node: Node, x: np.ndarray) -> str:
    """How a rank ends whose peer was killed."""
    if not isinstance(node, GpuNode):
        time.sleep(1.5)  # the watch looks twice a second
        return "" if node(x, "f16") is None else "it did not end"
    begin = time.monotonic()
    try:
        node.replay()
    except RuntimeError as error:
        return f"ended after {time.monotonic() - begin:.1f} s: {error}"
    return "it did not end"


def wait_for(file: Path) -> None:
    while not file.exists():
        time.sleep(0.01)


def refuse(driver: Driver, folder: Path, rank: int) -> None:
    """Rank 1 of 2 has an engine of another export, and lives until rank 0 has heard it."""
    node = Node(driver, 0, rank, 2, export_id=5)
    assert node(drawn(0, rank), "f16") is not None, driver.log()
    if rank == 0:
        wait_for(folder / "failed")
        time.sleep(1.5)  # the watch looks twice a second
        assert node(drawn(0, rank), "f16") is None
        (folder / "heard").touch()
        return
    assert not Node(driver, 0, rank, 2, export_id=7).runs
    (folder / "failed").touch()
    wait_for(folder / "heard")


def run_rank(given: dict[str, Any]) -> None:
    """What a rank's process does: writes y of the nodes, says what was logged."""
    gpu, folder, rank, world = given["gpu"], Path(given["folder"]), given["rank"], given["world"]
    driver = Driver(fake=not gpu)
    if given["refused"]:
        refuse(driver, folder, rank)
    for at in given["nodes"]:
        node = (GpuNode if gpu else Node)(driver, at, rank, world, given["layer"], export_id=given["export_id"])
        for dtype in ("f16", "bf16") if node.runs else ():
            y = node(drawn(at, rank), dtype)
            if y is not None:
                np.save(folder / f"{at}.{rank}.{dtype}.npy", y)
        if given["waits"]:
            (folder / f"ran{rank}").touch()
            wait_for(folder / "killed")
            print(outlive(node, drawn(at, rank)), driver.log(), flush=True)
            os._exit(0)  # a process with a GPU has none any more
        if given["other"]:
            assert not Node(driver, at, 1 - rank, world).runs
    print(driver.log())


if __name__ == "__main__":
    run_rank(json.loads(sys.argv[1]))
