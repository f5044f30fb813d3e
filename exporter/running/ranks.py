"""Ranks of a sliced model that a launcher started, a process each: torchrun's environment, and its store for what rank
0 tells the others: the group, and each token that it chooses."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import secrets
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from quantmoe.exporter.errors import ModelError
from quantmoe.exporter.reading.sampling import Sampling
from quantmoe.exporter.running.sampling import Choose, Sampler
from quantmoe.exporter.writing.output import MODEL, ranks_in, ranks_stated

#: what torchrun says to each process
LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
#: for ranks to meet, as long as the session entry quantmoe.timeout is by default
PATIENCE = timedelta(seconds=30)
#: for a token: rank 0 may wait for whoever reads what it prints
TOKEN = timedelta(days=1)


@dataclass(frozen=True)
class Rank:
    """Of this process.

    Attributes:
        path: its folder. group: the session entry, one in all ranks. seed: of sampling, rank 0's.
        store: the launcher's, a torch.distributed.Store. chosen: counts tokens.
    """

    rank: int
    world: int
    path: Path
    group: str
    seed: int
    store: Any
    chosen: Iterator[int] = field(default_factory=itertools.count)

    def sampler(self, sampling: Sampling | None) -> Choose:
        """In the place of Sampler: rank 0 chooses, the others hear it.

        Hosts round differently: NumPy by the CPU's instructions, an lm_head that all ranks have by the GPU. Ranks that
        went on with other tokens, or ended at others, would make wrong sums, or wait without end.

        Returns:
            Logits [vocabulary] -> a token id. It raises ModelError where the store has failed.
        """
        sample = Sampler(sampling)

        def choose(logits: np.ndarray) -> int:
            key = f"quantmoe.token.{next(self.chosen)}"
            with asking(self.rank):
                if self.rank == 0:
                    self.store.set(key, str(token := sample(logits)))
                    return token
                return int(self.store.get(key))

        return choose

    def leave(self) -> None:
        """After the last token. Rank 0, whose process may have the store, waits until all have heard it.

        Raises:
            ModelError: the store has failed, or a rank has not come here.
        """
        with asking(self.rank):
            self.store.set(f"quantmoe.left.{self.rank}", "")
            if self.rank == 0:
                self.store.wait([f"quantmoe.left.{other}" for other in range(self.world)], PATIENCE)


@contextlib.contextmanager
def asking(rank: int) -> Iterator[None]:
    """The store's errors as ModelError."""
    from torch.distributed import DistError

    try:
        yield
    except (DistError, OSError) as error:
        at = ":".join(os.environ[name] for name in LAUNCHED[3:])
        raise ModelError(f"rank {rank}: the launcher's store at {at} (MASTER_ADDR, MASTER_PORT): {error}") from None


def launched() -> bool:
    return all(name in os.environ for name in LAUNCHED)


def meet(outdir: Path, device: str, seed: int | None = None) -> Rank:
    """Meets the other ranks. The process sees the GPU of its LOCAL_RANK alone from then on.

    Args:
        outdir: what ``export --tensor-parallel`` wrote. seed: rank 0's is all ranks'; None: it takes one.

    Raises:
        ModelError: the folder has slices of another number of ranks, or not all of them; the device is no GPU; there
            are fewer GPUs than ranks; no NCCL; rank 0 does not come.
    """
    rank, local, world = (int(os.environ[name]) for name in LAUNCHED[:3])
    there = ranks_in(outdir)
    path = there.get(rank, next(iter(there.values()), outdir))
    if (stated := ranks_stated(path / MODEL)) > 1 and stated != len(there):
        raise ModelError(
            f"{path}: is of {stated} ranks, {outdir} has slices of {len(there)}: repeat the export, which did not end"
        )
    if len(there) != world or rank not in there:
        raise ModelError(f"{outdir}: has slices of {len(there)} ranks, the launcher started {world}")
    if device != "cuda":
        raise ModelError(
            f"{outdir}: processes of a launcher are for --device cuda; on the cpu ranks are threads of one"
        )
    gpus = visible_gpus()
    if local >= len(gpus):
        raise ModelError(f"rank {rank} is process {local} of this host, which has {len(gpus)} GPUs, from 0")
    os.environ["CUDA_VISIBLE_DEVICES"] = gpus[local]
    library = os.environ.setdefault("QUANTMOE_NCCL", nccl_library())
    own = f"{nccl_id(library)} {secrets.randbits(32) if seed is None else seed}" if rank == 0 else None
    with asking(rank):
        store = _store(rank, world)
        if own is not None:
            store.set("quantmoe", own)
        group, seed_of_all = store.get("quantmoe").decode().split()
        store.set_timeout(TOKEN)
    return Rank(rank, world, path, group, int(seed_of_all), store)


def _store(rank: int, world: int) -> Any:
    """The launcher's, which is rank 0's own where the launcher has none."""
    from torch.distributed import TCPStore

    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    end = time.monotonic() + PATIENCE.total_seconds()
    while not serves:  # TCPStore itself tries for up to twice its timeout
        try:
            socket.create_connection((host, port), max(end - time.monotonic(), 0.1)).close()
            break
        except OSError as error:
            if time.monotonic() > end:
                raise OSError(f"nobody has answered in {PATIENCE.total_seconds():.0f} s: {error}") from None
            time.sleep(0.1)
    return TCPStore(host, port, world, serves, PATIENCE)


def visible_gpus() -> list[str]:
    """What CUDA_VISIBLE_DEVICES may be, one by one."""
    if (named := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name for name in named.split(",") if name]
    return [path.name.removeprefix("nvidia") for path in sorted(Path("/dev").glob("nvidia[0-9]*"))]


def nccl_library() -> str:
    """PyPI's libnccl.so.2, or the system's."""
    spec = find_spec("nvidia.nccl") if find_spec("nvidia") else None
    folders = list(spec.submodule_search_locations or ()) if spec else []
    return next((str(p) for folder in folders for p in Path(folder).glob("lib/libnccl.so.2")), "libnccl.so.2")


def nccl_id(library: str) -> str:
    """A new group's, as the session entry quantmoe.group takes it.

    Raises:
        ModelError: there is no NCCL.
    """
    unique = ctypes.create_string_buffer(128)
    try:
        result = ctypes.CDLL(library).ncclGetUniqueId(unique)
    except (OSError, AttributeError) as error:
        raise ModelError(
            f"NCCL: {error}; pip install nvidia-nccl-cu13, or name its libnccl.so.2 in QUANTMOE_NCCL"
        ) from None
    if result:
        raise ModelError(f"{library}: ncclGetUniqueId: error {result}")
    return unique.raw.hex()
