"""CachedAttention of latents with `selected` on CUDA, as test_attention_latents.py."""

from __future__ import annotations

from dataclasses import replace

import attention
import cuda_kernels
import numpy as np
import pytest
from cuda.attention_cases import CALLS, DEVICE, HEADS, LATENT, LATENT_DEVICES, Inputs, check
from cuda.built import gpu, torch

from quantmoe.custom_ops import cuda
from quantmoe.custom_ops.op import AttentionSpec

LATENTS = {
    "deepseek-v3.2": replace(LATENT, num_heads=128),
    "glm-5": replace(LATENT, num_heads=64, rotary_interleaved=0),
    "hunyuan 4": replace(LATENT, num_heads=32),
    "twenty": replace(LATENT, num_heads=20, softcap=2.0),
    "of two": replace(LATENT, num_heads=24, kv_num_heads=2, rotary_size=576, rotary_interleaved=0),
}
LIST_CALLS = CALLS | {
    "eight": ([(0, 8, 61), (2, 5, 120), (0, 0, 3)], 8, 200),
    "prefill of 33": ([(0, 33, 0), (1, 32, 64)], 33, 100),
}
RUNS = [("wgmma", "f16"), ("wgmma", "bf16"), ("mma", "bf16"), ("mma, two stages", "f16")]


def listed(a: Inputs, size: int, lists: int = 1) -> Inputs:
    """Give the call random lists, with -1 for tokens that do not count."""
    rows, (_, tokens, _) = a.tensors[3].tolist(), a.tensors[0].shape
    return replace(a, selected=attention.random_lists(rows, tokens, lists, size))


@gpu
@pytest.mark.parametrize(("device", "dtype"), RUNS)
@pytest.mark.parametrize("call", LIST_CALLS)
@pytest.mark.parametrize("name", LATENTS)
def test_lists(monkeypatch: pytest.MonkeyPatch, name: str, call: str, dtype: str, device: str) -> None:
    monkeypatch.setattr(cuda, "query", lambda _: LATENT_DEVICES[device])
    check(listed(Inputs.make(LATENTS[name], dtype, *LIST_CALLS[call]), 50))
    if LATENTS[name].kv_num_heads > 1:
        check(listed(Inputs.make(LATENTS[name], dtype, *LIST_CALLS[call]), 50, LATENTS[name].kv_num_heads))


@gpu
@pytest.mark.parametrize("device", LATENT_DEVICES)
@pytest.mark.parametrize("size", [2048, 1000])
@pytest.mark.parametrize(("slots", "tokens"), [(5000, 1), (5000, 3), (9000, 1), (4500, 40)])
@pytest.mark.parametrize("name", ["deepseek-v3.2", "twenty"])
def test_long_lists(
    monkeypatch: pytest.MonkeyPatch, name: str, slots: int, tokens: int, size: int, device: str
) -> None:
    monkeypatch.setattr(cuda, "query", lambda _: LATENT_DEVICES[device])
    check(listed(Inputs.make(LATENTS[name], "bf16", [(0, tokens, slots - tokens - 7)], tokens, slots), size))


@gpu
@pytest.mark.parametrize("call", ["decode", "prefill after", "ragged prefill", "eight"])
def test_a_cache_that_grows(call: str) -> None:
    rows, tokens, _ = LIST_CALLS[call]
    rows = [(begin, count, min(past, 70)) for begin, count, past in rows]
    check(listed(Inputs.make(LATENTS["glm-5"], "f16", rows, tokens, 70, 210), 40))


def outputs(a: Inputs) -> list[torch.Tensor]:
    given, lists = a.on_device(), None if a.selected is None else torch.from_numpy(a.selected).to(DEVICE)
    return [x.cpu() for x in cuda_kernels.attention(a.spec, *given[:4], a.length, *given[4:], selected=lists)]


@gpu
@pytest.mark.parametrize("device", LATENT_DEVICES)
@pytest.mark.parametrize(("tokens", "slots"), [(1, 3000), (5, 3000), (70, 200), (1, 100)])
@pytest.mark.parametrize("name", LATENTS)
def test_rows_that_read_no_list(
    monkeypatch: pytest.MonkeyPatch, name: str, tokens: int, slots: int, device: str
) -> None:
    """Up to as many tokens as a list has, they have the bytes of attention without lists, whatever the lists say."""
    monkeypatch.setattr(cuda, "query", lambda _: LATENT_DEVICES[device])
    size = slots * 2 // 3
    rows = [(0, tokens, size - tokens), (0, tokens, slots - tokens), (0, max(tokens - 2, 1), 3)]
    a = Inputs.make(LATENTS[name], "bf16", rows, tokens, slots)
    found, want = outputs(listed(a, size)), outputs(a)
    for b in (0, 2):
        assert torch.equal(found[0][b].view(torch.int16), want[0][b].view(torch.int16))
    assert not torch.equal(found[0][1].view(torch.int16), want[0][1].view(torch.int16))


