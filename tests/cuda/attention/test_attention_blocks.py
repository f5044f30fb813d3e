"""CachedAttention over caches in blocks on CUDA, against reference.py. Launches are skipped where no GPU is."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from support.cuda import cuda_kernels as cuda
from support.cuda.attention_cases import DEVICE, HEADS, LATENT, Inputs, close
from support.cuda.built import NUMPY, SM80, UNIT, gpu

from quantmoe.custom_ops import reference
from quantmoe.custom_ops.op import AttentionSpec

#: (new tokens, slots before) of requests. One each: borders of stages and blocks, and an empty cache.
DECODE = [(1, 0), (1, 63), (1, 64), (1, 255), (1, 256), (1, 600), (1, 511), (1, 37)]
#: few and many tokens side by side, with and without slots before them
MIXED = [(1, 300), (2, 255), (130, 0), (1, 0), (16, 250), (300, 211), (3, 511), (1, 1), (65, 192)]
NAMES = ["qwen3", "each its own", "three of 96", "window-128", "norm-row", "softcap", "window-chunk", "mimo", "qwen3.5"]


@dataclass(frozen=True)
class Blocks(Inputs):
    """Requests whose slots are in blocks in random order; slots that no token has are NaN, or 0x7f of codes."""

    table: np.ndarray = field(kw_only=True)

    @classmethod
    def of(
        cls,
        spec: AttentionSpec,
        dtype: str,
        lengths: list[tuple[int, int]],
        columns: int = 3,
        cache_format: str = "none",
    ) -> Blocks:
        tokens, rng = sum(count for count, _ in lengths), np.random.default_rng(3)
        made = Inputs.make(spec, dtype, [(0, tokens, 0)], tokens, 0, cache_format=cache_format)
        qkv, _, _, _, _, _, *others = made.tensors
        spec = replace(made.spec, block_size=256)
        blocks = len(lengths) * columns + 2
        table = rng.permutation(blocks)[:-2].reshape(len(lengths), columns).astype(np.int32)
        kind = NUMPY[dtype] if spec.cache_dtype is None else spec.cache_dtype
        past = []
        for width, scale in zip(spec.cache_widths, (spec.k_scale, spec.v_scale), strict=True):
            cache = np.full((blocks, 256, spec.kv_num_heads, width), np.nan if spec.cache_dtype is None else 0x7F, kind)
            for row, (_, before) in zip(table, lengths, strict=True):
                x = rng.normal(0, 1, (before, spec.kv_num_heads, width)).astype(np.float32)
                slots = np.arange(before)
                cache[row[slots // 256], slots % 256] = reference.encode_cache(spec, x, scale, cache.dtype)
            past.append(cache)
        begins = np.cumsum([0, *(count for count, _ in lengths)])
        rows = np.array([(begin, *length) for begin, length in zip(begins, lengths, strict=False)], np.int32)
        angles = rng.uniform(-np.pi, np.pi, (columns * 256, spec.rotary_size // 2))
        turn = [f(angles).astype(np.float32) for f in (np.cos, np.sin)]
        return cls(spec, dtype, (qkv, *past, rows, *turn, *others), 0, table=table)

    def run(self) -> list[np.ndarray]:
        found = []
        for _ in range(2):
            inputs = self.on_device()
            table = torch.from_numpy(self.table).to(DEVICE)
            results = cuda.attention(self.spec, *inputs[:4], 0, *inputs[4:], block_table=table)
            found.append([r.cpu() for r in results])
        for one, two in zip(*found, strict=True):
            assert torch.equal(one.view(torch.uint8), two.view(torch.uint8)), "two runs differ"
        output, *caches = found[0]
        if self.spec.cache_format != "none":
            return [output.double().numpy(), *self.decoded([c.numpy() for c in caches])]
        return [r.float().numpy().astype(np.float64) for r in found[0]]

    def want(self) -> list[np.ndarray]:
        qkv, key, value, rows, *others = self.tensors
        found = reference.attention(self.spec, qkv, key, value, rows, 0, *others, block_table=self.table)
        return [found[0].astype(np.float64), *self.decoded(list(found[1:]))]


def check(inputs: Blocks) -> None:
    """Check a run with the bounds of attention_cases.check_results."""
    output, *present = inputs.want()
    got, *caches = inputs.run()
    spec, unit = inputs.spec, UNIT[inputs.dtype]
    other = [(found != want) & np.isfinite(want) for found, want in zip(caches, present, strict=True)]
    apart = None
    rtol, atol = 2 * unit, unit * 2**-10
    if spec.cache_format != "none":
        apart = np.repeat(other[0].any((0, 1, 3)) | other[1].any((0, 1, 3)), spec.num_heads // spec.kv_num_heads)[None]
        rtol, atol = 0.13, max(spec.k_scale, spec.v_scale) * (2.0**-8 if spec.cache_format == "fp8_e4m3" else 1.01)
    close(got, output, unit, spec.num_heads, apart)
    for found, want, differs in zip(caches, present, other, strict=True):
        np.testing.assert_allclose(found, want, rtol=rtol, atol=atol)
        assert differs.sum() <= 2 + want.size // 1000


@gpu
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("lengths", [DECODE, MIXED, [(1, 700)], [(500, 3)]], ids=["decode", "mixed", "one", "prompt"])
@pytest.mark.parametrize("name", NAMES)
def test_requests_in_blocks(name: str, lengths: list[tuple[int, int]], dtype: str) -> None:
    check(Blocks.of(HEADS[name], dtype, lengths))


@gpu
@pytest.mark.parametrize("cache_format", ["int8", "fp8_e4m3"])
@pytest.mark.parametrize("lengths", [DECODE, MIXED], ids=["decode", "mixed"])
@pytest.mark.parametrize("name", ["qwen3", "each its own", "mimo", "window-128"])
def test_codes_in_blocks(name: str, lengths: list[tuple[int, int]], cache_format: str) -> None:
    check(Blocks.of(HEADS[name], "bf16", lengths, cache_format=cache_format))


@gpu
@pytest.mark.parametrize("lengths", [DECODE, MIXED], ids=["decode", "mixed"])
@pytest.mark.parametrize("name", ["qwen3", "three of 96", "mimo"])
def test_blocks_on_mma_sync(monkeypatch: pytest.MonkeyPatch, name: str, lengths: list[tuple[int, int]]) -> None:
    """What a GPU without wgmma and clusters runs."""
    monkeypatch.setattr(cuda, "query", lambda _: SM80)
    check(Blocks.of(HEADS[name], "bf16", lengths))


@gpu
def test_many_requests_in_blocks() -> None:
    """More than a block searches at a time, in long tables; a long one whose splits are no cluster."""
    check(Blocks.of(HEADS["qwen3"], "f16", [(1, 7 * b % 700) for b in range(300)]))
    check(Blocks.of(HEADS["qwen3"], "f16", [(1, 7 * b % 700) for b in range(200)] + [(200, 0), (1, 5), (40, 300)]))
    check(Blocks.of(HEADS["qwen3"], "f16", [(1, 10_000), (1, 300)], columns=40))


@gpu
@pytest.mark.parametrize(
    ("lengths", "bad"),
    [
        (DECODE, (3, 1, -1)),
        (DECODE, (3, 1, 768)),
        (DECODE, (2, 1, 5)),
        (DECODE, (3, 0, 5)),
        (MIXED, (149, 1, 768)),
        (MIXED, (149, 16, 760)),
    ],
)
def test_a_request_that_is_not_there(lengths: list[tuple[int, int]], bad: tuple[int, int, int]) -> None:
    """It stores nothing, and the other requests have the output that they have beside a good one."""
    row = 3 if lengths is DECODE else 4
    good = Blocks.of(HEADS["qwen3"], "f16", lengths)
    want = good.run()
    begin, count, past = good.tensors[3][row]
    before = [cache[good.table[row]].astype(np.float64) for cache in good.tensors[1:3]]
    good.tensors[3][row] = bad
    got = good.run()
    mine = slice(begin, begin + count)
    others = np.delete(np.arange(got[0].shape[1]), np.arange(begin, begin + count))
    np.testing.assert_array_equal(got[0][:, others], want[0][:, others])
    if lengths is DECODE:
        assert np.isnan(got[0][:, mine]).all()
    for found, held in zip(got[1:], before, strict=True):
        np.testing.assert_array_equal(found[good.table[row]].reshape(held.shape), held)
    assert past >= 0


@gpu
def test_blocks_that_are_not_there() -> None:
    """Nothing is stored in another block, and the other requests' output does not change."""
    inputs = Blocks.of(HEADS["qwen3"], "f16", MIXED)
    want = inputs.run()
    inputs.table[5, 1] = 10_000
    inputs.table[0, 1] = -7
    got = inputs.run()
    begin, count, _ = inputs.tensors[3][5]
    others = np.delete(np.arange(1, got[0].shape[1]), np.arange(begin - 1, begin + count - 1))
    np.testing.assert_array_equal(got[0][:, others], want[0][:, others])


