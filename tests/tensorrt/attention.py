"""CachedAttention in engines of that one node against float64, on this machine's GPU.

    PYTHONPATH=tests python tests/tensorrt/attention.py BENCH LIBRARY

BENCH is tensorrt_bench.cc of tests/benchmarks, compiled (tensorrt_bench.py says how), LIBRARY libquantmoe_trt.so. Of
each head's engine: rows of one batch that differ, prompts, single tokens; present in past's memory, in other memory of
as many slots and of more; one CUDA graph for several positions.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
import onnx
import torch
from benchmarks.cuda.tensorrt_bench import TYPES, Context, TensorRT
from support.cuda.attention_cases import CALLS, HEADS, TORCH, Inputs, check_results
from support.cuda.attention_model import attention_model

from quantmoe.custom_ops.op import AttentionSpec

NAMES = ("qkv", "past_key", "past_value", "rows", "attention_mask", "cos", "sin")
WHERE = ("in place", "copied", "growing")


def profile(spec: AttentionSpec) -> dict[str, tuple[tuple[int, ...], ...]]:
    heads, groups, d = spec.num_heads, spec.kv_num_heads, spec.head_size
    sizes = ((1, 1, 0, 1), (1, 1, 200, 200), (5, 80, 800, 900))
    caches = tuple((batch, groups, past, d) for batch, _, past, _ in sizes)
    tables = tuple((batch, new, spec.rotary_size // 2) for batch, new, _, _ in sizes)
    return {
        "qkv": tuple((batch, new, (heads + 2 * groups) * d) for batch, new, _, _ in sizes),
        "past_key": caches,
        "past_value": caches,
        "rows": tuple((batch, 3) for batch, *_ in sizes),
        "attention_mask": tuple((batch, total) for batch, _, _, total in sizes),
        "cos": tables,
        "sin": tables,
    }


def bind(context: Context, inputs: Inputs, where: str) -> list[torch.Tensor]:
    """output, present_key and present_value, NaN but for a cache in place."""
    given = inputs.on_device()
    mask = torch.zeros(len(given[3]), max(inputs.length, 1), dtype=torch.int64, device="cuda")
    for name, tensor in zip(NAMES, (*given[:4], mask, *given[4:6]), strict=True):
        context.bind(name, tensor)
    for name, tensor in zip(("q_norm", "k_norm", "sinks"), given[6:], strict=True):
        if tensor.numel():
            context.bind(name, tensor, shaped=False)
    spec, slots = inputs.spec, max(given[1].shape[2], mask.shape[1])
    output = given[0].new_full((*given[0].shape[:2], spec.num_heads * spec.v_head_size), float("nan"))
    present = given[1:3]
    if where != "in place":
        present = [x.new_full((*x.shape[:2], slots, x.shape[3]), float("nan")) for x in present]
    for name, tensor in zip(("output", "present_key", "present_value"), (output, *present), strict=True):
        context.bind(name, tensor, shaped=False)
    return [output, *present]


def check(context: Context, spec: AttentionSpec, dtype: str, call: str, where: str) -> None:
    rows, tokens, slots = CALLS[call]
    length = slots + 100 if where == "growing" else 0
    if where == "growing" and not any(past for _, _, past in rows):
        slots = 0  # from nothing
    made = Inputs.make(spec, dtype, rows, tokens, slots, length)
    results = bind(context, made, where)
    context.run()
    torch.cuda.synchronize()
    found = [x.float().cpu().numpy().astype(np.float64) for x in results]
    if where == "copied":  # what is not filled is zero in other memory, and stays NaN in past's
        for cache, (b, (_, count, past)) in ((c, r) for c in found[1:] for r in enumerate(rows)):
            assert (cache[b, :, past + count :] == 0).all()
            cache[b, :, past + count :] = np.nan
    check_results(made, found)


def check_graph(context: Context, spec: AttentionSpec, dtype: str) -> None:
    """One capture, replayed with other tokens and lengths, gives the bytes of calls without it."""
    made = [Inputs.make(spec, dtype, [(0, 1, past), (0, 1, past // 3)], 1, 700) for past in (5, 300, 699)]
    wanted = []
    for inputs in made:
        results = bind(context, inputs, "in place")
        context.run()
        torch.cuda.synchronize()
        wanted.append([x.clone() for x in results])
    results = bind(context, made[0], "in place")
    context.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        context.run()
    for inputs, want in zip(made, wanted, strict=True):
        for name, x in zip((*NAMES[:4], *NAMES[5:], "q_norm", "k_norm", "sinks"), inputs.on_device(), strict=True):
            if x.numel():
                context.held[name].copy_(x)
        graph.replay()
        torch.cuda.synchronize()
        for found, x in zip(results, want, strict=True):
            assert torch.equal(found.view(torch.int16), x.view(torch.int16))


def main() -> None:
    trt, failed, count = TensorRT(*sys.argv[1:3]), 0, 0
    heads = {name: spec for name, spec in HEADS.items() if name not in ("five", "sixteen", "window-1", "window-128")}
    with tempfile.TemporaryDirectory() as folder, torch.cuda.stream(torch.cuda.Stream()):
        for name, spec in heads.items():
            for dtype in TORCH:
                path = Path(folder) / "model.onnx"
                onnx.save(attention_model(spec, TYPES[dtype][1], given=True), path)
                context = Context(trt, trt.build(path, [profile(spec)]), 0)
                for call, where in ((c, w) for c in CALLS for w in WHERE):
                    count += 1
                    try:
                        check(context, spec, dtype, call, where)
                    except AssertionError as error:
                        failed += 1
                        print("FAILED", name, dtype, call, where, str(error)[:300], flush=True)
                check_graph(context, spec, dtype)
    print(f"{count} calls, {failed} failed")
    sys.exit(bool(failed or not count))


if __name__ == "__main__":
    main()
