"""Time of whole MoE layers on one GPU: CUDA graph replay, weights colder than L2, medians.

    python cuda_bench.py [--shapes qwen3-30b-a3b,...] [--tokens 1,8,...] [--formats int4,mxfp4,...] [--json out.json]

Each graph holds several layers that rotate over copies of the weights and have their own ids, so that between two uses
of any byte far more than L2 has been read. `floor` is the larger of touched bytes over the measured read bandwidth and
FLOPs over the measured matrix rate.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Callable
from typing import Any

import torch

from quantmoe.custom_ops import cuda
from quantmoe.custom_ops.layouts import marlin
from quantmoe.custom_ops.op import MoESpec, Projection
from quantmoe.custom_ops.shapes import SHAPES, Shape

L2_BYTES = 60 << 20


#: format, group_size, scale type, zero points
FORMATS = {
    "int4": ("int4", 128, "bf16", 0),
    "int4-g32": ("int4", 32, "bf16", 0),
    "int4-zero": ("int4", 128, "f16", 1),
    "int8": ("int8", -1, "bf16", 0),
    "fp8": ("fp8_e4m3", -1, "bf16", 0),
    "fp8-128": ("fp8_e4m3", 128, "f32", 0),
    "mxfp4": ("mxfp4", 32, "e8m0", 0),
    "nvfp4": ("nvfp4", 16, "e4m3", 0),
}


def spec_of(s: Shape, name: str) -> MoESpec:
    kind, group_size, scale_type, zeros = FORMATS[name]
    w = Projection(kind, group_size, scale_type, "none", layout="marlin", zero_points=zeros)
    return MoESpec(s.experts, s.hidden, s.intermediate, w, w)


def random_rows(spec: MoESpec, projection: str, generator: torch.Generator) -> torch.Tensor:
    """uint8 [E, row bytes]: random codes, scales near the usual ones."""
    parts = marlin._Parts(spec, projection)
    rows = torch.empty((spec.num_experts, parts.row_bytes), dtype=torch.uint8, device="cuda")
    for row in rows:
        row.random_(0, 256, generator=generator)

    def put(name: str, values: torch.Tensor) -> None:
        rows[:, parts.slices[name]] = values.view(torch.uint8).view(spec.num_experts, -1)

    def uniform(name: str, size: int) -> torch.Tensor:
        at = parts.slices[name]
        return torch.rand((spec.num_experts, (at.stop - at.start) // size), device="cuda", generator=generator) + 0.5

    dtype = {
        "f32": torch.float32,
        "f16": torch.float16,
        "bf16": torch.bfloat16,
        "e8m0": torch.float8_e8m0fnu,
        "e4m3": torch.float8_e4m3fn,
    }[parts.attributes.scale_type]
    # products keep unit variance, about
    spread = {"int4": 5, "int8": 74, "fp8_e4m3": 115, "mxfp4": 3, "nvfp4": 3}[parts.attributes.format] * parts.K**0.5
    put("scales", (uniform("scales", dtype.itemsize) / (1 if dtype is torch.float8_e4m3fn else spread)).to(dtype))
    if dtype is torch.float8_e4m3fn:
        put("global_scale", uniform("global_scale", 4) / spread)
    rows[:, parts.slices["zero_points"]] &= 15
    if parts.attributes.format == "fp8_e4m3":
        rows[:, parts.slices["codes"]] &= 0xBF  # no code that is not a number
    return rows


def routing(s: Shape, tokens: int, seed: int, zipf: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """ids int32 [T, k], weights f32 [T, k]; experts uniform or with Zipf 1.0 popularity."""
    g = torch.Generator().manual_seed(seed)
    popularity = torch.ones(s.experts)
    if zipf:
        popularity = 1 / (torch.randperm(s.experts, generator=g) + 1.0)
    ids = torch.multinomial(popularity.expand(tokens, -1), s.top_k, generator=g).int()
    weights = torch.rand((tokens, s.top_k), generator=g)
    return ids.cuda(), (weights / weights.sum(1, keepdim=True)).cuda()


def graph_time(body: Callable[[], None], repeats: int) -> float:
    """Median seconds of a replay."""
    body()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    for _ in range(3):
        graph.replay()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in "be")
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


def ceilings() -> tuple[float, float]:
    """(read bytes/s, bf16 FLOP/s) of this GPU: the maximum of 4 GiB, an 8192 cube of random values."""
    x = torch.empty(1 << 32, dtype=torch.uint8, device="cuda").random_().view(torch.int32)
    read = graph_time(lambda: torch.max(x), 10)
    a, b = (torch.randn((8192, 8192), device="cuda", dtype=torch.bfloat16) for _ in "ab")
    matmul = graph_time(lambda: torch.matmul(a, b), 10)
    return 4 * x.numel() / read, 2 * 8192**3 / matmul


def measure(name: str, tokens: int, layers: list[cuda.CudaMoE], zipf: bool, repeats: int) -> dict[str, Any]:
    s = SHAPES[name]
    spec = layers[0].spec
    row_bytes = sum(marlin.row_bytes(spec, p) for p in ("w13", "w2"))
    touched, calls = 0, []
    # As many layers in a graph as read several times L2, each expert of each copy at most a few times.
    count = max(len(layers), 4 if tokens > 64 else 16)
    for i in range(count):
        ids, weights = routing(s, tokens, i, zipf)
        x = torch.randn((tokens, s.hidden), device="cuda").bfloat16()
        layer = layers[i % len(layers)]
        prepared = layer.prepare(x, ids)
        out = torch.empty_like(x)
        workspace = torch.empty(prepared[1].workspace_bytes, dtype=torch.uint8, device="cuda")
        calls.append((layer, prepared, x, ids, weights, out, workspace))
        touched += ids.unique().numel() * row_bytes

    def body() -> None:
        for layer, *arguments in calls:
            layer.launch(*arguments)

    seconds = graph_time(body, repeats) / count
    plan = calls[0][1][1]
    return {
        "shape": name,
        "tokens": tokens,
        "format": spec.w13.format,
        "group_size": spec.w13.group_size,
        "zipf": zipf,
        "us": seconds * 1e6,
        "bytes": touched / count,
        "flops": 6 * tokens * s.top_k * s.hidden * s.intermediate,
        "path": cuda.PATHS[plan.path],
        "plan": {
            which: [getattr(getattr(plan, which), field[0]) for field in cuda.Gemm._fields_] for which in ("w13", "w2")
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shapes", default="qwen3-30b-a3b,mixtral-8x7b,gpt-oss-120b,deepseek-v3-tp8")
    parser.add_argument("--tokens", default="1,8,64,512,4096")
    parser.add_argument("--formats", default="int4", help=", ".join(FORMATS))
    parser.add_argument("--zipf", action="store_true")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--json")
    args = parser.parse_args()
    bandwidth, rate = ceilings()
    print(f"{torch.cuda.get_device_name()}: read {bandwidth / 1e12:.2f} TB/s, bf16 product {rate / 1e12:.0f} TFLOP/s")
    generator = torch.Generator(device="cuda").manual_seed(0)
    results = []
    for name, kind in itertools.product(args.shapes.split(","), args.formats.split(",")):
        spec = spec_of(SHAPES[name], kind)
        one = spec.num_experts * sum(marlin.row_bytes(spec, p) for p in ("w13", "w2"))
        copies = max(2, -(-8 * L2_BYTES // one))
        layers = [cuda.CudaMoE(spec, *(random_rows(spec, p, generator) for p in ("w13", "w2"))) for _ in range(copies)]
        for tokens in map(int, args.tokens.split(",")):
            r = measure(name, tokens, layers, args.zipf, args.repeats)
            r["floor_us"] = max(r["bytes"] / bandwidth, r["flops"] / rate) * 1e6
            results.append(r)
            print(
                f"{name:16} {kind:9} T={tokens:<5} {r['us']:9.1f} us  floor {r['floor_us']:8.1f}  "
                f"{r['bytes'] / r['us'] / 1e6:5.2f} TB/s {r['flops'] / r['us'] / 1e6:6.1f} TFLOP/s  "
                f"{r['path']} {r['plan']}",
                flush=True,
            )
        del layers
        torch.cuda.empty_cache()
    if args.json:
        with open(args.json, "w") as f:
            json.dump(
                {"device": torch.cuda.get_device_name(), "read": bandwidth, "rate": rate, "results": results},
                f,
                indent=1,
            )


if __name__ == "__main__":
    main()
