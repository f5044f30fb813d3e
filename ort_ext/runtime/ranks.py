"""Ranks of a sliced model, one process each, started by a launcher.

They meet by torchrun's environment and store. In the store, rank 0 tells the others the group, and each token that it
chooses.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import os
import secrets
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from quantmoe.exporter.errors import ModelError
from quantmoe.exporter.folder.files import MODEL, ranks_in
from quantmoe.exporter.folder.model_file import ranks_stated
from quantmoe.exporter.folder.sampling_options import Sampling
from quantmoe.exporter.targets import of_device
from quantmoe.runtime.choosing.sampling import Choose, Sampler

#: what torchrun says to each process
LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
#: for ranks to meet, as long as the session entry quantmoe.timeout is by default
PATIENCE = timedelta(seconds=30)
#: for a token: rank 0 may wait for whoever reads what it prints
TOKEN = timedelta(days=1)


@dataclass(frozen=True, kw_only=True)
class Rank:
    """The rank of this process.

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

    def sampler(self, sampling: Sampling | None, prompt: Sequence[int] = ()) -> Choose:
        """Return a stand-in for Sampler: rank 0 chooses, the others hear it.

        Hosts round differently: NumPy by the CPU's instructions, an lm_head that all ranks have by the GPU. Ranks that
        went on with other tokens, or ended at others, would make wrong sums, or wait without end.

        Returns:
            Logits [vocabulary] -> a token id. It raises ModelError where the store has failed.
        """
        sample = Sampler(sampling, prompt)

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
            _part(self.store, self.rank, self.world)


def _part(store: Any, rank: int, world: int) -> None:
    store.set(f"quantmoe.left.{rank}", "")
    if rank == 0:
        store.wait([f"quantmoe.left.{other}" for other in range(world)], PATIENCE)


@contextlib.contextmanager
def asking(rank: int) -> Iterator[None]:
    """Yield the store's errors as ModelError."""
    from torch.distributed import DistError

    try:
        yield
    except (DistError, OSError) as error:
        at = ":".join(os.environ[name] for name in LAUNCHED[3:])
        raise ModelError(f"rank {rank}: the launcher's store at {at} (MASTER_ADDR, MASTER_PORT): {error}") from None


def launched() -> bool:
    return all(name in os.environ for name in LAUNCHED)


def meet(outdir: Path, device: str, seed: int | None = None) -> Rank:
    """Meet the other ranks. The process sees the GPU of its LOCAL_RANK alone from then on.

    Args:
        outdir: what ``export --tensor-parallel`` wrote. seed: rank 0's is all ranks'; None: it takes one.

    Raises:
        ModelError: the folder has no slice of this rank, a slice of another number of ranks, or, on one host, not all
            slices. The device is no GPU. The host has fewer GPUs than ranks. Rank 0 has no NCCL, or does not come.
    """
    rank, local, world = (_number(name) for name in LAUNCHED[:3])
    here = _number("LOCAL_WORLD_SIZE", local + 1)  # this host's, of which others may have the other folders
    there = ranks_in(outdir)
    if not there:
        raise ModelError(
            f"{outdir}: has no slices (rank0, rank1, ..), the launcher started {world} processes: run a whole model "
            f"without it, or export with --tensor-parallel {world}"
        )
    stated = max(ranks_stated(next(iter(there.values())) / MODEL), len(there))
    if stated != world:
        raise ModelError(f"{outdir}: has slices of {stated} ranks, the launcher started {world}")
    for needed in range(world) if here == world else [rank]:
        if needed not in there:
            raise ModelError(f"{outdir}: has no rank{needed} of {world} ranks: repeat the export, which did not end")
    if not of_device(device).on_gpu:
        raise ModelError(
            f"{outdir}: processes of a launcher are for --device cuda; on the cpu ranks are threads of one"
        )
    gpus = visible_gpus()
    if here > len(gpus):
        raise ModelError(f"rank {rank}: this host has {len(gpus)} GPUs, the launcher started {here} processes here")
    os.environ["CUDA_VISIBLE_DEVICES"] = gpus[local]
    library = os.environ.setdefault("QUANTMOE_NCCL", nccl_library())
    own = _group(library, seed) if rank == 0 else None
    with asking(rank):
        store = _store(rank, world)
        if own is not None:
            store.set("quantmoe", json.dumps(own))
        said = json.loads(store.get("quantmoe"))
        store.set_timeout(TOKEN)
        if "error" in said:
            _part(store, rank, world)
    if "error" in said:
        raise ModelError(said["error"] if rank == 0 else f"rank 0: {said['error']}")
    return Rank(rank=rank, world=world, path=there[rank], group=said["group"], seed=said["seed"], store=store)


def _group(library: str, seed: int | None) -> dict[str, Any]:
    """Return what rank 0 says to all; it may be an error."""
    try:
        return {"group": nccl_id(library), "seed": secrets.randbits(32) if seed is None else seed}
    except ModelError as error:
        return {"error": str(error)}


def _number(name: str, absent: int | None = None) -> int:
    """Return a number from the environment."""
    text = os.environ.get(name, absent)
    try:
        return int(text)  # type: ignore[arg-type]
    except ValueError:
        raise ModelError(f"{name} is {text!r}, expected a number, as torchrun sets it") from None


def _store(rank: int, world: int) -> Any:
    """Return the launcher's store, or rank 0's own if the launcher has none."""
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
    """Return what CUDA_VISIBLE_DEVICES may be, one by one."""
    if (named := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        names = (name.strip() for name in named.split(","))
        return list(itertools.takewhile(lambda name: name and not name.startswith("-"), names))  # as CUDA reads it
    return [str(i) for i, _ in enumerate(Path("/dev").glob("nvidia[0-9]*"))]  # CUDA counts what it finds


def nccl_library() -> str:
    """PyPI's libnccl.so.2, or the system's."""
    spec = find_spec("nvidia.nccl") if find_spec("nvidia") else None
    folders = list(spec.submodule_search_locations or ()) if spec else []
    return next((str(p) for folder in folders for p in Path(folder).glob("lib/libnccl.so.2")), "libnccl.so.2")


def nccl_id(library: str) -> str:
    """Return a new group's, as the session entry quantmoe.group takes it.

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
