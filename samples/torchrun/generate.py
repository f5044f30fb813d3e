"""torchrun --nproc-per-node N generate.py OUTDIR COUNT ID...: greedy decoding of slices (guides/several-gpus).

OUTDIR is what `quantmoe export --target cuda --tensor-parallel N` wrote. Every rank chooses the same tokens.
"""

import os
import sys

import torch
from torch.distributed import TCPStore

from quantmoe import Generator

rank, local, world = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
gpus = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(world)))
os.environ["CUDA_VISIBLE_DEVICES"] = gpus.split(",")[local]  # before anything looks for GPUs
store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), world, is_master=False)  # torchrun's own
if rank == 0:
    store.set("group", torch.cuda.nccl.unique_id().hex())
group = store.get("group").decode()
model = Generator(f"{sys.argv[1]}/rank{rank}", device="cuda", group=group)
tokens = model.greedy([int(text) for text in sys.argv[3:]], int(sys.argv[2])).tokens
if rank == 0:
    print(*tokens, sep=",")
