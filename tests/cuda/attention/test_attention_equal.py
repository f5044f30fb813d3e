"""CachedAttention on CUDA whose keys are their values: with compressed keys, and latents of 512 features."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cuda.attention.test_attention_lists import LIST_CALLS, RUNS, listed, outputs
from support.cuda.attention_cases import CALLS, EQUALS, LATENT_DEVICES, Inputs, check
from support.cuda.built import gpu, torch

from quantmoe.custom_ops import cuda

#: that may have lists
LISTED = [name for name, spec in EQUALS.items() if spec.compress_rate or not spec.sliding_window]


def made(name: str, dtype: str, rows: list[tuple[int, int, int]], tokens: int, slots: int, length: int = 0) -> Inputs:
    """Inputs whose unread compressed keys are NaN."""
    a = Inputs.make(EQUALS[name], dtype, rows, tokens, slots, length)
    if rate := a.spec.compress_rate:
        unread = (np.arange(slots) + 1) % rate != 0
        a.tensors[2][:, :, unread] = np.nan
        for b, (begin, count, past) in enumerate(rows):
            own = (past + np.arange(count) + 1) % rate != 0
            a.tensors[0][b, begin : begin + count][own, -a.spec.kv_num_heads * 512 :] = np.nan
    return a


@gpu
@pytest.mark.parametrize(("device", "dtype"), RUNS)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", EQUALS)
def test_attention(monkeypatch: pytest.MonkeyPatch, name: str, call: str, dtype: str, device: str) -> None:
    monkeypatch.setattr(cuda, "query", lambda _: LATENT_DEVICES[device])
    check(made(name, dtype, *CALLS[call]))


@gpu
@pytest.mark.parametrize(("device", "dtype"), RUNS)
@pytest.mark.parametrize("call", LIST_CALLS)
@pytest.mark.parametrize("name", LISTED)
def test_lists(monkeypatch: pytest.MonkeyPatch, name: str, call: str, dtype: str, device: str) -> None:
    monkeypatch.setattr(cuda, "query", lambda _: LATENT_DEVICES[device])
    a = made(name, dtype, *LIST_CALLS[call])
    check(listed(a, 50))
    if a.spec.kv_num_heads > 1:
        check(listed(a, 50, a.spec.kv_num_heads))


@gpu
@pytest.mark.parametrize("device", LATENT_DEVICES)
@pytest.mark.parametrize("size", [2051, 1000])
@pytest.mark.parametrize(("slots", "tokens"), [(5000, 1), (5000, 3), (9000, 1)])
@pytest.mark.parametrize("name", ["deepseek-v4", "glm-5.3-flash", "ten"])
def test_long_lists(
    monkeypatch: pytest.MonkeyPatch, name: str, slots: int, tokens: int, size: int, device: str
) -> None:
    """There are splits, and a list takes several rounds to compress."""
    monkeypatch.setattr(cuda, "query", lambda _: LATENT_DEVICES[device])
    a = made(name, "bf16", [(0, tokens, slots - tokens - 7)], tokens, slots)
    check(a)
    check(listed(a, size))


@gpu
@pytest.mark.parametrize("name", LISTED)
@pytest.mark.parametrize("call", ["decode", "three", "prefill after", "ragged prefill", "eight"])
def test_a_cache_that_grows(call: str, name: str) -> None:
    rows, tokens, _ = LIST_CALLS[call]
    rows = [(begin, count, min(past, 70)) for begin, count, past in rows]
    check(listed(made(name, "f16", rows, tokens, 70, 210), 40))


@gpu
@pytest.mark.parametrize("device", LATENT_DEVICES)
@pytest.mark.parametrize("tokens", [1, 6, 40])
@pytest.mark.parametrize("name", LISTED)
def test_a_list_of_all_slots(monkeypatch: pytest.MonkeyPatch, name: str, tokens: int, device: str) -> None:
    """It gives the bytes of no list."""
    monkeypatch.setattr(cuda, "query", lambda _: LATENT_DEVICES[device])
    a = made(name, "f16", [(0, tokens, 400)], tokens, 500)
    lists = np.full((1, tokens, 1, 400 + tokens - 1), -1, np.int32)  # of the last token it has not all
    for i in range(tokens - 1):
        lists[0, i, 0, : 401 + i] = np.arange(401 + i)
    lists[0, -1, 0] = np.arange(1, 400 + tokens)
    found, want = (outputs(x)[0].view(torch.int16) for x in (replace(a, selected=lists), a))
    assert torch.equal(found[0, : tokens - 1], want[0, : tokens - 1])
    rate = a.spec.compress_rate
    assert torch.equal(found[0, -1], want[0, -1]) == (rate > 1)  # slot 0 has no compressed key


@gpu
@pytest.mark.parametrize("tokens", [1, 2, 40])
@pytest.mark.parametrize("name", LISTED)
def test_bad_lists_reach_no_other_row(name: str, tokens: int) -> None:
    """Slots that a token does not see, and none at all: such a row's output is undefined, and memory is not."""
    a = listed(made(name, "f16", [(0, tokens, 100)] * 3, tokens, 200), 50)
    assert a.selected is not None
    bad = np.full_like(a.selected, -1)
    bad[0], bad[1] = a.selected[0], np.random.default_rng(1).integers(-(2**31), 2**31, bad.shape[1:])
    found, want = outputs(replace(a, selected=bad))[0], outputs(a)[0]
    assert torch.equal(found[0].view(torch.int16), want[0].view(torch.int16))
