"""QuantLinear on CUDA beside torch's bf16 product of the same sizes.

    PYTHONPATH=tests python tests/benchmarks/cuda/linear_cuda_bench.py [--shapes 5120x2048,...] [--rows 1,8,...]
        [--apart] [--formats int4,fp8,bf16] [--repeats 10] [--json out.json]

Shapes are out x in features. Times are of CUDA graphs of many calls on weights that take turns, so that each finds its
own out of L2, replayed in turn with torch's; medians of a call. x and y stay where they are. Calls of ours overlap
(programmatic dependent launch), torch's do not; with `--apart` a small kernel of torch's stands after each of both and
its time is in both.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from benchmarks.cuda.cuda_bench import (
    FORMATS,
    L2_BYTES,
    capture,
    projection,
    random_rows,
    times_in_turn,
)
from support.cuda import cuda_kernels as cuda

from quantmoe.custom_ops.layouts import marlin
from quantmoe.custom_ops.op import LinearSpec

#: q, k and v joined, and o, of qwen3-30b-a3b and gpt-oss-20b; others of larger models, joined as the exporter joins
SHAPES = [
    *((5120, 2048), (2048, 4096), (5120, 2880), (2880, 4096), (6144, 4096)),
    *((9216, 4096), (4096, 8192), (24576, 1536), (7168, 16384)),
]
ROWS = (1, 8, 16, 32, 48, 64, 96, 128, 256, 512, 1024, 2048, 4096)
Call = Callable[[], object]


def spec_of(shape: tuple[int, int], name: str) -> LinearSpec:
    plain = {"bf16": ("bf16", -1, 1, "f32", 0, "none")}
    w = projection(*(FORMATS | plain)[name])
    return LinearSpec(in_features=shape[1], out_features=shape[0], w=w)


def weights_of(spec: LinearSpec, generator: torch.Generator) -> torch.Tensor:
    if spec.w.format != "bf16":
        return random_rows(spec.moe, "w2", generator)
    values = torch.randn((1, marlin.row_bytes(spec.moe, "w2") // 2), device="cuda", generator=generator)
    return values.bfloat16().view(torch.uint8)


def copies_of(row_bytes: int, rows: int) -> int:
    """Return the weights that take turns: twice what L2 holds, and few where a call is long."""
    return max(2, 2 * L2_BYTES // row_bytes + 1) if rows <= 512 else 2


def ours(spec: LinearSpec, weights: list[torch.Tensor], x: torch.Tensor, plan: cuda.Plan | None = None) -> list[Call]:
    """Return a call for each of the weights."""
    p = cuda.linear_problem(spec, "bf16", len(x))
    plan = plan or cuda.plan(p, cuda.query())
    y = torch.empty((len(x), spec.out_features), dtype=x.dtype, device="cuda")
    workspace = torch.empty(max(1, plan.workspace_bytes), dtype=torch.uint8, device="cuda")
    return [partial(cuda.CudaLinear(spec, w).launch, p, plan, x, y, workspace) for w in weights]


def theirs(weights: list[torch.Tensor], x: torch.Tensor) -> list[Call]:
    y = torch.empty((len(x), len(weights[0])), dtype=x.dtype, device="cuda")
    return [partial(torch.matmul, x, w.t(), out=y) for w in weights]


def in_turn(calls: list[list[Call]], repeats: int, apart: bool = False) -> list[float]:
    """Return the microseconds of a call of each list."""
    between = torch.zeros(1, device="cuda")

    def body(of: list[Call]) -> None:
        for call in of:
            call()
            if apart:
                between.add_(1)

    times = times_in_turn(capture([partial(body, of) for of in calls]), repeats)
    return [t / len(of) * 1e6 for t, of in zip(times, calls, strict=True)]


def measure(shape: tuple[int, int], name: str, all_rows: list[int], apart: bool, repeats: int) -> list[dict[str, Any]]:
    generator, spec = torch.Generator("cuda").manual_seed(0), spec_of(shape, name)
    row_bytes = marlin.row_bytes(spec.moe, "w2")
    mine = [weights_of(spec, generator) for _ in range(copies_of(row_bytes, 1))]
    wide = [torch.randn(shape, device="cuda").bfloat16() for _ in range(copies_of(2 * shape[0] * shape[1], 1))]
    found = []
    for rows in all_rows:
        x = torch.randn((rows, shape[1]), device="cuda").bfloat16()
        few, few_wide = mine[: copies_of(row_bytes, rows)], wide[: copies_of(2 * shape[0] * shape[1], rows)]
        us, torch_us = in_turn([ours(spec, few, x), theirs(few_wide, x)], repeats, apart)
        plan = cuda.plan(cuda.linear_problem(spec, "bf16", rows), cuda.query())
        found.append(
            {
                "shape": list(shape),
                "format": name,
                "rows": rows,
                "us": us,
                "torch_us": torch_us,
                "bytes": row_bytes + 2 * rows * sum(shape),
                "flops": 2 * rows * shape[0] * shape[1],
                "path": cuda.PATHS[plan.path],
                "plan": {n: getattr(plan.w2, n) for n in cuda.PlanStep.instance},
            }
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(f"{n}x{k}" for n, k in SHAPES))
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--formats", default="int4,fp8")
    parser.add_argument("--apart", action="store_true")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    rows, results = [int(r) for r in arguments.rows.split(",")], []
    print(f"torch's time / ours (us of ours)\n| out x in | format | {' | '.join(map(str, rows))} |")
    print("|---|---|" + "---|" * len(rows))
    for shape in ([int(n) for n in s.split("x")] for s in arguments.shapes.split(",")):
        for name in arguments.formats.split(","):
            cells = measure((shape[0], shape[1]), name, rows, arguments.apart, arguments.repeats)
            line = " | ".join(f"{c['torch_us'] / c['us']:.2f} ({c['us']:.1f})" for c in cells)
            print(f"| {shape[0]} x {shape[1]} | {name} | {line} |", flush=True)
            results += cells
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(results, file)


if __name__ == "__main__":
    main()
