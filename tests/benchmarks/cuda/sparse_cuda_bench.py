"""A layer with an indexer on CUDA: SparseIndexer and CachedAttention with its lists, beside attention to all tokens.

    export PYTHONPATH=tests
    python tests/benchmarks/cuda/sparse_cuda_bench.py [--model minimax-m3] [--repeats 10] [--kernels]

Times are of CUDA graphs of several layers, each with caches of its own; medians. A token's layer has all products of
the layer, of e4m3 weights in blocks of 128, its experts and the shared one. It lacks norms, the router and what turns
an indexer's queries. Caches have room for 65,600 tokens in each row of the first table. Prompts are attention and the
indexer alone, in one call and in steps of 2,048 tokens. Queries and keys are random, so each token of a prompt selects
something else. In "alike" 64 neighbours have one query of the indexer, so they select alike.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from benchmarks.attention_spec import spec_of
from benchmarks.cuda.attention_cuda_bench import LATENTS, microseconds, ours
from benchmarks.cuda.cuda_bench import Shape, random_rows, routing
from benchmarks.cuda.cuda_bench import spec_of as experts_of
from benchmarks.cuda.linear_cuda_bench import ours as linears
from benchmarks.cuda.linear_cuda_bench import spec_of as linear_of
from benchmarks.cuda.linear_cuda_bench import weights_of
from support.cuda import cuda_kernels as cuda

from quantmoe.custom_ops.op import AttentionSpec, IndexerSpec

SLOTS, LAYERS, ALIKE = 65_600, 4, 64
Call = Callable[[], object]


@dataclass(frozen=True)
class Layer:
    """A model's layer.

    Attributes:
        experts: with the shared one. before: [inputs, outputs] of the products before attention. by_heads: what 128
            heads multiply before and after it, if they do. after: of the product after it.
    """

    attention: AttentionSpec
    indexer: IndexerSpec
    experts: Shape
    before: tuple[tuple[int, int], ...]
    after: tuple[int, int]
    by_heads: tuple[int, int] | None = None


MODELS = {
    "deepseek-v3.2": Layer(
        attention=LATENTS["deepseek-v3"],
        indexer=IndexerSpec(num_heads=64, head_size=128, top_k=2048),
        experts=Shape(7168, 2048, 257, 9),
        before=((7168, 2112), (1536, 24576), (7168, 192), (1536, 8192)),
        after=(16384, 7168),
        by_heads=(128, 512),
    ),
    "minimax-m3": Layer(
        attention=replace(spec_of(64, 4, 128, "head"), rotary_size=64),
        indexer=IndexerSpec(
            num_heads=4, head_size=128, top_k=2048, num_groups=4, relu=0, block_size=128, best_slot=1, local_blocks=1
        ),
        experts=Shape(6144, 3072, 129, 5),
        before=((6144, 9216), (6144, 640)),
        after=(8192, 6144),
    ),
}


def indexer(spec: IndexerSpec, tokens: int, past: int, slots: int, alike: int = 1) -> tuple[Call, torch.Tensor]:
    """Return a call on random inputs, bf16, with a cache of its own, and its lists.

    Args:
        alike: neighbours that have the same query.
    """

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    keys = random(1, 1, slots, spec.head_size)
    weights = torch.rand(1, -(-tokens // alike), spec.num_heads, device="cuda")
    rows = torch.tensor([[0, tokens, past]], dtype=torch.int32, device="cuda")
    query = random(1, -(-tokens // alike), spec.num_heads * spec.head_size)
    query, weights = (x.repeat_interleave(alike, 1)[:, :tokens].contiguous() for x in (query, weights))
    inputs = [query, random(1, tokens, spec.head_size), weights, keys, rows, rows.new_zeros(1, 1).long()]
    plan = cuda.plan_shapes(spec, "bf16", [x.shape for x in inputs], device=cuda.query())
    selected = torch.full((1, tokens, spec.num_groups, spec.top_k), -1, dtype=torch.int32, device="cuda")
    workspace = torch.empty(max(1, plan.workspace_bytes), dtype=torch.uint8, device="cuda")
    return partial(cuda.launch_node, spec, plan, inputs, [selected, keys], workspace), selected


def both(layer: Layer, tokens: int, past: int, slots: int, alike: int = 1) -> tuple[Call, Call, Call]:
    """Return the indexer, attention to its lists, which are there, and attention to all tokens."""
    select, selected = indexer(layer.indexer, tokens, past, slots, alike)
    select()
    attend = (ours(layer.attention, 1, tokens, past, slots, selected=lists) for lists in (selected, None))
    return select, *attend


def products(layer: Layer) -> tuple[list[Call], list[Call]]:
    """Return what a layer multiplies before its attention, and after."""
    generator = torch.Generator("cuda").manual_seed(0)

    def linear(inputs: int, outputs: int) -> Call:
        spec = linear_of((outputs, inputs), "fp8-128")
        x = torch.randn(1, inputs, device="cuda", dtype=torch.bfloat16)
        return linears(spec, [weights_of(spec, generator)], x)[0]

    def by_heads(inputs: int, outputs: int) -> Call:
        w, x = (torch.randn(128, n, inputs, device="cuda", dtype=torch.bfloat16) for n in (outputs, 1))
        return lambda: w @ x.mT

    spec, hidden = experts_of(layer.experts, "fp8-128"), layer.after[1]
    made = cuda.CudaMoE(spec, *(random_rows(spec, p, generator) for p in ("w13", "w2")))
    x = torch.randn(1, hidden, device="cuda", dtype=torch.bfloat16)
    ids, weights = routing(layer.experts, 1, 0, zipf=False)
    prepared, output = made.prepare(x, ids), torch.empty_like(x)
    workspace = torch.empty(max(1, prepared[1].workspace_bytes), dtype=torch.uint8, device="cuda")
    experts = partial(made.launch, prepared, x, ids, weights, output, workspace)
    turned = [by_heads(*sizes) for sizes in ([layer.by_heads, layer.by_heads[::-1]] if layer.by_heads else [])]
    before = [linear(*sizes) for sizes in layer.before]
    return [*before, *turned[:1]], [*turned[1:], linear(*layer.after), experts]


def tokens(layer: Layer, repeats: int) -> None:
    before, after = products(layer)
    print(
        "| tokens before | indexer us | lists us | all us | layer us | with all | indexer, share |\n" + "|--:" * 7 + "|"
    )
    for past in (2_047, 4_095, 16_383, 65_535):
        calls = [both(layer, 1, past, SLOTS) for _ in range(LAYERS)]
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


def prompts(layer: Layer, repeats: int) -> None:
    print("| tokens | steps of | indexer us | lists us | alike us | all us | ratio | alike |\n" + "|--:" * 8 + "|")
    for length, step in ((4096, 4096), (16384, 16384), (16384, 2048), (65536, 2048)):
        found = [0.0] * 4  # indexer, lists, lists of tokens that select alike, all
        some = range(0, length, step) if length < 65536 else (14336, 30720, 63488)
        for past in some:
            select, lists, attend = both(layer, step, past, length)
            alike = both(layer, step, past, length, ALIKE)[1]
            for i, call in enumerate((select, lists, alike, attend)):
                found[i] += microseconds([call], repeats)
            del select, lists, attend, alike, call
            torch.cuda.empty_cache()
        name = step if length < 65536 else f"{step}, three of them"
        ratios = (found[3] / (found[0] + us) for us in found[1:3])
        print(f"| {length} | {name} |", *(f"{us:.0f} |" for us in found), *(f"{x:.2f} |" for x in ratios), flush=True)


def kernels(layer: Layer) -> None:
    """Print each kernel's time, of a token and of a prompt."""
    for count, past, slots in ((1, 65_535, SLOTS), (1, 4_095, SLOTS), (2048, 14_336, 16_384)):
        calls = both(layer, count, past, slots)
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
    parser.add_argument("--model", choices=MODELS, default="deepseek-v3.2")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--kernels", action="store_true", help="print each kernel's time too")
    args = parser.parse_args()
    layer = MODELS[args.model]
    tokens(layer, args.repeats)
    prompts(layer, args.repeats)
    if args.kernels:
        kernels(layer)


if __name__ == "__main__":
    main()