@gpu
def test_a_graph_serves_every_position_in_blocks() -> None:
    """One capture of single tokens, replayed with other lengths and tables, gives the bytes of calls without it."""
    made = [Blocks.of(HEADS["qwen3"], "bf16", [(1, n * b % 700) for b in range(1, 9)]) for n in (3, 51, 97)]
    wanted = []
    for inputs in made:
        t, table = inputs.on_device(), torch.from_numpy(inputs.table).to(DEVICE)
        wanted.append([r.clone() for r in cuda.attention(inputs.spec, *t[:4], 0, *t[4:], block_table=table)])
    spec = made[0].spec
    fixed = [*made[0].on_device(), torch.from_numpy(made[0].table).to(DEVICE)]
    p = cuda.attention_problem(spec, "bf16", 8, 8, 768, 768, len(fixed[1]), 768)
    chosen = cuda.plan_attention(p, cuda.query())
    output = torch.empty_like(wanted[0][0])
    workspace = torch.empty(max(1, chosen.workspace_bytes), dtype=torch.uint8, device=DEVICE)

    def launch() -> None:
        cuda.launch_attention(p, chosen, *fixed, output, fixed[1], fixed[2], workspace)

    launch()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    for inputs, want in zip(made, wanted, strict=True):
        for to, x in zip(fixed, [*inputs.on_device(), torch.from_numpy(inputs.table)], strict=True):
            to.copy_(x)
        graph.replay()
        torch.cuda.synchronize()
        for found, x in zip((output, fixed[1], fixed[2]), want, strict=True):
            assert torch.equal(found.view(torch.int16), x.view(torch.int16))


