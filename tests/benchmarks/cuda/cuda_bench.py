"""Time of whole MoE layers on one GPU: CUDA graph replay, weights colder than L2, medians.

    PYTHONPATH=tests python tests/benchmarks/cuda/cuda_bench.py [--shapes qwen3-30b-a3b,2048/1024/64/8,...]
        [--tokens 1,8,512..4096] [--formats int4,...] [--activation swiglu_oai] [--warm] [--against humming,marlin]
        [--json out.json] [--plot out.png]

A shape without a name is hidden / intermediate / experts / top_k; 512..4096 are 512, 768, 1024, 1536 and so on.

Each graph holds several layers that rotate over copies of the weights and have their own ids, so that between two uses
of any byte far more than L2 has been read; with `--warm` they have one copy and the same ids, and what fits stays in
L2, whose bandwidth is no part of `floor`. `floor` is the larger of touched bytes over the measured read bandwidth and
FLOPs over the measured matrix rate.

`--against humming,marlin` (PyPI humming-kernels, vllm) runs the peers on the same weights, ids and tokens; outputs are
compared first, then replays take turns. `best` is the faster peer's time over ours; `sorted` is a peer with the pairs
already sorted by expert, `alone` is each by itself. The last line is the cell with the smallest `best`.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import re
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from support.cuda import cuda_kernels as cuda

from quantmoe.benchmarks.layer_sizes import SHAPES, Shape
from quantmoe.custom_ops.layouts import marlin
from quantmoe.custom_ops.op import MoESpec, Projection
from quantmoe.exporter.command_arguments import steps

L2_BYTES = 60 << 20


#: us of int4 g128 layers on one H200
GOALS = {
    "qwen3-30b-a3b": {1: 15, 8: 42, 64: 88, 512: 120, 4096: 610},
    "mixtral-8x7b": {1: 52, 8: 170, 64: 205, 512: 790, 4096: 5300},
    "gpt-oss-120b": {1: 22, 8: 112, 64: 410, 512: 520, 4096: 1750},
    "deepseek-v3-tp8": {1: 16, 8: 50, 64: 170, 512: 230, 4096: 900},
}

#: module and class of each peer
PEERS = {"humming": ("humming_moe", "HummingMoE"), "marlin": ("marlin_moe", "MarlinMoE")}

#: format, group_size, block_n, scale type, zero points, activations
FORMATS = {
    "int4": ("int4", 128, 1, "bf16", 0, "none"),
    "int4-g32": ("int4", 32, 1, "bf16", 0, "none"),
    "int4-zero": ("int4", 128, 1, "f16", 1, "none"),
    "int8": ("int8", -1, 1, "bf16", 0, "none"),
    "int8-zero": ("int8", 128, 1, "f16", 1, "none"),
    "fp8": ("fp8_e4m3", -1, 1, "bf16", 0, "none"),
    "fp8-128": ("fp8_e4m3", 128, 128, "f32", 0, "none"),
    "w8a8": ("fp8_e4m3", -1, 1, "f32", 0, "fp8_token"),
    "w8a8-128": ("fp8_e4m3", 128, 128, "f32", 0, "fp8_group128"),
    "mxfp4": ("mxfp4", 32, 1, "e8m0", 0, "none"),
    "nvfp4": ("nvfp4", 16, 1, "e4m3", 0, "none"),
    "q4_k": ("q4_k", 256, 1, "k32", 0, "none"),
    "q5_k": ("q5_k", 256, 1, "k32", 0, "none"),
    "q6_k": ("q6_k", 256, 1, "k16", 0, "none"),
}


#: of the activations
LIMITS: dict[str, dict[str, Any]] = {"silu": {}, "swiglu_oai": {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}}


def projection(
    kind: str, group_size: int, block_n: int, scale_type: str, zero_points: int, activations: str
) -> Projection:
    """Return one of FORMATS' rows."""
    return Projection(
        format=kind,
        group_size=group_size,
        block_n=block_n,
        scale_type=scale_type,
        zero_points=zero_points,
        bias=0,
        perm=0,
        pre_scale=0,
        activation_format=activations,
        layout="marlin",
        layout_version=marlin.VERSION,
    )


