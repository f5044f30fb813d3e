"""Logits of slices beside those of the whole model on one GPU: the rows of the table in docs/lab/several-gpus.md.

    quantmoe export CHECKPOINT whole --target cuda --dtype f16 --logits all
    quantmoe export CHECKPOINT slices --target cuda --dtype f16 --logits all --tensor-parallel 2
    torchrun --nproc-per-node 2 tests/benchmarks/slice_logits.py whole slices

Each rank compares its own logits with those of the whole model on its own GPU. Without torchrun the folders are of
--target cpu --activations float, and the ranks threads of this process. ``--limit`` names two exports for the CPU
(--dtype f16, and --cache f32; both --logits all --activations float): four times what these are apart. Tokens that took
other experts, as nearly tied ones may, are counted by themselves.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from quantmoe.exporter.folder.files import ranks_in
from quantmoe.runtime import ranks
from quantmoe.runtime.generate import Generator

#: name -> sequences, and how many of their tokens are run at a time
RUNS = {
    "a prompt at once": (1, (24,)),
    "a prompt in pieces": (1, (16, 5, 1, 1, 1)),
    "64 sequences": (64, (12, 1, 1)),
    "a prompt of 2,048, a token": (1, (2048, 1)),
}
#: tokens of greedy text
TEXT = 16
#: a token that is further apart has taken other experts
OTHER = 0.05


def drawn(batch: int, length: int, vocabulary: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, vocabulary, (batch, length))


def measure(model: Generator, vocabulary: int) -> tuple[dict[str, np.ndarray], list[int]]:
    """Return the logits of each run [B, S, vocabulary], of its last tokens where the export has only these; and a
    greedy text."""
    made = {}
    for name, (batch, pieces) in RUNS.items():
        ids, past, at = drawn(batch, sum(pieces), vocabulary), model.start(batch), 0
        found = []
        for piece in pieces:
            logits, past = model.step(ids[:, at : at + piece], past)
            found.append(logits.astype(np.float32))
            at += piece
        made[name] = np.concatenate(found, 1)
    return made, model.greedy(drawn(1, 12, vocabulary)[0].tolist(), TEXT).tokens


def apart(found: np.ndarray, want: np.ndarray) -> tuple[float, int]:
    """Return the largest distance of a token's logits, relative to their length; and how many tokens took other
    experts."""
    distance = np.linalg.norm(found - want, axis=-1) / np.linalg.norm(want, axis=-1)
    same = distance <= OTHER  # no NaN is
    return float(distance.max(initial=0, where=same)), int((~same).sum())


def compare(own: Generator, whole: tuple[dict[str, np.ndarray], list[int]], vocabulary: int) -> dict[str, Any]:
    """Return what a rank has found, for :func:`say`."""
    (found, text), (want, wanted) = measure(own, vocabulary), whole
    return {
        "apart": {name: apart(found[name], want[name]) for name in RUNS},
        "bytes": {name: hashlib.sha256(found[name].tobytes()).hexdigest() for name in RUNS},
        "same": next((i for i, pair in enumerate(zip(text, wanted, strict=True)) if pair[0] != pair[1]), len(text)),
    }


def say(found: Sequence[dict[str, Any]]) -> None:
    """Of all ranks."""
    for name in RUNS:
        (worst, others), alike = max(rank["apart"][name] for rank in found), len({r["bytes"][name] for r in found}) == 1
        print(
            f"{name}: {worst:.1e}, {others} tokens of other experts; ranks have {'' if alike else 'not '}the same bytes"
        )
    print(f"greedy text: the whole model's first {min(rank['same'] for rank in found)} of {TEXT} tokens")
    print(f"worst: {max(rank['apart'][name][0] for rank in found for name in RUNS):.1e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("whole", type=Path)
    parser.add_argument("slices", type=Path)
    parser.add_argument("--vocabulary", type=int, default=384, help="ids are below")
    parser.add_argument("--limit", type=Path, nargs=2, metavar=("F16", "F32"))
    given = parser.parse_args()
    vocabulary = given.vocabulary
    if ranks.launched():
        own = ranks.meet(given.slices, "cuda", seed=0)
        whole = measure(Generator(given.whole, device="cuda"), vocabulary)
        rank = Generator(own.path, device="cuda", group=own.group)
        own.store.set(f"slice_logits.{own.rank}", json.dumps(compare(rank, whole, vocabulary)))
        if own.rank == 0:
            say([json.loads(own.store.get(f"slice_logits.{other}")) for other in range(own.world)])
        own.leave()
        if own.rank:
            return
    else:
        whole = measure(Generator(given.whole), vocabulary)
        models = [Generator(path, threads=1, group="slices") for path in ranks_in(given.slices).values()]
        with ThreadPoolExecutor(len(models)) as pool:
            say(list(pool.map(lambda model: compare(model, whole, vocabulary), models)))
    if given.limit:
        (f16, _), (f32, _) = (measure(Generator(path), vocabulary) for path in given.limit)
        print(f"limit: {4 * max(apart(f16[name], f32[name])[0] for name in RUNS):.1e}")


if __name__ == "__main__":
    main()
