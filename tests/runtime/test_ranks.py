"""Processes of a launcher that are a sliced model's ranks: what they tell each other, who chooses tokens, and what is
refused."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import onnx_ir as ir
import pytest
from support.models.checkpoints import TINY, make_checkpoint

from quantmoe.exporter.errors import ModelError
from quantmoe.exporter.folder.sampling_options import Sampling
from quantmoe.exporter.writing.convert import export
from quantmoe.runtime import ranks
from quantmoe.runtime.generate import Generator

ENVIRONMENT = {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
#: a process of the launcher's: GPUs and NCCL are the test's
PROCESS = """
import os
import sys
from pathlib import Path
from quantmoe.runtime import ranks
ranks.visible_gpus = lambda: ["4", "7", "5", "6"]
ranks.nccl_id = lambda library: "ab" * 128
own = ranks.meet(Path(sys.argv[1]), "cuda", int(sys.argv[2]) if sys.argv[2:] else None)
own.leave()
gpu, told = os.environ["CUDA_VISIBLE_DEVICES"], own.group == "ab" * 128
said = f"{own.path.name} of {own.world}, GPU {gpu}, {told}, {own.seed}"
Path(sys.argv[1], f"said{own.rank}").write_text(said)
"""
#: quantmoe generate in such a process, on the CPU; the last rank's logits are another model's
GENERATE = """
import os
import sys
from pathlib import Path
from quantmoe.exporter.cli import app
from quantmoe.runtime import generate, ranks
ranks.visible_gpus = lambda: ["4", "7"]
ranks.nccl_id = lambda library: "ab" * 128
rank, folder = os.environ["RANK"], sys.argv[1]
class Generator(generate.Generator):
    def __init__(self, path, threads, device, group, **options):
        assert (device, group) == ("cuda", "ab" * 128)
        super().__init__(path, 1, **options)
    def finite(self, logits, length):
        return -logits if rank == "1" else logits
    def generate(self, *given, **others):
        found = super().generate(*given, **others)
        Path(folder, f"chose{rank}").write_text(",".join(map(str, found.tokens)))
        return found
generate.Generator = Generator
app(["generate", folder, "--device", "cuda", "--ids", "5,6,7", *sys.argv[2:]])
"""
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def slices(folder: Path, count: int, stated: int | None = None) -> Path:
    """The first ``count`` of an export's folders; stated: how many that has."""
    for rank in range(count):
        (folder / f"rank{rank}").mkdir(exist_ok=True)
        model = ir.Model(ir.Graph([], [], nodes=[]), ir_version=10, producer_name="quantmoe")
        model.metadata_props.update(rank=str(rank), world=str(stated or count))
        ir.save(model, folder / f"rank{rank}" / "model.onnx")
    return folder


@pytest.mark.parametrize(("count", "seed"), [(2, []), (4, ["5"])])
def test_torchrun(tmp_path: Path, count: int, seed: list[str]) -> None:
    script = tmp_path / "process.py"
    script.write_text(PROCESS, encoding="utf-8")
    command = [*TORCHRUN[:-1], str(count), str(script), str(slices(tmp_path, count)), *seed]
    subprocess.run(command, check=True, timeout=300)
    said = [(tmp_path / f"said{rank}").read_text(encoding="utf-8") for rank in range(count)]
    seeds = {text.rpartition(" ")[2] for text in said}
    assert len(seeds) == 1  # of rank 0
    assert not seed or seeds == {*seed}
    assert [text.rpartition(",")[0] for text in said] == [
        f"rank{rank} of {count}, GPU {gpu}, True" for rank, gpu in zip(range(count), "4756", strict=False)
    ]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two folders of one whole model."""
    folder = tmp_path_factory.mktemp("model")
    export(make_checkpoint(folder / "checkpoint", **TINY | {"num_hidden_layers": 1}), folder / "rank0", logits="all")
    shutil.copytree(folder / "rank0", folder / "rank1")
    return folder


def free_port() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


@pytest.mark.parametrize(
    ("how", "launcher"), [("greedy", "torchrun"), ("sampled", "one without a store"), ("drafts", "torchrun")]
)
def test_rank_0_chooses(model: Path, how: str, launcher: str) -> None:
    """Its tokens are all ranks', and all end at the same one, whatever their own logits are."""
    sampling = None if how == "greedy" else Sampling(temperature=2.0, seed=5)
    usual = Generator(model / "rank0", 1).generate([5, 6, 7], 12, sampling=sampling).tokens
    end = next(i for i, token in enumerate(usual) if i > 2 and token not in usual[:i])
    for rank in range(2):
        (model / f"rank{rank}/generation_config.json").write_text(f'{{"eos_token_id": {usual[end]}}}', encoding="utf-8")
    script = model / "process.py"
    script.write_text(GENERATE, encoding="utf-8")
    given = [str(script), str(model), "--max-new-tokens", "12"]
    given += [] if how == "greedy" else ["--temperature", "2", "--seed", "5"]
    given += ["--speculate", "ngram"] if how == "drafts" else []
    if launcher == "torchrun":
        subprocess.run([*TORCHRUN, *given], check=True, timeout=300)
    else:
        store = ENVIRONMENT | {"MASTER_PORT": free_port()}
        processes = [
            subprocess.Popen([sys.executable, *given], env=os.environ | store | {"RANK": rank, "LOCAL_RANK": rank})
            for rank in "01"
        ]
        assert [process.wait(timeout=300) for process in processes] == [0, 0]
    for rank in range(2):
        assert (model / f"chose{rank}").read_text(encoding="utf-8") == ",".join(map(str, usual[: end + 1]))
        (model / f"chose{rank}").unlink()


