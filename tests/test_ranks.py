"""Processes of a launcher that are a sliced model's ranks: what they tell each other, and what is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import onnx_ir as ir
import pytest

from quantmoe.exporter.errors import ModelError
from quantmoe.exporter.running import ranks

ENVIRONMENT = {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
#: a process of the launcher's: GPUs and NCCL are the test's
PROCESS = """
import os
import sys
from pathlib import Path
from quantmoe.exporter.running import ranks
ranks.visible_gpus = lambda: ["4", "7"]
ranks.nccl_id = lambda library: "ab" * 128
own = ranks.meet(Path(sys.argv[1]), "cuda", int(sys.argv[2]) if sys.argv[2:] else None)
gpu, told = os.environ["CUDA_VISIBLE_DEVICES"], own.group == "ab" * 128
said = f"{own.path.name} of {own.world}, GPU {gpu}, {told}, {own.seed}"
Path(sys.argv[1], f"said{own.rank}").write_text(said)
"""


def slices(folder: Path, count: int, stated: int | None = None) -> Path:
    """The first ``count`` of an export's folders; stated: how many that has."""
    for rank in range(count):
        (folder / f"rank{rank}").mkdir(exist_ok=True)
        model = ir.Model(ir.Graph([], [], nodes=[]), ir_version=10, producer_name="quantmoe")
        model.metadata_props.update(rank=str(rank), world=str(stated or count))
        ir.save(model, folder / f"rank{rank}" / "model.onnx")
    return folder


@pytest.mark.parametrize("seed", [[], ["5"]])
def test_torchrun(tmp_path: Path, seed: list[str]) -> None:
    script = tmp_path / "process.py"
    script.write_text(PROCESS)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    subprocess.run([*launcher, str(script), str(slices(tmp_path, 2)), *seed], check=True, timeout=300)
    said = [(tmp_path / f"said{rank}").read_text() for rank in range(2)]
    seeds = {text.rpartition(" ")[2] for text in said}
    assert len(seeds) == 1  # of rank 0
    assert not seed or seeds == {*seed}
    assert [text.rpartition(",")[0] for text in said] == [
        "rank0 of 2, GPU 4, True",
        "rank1 of 2, GPU 7, True",
    ]


def test_what_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not ranks.launched()
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    assert ranks.launched()
    with pytest.raises(ModelError, match="has slices of 0 ranks, the launcher started 2"):
        ranks.meet(tmp_path, "cuda")
    slices(tmp_path, 2, 4)
    with pytest.raises(ModelError, match=r"rank0: is of 4 ranks, .* has slices of 2: repeat the export"):
        ranks.meet(tmp_path, "cuda")  # two of four: the export was killed
    slices(tmp_path, 2)
    with pytest.raises(ModelError, match="on the cpu ranks are threads of one"):
        ranks.meet(tmp_path, "cpu")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(ModelError, match=r"rank 0 is process 1 of this host, which has 1 GPUs, from 0"):
        ranks.meet(tmp_path, "cuda")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("QUANTMOE_NCCL", str(tmp_path / "nowhere.so"))
    with pytest.raises(ModelError, match=r"NCCL: .*nowhere\.so.*pip install nvidia-nccl-cu13"):
        ranks.meet(tmp_path, "cuda")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "3"
