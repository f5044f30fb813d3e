"""The generation loop on a GPU beside the captured step alone: tokens a second of Generator, single and in batches.

The graph is one of ort_cuda_bench, which has the sizes of a model and random weights:

    python tests/benchmarks/cuda/ort_cuda_bench.py graph qwen.onnx
    python tests/benchmarks/cuda/loop_cuda_bench.py qwen.onnx  # with onnxruntime-gpu and a GPU

The step alone is the loop's own, over its cache, with its last token: replayed, and waited for each time. Rates of
single texts are the best of three. A batch runs once; the first of a size also allocates its cache, captures its step.
Threads share one session: with CUDA graphs they take turns, without each launches its own kernels.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx
from benchmarks.cuda.ort_cuda_bench import fill

from quantmoe.exporter.folder.metadata import SHARE_BUFFER
from quantmoe.exporter.folder.sampling_options import Sampling
from quantmoe.runtime.cache import SharedCache
from quantmoe.runtime.cache_memory import DecodeStep
from quantmoe.runtime.generate import Generator

SAMPLINGS = {
    "greedy": None,
    "temperature 0.7, top-k 20, top-p 0.8": Sampling(0.7, 20, 0.8, seed=1),
    "the same with penalties": Sampling(
        0.7, 20, 0.8, seed=1, repetition_penalty=1.1, presence_penalty=0.5, no_repeat_ngram_size=4
    ),
    "temperature 1": Sampling(1.0, 0, seed=1),
    "min-p 0.05": Sampling(1.0, 0, min_p=0.05, seed=1),
    "top-p 0.95": Sampling(1.0, 0, 0.95, seed=1),
}


def milliseconds(call: Callable[[], object], runs: int = 40) -> float:
    """Return the median time of a call."""
    times = []
    for _ in range(runs):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return float(np.median(times)) * 1e3


def alone(step: DecodeStep, length: int) -> float:
    """Return the milliseconds of a step after ``length`` tokens."""
    return milliseconds(lambda: step.launch(length))


def single(model: Generator, prompt: list[int], count: int) -> None:
    """Print rates of one text."""
    cache = model.cache()
    assert isinstance(cache, SharedCache)
    model.generate(prompt, count // 2, cache=cache)
    base = alone(cache.step(), len(cache.tokens))
    print(f"the step alone after {len(cache.tokens)}: {base:.3f} ms, {1e3 / base:.0f} tokens/s")
    del cache
    for where in ("host", "GPU"):
        choice, model.choice = model.choice, model.choice if where == "GPU" else None
        for name, sampling in SAMPLINGS.items():
            found = [model.generate(prompt, count, sampling=sampling) for _ in range(3)]
            rate = max(one.tokens_per_second for one in found)
            print(f"chosen on the {where}, {name}: {rate:.0f} tokens/s, {rate * base / 1e3:.1%} of the step alone")
        model.choice = choice


def conversations(model: Generator, rng: np.random.Generator, length: int) -> float:
    """Print the time to the first token of new conversations. Return a prompt's milliseconds."""
    assert model.vocabulary is not None
    prompts = iter(rng.integers(1, model.vocabulary, (12, length)).tolist())
    first = milliseconds(lambda: next(model.stream(next(prompts), 2)), 6)
    cache = model.cache()

    def read() -> None:
        cache.rewind(0)
        cache.append(next(prompts))

    prompt = milliseconds(read, 6)
    print(f"a new conversation's first token after {length}: {first:.2f} ms, its prompt in a cache {prompt:.2f} ms")
    return prompt


def batches(model: Generator, prompts: list[list[int]], count: int, prompt: float) -> None:
    """Print rates of texts that run together; prompt: milliseconds of one."""
    for name in list(SAMPLINGS)[:2]:
        batch = model.stream_batch(prompts, count, sampling=SAMPLINGS[name])
        list(batch)
        base = alone(batch.step(), max(map(len, prompts)) + count - 1)
        rate, own = len(prompts) * (count - 1) / batch.decode, len(prompts) / base * 1e3
        read, one = batch.prompt / batch.prefill, len(prompts[0]) / prompt * 1e3
        print(
            f"batch {len(prompts)}, {name}: {rate:,.0f} tokens/s, {rate / own:.1%} of the step alone ({own:,.0f}); "
            f"prompts {read:,.0f} tokens/s, {read / one:.1%} of one alone ({one:,.0f})"
        )


def threads(model: Generator, prompts: list[list[int]], count: int) -> None:
    """Print the rate of the texts that threads of one session make at once, and whether one thread makes the same."""

    def text(prompt: list[int]) -> tuple[list[int], float]:
        found = model.generate(prompt, count)
        return list(found.tokens), found.tokens_per_second

    expected = [text(prompt)[0] for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        list(pool.map(text, prompts))  # captures a graph for each thread
        begin = time.perf_counter()
        found = list(pool.map(text, prompts))
        seconds = time.perf_counter() - begin
    same = [tokens for tokens, _ in found] == expected
    print(
        f"{'with' if model.cuda_graph else 'without'} CUDA graphs, {len(prompts)} threads: "
        f"{sum(rate for _, rate in found):.0f} tokens/s after the prompts, {len(prompts) * count / seconds:.0f} with "
        f"them; {'the same tokens as' if same else 'OTHER TOKENS THAN'} one thread's",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("graph", type=Path)
    parser.add_argument("--prompt", type=int, default=1920)
    parser.add_argument("--tokens", type=int, default=256, help="of single texts; batches have half as many")
    parser.add_argument("--batches", nargs="*", type=int, default=[8, 32, 128])
    parser.add_argument("--threads", nargs="*", type=int, default=[], help="of one session, such as 1 2 4; alone")
    parser.add_argument("--folder", type=Path, default=Path("loop-cuda-bench"), help="scratch")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    fill(given.graph, given.folder)
    model = onnx.load(given.folder / "model.onnx", load_external_data=False)
    onnx.helper.set_model_props(model, {p.key: p.value for p in model.metadata_props} | {SHARE_BUFFER: "true"})
    onnx.save(model, given.folder / "model.onnx")
    rng = np.random.default_rng(0)
    for graph in (True, False) if given.threads else ():
        with Generator(given.folder, device="cuda", cuda_graph=graph) as generator:
            assert generator.vocabulary is not None
            prompts = rng.integers(1, generator.vocabulary, (max(given.threads), given.prompt)).tolist()
            for count in given.threads:
                threads(generator, prompts[:count], given.tokens)
    if given.threads:
        return
    with Generator(given.folder, device="cuda") as generator:
        assert generator.vocabulary is not None
        prompts = rng.integers(1, generator.vocabulary, (max([1, *given.batches]), given.prompt)).tolist()
        single(generator, prompts[0], given.tokens)
        conversations(generator, rng, 128)
        prompt = conversations(generator, rng, given.prompt)
        for size in given.batches:
            batches(generator, prompts[:size], given.tokens // 2, prompt)


if __name__ == "__main__":
    main()
