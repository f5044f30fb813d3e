"""CachedAttention with `selected` on CUDA: of latents, and of heads that have keys of their own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.cuda import cuda_kernels
from support.cuda.attention_cases import CALLS, DEVICE, EQUALS, LATENT, LATENT_DEVICES, SPEC, Inputs, check
from support.cuda.built import gpu, torch
from support.operators import attention
from support.operators.specs import attention_spec

from quantmoe.custom_ops import cuda
from quantmoe.custom_ops.op import AttentionSpec

LATENTS = {
    "deepseek-v3.2": replace(LATENT, num_heads=128),
    "glm-5": replace(LATENT, num_heads=64, rotary_interleaved=0),
    "hunyuan 4": replace(LATENT, num_heads=32),
    "twenty": replace(LATENT, num_heads=20, softcap=2.0),
    "of two": replace(LATENT, num_heads=24, kv_num_heads=2, rotary_size=576, rotary_interleaved=0),
}
GROUPED = {
    "minimax-m3": attention_spec(64, 4, 128, rotary_size=64, qk_norm="head"),
    "qwen4-exp": attention_spec(16, 2, 256, rotary_size=64, qk_norm="head", gated=1),
    "each its own": attention_spec(4, 4, 128, rotary_size=128, rotary_interleaved=1),
    "three": attention_spec(6, 2, 128, rotary_size=96, qk_norm="row", softcap=2.0),
    "twenty of one": attention_spec(20, 1, 256, scale=0.1),
}
SPECS = LATENTS | GROUPED
#: and a GPU without wgmma for heads with keys of their own, whose blocks have few bytes
GROUPED_DEVICES = {"wgmma": cuda.H200, "mma": cuda.Device(86, 84, 102400)}
LIST_CALLS = CALLS | {
    "three": ([(0, 3, 90), (1, 2, 120), (0, 3, 0), (0, 1, 49)], 3, 140),
    "eight": ([(0, 8, 61), (2, 5, 120), (0, 0, 3)], 8, 200),
    "prefill of 33": ([(0, 33, 0), (1, 32, 64)], 33, 100),
}
RUNS = [("wgmma", "f16"), ("wgmma", "bf16"), ("mma", "bf16"), ("mma, two stages", "f16")]


def listed(a: Inputs, size: int, lists: int = 1) -> Inputs:
    """Give the call random lists, with -1 for tokens that do not count."""
    rows, (_, tokens, _) = a.tensors[3].tolist(), a.tensors[0].shape
    return replace(a, selected=attention.random_lists(rows, tokens, lists, size))


def of_blocks(a: Inputs, size: int, block: int) -> Inputs:
    """Give the call lists of random blocks of slots, the token's own among them, for each head of keys."""
    rows, (_, tokens, _), rng = a.tensors[3].tolist(), a.tensors[0].shape, np.random.default_rng(5)
    lists = np.full((len(rows), tokens, a.spec.kv_num_heads, size), -1, np.int32)
    for b, (begin, count, past) in enumerate(rows):
        for i, j in np.ndindex(count, a.spec.kv_num_heads):
            own = (past + i) // block
            blocks = np.sort(rng.choice(own, min(own, size // block - 1), replace=False))
            slots = np.append(blocks, own)[:, None] * block + np.arange(block)
            slots = slots[slots <= past + i]
            lists[b, begin + i, j, : slots.size] = slots
    return replace(a, selected=lists)


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
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("device", GROUPED_DEVICES)
@pytest.mark.parametrize("call", LIST_CALLS)
@pytest.mark.parametrize("name", GROUPED)
def test_lists_of_grouped_queries(
    monkeypatch: pytest.MonkeyPatch, name: str, call: str, device: str, dtype: str
) -> None:
    monkeypatch.setattr(cuda, "query", lambda _: GROUPED_DEVICES[device])
    a = Inputs.make(GROUPED[name], dtype, *LIST_CALLS[call])
    check(listed(a, 50))
    check(listed(a, 50, a.spec.kv_num_heads))
    check(of_blocks(a, 32, 8))
    check(of_blocks(a, 1, 1))


@gpu
@pytest.mark.parametrize("cache_format", ["int8", "fp8_e4m3"])
@pytest.mark.parametrize("device", GROUPED_DEVICES)
@pytest.mark.parametrize("call", ["decode", "three", "prefill after", "ragged prefill", "ragged decode"])
@pytest.mark.parametrize("name", ["minimax-m3", "qwen4-exp", "three"])
def test_lists_over_codes(
    monkeypatch: pytest.MonkeyPatch, name: str, call: str, device: str, cache_format: str
) -> None:
    if GROUPED_DEVICES[device].sm < 90 and cache_format == "fp8_e4m3":
        pytest.skip("fp8_e4m3 needs 9.0")
    monkeypatch.setattr(cuda, "query", lambda _: GROUPED_DEVICES[device])
    a = Inputs.make(GROUPED[name], "bf16", *LIST_CALLS[call], cache_format=cache_format)
    check(listed(a, 50, a.spec.kv_num_heads))


@gpu
@pytest.mark.parametrize("device", [*GROUPED_DEVICES, "wgmma, no splits"])
@pytest.mark.parametrize("block", [1, 128])
@pytest.mark.parametrize(("past", "tokens"), [(5000, 1), (20000, 1), (20000, 2), (9000, 5), (4400, 12)])
@pytest.mark.parametrize("name", ["minimax-m3", "qwen4-exp", "each its own"])
def test_long_lists_of_grouped_queries(
    monkeypatch: pytest.MonkeyPatch, name: str, past: int, tokens: int, block: int, device: str
) -> None:
    """There are splits, clusters, and several windows of a tile."""
    found = GROUPED_DEVICES.get(device, cuda.Device(90, 4, cuda.H200.shared_bytes))
    monkeypatch.setattr(cuda, "query", lambda _: found)
    a = Inputs.make(GROUPED[name], "bf16", [(0, tokens, past)], tokens, past + tokens + 9)
    check(of_blocks(a, 2048, block))


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
@pytest.mark.parametrize("name", ["glm-5", "minimax-m3", "three", "each its own"])
@pytest.mark.parametrize("call", ["decode", "three", "prefill after", "ragged prefill", "eight"])
def test_a_cache_that_grows(call: str, name: str) -> None:
    rows, tokens, _ = LIST_CALLS[call]
    rows = [(begin, count, min(past, 70)) for begin, count, past in rows]
    check(listed(Inputs.make(SPECS[name], "f16", rows, tokens, 70, 210), 40))


def outputs(a: Inputs) -> list[torch.Tensor]:
    given, lists = a.on_device(), None if a.selected is None else torch.from_numpy(a.selected).to(DEVICE)
    return [x.cpu() for x in cuda_kernels.attention(a.spec, *given[:4], a.length, *given[4:], selected=lists)]


@gpu
@pytest.mark.parametrize("device", LATENT_DEVICES)
@pytest.mark.parametrize(("tokens", "slots"), [(1, 3000), (5, 3000), (70, 200), (1, 100)])
@pytest.mark.parametrize("name", SPECS)
def test_rows_that_read_no_list(
    monkeypatch: pytest.MonkeyPatch, name: str, tokens: int, slots: int, device: str
) -> None:
    """Up to as many tokens as a list has, they have the bytes of attention without lists, whatever the lists say."""
    monkeypatch.setattr(cuda, "query", lambda _: LATENT_DEVICES[device])
    size = slots * 2 // 3
    rows = [(0, tokens, size - tokens), (0, tokens, slots - tokens), (0, max(tokens - 2, 1), 3)]
    a = Inputs.make(SPECS[name], "bf16", rows, tokens, slots)
    found, want = outputs(listed(a, size)), outputs(a)
    for b in (0, 2):
        assert torch.equal(found[0][b].view(torch.int16), want[0][b].view(torch.int16))
    assert not torch.equal(found[0][1].view(torch.int16), want[0][1].view(torch.int16))


@gpu
@pytest.mark.parametrize("device", LATENT_DEVICES)
@pytest.mark.parametrize("tokens", [6, 40])
@pytest.mark.parametrize("name", ["deepseek-v3.2", "minimax-m3", "twenty of one"])
def test_a_list_of_all_slots(monkeypatch: pytest.MonkeyPatch, name: str, tokens: int, device: str) -> None:
    """Heads that fill their tiles have the bytes of attention without lists."""
    monkeypatch.setattr(cuda, "query", lambda _: LATENT_DEVICES[device])
    size, past = 400, 400 - tokens // 2  # the second half of the tokens sees more slots than a list has
    a = Inputs.make(SPECS[name], "f16", [(0, tokens, past)], tokens, 500)
    lists = np.full((1, tokens, 1, size), -1, np.int32)
    for i in range(tokens):
        lists[0, i, 0, : past + i + 1] = np.arange(min(size, past + i + 1))
    found, want = outputs(replace(a, selected=lists))[0], outputs(a)[0]
    whole = tokens // 2
    assert torch.equal(found[0, :whole].view(torch.int16), want[0, :whole].view(torch.int16))
    assert not torch.equal(found[0, whole:].view(torch.int16), want[0, whole:].view(torch.int16))


@gpu
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("device", LATENT_DEVICES)
@pytest.mark.parametrize("tokens", [2, 40])
@pytest.mark.parametrize("name", ["twenty", "minimax-m3", "three", "each its own"])
def test_a_value_that_is_no_number(
    monkeypatch: pytest.MonkeyPatch, name: str, tokens: int, device: str, bad: float
) -> None:
    """It reaches the tokens that selected it, and no others."""
    monkeypatch.setattr(cuda, "query", lambda _: LATENT_DEVICES[device])
    a = listed(Inputs.make(replace(SPECS[name], softcap=0.0), "bf16", [(0, tokens, 100)], tokens, 200), 30)
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
@pytest.mark.parametrize("device", LATENT_DEVICES)
@pytest.mark.parametrize("tokens", [1, 2, 40])
@pytest.mark.parametrize("name", ["glm-5", "minimax-m3", "three", "each its own"])
def test_bad_lists_reach_no_other_row(monkeypatch: pytest.MonkeyPatch, name: str, tokens: int, device: str) -> None:
    """Slots that a token does not see, and none at all: such a row's output is undefined, and memory is not."""
    monkeypatch.setattr(cuda, "query", lambda _: LATENT_DEVICES[device])
    rows = [(0, tokens, 100), (0, tokens, 100), (0, tokens, 100)]
    a = listed(Inputs.make(SPECS[name], "f16", rows, tokens, 200), 50)
    bad = np.full_like(a.selected, -1)
    bad[0], bad[1] = a.selected[0], np.random.default_rng(1).integers(-(2**31), 2**31, bad.shape[1:])
    found, want = outputs(replace(a, selected=bad))[0], outputs(a)[0]
    assert torch.equal(found[0].view(torch.int16), want[0].view(torch.int16))


@gpu
@pytest.mark.parametrize(
    "name", ["deepseek-v3.2", "minimax-m3", "deepseek-v4", "deepseek-v4, heavily", "glm-5.3-flash"]
)
def test_a_graph_serves_every_position(name: str) -> None:
    spec, size = (SPECS | EQUALS)[name], 300
    whole = Inputs.make(spec, "bf16", [(0, 1, 1999)], 1, 2000)
    inputs = whole.on_device()
    inputs[3].copy_(torch.tensor([[0, 1, 0]]))
    p = cuda_kernels.attention_problem(spec, "bf16", 1, 1, 2000, 2000, lists=(1, size))
    plan = cuda_kernels.plan_attention(p, cuda.query(0))
    lists = torch.full((1, 1, 1, size), -1, dtype=torch.int32, device=DEVICE)
    output = inputs[0].new_empty(1, 1, spec.num_heads * spec.v_head_size)
    workspace = torch.empty(max(1, plan.workspace_bytes), dtype=torch.uint8, device=DEVICE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        given = (*inputs, inputs[3], output, *inputs[1:3], workspace)
        cuda_kernels.launch_attention(p, plan, *given, selected=lists)
    for past in (0, size - 1, size, 1500, 1999):
        rows = np.array([[0, 1, past]], np.int32)
        own = replace(whole, tensors=(*whole.tensors[:3], rows, *whole.tensors[4:]))
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
        (SPEC, (1, 50), "head_size is 64 and v_head_size 64, with the input selected the CUDA kernels take"),
        (GROUPED["minimax-m3"], (2, 50), "selected has 2 lists of a token, the CUDA kernels"),
        (replace(LATENT, sliding_window=9), (1, 50), "sliding_window is 9, chunk_size 0 and block_size 0, expected 0"),
        (replace(GROUPED["qwen4-exp"], chunk_size=8), (1, 50), "sliding_window is 0, chunk_size 8 and block_size 0"),
        (replace(LATENT, num_heads=24, kv_num_heads=4), (2, 50), "selected has 2 lists of a token, the CUDA kernels"),
    ],
)
def test_lists_that_are_refused(spec: AttentionSpec, lists: tuple[int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cuda_kernels.plan_attention(cuda_kernels.attention_problem(spec, "f16", 1, 1, 64, 64, lists=lists))
