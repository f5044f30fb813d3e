"""CachedAttention on CUDA, torch's scaled_dot_product_attention beside it.

    export PYTHONPATH=tests
    python tests/benchmarks/cuda/attention_cuda_bench.py [--repeats 10] [--codes fp8_e4m3 int8] [--latent]
    python tests/benchmarks/cuda/attention_cuda_bench.py --blocks

A call is all of it: norm, rotary, append to the cache in place, attention. torch's is attention alone, of queries, keys
and values that are ready. Times are of CUDA graphs of several calls, each with a cache of its own, so that decode finds
none of them in L2 where they are larger than that together; medians. Ratios are the time of a bf16 cache by that of the
codes. Of latent attention (--latent) torch multiplies the absorbed queries and the latent: two products and a softmax.
--blocks compares caches in blocks with caches of their own for the same requests, in turns. The blocks lie in random
order. A prompt beside requests of one token is one call over blocks, and two calls without them.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import replace

import torch
from benchmarks.attention_spec import spec_of
from support.cuda import cuda_kernels as cuda
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from quantmoe.custom_ops.op import AttentionSpec

GPT_OSS = spec_of(64, 8, 64)
SHAPES = {
    "qwen3-30b-a3b": spec_of(32, 4, 128, "head"),
    "mixtral-8x7b": spec_of(32, 8, 128),
    "gpt-oss-20b": GPT_OSS,
    "gpt-oss-20b, window": replace(GPT_OSS, sliding_window=128),
    "qwen3.5-35b-a3b": replace(spec_of(16, 2, 256, "head"), rotary_size=64),
    "mimo-v2-flash": replace(spec_of(64, 4, 192), v_head_size=128, rotary_size=64),
}
_LATENT = replace(spec_of(128, 1, 576), v_head_size=512, key_split=288, rotary_size=64, rotary_interleaved=1)
LATENTS = {
    "deepseek-v3": _LATENT,
    "kimi-k2": replace(_LATENT, num_heads=64),
    "glm-4.7-flash": replace(_LATENT, num_heads=20),
    "deepseek-v2-lite": replace(_LATENT, num_heads=16),
}
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
Call = Callable[[], object]


def ours(
    spec: AttentionSpec,
    batch: int,
    tokens: int,
    past: int | list[int],
    slots: int,
    codes: str = "none",
    selected: torch.Tensor | None = None,
) -> Call:
    """Return a call on random inputs, bf16, with a cache of its own, of bf16 or of codes.

    Args:
        past: tokens in the cache, of all rows or of each. selected: lists of slots.
    """
    spec = replace(spec, cache_format=codes)
    heads, groups, d, v = spec.num_heads, spec.kv_num_heads, spec.head_size, spec.v_head_size

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    qkv = random(batch, tokens, (heads + groups) * d + (0 if spec.key_split else groups * v))
    key, value = (random(batch, groups, slots, width) for width in spec.cache_widths)
    if codes != "none":
        key, value = ((cache.abs() * 8).to(torch.uint8) for cache in (key, value))  # e4m3's below 1
    pasts = [past] * batch if isinstance(past, int) else past
    rows = torch.tensor([[0, tokens, before] for before in pasts], dtype=torch.int32, device="cuda")
    angles = torch.rand(batch, tokens, spec.rotary_size // 2, device="cuda")
    norm = torch.ones(d if spec.qk_norm == "head" else 0, device="cuda")
    tables = [angles.cos(), angles.sin(), norm, norm, torch.full((heads,), float("-inf"), device="cuda")]
    lists = () if selected is None else tuple(selected.shape[2:])
    p = cuda.attention_problem(spec, "bf16", batch, tokens, slots, slots, lists=lists)
    plan = cuda.plan_attention(p, cuda.query())
    output = random(batch, tokens, heads * v)
    workspace = torch.empty(plan.workspace_bytes, dtype=torch.uint8, device="cuda")
    given = (qkv, key, value, rows, *tables, rows, output, key, value, workspace)
    return lambda: cuda.launch_attention(p, plan, *given, selected=selected)


def packed(spec: AttentionSpec, requests: list[tuple[int, int]], slots: int, codes: str = "none") -> Call:
    """Return a call as of ours over caches in blocks.

    Args:
        requests: new tokens and tokens in the cache of each.
    """
    spec = replace(spec, cache_format=codes, block_size=256)
    heads, groups, d, v = spec.num_heads, spec.kv_num_heads, spec.head_size, spec.v_head_size
    begins = [0]
    for tokens, _ in requests:
        begins.append(begins[-1] + tokens)
    count, columns = begins[-1], slots // spec.block_size

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    qkv = random(1, count, (heads + groups) * d + groups * v)
    blocks = len(requests) * columns
    key, value = (random(blocks, spec.block_size, groups, width) for width in spec.cache_widths)
    if codes != "none":
        key, value = ((cache.abs() * 8).to(torch.uint8) for cache in (key, value))
    table = torch.randperm(blocks, device="cuda").to(torch.int32).view(-1, columns)
    rows = [(begin, *request) for begin, request in zip(begins, requests, strict=False)]
    angles = torch.rand(slots, spec.rotary_size // 2, device="cuda")
    norm = torch.ones(d if spec.qk_norm == "head" else 0, device="cuda")
    tables = [angles.cos(), angles.sin(), norm, norm, torch.full((heads,), float("-inf"), device="cuda"), table]
    p = cuda.attention_problem(spec, "bf16", len(requests), count, slots, slots, blocks, slots)
    plan = cuda.plan_attention(p, cuda.query())
    output = random(1, count, heads * v)
    workspace = torch.empty(max(1, plan.workspace_bytes), dtype=torch.uint8, device="cuda")
    inputs = [qkv, key, value, torch.tensor(rows, dtype=torch.int32, device="cuda"), *tables]
    return lambda: cuda.launch_attention(p, plan, *inputs, output, key, value, workspace)


def theirs(spec: AttentionSpec, batch: int, tokens: int, length: int, backend: SDPBackend | None) -> Call:
    """torch's, of its own choice if backend is None; of a window the slots that it has."""

    def random(heads: int, rows: int, width: int) -> torch.Tensor:
        return torch.randn(batch, heads, rows, width, device="cuda", dtype=torch.bfloat16)

    d, seen = spec.head_size, min(length, spec.sliding_window or length)
    q = random(spec.num_heads, tokens, d)
    k, v = (random(spec.kv_num_heads, seen, width) for width in (d, spec.v_head_size))

    def call() -> object:
        if backend is None:
            return scaled_dot_product_attention(q, k, v, is_causal=tokens > 1, enable_gqa=True)
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, is_causal=tokens > 1, enable_gqa=True)

    return call