def plan(spec: AttentionSpec, requests: int, tokens: int, slots: int = 2048) -> cuda.AttentionPlan:
    return cuda.plan_attention(cuda.attention_problem(spec, "f16", requests, tokens, slots, slots, 100, slots))


def test_plans_of_blocks() -> None:
    qwen3 = replace(HEADS["qwen3"], block_size=256)

    def found(requests: int, tokens: int, spec: AttentionSpec = qwen3) -> tuple[int, ...]:
        p = plan(spec, requests, tokens)
        return p.few_tokens, p.splits, p.cluster, p.many_rows, p.wgmma

    assert found(1, 1) == (1, 16, 16, 0, 0)  # as without blocks
    assert found(256, 256) == (1, 1, 1, 0, 0)
    assert plan(qwen3, 256, 256).workspace_bytes == 0
    assert found(256, 257) == (2, 1, 1, 64, 1)
    assert found(10, 2048) == (2, 3, 1, 128, 1)  # splits that are no cluster
    assert found(10, 2048, replace(HEADS["three of 96"], block_size=256))[3:] == (128, 0)
    shared = replace(qwen3, num_heads=80)  # 20 heads that share keys are more than a tile of few rows
    assert found(8, 8, shared) == (0, 0, 1, 64, 1)


def test_what_blocks_refuse() -> None:
    qwen3 = replace(HEADS["qwen3"], block_size=256)
    with pytest.raises(ValueError, match="3 requests have 2 tokens, expected at least one for each"):
        plan(qwen3, 3, 2)
    with pytest.raises(ValueError, match="cos and sin have 0 slots, expected those of the longest request"):
        cuda.plan_attention(cuda.attention_problem(qwen3, "f16", 3, 3, 2048, 2048, 100, 0))
    with pytest.raises(ValueError, match="block_size is 100, expected a multiple of 256"):
        plan(replace(qwen3, block_size=100), 3, 3)
    with pytest.raises(ValueError, match="block_size is 256, of latent attention the CUDA kernels take 0"):
        plan(replace(LATENT, block_size=256), 3, 3)
