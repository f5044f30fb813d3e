"""How ranks of a sliced model learn that one is gone: processes with the library's watch and no GPU."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

if "QUANTMOE_ORT_DRIVER" not in os.environ:
    pytest.skip("make test-cuda builds the driver", allow_module_level=True)
FAKE = Path(os.environ["QUANTMOE_ORT_DRIVER"]).with_name("libquantmoe_ort_fake.so")
GONE = "rank 1 is gone: its process has ended, or its host is not reached"


def rank(library: str, *given: str) -> None:
    """What a rank's process runs."""
    said = ctypes.create_string_buffer(512)
    numbers = (0, 1, 4, 6)
    values = [int(text) if i in numbers else text.encode() for i, text in enumerate(given)]
    ctypes.CDLL(library).driver_watch(*values, said, ctypes.c_size_t(len(said)))
    print(said.value.decode())


class Ranks:
    def __init__(self, folder: Path, world: int, **of: dict[int, object]):
        """of: release, busy, error and ms of ranks that have others."""
        usual = {"release": "quantmoe 1", "busy": 1, "error": "", "ms": 20_000}
        self.processes = []
        self.met = [folder / f"rank{r}" / "met" for r in range(world)]
        for r in range(world):
            own = {name: of.get(name, {}).get(r, value) for name, value in usual.items()}
            self.met[r].parent.mkdir()
            given = [r, world, own["release"], self.met[r].parent, own["busy"], own["error"], own["ms"]]
            command = [sys.executable, __file__, FAKE, *given]
            self.processes.append(subprocess.Popen([str(x) for x in command], stdout=subprocess.PIPE, text=True))

    def wait(self) -> Ranks:
        while not all(path.exists() for path in self.met):
            assert all(process.poll() is None for process in self.processes)
            time.sleep(0.01)
        return self

    def kill(self, rank: int) -> None:
        self.processes[rank].send_signal(signal.SIGKILL)

    def said(self) -> list[str]:
        return [process.communicate(timeout=60)[0].strip() for process in self.processes]


@pytest.mark.parametrize("world", [2, 4])
def test_a_killed_process(tmp_path: Path, world: int) -> None:
    ranks = Ranks(tmp_path, world).wait()
    ranks.kill(1)
    others = [said for r, said in enumerate(ranks.said()) if r != 1]
    assert others == [f"gave up: {GONE}"] * (world - 1)


def test_the_process_that_all_are_connected_to(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, 3).wait()
    ranks.kill(0)
    assert ranks.said()[1:] == [f"gave up: {GONE.replace('1', '0')}"] * 2


def test_a_gpu_that_waits_for_nothing_is_left_alone(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, 2, busy={0: 0}, ms={0: 6_000}).wait()
    ranks.kill(1)
    assert ranks.said()[0] == GONE  # its next sum says so


def test_a_session_that_ends(tmp_path: Path) -> None:
    said = Ranks(tmp_path, 3, ms={2: 500}).said()
    assert said == ["gave up: rank 2 has ended its session"] * 2 + [""]


def test_an_error_of_the_connections(tmp_path: Path) -> None:
    said = Ranks(tmp_path, 2, error={1: "NCCL: unhandled system error"}).said()
    assert said == ["gave up: rank 1 has failed: NCCL: unhandled system error"] * 2


def test_ranks_of_two_releases(tmp_path: Path) -> None:
    said = Ranks(tmp_path, 2, release={1: "quantmoe 2"}).said()
    assert said[0] == "refused: rank 1 is of quantmoe 2, rank 0 of quantmoe 1"
    assert said[1] == "refused: rank 0 is of quantmoe 1, rank 1 of quantmoe 2"


if __name__ == "__main__":
    rank(*sys.argv[1:])
