"""Tokens a second of a model on the CPU with memory for a part of its experts (docs/lab/expert-offloading.md).

    python -m quantmoe.benchmarks.small_memory OUTDIR --experts disk --ram 800000000
    python -m quantmoe.benchmarks.small_memory MODEL.gguf

A GGUF file is llama.cpp's, mapped and not repacked. Tokens are random ids, so that routes have as little locality as
the model's router gives them. The CRC is of all logits. A run with all experts in memory has an equal one. Start it
within a control group to limit its page cache, too.
"""

from __future__ import annotations

import argparse
import resource
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from quantmoe.benchmarks.bench_engines import LlamaCpp
from quantmoe.custom_ops import native
from quantmoe.exporter.reading.checkpoint import is_gguf
from quantmoe.ort_ext import experts_report, library_path
from quantmoe.runtime.generate import Generator


def ours(model: Generator, ids: np.ndarray) -> Iterator[np.ndarray]:
    past = model.start()
    for token in ids:
        logits, past = model.step(np.array([[token]]), past)
        yield logits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="an exported model, or a GGUF file")
    parser.add_argument("--experts", choices=["host", "disk", "auto"])
    parser.add_argument("--ram", type=int, help="bytes")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--warm-up", type=int, default=8, help="tokens before the clock starts")
    parser.add_argument("--tokens", type=int, default=32)
    given = parser.parse_args()
    begin = time.perf_counter()
    ids = np.random.default_rng(0).integers(0, 1 << 12, given.warm_up + given.tokens)
    model: LlamaCpp | Generator  # lives until its experts were counted
    if is_gguf(Path(given.model)):
        model = LlamaCpp(given.model, given.threads or native.cpus(), repack=False)
        steps = model.one_by_one(ids)
    else:
        model = Generator(given.model, threads=given.threads, experts=given.experts, ram=given.ram)
        steps = ours(model, ids)
    checksum, times = 0, []
    for logits in steps:
        times.append(time.perf_counter())
        checksum = zlib.crc32(logits.tobytes(), checksum)
    seconds = times[-1] - times[given.warm_up - 1]
    print(
        f"{given.tokens / seconds:.2f} tokens/s, {times[0] - begin:.2f} s to load and the first token, "
        f"CRC {checksum:08x}, {resource.getrusage(resource.RUSAGE_SELF).ru_majflt} major faults"
    )
    for counts in experts_report(library_path()):
        hits = counts["hits"] / max(1, counts["hits"] + counts["misses"])
        read = counts["bytes_read"] / len(ids) / 1e6
        print(f"  hit rate {hits:.3f}, {read:.0f} MB read a token, {counts}")


if __name__ == "__main__":
    main()
