"""CachedAttention on CUDA against reference.py, through the C ABI. Launches are skipped where no GPU is."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.cuda import cuda_kernels as cuda
from support.cuda.attention_cases import ALL, CALLS, DEVICE, HEADS, LATENT, LATENTS, SPEC, Inputs, check
from support.cuda.built import SM80, UNIT, gpu
from support.operators.specs import attention_spec

from quantmoe.custom_ops.op import AttentionSpec


@gpu
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", HEADS)
def test_against_the_reference(name: str, call: str, dtype: str) -> None:
    check(Inputs.make(HEADS[name], dtype, *CALLS[call]))


@gpu
@pytest.mark.parametrize("call", ["decode", "ragged decode", "prefill", "prefill after", "ragged prefill"])
@pytest.mark.parametrize("name", ["qwen3", "norm-row", "window-chunk", "softcap", "qwen3.5", "192", "deepseek, gated"])
def test_on_mma_sync(monkeypatch: pytest.MonkeyPatch, name: str, call: str) -> None:
    """What a GPU without wgmma runs."""
    monkeypatch.setattr(cuda, "query", lambda _: SM80)
    check(Inputs.make(HEADS[name], "bf16", *CALLS[call]))


@gpu
@pytest.mark.parametrize("slots", [0, 70])
@pytest.mark.parametrize("call", ["decode at 0", "decode", "prefill", "ragged prefill"])
@pytest.mark.parametrize("name", ["interleaved", "mimo"])
def test_a_cache_that_grows(name: str, call: str, slots: int) -> None:
    """present is other memory, in which what past has is copied."""
    rows, tokens, _ = CALLS[call]
    rows = [(begin, count, min(past, slots)) for begin, count, past in rows]
    check(Inputs.make(HEADS[name], "bf16", rows, tokens, slots, slots + 100))


@gpu
@pytest.mark.parametrize(("slots", "tokens"), [(5000, 1), (5000, 3), (1500, 60)])
@pytest.mark.parametrize("name", ["qwen3", "window-128", "qwen3.5, gated", "mimo"])
def test_long(name: str, slots: int, tokens: int) -> None:
    """Many splits, and more splits than there are stages in a window."""
    check(Inputs.make(HEADS[name], "f16", [(0, tokens, slots - tokens - 7)], tokens, slots))


@gpu
@pytest.mark.parametrize(
    ("name", "tokens", "past"),
    [("qwen3", 700, 0), ("qwen3", 2048, 0), ("qwen3", 600, 1000), ("qwen3.5, gated", 2048, 0), ("mimo", 700, 300),
     ("192", 2900, 0), ("norm-row of 256", 3000, 0), ("sixteen", 3300, 0), ("deepseek, gated", 2200, 0)],
)  # fmt: skip
def test_many_tiles(name: str, tokens: int, past: int) -> None:
    """More tiles than multiprocessors, which attend_ring takes in turn."""
    check(Inputs.make(HEADS[name], "bf16", [(0, tokens, past)], tokens, tokens + past + 7))


@gpu
@pytest.mark.parametrize("tokens", [1, 2])
def test_batch_of_64(tokens: int) -> None:
    rows = [(b % tokens, tokens - b % tokens, 37 * b % 500) for b in range(64)]
    check(Inputs.make(HEADS["five"], "bf16", rows, tokens, 512))


@gpu
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("device", [cuda.H200, SM80], ids=["wgmma", "mma"])
@pytest.mark.parametrize("tokens", [2, 40])
@pytest.mark.parametrize("size", [64, 256])
def test_a_value_that_is_no_number(
    monkeypatch: pytest.MonkeyPatch, size: int, tokens: int, device: cuda.Device, bad: float
) -> None:
    """It reaches the tokens that see it and no others."""
    monkeypatch.setattr(cuda, "query", lambda _: device)
    spec, at = attention_spec(8, 2, size, rotary_size=64, sliding_window=30), tokens // 2
    inputs = Inputs.make(spec, "bf16", [(0, tokens, 100)], tokens, 200)
    inputs.tensors[0][0, at, -3] = bad  # of the last head's values
    inputs.tensors[2][0, 0, 95, 5] = bad
    with np.errstate(invalid="ignore"):
        want, *_ = inputs.want()
    got, *_ = inputs.run()
    assert not np.isfinite(want).all()
    np.testing.assert_array_equal(np.isfinite(got), np.isfinite(want))
    got, want = got[np.isfinite(want)], want[np.isfinite(want)]
    assert np.linalg.norm(got - want) < ALL * UNIT["bf16"] * np.linalg.norm(want)


@gpu
def test_a_query_that_is_no_number() -> None:
    """Its head of its token is NaN, and nothing else."""
    inputs = Inputs.make(SPEC, "f16", [(0, 20, 60)], 20, 80)
    inputs.tensors[0][0, 4, 3 * 64] = np.nan
    got, *_ = inputs.run()
    lost = np.zeros(got.shape, bool)
    lost[0, 4, 3 * 64 : 4 * 64] = True
    np.testing.assert_array_equal(np.isnan(got), lost)


@gpu
@pytest.mark.parametrize("spec", [SPEC, LATENT], ids=["grouped", "latent"])
@pytest.mark.parametrize(
    "bad", [(-1, 1, 5), (0, -1, 5), (0, 1, -1), (1, 2, 5), (0, 1, 64), (0, 2, 63), (0, 1, 2**31 - 1)]
)
def test_rows_that_are_not_there(bad: tuple[int, int, int], spec: AttentionSpec) -> None:
    """The row's output is NaN, its cache and the other rows are untouched."""
    good = Inputs.make(spec, "f16", [(0, 2, 30), (0, 2, 40)], 2, 64)
    want = good.run()
    good.tensors[3][0] = bad
    got = good.run()
    assert np.isnan(got[0][0]).all()
    np.testing.assert_array_equal(got[0][1], want[0][1])
    for found, before in zip(got[1:], good.tensors[1:3], strict=True):
        np.testing.assert_array_equal(found[0], before[0].astype(np.float64))


@gpu
@pytest.mark.parametrize("spec", [HEADS["qwen3"], LATENT, LATENTS["deepseek-v3"]], ids=["qwen3", "latent", "wgmma"])
def test_a_graph_serves_every_position(spec: AttentionSpec) -> None:
    """One capture, replayed with other tokens and lengths, gives the bytes of calls without it."""
    made = [Inputs.make(spec, "bf16", [(0, 1, past), (0, 1, past // 3)], 1, 700) for past in (5, 300, 699)]
    wanted = []
    for inputs in made:
        t = inputs.on_device()
        wanted.append([r.clone() for r in cuda.attention(spec, *t[:4], 0, *t[4:])])
    fixed = made[0].on_device()
    p = cuda.attention_problem(spec, "bf16", 2, 1, 700, 700)
    chosen = cuda.plan_attention(p, cuda.query())
    output = torch.empty_like(wanted[0][0])
    workspace = torch.empty(chosen.workspace_bytes, dtype=torch.uint8, device=DEVICE)

    def launch() -> None:
        cuda.launch_attention(p, chosen, *fixed, fixed[3], output, fixed[1], fixed[2], workspace)

    launch()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    for inputs, want in zip(made, wanted, strict=True):
        for to, x in zip(fixed, inputs.on_device(), strict=True):
            to.copy_(x)
        graph.replay()
        torch.cuda.synchronize()
        for found, x in zip((output, fixed[1], fixed[2]), want, strict=True):
            assert torch.equal(found.view(torch.int16), x.view(torch.int16))
