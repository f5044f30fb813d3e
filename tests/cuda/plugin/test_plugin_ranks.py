"""AllReduce, AllGather and ReduceScatter in the TensorRT plug-in: processes with GPUs and an NCCL of the test's, and
with the machine's where it has two GPUs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

if "QUANTMOE_TRT_DRIVER" not in os.environ:
    pytest.skip("make test-cuda builds the driver", allow_module_level=True)
from support.cuda.plugin_rank import NODES, Node, drawn
from support.cuda.trt import attributes_of, tensor
from support.harness.children import PYTHONPATH

from quantmoe.custom_ops.op import NormSpec, ScatterSpec
from quantmoe.custom_ops.reference import add_norm, all_gather, all_reduce, reduce_scatter
from quantmoe.runtime.ranks import nccl_library

NCCL = Path(os.environ["QUANTMOE_TRT_DRIVER"]).with_name("libquantmoe_fake_nccl.so")
GROUP = ("QUANTMOE_GROUP", "QUANTMOE_GROUP_FILE", "QUANTMOE_TIMEOUT", "RANK", "WORLD_SIZE")


class Ranks:
    """Processes of the ranks; `of` is what one of them has in place of `given`, `environments` beside the others'."""

    def __init__(self, folder: Path, ranks: int, environments: list[dict[str, str]], of: Any = None, **given: Any):
        usual = {"folder": str(folder), "nodes": [0], "world": ranks, "layer": "sum", "waits": 0, "other": 0, "gpu": 0}
        usual |= {"export_id": 5, "refused": 0} | given
        clean = {name: value for name, value in os.environ.items() if name not in GROUP}
        self.processes = []
        for rank in range(ranks):
            own = usual | {"rank": rank} | ((of or {}).get(rank, {}))
            environment = (
                clean
                | {"QUANTMOE_NCCL": str(NCCL), "TMPDIR": str(folder), "PYTHONPATH": PYTHONPATH}
                | environments[rank % len(environments)]
            )
            command = [sys.executable, "-m", "support.cuda.plugin_rank", json.dumps(own)]
            options = {"env": environment, "cwd": Path(__file__).parents[2], "text": True}
            self.processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options))

    def said(self) -> list[str]:
        found = [process.communicate(timeout=60) for process in self.processes]
        assert all(process.returncode in (0, -signal.SIGKILL) for process in self.processes), found
        return [said.strip() for said, _ in found]


def by_id(folder: Path) -> dict[str, str]:
    """An id of fake_nccl.cc's."""
    (folder / "nccl").mkdir(exist_ok=True)
    return {"QUANTMOE_GROUP": str(folder / "nccl").encode().ljust(128, b"\0").hex()}


@pytest.mark.parametrize(("world", "by"), [(1, "id"), (2, "file"), (3, "id")])
def test_sums_and_joined_parts(tmp_path: Path, world: int, by: str) -> None:
    file = tmp_path / "group"
    environment = by_id(tmp_path) if by == "id" else {"QUANTMOE_GROUP_FILE": str(file)}
    launcher = [{"RANK": str(rank), "WORLD_SIZE": str(world)} | environment for rank in range(world)]
    said = Ranks(tmp_path, world, launcher, nodes=[*range(len(NODES))]).said()
    assert said == [""] * world
    assert not file.exists()
    check_values(tmp_path, world, [*range(len(NODES))])


def normed(total: np.ndarray, epsilon: float) -> np.ndarray:
    y, _ = add_norm(NormSpec(norm_epsilon=epsilon), total, np.zeros_like(total), np.ones(total.shape[-1]))
    return y


def check_values(folder: Path, world: int, nodes: list[int], gpu: bool = False) -> None:
    """Of a norm the fake GPU has the sum."""
    reference = {
        "AllReduce": lambda xs, rank: all_reduce(xs),
        "AllGather": lambda xs, rank, axis=-1: all_gather(xs, axis),
        "ReduceScatter": lambda xs, rank: reduce_scatter(xs)[rank],
        "AllReduceAddRMSNorm": lambda xs, rank, norm_epsilon: (
            normed(all_reduce(xs), norm_epsilon) if gpu else all_reduce(xs)
        ),
    }
    for at in nodes:
        op, own, _ = NODES[at]
        for rank in range(world):
            want = reference[op]([drawn(at, other) for other in range(world)], rank, **own)
            for dtype, unit in (("f16", 2.0**-11), ("bf16", 2.0**-8)):
                found = np.load(folder / f"{at}.{rank}.{dtype}.npy")
                np.testing.assert_allclose(found, want, rtol=unit + 2.0**-20 if op == "AllReduceAddRMSNorm" else 0)