def spec_of(s: Shape, name: str) -> MoESpec:
    w = projection(*FORMATS[name])
    return MoESpec(
        num_experts=s.experts,
        expert_offset=0,
        hidden_size=s.hidden,
        intermediate_size=s.intermediate,
        activation="silu",
        gated=1,
        swiglu_alpha=0.0,
        swiglu_limit=0.0,
        apply_router_weight_on_input=0,
        w13=w,
        w2=w,
    )


def random_rows(spec: MoESpec, projection: str, generator: torch.Generator) -> torch.Tensor:
    """uint8 [E, row bytes]: random codes, scales near the usual ones."""
    at, (own, n, k, halves) = marlin.row(spec, projection), spec.matrices(projection)
    rows = torch.empty((spec.num_experts, at.bytes), dtype=torch.uint8, device="cuda")
    for row in rows:
        row.random_(0, 256, generator=generator)

    def put(name: str, values: torch.Tensor) -> None:
        rows[:, at.part(name)] = values.view(torch.uint8).view(spec.num_experts, -1)

    def uniform(name: str, size: int) -> torch.Tensor:
        part = at.part(name)
        return (
            torch.rand((spec.num_experts, (part.stop - part.start) // size), device="cuda", generator=generator) + 0.5
        )

    if own.format.endswith("_k"):  # FORMAT.md 3.3: a panel's factors, then its levels, which are random
        factor_bytes = 32 if own.format == "q6_k" else 64
        blocks = rows[:, at.part("scales")].unflatten(1, (-1, factor_bytes + 256))
        factors = torch.rand((*blocks.shape[:2], factor_bytes // 2), device="cuda", generator=generator) + 0.5
        blocks[:, :, :factor_bytes] = (factors / (600 * k**0.5)).half().view(torch.uint8)
        return rows
    dtype = {
        "f32": torch.float32,
        "f16": torch.float16,
        "bf16": torch.bfloat16,
        "e8m0": torch.float8_e8m0fnu,
        "e4m3": torch.float8_e4m3fn,
    }[own.scale_type]
    # products keep unit variance, about
    spread = {"int4": 5, "int8": 74, "fp8_e4m3": 115, "mxfp4": 3, "nvfp4": 3}[own.format] * k**0.5
    scales = uniform("scales", dtype.itemsize)
    if own.block_n > 1:  # the rows of a block have one: here all rows
        panels, group = -(-n // (16 // halves)), own.group_size
        by_block = scales.view(spec.num_experts, panels, 1 if group == -1 else -(-k // max(group, 64)), -1)
        scales = by_block[:, :1, :, :1].expand_as(by_block).reshape(scales.shape)
    put("scales", (scales / (1 if dtype is torch.float8_e4m3fn else spread)).to(dtype))
    if dtype is torch.float8_e4m3fn:
        put("global_scale", uniform("global_scale", 4) / spread)
    rows[:, at.part("zero_points")] &= 15
    if own.format == "fp8_e4m3":
        rows[:, at.part("codes")] &= 0xBF  # no code that is not a number
    return rows


def routing(s: Shape, tokens: int, seed: int, zipf: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids int32 [T, k], weights f32 [T, k]; experts uniform or with Zipf 1.0 popularity."""
    g = torch.Generator().manual_seed(seed)
    popularity = torch.ones(s.experts)
    if zipf:
        popularity = 1 / (torch.randperm(s.experts, generator=g) + 1.0)
    ids = torch.multinomial(popularity.expand(tokens, -1), s.top_k, generator=g).int()
    weights = torch.rand((tokens, s.top_k), generator=g)
    return ids.cuda(), (weights / weights.sum(1, keepdim=True)).cuda()


def capture(bodies: list[Callable[[], None]]) -> list[torch.cuda.CUDAGraph]:
    graphs = []
    for body in bodies:
        body()
        torch.cuda.synchronize()
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            body()
    return graphs


def replay_time(graph: torch.cuda.CUDAGraph) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in "be")
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def times_in_turn(graphs: list[torch.cuda.CUDAGraph], repeats: int) -> list[float]:
    """Median seconds of a replay of each, replayed in turn: all at one clock, whatever power each would draw alone."""
    times = [[replay_time(graph) for graph in graphs] for _ in range(3 + repeats)]
    return [statistics.median(mine) for mine in zip(*times[3:], strict=True)]


def times_alone(graphs: list[torch.cuda.CUDAGraph], seconds: float) -> list[float]:
    """Return the times while nothing else runs, at the clock that this graph's power allows (many tokens draw all of
    it).

    Each has two turns of `seconds`; the second half of the second counts.
    """
    found = [0.0] * len(graphs)
    for i in [*range(len(graphs))] * 2:
        times, start = [], time.perf_counter()
        while time.perf_counter() - start < seconds:
            times.append(replay_time(graphs[i]))
        found[i] = statistics.median(times[len(times) // 2 :])
    return found


def ceilings() -> tuple[float, float, float]:
    """(read bytes/s, bf16 FLOP/s, e4m3 FLOP/s) of this GPU: the maximum of 4 GiB, 8192 cubes of random values."""
    x = torch.empty(1 << 32, dtype=torch.uint8, device="cuda").random_().view(torch.int32)
    (read,) = times_in_turn(capture([lambda: torch.max(x)]), 10)
    a, b = (torch.randn((8192, 8192), device="cuda", dtype=torch.bfloat16) for _ in "ab")
    (matmul,) = times_in_turn(capture([lambda: torch.matmul(a, b)]), 10)
    a, b = (v.to(torch.float8_e4m3fn) for v in (a, b))
    one = torch.ones((), device="cuda")
    (scaled,) = times_in_turn(capture([lambda: torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16)]), 10)
    return 4 * x.numel() / read, 2 * 8192**3 / matmul, 2 * 8192**3 / scaled


def measure(
    name: str,
    s: Shape,
    tokens: int,
    layers: list[cuda.CudaMoE],
    peers: dict[str, list[Any]],
    zipf: bool,
    warm: bool,
    repeats: int,
    alone: float,
) -> dict[str, Any]:
    spec = layers[0].spec
    row_bytes = sum(marlin.row_bytes(spec, p) for p in ("w13", "w2"))
    touched, calls = 0, []
    peer_calls: dict[str, list[Any]] = {peer: [] for peer in peers}
    # As many layers in a graph as read several times L2, each expert of each copy at most a few times.
    count = max(len(layers), 4 if tokens > 64 else 16)
    for i in range(count):
        ids, weights = routing(s, tokens, 0 if warm else i, zipf)
        x = torch.randn((tokens, s.hidden), device="cuda").bfloat16()
        layer = layers[i % len(layers)]
        prepared = layer.prepare(x, ids)
        out = torch.empty_like(x)
        workspace = torch.empty(prepared[1].workspace_bytes, dtype=torch.uint8, device="cuda")
        calls.append((layer, prepared, x, ids, weights, out, workspace))
        for peer, copies in peers.items():
            theirs = copies[i % len(copies)]
            peer_calls[peer].append((theirs, theirs.prepare(x), ids, weights))
        touched += ids.unique().numel() * row_bytes

    def ours() -> None:
        for layer, *arguments in calls:
            layer.launch(*arguments)

    def launch(peer: str, lists: bool) -> None:
        for theirs, *arguments in peer_calls[peer]:
            theirs.launch(*arguments, lists=lists)

    against: dict[str, Any] = {}
    ours()
    for peer, copies in peers.items():
        launch(peer, True)
        difference = max(
            float((mine[5] - other[1]["output"]).float().norm() / mine[5].float().norm())
            for mine, other in zip(calls, peer_calls[peer], strict=True)
        )
        if not difference < 0.01:
            raise ValueError(f"{name} T={tokens}: {peer}'s result differs from ours by {difference:.2g}")
        against[peer] = {"difference": difference, "tiles": copies[0].tiles(tokens)}
    # ours, each peer, each peer with the pairs already sorted by expert
    graphs = capture([ours, *(partial(launch, peer, lists) for lists in (True, False) for peer in peers)])

    def layer_us(seconds: float) -> float:
        return seconds / count * 1e6

    us, *peer_us = map(layer_us, times_in_turn(graphs, repeats))
    for i, peer in enumerate(peers):
        against[peer] |= {"us": peer_us[i], "sorted_us": peer_us[len(peers) + i]}
    alone_us = None
    if peers and alone:
        alone_us, *peer_us = map(layer_us, times_alone(graphs[: 1 + len(peers)], alone))
        for peer, mine in zip(peers, peer_us, strict=True):
            against[peer]["alone_us"] = mine
    plan = calls[0][1][1]
    return {
        "shape": name,
        "tokens": tokens,
        "format": spec.w13.format,
        "group_size": spec.w13.group_size,
        "activation_format": spec.w13.activation_format,
        "zipf": zipf,
        "warm": warm,
        "us": us,
        "alone_us": alone_us,
        "peers": against,
        "bytes": touched / count,
        "flops": 6 * tokens * s.top_k * s.hidden * s.intermediate,
        "path": cuda.PATHS[plan.path],
        "plan": {name: {n: getattr(step, n) for n in cuda.PlanStep.instance} for name, step in plan.steps.items()},
    }


def draw(results: list[dict[str, Any]], file: str) -> None:
    """A panel a layer: us over tokens."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    panels: dict[str, list[dict[str, Any]]] = {}
    for r in results:
        panels.setdefault(f"{r['shape']} {r['format']} group {r['group_size']}", []).append(r)
    figure, axes = plt.subplots(1, len(panels), squeeze=False, figsize=(4 * len(panels), 3.4), layout="constrained")
    for axis, (title, cells) in zip(axes[0], panels.items(), strict=True):
        tokens = [r["tokens"] for r in cells]
        axis.plot(tokens, [r["us"] for r in cells], "o-", label="ours")
        for peer in cells[0]["peers"]:
            axis.plot(tokens, [r["peers"][peer]["us"] for r in cells], "s-", label=peer)
        if goals := [(r["tokens"], r["goal_us"]) for r in cells if "goal_us" in r]:
            axis.plot(*zip(*goals, strict=True), "k--", label="goal")
        axis.plot(tokens, [r["floor_us"] for r in cells], "k:", label="floor")
        axis.set(title=title, xlabel="tokens", ylabel="us a layer", xscale="log", yscale="log")
        axis.grid(which="both", alpha=0.2)
    axes[0][0].legend()
    figure.savefig(file, dpi=120)


def some_of(known: Iterable[str]) -> Callable[[str], list[str]]:
    """argparse's type of a list with commas."""

    def parse(text: str) -> list[str]:
        names = list(filter(None, text.split(",")))
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r}, expected some of {', '.join(known)}")
        return names

    return parse


def shapes(text: str) -> dict[str, Shape]:
    """argparse's type of a list of names and sizes."""
    found = {}
    for name in text.split(","):
        sizes = re.fullmatch(r"(\d+)/(\d+)/(\d+)/(\d+)", name)
        if not sizes and name not in SHAPES:
            raise argparse.ArgumentTypeError(
                f"{name!r}, expected some of {', '.join(SHAPES)}, or sizes as 2048/768/128/8"
            )
        if sizes:
            hidden, intermediate, experts, top_k = map(int, sizes.groups())
            found[name] = Shape(hidden, intermediate, experts, top_k)
        else:
            found[name] = SHAPES[name]
    return found


def counts(text: str) -> list[int]:
    """argparse's type of a list of numbers of tokens and ranges of them."""
    found = []
    for part in text.split(","):
        if not re.fullmatch(r"0*[1-9]\d*(\.\.\d+)?", part):
            raise argparse.ArgumentTypeError(f"{part!r}, expected numbers of tokens, or a range as 1..8192")
        found += steps(part)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    usual = "qwen3-30b-a3b,mixtral-8x7b,gpt-oss-120b,deepseek-v3-tp8"
    parser.add_argument("--shapes", type=shapes, default=usual, help=f"{', '.join(SHAPES)}, or H/I/E/k")
    parser.add_argument("--tokens", type=counts, default="1,8,64,512,4096")
    parser.add_argument("--formats", type=some_of(FORMATS), default="int4", help=", ".join(FORMATS))
    parser.add_argument("--activation", choices=("silu", "swiglu_oai"), default="silu", help="swiglu_oai: gpt-oss's")
    parser.add_argument("--zipf", action="store_true")
    parser.add_argument("--warm", action="store_true", help="the same layer again and again")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--against", type=some_of(PEERS), default="", help=f"{', '.join(PEERS)}; format int4 only")
    parser.add_argument("--alone", type=float, default=0.5, help="with --against: also seconds of each side alone")
    parser.add_argument("--json")
    parser.add_argument("--plot")
    args = parser.parse_args()
    if args.against and args.formats != ["int4"]:
        parser.error(f"--against: expected --formats int4, not {','.join(args.formats)}")
    if args.against and args.activation != "silu":
        parser.error(f"--against: expected --activation silu, not {args.activation}")
    if not torch.cuda.is_available():
        parser.error("torch finds no CUDA device")
    makers = {}
    for peer in args.against:
        module = importlib.import_module(PEERS[peer][0])
        makers[module.NAME] = getattr(module, PEERS[peer][1])
    bandwidth, rate, fp8_rate = ceilings()
    print(
        f"{torch.cuda.get_device_name()}: read {bandwidth / 1e12:.2f} TB/s, bf16 product {rate / 1e12:.0f} TFLOP/s, "
        f"e4m3 product {fp8_rate / 1e12:.0f} TFLOP/s"
    )
    generator = torch.Generator(device="cuda").manual_seed(0)
    results = []
    for (name, shape), kind in itertools.product(args.shapes.items(), args.formats):
        spec = replace(spec_of(shape, kind), activation=args.activation, **LIMITS[args.activation])
        one = spec.num_experts * sum(marlin.row_bytes(spec, p) for p in ("w13", "w2"))
        copies = 1 if args.warm else max(2, -(-8 * L2_BYTES // one))
        rows = [[random_rows(spec, p, generator) for p in ("w13", "w2")] for _ in range(copies)]
        layers = [cuda.CudaMoE(spec, *pair) for pair in rows]
        peers = {peer: [make(layer, shape.top_k, args.tokens) for layer in layers] for peer, make in makers.items()}
        for tokens in args.tokens:
            r = measure(name, shape, tokens, layers, peers, args.zipf, args.warm, args.repeats, args.alone)
            peak = rate if spec.w13.activation_format == "none" else fp8_rate
            r["floor_us"] = max(r["bytes"] / bandwidth, r["flops"] / peak) * 1e6
            if kind == "int4" and tokens in GOALS.get(name, {}):
                r["goal_us"] = GOALS[name][tokens]
            results.append(r)
            if found := r["peers"].values():
                r["best"] = min(f["us"] for f in found) / r["us"]
                print(f"{r['best']:5.2f}x best", end="")
                for peer, f in r["peers"].items():
                    alone = f", {f['alone_us'] / r['alone_us']:.2f}x alone" if args.alone else ""
                    print(
                        f" | {peer} {f['us'] / r['us']:.2f}x ({f['sorted_us'] / r['us']:.2f}x sorted{alone}) "
                        f"{f['us']:.1f} us, difference {f['difference']:.1e}",
                        end="",
                    )
                print()
            print(
                f"{name:16} {kind:9} T={tokens:<5} {r['us']:9.1f} us  floor {r['floor_us']:8.1f}  "
                f"{r['bytes'] / r['us'] / 1e6:5.2f} TB/s {r['flops'] / r['us'] / 1e6:6.1f} TFLOP/s  "
                f"{r['path']} {r['plan']}",
                flush=True,
            )
        del rows, layers, peers
        torch.cuda.empty_cache()
    if args.against:
        worst = min(results, key=lambda r: r["best"])
        behind = sum(r["best"] < 1 for r in results)
        print(
            f"worst: {worst['shape']} T={worst['tokens']}, {worst['best']:.2f}; {behind} of {len(results)} cells behind"
        )
    if args.json:
        with open(args.json, "w", encoding="utf-8") as f:
            json.dump(
                {
                    "device": torch.cuda.get_device_name(),
                    "read": bandwidth,
                    "rate": rate,
                    "fp8_rate": fp8_rate,
                    "results": results,
                },
                f,
                indent=1,
            )
    if args.plot:
        draw(results, args.plot)


if __name__ == "__main__":
    main()
