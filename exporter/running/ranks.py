"""Ranks of a sliced model that a launcher started, a process each: torchrun's environment, and its store for what rank
0 tells the others."""

from __future__ import annotations

import ctypes
import os
import secrets
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path

from quantmoe.exporter.errors import ModelError
from quantmoe.exporter.writing.output import MODEL, ranks_in, ranks_stated

#: what torchrun says to each process
LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
PATIENCE = timedelta(seconds=60)


@dataclass(frozen=True)
class Rank:
    """Of this process.

    Attributes:
        path: its folder. group: the session entry, one in all ranks. seed: of sampling, one in all ranks.
    """

    rank: int
    world: int
    path: Path
    group: str
    seed: int


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
    if (stated := ranks_stated(path / MODEL)) not in (0, len(there)):  # 0: no export's, as a measured layer
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
    group, seed_of_all = _told(own, rank, world).split()
    return Rank(rank, world, path, group, int(seed_of_all))


def _told(own: str | None, rank: int, world: int) -> str:
    """What rank 0 says."""
    from torch.distributed import DistError, TCPStore

    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        store = TCPStore(host, port, world, serves, PATIENCE)
        if own is not None:
            store.set("quantmoe", own)
        told = store.get("quantmoe").decode()
        if serves:  # the store is this process's: the others have read when all have come
            store.set(f"quantmoe.{rank}", "")
            store.wait([f"quantmoe.{other}" for other in range(world)], PATIENCE)
        else:
            store.set(f"quantmoe.{rank}", "")
    except DistError as error:
        raise ModelError(f"rank {rank}: the launcher's store at {host}:{port}: {error}") from None
    return told


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