def test_a_builder_has_no_other_ranks(fake) -> None:
    for at, (op, own, shape) in enumerate(NODES):
        node = Node(fake, at, 1, 2, phase=0)
        assert node.runs, fake.log()
        rows = shape[0] * 2 if "axis" in own else shape[0] // 2 if op == "ReduceScatter" else shape[0]
        features = 16 if op == "AllGather" and not own else 8
        np.testing.assert_array_equal(node(drawn(at, 0), "f16"), np.zeros((rows, features), np.float32))
    fake.select("ReduceScatter")
    made = fake.create(attributes_of(ScatterSpec(rank=0, world=2)))
    assert made.call("shape_change", [tensor("f16", (3, 8)), tensor("f16", (1, 8))]) != 0
    assert "x has shape [3, 8], expected [2 * N, ..]" in fake.log()
    assert not made.call("supports", [tensor("f32", (2, 8)), tensor("f32", (1, 8))], 0)
    assert fake.create(attributes_of(ScatterSpec(rank=2, world=2))) is None
    assert "rank is 2, expected 0 to 1" in fake.log()
    fake.select("QuantMoE")


ENGINE = 'AllReduce layer "sum": the engine is rank 0 of 2'


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({}, f"{ENGINE} of a sliced model: set QUANTMOE_GROUP to rank 0's NCCL id in hex, or QUANTMOE_GROUP_FILE to"),
        ({"QUANTMOE_GROUP": "ab" * 128, "QUANTMOE_GROUP_FILE": "group"}, "writes it to, not both"),
        ({"QUANTMOE_GROUP": "abc"}, "QUANTMOE_GROUP has 3 characters, expected the 256 hex digits of rank 0's"),
        ({"RANK": "1"}, f"{ENGINE}, the launcher's process rank 1 of  (RANK, WORLD_SIZE)"),
        ({"RANK": "0", "WORLD_SIZE": "4"}, f"{ENGINE}, the launcher's process rank 0 of 4 (RANK, WORLD_SIZE)"),
        ({"QUANTMOE_GROUP": "ab" * 128, "QUANTMOE_TIMEOUT": "soon"}, 'QUANTMOE_TIMEOUT is "soon", expected 1 to 86400'),
        ({"QUANTMOE_GROUP_FILE": __file__}, "test_plugin_ranks.py exists: remove it, an earlier run has left it"),
        (
            {"QUANTMOE_GROUP_FILE": "/nowhere/group"},
            "QUANTMOE_GROUP_FILE /nowhere/group cannot be written: No such file",
        ),
        (
            {"QUANTMOE_GROUP": "ab" * 128, "QUANTMOE_NCCL": "nowhere.so"},
            "NCCL cannot be opened (nowhere.so: cannot open",
        ),
    ],
)
def test_an_environment_that_is_none(tmp_path: Path, environment: dict[str, str], message: str) -> None:
    (said,) = Ranks(tmp_path, 1, [environment], world=2).said()
    assert message in said
    assert not list(tmp_path.glob("*.npy"))


def test_ranks_that_do_not_come(tmp_path: Path) -> None:
    environment = by_id(tmp_path) | {"QUANTMOE_TIMEOUT": "1"}
    (said,) = Ranks(tmp_path, 1, [environment], world=2).said()
    assert "rank 0 waited 1 s for the other 1 ranks to begin, with the same QUANTMOE_GROUP and of as many ranks" in said
    file = {"QUANTMOE_GROUP_FILE": str(tmp_path / "group"), "QUANTMOE_TIMEOUT": "1"}
    (said,) = Ranks(tmp_path, 1, [file], of={0: {"rank": 1}}, world=2).said()
    assert f"QUANTMOE_GROUP_FILE {tmp_path}/group has not come from rank 0 in 1 s" in said
    (said,) = Ranks(tmp_path, 1, [file], world=2).said()
    assert "with the same QUANTMOE_GROUP_FILE and of as many ranks" in said
    assert not (tmp_path / "group").exists()