def test_a_store_that_nobody_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "visible_gpus", lambda: ["0", "1"])
    monkeypatch.setattr(ranks, "PATIENCE", timedelta(seconds=2))
    address = {"RANK": "1", "LOCAL_RANK": "1", "MASTER_PORT": free_port()}
    for name, value in (ENVIRONMENT | address | {"QUANTMOE_NCCL": "", "CUDA_VISIBLE_DEVICES": ""}).items():
        monkeypatch.setenv(name, value)
    at = rf"127\.0\.0\.1:{address['MASTER_PORT']} \(MASTER_ADDR, MASTER_PORT\)"
    with pytest.raises(ModelError, match=rf"rank 1: the launcher's store at {at}: nobody has answered in 2 s"):
        ranks.meet(slices(tmp_path, 2), "cuda")


def test_what_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not ranks.launched()
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    assert ranks.launched()
    with pytest.raises(ModelError, match=r"has no slices \(rank0, .*started 2 processes: .*--tensor-parallel 2"):
        ranks.meet(tmp_path, "cuda")
    slices(tmp_path, 2, 4)
    with pytest.raises(ModelError, match="has slices of 4 ranks, the launcher started 2"):
        ranks.meet(tmp_path, "cuda")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(ModelError, match=f"{tmp_path}: has no rank2 of 4 ranks: repeat the export, which did not end"):
        ranks.meet(tmp_path, "cuda")  # two of four: the export was killed
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ModelError, match="on the cpu ranks are threads of one"):
        ranks.meet(tmp_path, "cpu")  # the others are another host's
    monkeypatch.setenv("RANK", "2")
    with pytest.raises(ModelError, match="has no rank2 of 4 ranks"):
        ranks.meet(tmp_path, "cuda")
    monkeypatch.setenv("RANK", "x")
    with pytest.raises(ModelError, match="RANK is 'x', expected a number, as torchrun sets it"):
        ranks.meet(tmp_path, "cuda")
    for name, value in (ENVIRONMENT | {"LOCAL_WORLD_SIZE": "2"}).items():
        monkeypatch.setenv(name, value)
    slices(tmp_path, 2)
    with pytest.raises(ModelError, match="on the cpu ranks are threads of one"):
        ranks.meet(tmp_path, "cpu")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.setenv("LOCAL_RANK", "1")
    for named in ("3", "3,-1,4"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
        with pytest.raises(ModelError, match="rank 0: this host has 1 GPUs, the launcher started 2 processes here"):
            ranks.meet(tmp_path, "cuda")


def test_no_nccl(tmp_path: Path) -> None:
    """Rank 0 has none: all say so."""
    script = tmp_path / "process.py"
    lines = [line for line in PROCESS.splitlines(keepends=True) if not line.startswith("ranks.nccl_id")]
    script.write_text("".join(lines), encoding="utf-8")
    store = ENVIRONMENT | {"MASTER_PORT": free_port(), "QUANTMOE_NCCL": str(tmp_path / "nowhere.so")}
    command = [sys.executable, str(script), str(slices(tmp_path, 2))]
    processes = [
        subprocess.Popen(command, env=os.environ | store | {"RANK": rank, "LOCAL_RANK": rank},
                         stderr=subprocess.PIPE, text=True)
        for rank in "01"
    ]  # fmt: skip
    for rank, process in enumerate(processes):
        said = process.communicate(timeout=120)[1]
        assert f"{'rank 0: ' if rank else ''}NCCL: {tmp_path}/nowhere.so: cannot open" in said
        assert "pip install nvidia-nccl-cu13" in said