@gpu
@pytest.mark.parametrize("device", LATENT_DEVICES)
@pytest.mark.parametrize("tokens", [1, 40])
def test_a_list_of_all_slots(monkeypatch: pytest.MonkeyPatch, tokens: int, device: str) -> None:
    """Heads that fill their tiles have the bytes of attention without lists."""
    monkeypatch.setattr(cuda, "query", lambda _: LATENT_DEVICES[device])
    # the last tokens of rows see more slots than a list has, the first tokens all
    a = Inputs.make(LATENTS["deepseek-v3.2"], "f16", [(0, tokens, 399), (0, tokens, 10)], tokens, 500)
    seen = np.array([399, 10])[:, None] + np.arange(tokens)
    lists = np.full((2, tokens, 1, 400 if tokens > 1 else 9), -1, np.int32)
    for b, i in np.ndindex(2, tokens):
        n = min(lists.shape[3], seen[b, i] + 1)
        lists[b, i, 0, :n] = np.arange(n)
    found, want = outputs(replace(a, selected=lists))[0], outputs(a)[0]
    for b, i in np.ndindex(2, tokens):
        if seen[b, i] < lists.shape[3]:
            assert torch.equal(found[b, i].view(torch.int16), want[b, i].view(torch.int16))


@gpu
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("device", LATENT_DEVICES)
@pytest.mark.parametrize("tokens", [2, 40])
def test_a_latent_that_is_no_number(monkeypatch: pytest.MonkeyPatch, tokens: int, device: str, bad: float) -> None:
    """It reaches the tokens that selected it, and no others."""
    monkeypatch.setattr(cuda, "query", lambda _: LATENT_DEVICES[device])
    a = listed(Inputs.make(replace(LATENT, num_heads=20), "bf16", [(0, tokens, 100)], tokens, 200), 30)
    assert a.selected is not None
    a.selected[0, : tokens // 2] = np.arange(30)  # of the others some have slot 71
    a.selected[0, -1] = np.arange(60, 90)
    a.tensors[2][0, 0, 71, 5] = bad
    with np.errstate(invalid="ignore"):
        want, *_ = a.want()
    got, *_ = a.run()
    assert np.isfinite(want[0, 0]).all()
    assert not np.isfinite(want[0, -1]).all()
    np.testing.assert_array_equal(np.isfinite(got), np.isfinite(want))


@gpu
@pytest.mark.parametrize("tokens", [1, 40])
def test_bad_lists_reach_no_other_row(tokens: int) -> None:
    """Slots that a token does not see, and none at all: such a row's output is undefined, and memory is not."""
    rows = [(0, tokens, 100), (0, tokens, 100), (0, tokens, 100)]
    a = listed(Inputs.make(LATENTS["glm-5"], "f16", rows, tokens, 200), 50)
    bad = np.full_like(a.selected, -1)
    bad[0], bad[1] = a.selected[0], np.random.default_rng(1).integers(-(2**31), 2**31, bad.shape[1:])
    found, want = outputs(replace(a, selected=bad))[0], outputs(a)[0]
    assert torch.equal(found[0].view(torch.int16), want[0].view(torch.int16))


@gpu
def test_a_graph_serves_every_position() -> None:
    spec, size = LATENTS["deepseek-v3.2"], 300
    a = Inputs.make(spec, "bf16", [(0, 1, 0)], 1, 2000)
    whole = Inputs.make(spec, "bf16", [(0, 1, 1999)], 1, 2000)
    inputs = whole.on_device()
    inputs[3].copy_(torch.tensor([[0, 1, 0]]))
    p = cuda_kernels.attention_problem(spec, "bf16", 1, 1, 2000, 2000, lists=(1, size))
    plan = cuda_kernels.plan_attention(p, cuda.query(0))
    lists = torch.full((1, 1, 1, size), -1, dtype=torch.int32, device=DEVICE)
    output = inputs[0].new_empty(1, 1, 128 * 512)
    workspace = torch.empty(max(1, plan.workspace_bytes), dtype=torch.uint8, device=DEVICE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        given = (*inputs, inputs[3], output, *inputs[1:3], workspace)
        cuda_kernels.launch_attention(p, plan, *given, selected=lists)
    for past in (0, size - 1, size, 1500, 1999):
        rows = np.array([[0, 1, past]], np.int32)
        own = replace(a, tensors=(*whole.tensors[:3], rows, *whole.tensors[4:]))
        own = replace(own, selected=attention.random_lists(rows.tolist(), 1, 1, size, own=True))
        inputs[3].copy_(torch.from_numpy(rows))
        lists.copy_(torch.from_numpy(own.selected))
        graph.replay()
        assert torch.equal(output.cpu().view(torch.int16), outputs(own)[0].view(torch.int16))
        for cache, x in zip(whole.tensors[1:3], outputs(own)[1:], strict=True):
            cache[:] = x.view(torch.int16).numpy().view(cache.dtype)  # with the token's key


@pytest.mark.parametrize(
    ("spec", "lists", "message"),
    [
        (HEADS["qwen3"], (1, 50), "it has the input selected, which the CUDA kernels take with a key_split alone"),
        (replace(LATENT, sliding_window=9), (1, 50), "sliding_window is 9 and chunk_size 0, expected 0 with the input"),
        (replace(LATENT, num_heads=24, kv_num_heads=4), (2, 50), "selected has 2 lists of a token, the CUDA kernels"),
    ],
)
def test_lists_that_are_refused(spec: AttentionSpec, lists: tuple[int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cuda_kernels.plan_attention(cuda_kernels.attention_problem(spec, "f16", 1, 1, 64, 64, lists=lists))
