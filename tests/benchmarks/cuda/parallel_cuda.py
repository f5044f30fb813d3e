"""Slices of a model on several GPUs beside the model on one: the same tokens, how far logits are apart, and times.

The folders are made where transformers is, on any machine; the GPUs' has onnxruntime-gpu, nvidia-nccl-cu13 and the CUDA
library of this checkout:

    quantmoe export CHECKPOINT whole --target cuda
    quantmoe export CHECKPOINT slices --target cuda --tensor-parallel 2
    python tests/benchmarks/cuda/parallel_cuda.py whole slices --prompt 512 --tokens 32

Each rank is a process that sees one GPU. Logits are of the whole model's tokens, which every rank is given: one token
that differs would make all after it incomparable.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from pathlib import Path

import numpy as np

from quantmoe.runtime.generate import Generator
from quantmoe.runtime.ranks import nccl_id, nccl_library


def work(
    folder: Path, gpu: int, group: str | None, prompt: list[int], forced: list[int] | int, queue: multiprocessing.Queue
) -> None:
    """Put (gpu, its own tokens, logits, milliseconds of the prompt, of a token), or (gpu, error).

    Args:
        forced: tokens after the prompt that the logits are of; a number: as many of its own.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = str(gpu)
    try:
        generator = Generator(folder, device="cuda", group=group)
        generator.greedy(prompt, 2)  # the first run allocates
        found = generator.greedy(prompt, forced if isinstance(forced, int) else len(forced))
        logits = found.logits
        if not isinstance(forced, int):
            cache = generator.cache()
            logits = np.stack([cache.append(ids) for ids in [prompt, *([token] for token in forced[:-1])]])
        per_token = found.decode / max(1, len(found.tokens) - 1)
        queue.put((gpu, found.tokens, np.asarray(logits, np.float32), 1e3 * found.prefill, 1e3 * per_token))
    except Exception as error:  # the parent says it
        queue.put((gpu, f"{type(error).__name__}: {error}"))


def run(folders: list[Path], group: str | None, prompt: list[int], forced: list[int] | int) -> list[tuple]:
    """Return what each folder's process found, by GPU."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    processes = [
        context.Process(target=work, args=(folder, gpu, group, prompt, forced, queue))
        for gpu, folder in enumerate(folders)
    ]
    for process in processes:
        process.start()
    found = sorted((queue.get(timeout=300) for _ in processes), key=lambda result: result[0])
    for process in processes:
        process.join()
    for result in found:
        if isinstance(result[1], str):
            sys.exit(f"GPU {result[0]}: {result[1]}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("whole", type=Path)
    parser.add_argument("slices", type=Path)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of it, random")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--vocabulary", type=int, default=384, help="ids of the prompt are below")
    options = parser.parse_args()
    prompt = np.random.default_rng(0).integers(0, options.vocabulary, options.prompt).tolist()
    os.environ["QUANTMOE_NCCL"] = library = nccl_library()
    ((_, tokens, want, prefill, token),) = run([options.whole], None, prompt, options.tokens)
    print(f"one GPU: prompt {prefill:.2f} ms, token {token:.3f} ms")
    ranks = sorted(options.slices.glob("rank*"), key=lambda path: int(path.name.removeprefix("rank")))
    for gpu, own, logits, prefill, token in run(ranks, nccl_id(library), prompt, tokens):
        apart = np.abs(logits - want).max(-1) / np.abs(want).max()
        same = next((i for i, pair in enumerate(zip(own, tokens, strict=False)) if pair[0] != pair[1]), len(tokens))
        print(
            f"rank {gpu}: prompt {prefill:.2f} ms, token {token:.3f} ms; logits apart by {apart.max():.2e} at most, "
            f"{np.median(apart):.2e} in the middle; its own first {same} of {len(tokens)} tokens are the same"
        )


if __name__ == "__main__":
    main()