def test_files_of_two_exports(tmp_path: Path) -> None:
    said = Ranks(tmp_path, 2, [by_id(tmp_path) | {"QUANTMOE_TIMEOUT": "3"}], of={1: {"world": 3}}).said()
    for text in said:
        assert "waited 3 s for the other" in text
    (tmp_path / "more").mkdir()
    said = Ranks(tmp_path, 2, [by_id(tmp_path / "more")], of={1: {"layer": "other"}}).said()
    for rank, text in enumerate(said):
        assert 'AllReduce layer "other": x [5, 8]' in text
        assert f'rank {1 - rank} is at AllReduce layer "{("other", "sum")[rank]}": x [5, 8], rank {rank} at' in text
        assert "expected files of one export, and runs in one order, of inputs of one shape" in text
    for text, others in (("7", {"export_id": 7}), ("no id", {"export_id": 0})):
        folder = tmp_path / text
        folder.mkdir()
        said = Ranks(tmp_path, 2, [by_id(folder)], of={1: others}).said()
        exports = ["export 00000005", "export 00000007" if text == "7" else "an export that has no export_id"]
        for rank, log in enumerate(said):
            own, other = (
                f"of quantmoe {version('quantmoe')}, {export}" for export in (exports[rank], exports[1 - rank])
            )
            assert f"rank {1 - rank} is {other}, rank {rank} {own}" in log


def test_a_rank_that_fails_and_lives(tmp_path: Path) -> None:
    """It has an engine of another export than the ranks have met with."""
    said = Ranks(tmp_path, 2, [by_id(tmp_path)], nodes=[], refused=1).said()
    why = "the engine is of export 00000007, the ranks have met with engines of export 00000005"
    assert f'AllReduce layer "sum": rank 1 has failed: {why}' in said[0]
    assert why in said[1]


def test_a_process_is_one_rank(tmp_path: Path) -> None:
    said = Ranks(tmp_path, 2, [by_id(tmp_path)], other=1).said()
    for rank, text in enumerate(said):
        assert f'"sum": the engine is rank {1 - rank} of 2, the process rank {rank} of 2' in text


def test_a_killed_rank(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, 3, [by_id(tmp_path)], waits=1)
    while not all((tmp_path / f"ran{rank}").exists() for rank in range(3)):
        assert all(process.poll() is None for process in ranks.processes)
        time.sleep(0.01)
    ranks.processes[1].send_signal(signal.SIGKILL)
    (tmp_path / "killed").touch()
    said = ranks.said()
    for rank in (0, 2):
        assert 'AllReduce layer "sum": rank 1 is gone: its process has ended, or its host is not reached' in said[rank]


def on_gpus(folder: Path) -> list[dict[str, str]]:
    group = {"QUANTMOE_GROUP_FILE": str(folder / "group"), "QUANTMOE_NCCL": nccl_library()}
    return [group | {"CUDA_VISIBLE_DEVICES": str(rank)} for rank in range(2)]


two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")


@two_gpus
def test_nccl(tmp_path: Path) -> None:
    nodes = [at for at, (_, _, shape) in enumerate(NODES) if shape[0]]
    said = Ranks(tmp_path, 2, on_gpus(tmp_path), nodes=nodes, gpu=1).said()
    assert said == [""] * 2
    check_values(tmp_path, 2, nodes, gpu=True)


@two_gpus
def test_a_rank_that_is_killed_while_a_graph_waits_for_it(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, 2, on_gpus(tmp_path), waits=1, gpu=1)
    while not all((tmp_path / f"ran{rank}").exists() for rank in range(2)):
        assert all(process.poll() is None for process in ranks.processes)
        time.sleep(0.01)
    ranks.processes[1].send_signal(signal.SIGKILL)
    (tmp_path / "killed").touch()
    assert float(ranks.said()[0].split()[2]) < 30
