"""A layer of DeepSeek-V3.2 on CUDA: SparseIndexer and CachedAttention with its lists, beside attention to all tokens.

    export PYTHONPATH=tests/support
    python tests/benchmarks/sparse_cuda_bench.py [--repeats 10] [--kernels]

Times are of CUDA graphs of several layers, each with caches of its own; medians. A token's layer has all products of
the layer, of e4m3 weights in blocks of 128, 8 of 256 experts and the shared one. It lacks norms, the router and what
turns an indexer's queries. Caches have room for 65,600 tokens in each row of the first table. Prompts are attention
and the indexer alone, in one call and in steps of 2,048 tokens.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import cuda_kernels as cuda
import torch
from attention_cuda_bench import LATENTS, microseconds, ours
from cuda_bench import Shape, random_rows, routing
from cuda_bench import spec_of as experts_of
from linear_cuda_bench import ours as linears
from linear_cuda_bench import spec_of as linear_of
from linear_cuda_bench import weights_of

from quantmoe.custom_ops.op import IndexerSpec

ATTENTION, INDEXER = LATENTS["deepseek-v3"], IndexerSpec(num_heads=64, head_size=128, top_k=2048)
EXPERTS = Shape(7168, 2048, 257, 9)
SLOTS, LAYERS = 65_600, 4
Call = Callable[[], object]


def indexer(tokens: int, past: int, slots: int) -> tuple[Call, torch.Tensor]:
    """Return a call on random inputs, bf16, with a cache of its own, and its lists."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    keys = random(1, 1, slots, INDEXER.head_size)
    weights = torch.rand(1, tokens, INDEXER.num_heads, device="cuda")
    rows = torch.tensor([[0, tokens, past]], dtype=torch.int32, device="cuda")
    query = random(1, tokens, INDEXER.num_heads * INDEXER.head_size)
    inputs = [query, random(1, tokens, INDEXER.head_size), weights, keys, rows, rows.new_zeros(1, 1).long()]
    plan = cuda.plan_shapes(INDEXER, "bf16", [x.shape for x in inputs], cuda.query())
    selected = torch.full((1, tokens, 1, INDEXER.top_k), -1, dtype=torch.int32, device="cuda")
    workspace = torch.empty(max(1, plan.workspace_bytes), dtype=torch.uint8, device="cuda")
    return partial(cuda.launch_node, INDEXER, plan, inputs, [selected, keys], workspace), selected


def both(tokens: int, past: int, slots: int) -> tuple[Call, Call, Call]:
    """Return the indexer, attention to its lists, which are there, and attention to all tokens."""
    select, selected = indexer(tokens, past, slots)
    select()
    attend = (ours(ATTENTION, 1, tokens, past, slots, selected=lists) for lists in (selected, None))
    return select, *attend


def products() -> tuple[list[Call], list[Call]]:
    """Return what a layer multiplies before its attention, and after."""
    generator = torch.Generator("cuda").manual_seed(0)

    def linear(inputs: int, outputs: int) -> Call:
        spec = linear_of((outputs, inputs), "fp8-128")
        x = torch.randn(1, inputs, device="cuda", dtype=torch.bfloat16)
        return linears(spec, [weights_of(spec, generator)], x)[0]

    def by_heads(inputs: int, outputs: int) -> Call:
        w, x = (torch.randn(128, n, inputs, device="cuda", dtype=torch.bfloat16) for n in (outputs, 1))
        return lambda: w @ x.mT

    spec = experts_of(EXPERTS, "fp8-128")
    layer = cuda.CudaMoE(spec, *(random_rows(spec, p, generator) for p in ("w13", "w2")))
    x = torch.randn(1, 7168, device="cuda", dtype=torch.bfloat16)
    ids, weights = routing(EXPERTS, 1, 0, zipf=False)
    prepared, output = layer.prepare(x, ids), torch.empty_like(x)
    workspace = torch.empty(max(1, prepared[1].workspace_bytes), dtype=torch.uint8, device="cuda")
    experts = partial(layer.launch, prepared, x, ids, weights, output, workspace)
    low, queries, small, indexed = (
        linear(*sizes) for sizes in ((7168, 2112), (1536, 24576), (7168, 192), (1536, 8192))
    )
    return [low, queries, small, indexed, by_heads(128, 512)], [by_heads(512, 128), linear(16384, 7168), experts]


def tokens(repeats: int) -> None:
    before, after = products()
    print(
        "| tokens before | indexer us | lists us | all us | layer us | with all | indexer, share |\n" + "|--:" * 7 + "|"
    )
    for past in (2_047, 4_095, 16_383, 65_535):
        calls = [both(1, past, SLOTS) for _ in range(LAYERS)]
        parts = [microseconds([call[i] for call in calls], repeats) for i in range(3)]
        layers = [
            microseconds([partial(in_turn, [*before, *(call[i] for i in own), *after]) for call in calls], repeats)
            for own in ((0, 1), (2,))
        ]
        row = [*parts, *layers]
        print(f"| {past + 1} |", *(f"{us:.1f} |" for us in row), f"{parts[0] / layers[0]:.3f} |", flush=True)


def in_turn(calls: list[Call]) -> None:
    for call in calls:
        call()


def prompts(repeats: int) -> None:
    print("| tokens | steps of | indexer us | lists us | all us | ratio |\n" + "|--:" * 6 + "|")
    for length, step in ((4096, 4096), (16384, 16384), (16384, 2048), (65536, 2048)):
        found = [0.0, 0.0, 0.0]
        some = range(0, length, step) if length < 65536 else (14336, 30720, 63488)
        for past in some:
            for i, call in enumerate(both(step, past, length)):
                found[i] += microseconds([call], repeats)
            torch.cuda.empty_cache()
        name = step if length < 65536 else f"{step}, three of them"
        ratio = found[2] / (found[0] + found[1])
        print(f"| {length} | {name} |", *(f"{us:.0f} |" for us in found), f"{ratio:.2f} |", flush=True)


def kernels() -> None:
    """Print each kernel's time, of a token and of a prompt."""
    for count, past, slots in ((1, 65_535, SLOTS), (1, 4_095, SLOTS), (2048, 14_336, 16_384)):
        calls = both(count, past, slots)
        for call in calls:
            call()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for call in calls * 3:
                call()
            torch.cuda.synchronize()
        print(f"{count} after {past}")
        for event in profile.events():
            print(f"  {event.name[:60]} {event.device_time:.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--kernels", action="store_true", help="print each kernel's time too")
    args = parser.parse_args()
    tokens(args.repeats)
    prompts(args.repeats)
    if args.kernels:
        kernels()


if __name__ == "__main__":
    main()