def absorbed(spec: AttentionSpec, batch: int, tokens: int, length: int) -> Call:
    """torch's products of a latent, without a mask."""
    q, k = (
        torch.randn(batch, rows, spec.head_size, device="cuda", dtype=torch.bfloat16)
        for rows in (tokens * spec.num_heads, length)
    )
    return lambda: (q @ k.mT * spec.scale).softmax(-1) @ k[..., -spec.v_head_size :]


def microseconds(calls: list[Call], repeats: int) -> float:
    """Of one of the calls, in a graph of all."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for i in range(repeats + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times += [start.elapsed_time(end) * 1000 / len(calls)] if i >= 2 else []
    return statistics.median(times)


def layers_of(cache_bytes: int) -> int:
    return max(4, min(48, 400_000_000 // cache_bytes + 1))


def decode(name: str, batch: int, past: int, slots: int, repeats: int, codes: list[str]) -> None:
    spec = SHAPES[name]
    seen = min(past + 1, spec.sliding_window or past + 1)
    cache = batch * spec.kv_num_heads * seen * (spec.head_size + spec.v_head_size) * 2
    layers = layers_of(cache)
    us = microseconds([ours(spec, batch, 1, past, slots) for _ in range(layers)], repeats)
    torchs = microseconds([theirs(spec, batch, 1, past + 1, None) for _ in range(layers)], repeats)
    row = f"| {name} | {batch} | {past + 1} of {slots} | {us:.1f} | {torchs:.1f} | {cache / us / 1e6:.2f} |"
    for kind in codes:
        calls = [ours(spec, batch, 1, past, slots, kind) for _ in range(layers_of(cache // 2))]
        row += f" {(took := microseconds(calls, repeats)):.1f} ({us / took:.2f}) |"
    print(row, flush=True)


def prefill(name: str, tokens: int, repeats: int, codes: list[str]) -> None:
    spec = SHAPES[name]
    us = microseconds([ours(spec, 1, tokens, 0, tokens) for _ in range(4)], repeats)
    rate = spec.num_heads * (spec.head_size + spec.v_head_size) * tokens * (tokens + 1) / us / 1e6
    row = f"| {name} | {tokens} | {us:.1f} | {rate:.0f} |"
    for backend in (None, *BACKENDS.values()):
        try:
            torchs = microseconds([theirs(spec, 1, tokens, tokens, backend)] * 4, repeats)
            row += f" {torchs:.1f} ({torchs / us:.2f}) |"
        except RuntimeError:  # it does not take these heads
            row += " |"
    for kind in codes:
        took = microseconds([ours(spec, 1, tokens, 0, tokens, kind) for _ in range(4)], repeats)
        row += f" {took:.1f} ({us / took:.2f}) |"
    print(row, flush=True)


def latent(name: str, batch: int, tokens: int, past: int, repeats: int) -> None:
    spec, length = LATENTS[name], past + tokens
    cache = batch * length * spec.head_size * 2
    layers = 4 if tokens > 16 else layers_of(cache)
    us = microseconds([ours(spec, batch, tokens, past, length) for _ in range(layers)], repeats)
    torchs = microseconds([absorbed(spec, batch, tokens, length) for _ in range(layers)], repeats)
    seen = tokens * past + tokens * (tokens + 1) // 2
    rate = 2 * batch * spec.num_heads * (spec.head_size + spec.v_head_size) * seen / us / 1e6
    sizes = f"| {name} | {batch} | {tokens} | {length} "
    print(f"{sizes}| {us:.1f} | {torchs:.1f} ({torchs / us:.2f}) | {cache / us / 1e6:.2f} | {rate:.0f} |", flush=True)


def latents(repeats: int) -> None:
    print(f"| shape | batch | tokens | slots | us | torch us (ratio) | TB/s | TFLOP/s |\n{'|---' * 8}|")
    for name in LATENTS:
        for batch, past in ((1, 2047), (1, 16383), (8, 2047), (8, 16383), (32, 4095)):
            latent(name, batch, 1, past, repeats)
    for tokens in (2, 8):
        latent("deepseek-v3", 1, tokens, 16384 - tokens, repeats)
    for tokens in (512, 2048):
        latent("deepseek-v3", 1, tokens, 0, repeats)


def blocks(name: str, requests: int, prompt: int, slots: int, repeats: int, codes: str) -> None:
    """One line: requests of one token after half of their slots or more, and a prompt beside them."""
    spec, generator = SHAPES[name], torch.Generator().manual_seed(requests)
    pasts = torch.randint(slots // 2, slots, (requests,), generator=generator).tolist()
    seen = sum(min(past + 1, spec.sliding_window or past + 1) for past in pasts)
    cache = seen * spec.kv_num_heads * (spec.head_size + spec.v_head_size) * (2 if codes == "none" else 1)
    layers, lengths = layers_of(cache), [(1, past) for past in pasts] + [(prompt, 0)] * (prompt > 0)
    calls = [packed(spec, lengths, slots, codes) for _ in range(layers)]
    apart = [ours(spec, requests, 1, pasts, slots, codes) for _ in range(layers)]
    beside = [ours(spec, 1, prompt, 0, prompt, codes) for _ in range(layers)] if prompt else []
    both = [call for pair in zip(apart, beside, strict=True) for call in pair] if prompt else apart
    times: list[tuple[float, float]] = []
    for _ in range(3):  # in turns
        times.append((microseconds(calls, repeats), microseconds(both, repeats) * len(both) / layers))
    paged, own = (statistics.median(column) for column in zip(*times, strict=True))
    sizes = f"| {name} | {codes} | {requests} | {prompt} "
    print(f"{sizes}| {paged:.1f} | {own:.1f} | {own / paged:.2f} | {cache / paged / 1e6:.2f} |", flush=True)


def all_blocks(repeats: int, codes: list[str]) -> None:
    print("| shape | cache | requests of a token | prompt | blocks, us | own caches, us | ratio | TB/s |")
    print("|---" * 8 + "|")
    for name in ("qwen3-30b-a3b", "gpt-oss-20b", "gpt-oss-20b, window"):
        for kind in ("none", *codes):
            for requests in (1, 8, 64, 256):
                blocks(name, requests, 0, 2048, repeats, kind)
            for prompt in (128, 1024):
                blocks(name, 255, prompt, 2048, repeats, kind)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--codes", nargs="*", default=[], choices=["fp8_e4m3", "int8"], help="of caches, beside bf16's")
    parser.add_argument("--latent", action="store_true", help="latent attention alone")
    parser.add_argument("--blocks", action="store_true", help="caches in blocks beside caches of their own")
    args = parser.parse_args()
    if args.latent:
        return latents(args.repeats)
    if args.blocks:
        return all_blocks(args.repeats, args.codes)
    repeats, codes = args.repeats, args.codes
    columns, lines = "".join(f" {kind} us (ratio) |" for kind in codes), "---|" * len(codes)
    torch.manual_seed(0)
    print(f"| shape | batch | slots | us | torch us | TB/s |{columns}\n|---|---|---|---|---|---|{lines}")
    for past, slots in ((0, 64), (511, 512), (2047, 2048), (2047, 4096), (2047, 40960), (16383, 16384)):
        decode("qwen3-30b-a3b", 1, past, slots, repeats, codes)
    for name in [*SHAPES][1:]:
        decode(name, 1, 2047, 2048, repeats, codes)
    decode("qwen3.5-35b-a3b", 1, 16383, 16384, repeats, codes)
    for batch in (8, 32):
        for name in ("qwen3-30b-a3b", "gpt-oss-20b", "gpt-oss-20b, window", "qwen3.5-35b-a3b"):
            decode(name, batch, 2047, 2560, repeats, codes)
    print(
        f"| shape | tokens | us | TFLOP/s | torch us (ratio) | {' | '.join(BACKENDS)} |{columns}\n"
        f"|---|---|---|---|---|---|---|{lines}"
    )
    for tokens in (128, 256, 512, 1024, 2048, 8192):
        prefill("qwen3-30b-a3b", tokens, repeats, codes)
    for name in ("mixtral-8x7b", "gpt-oss-20b", "qwen3.5-35b-a3b", "mimo-v2-flash"):
        for tokens in (512, 2048):
            prefill(name, tokens, repeats, codes)


if __name__ == "__main__":
    main()
