"""CachedAttention of latents on CUDA, as test_attention.py."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.cuda.attention_cases import ALL, CALLS, LATENT, LATENT_DEVICES, LATENTS, Inputs, check
from support.cuda.built import UNIT, gpu

from quantmoe.custom_ops import cuda

LATENT_CALLS = CALLS | {
    "eight": ([(0, 8, 61), (2, 5, 120), (0, 0, 3)], 8, 200),
    "prefill of 33": ([(0, 33, 0), (1, 32, 64)], 33, 100),
}


@gpu
@pytest.mark.parametrize(
    ("device", "dtype"), [("wgmma", "f16"), ("wgmma", "bf16"), ("mma", "bf16"), ("mma, two stages", "f16")]
)
@pytest.mark.parametrize("call", LATENT_CALLS)
@pytest.mark.parametrize("name", LATENTS)
def test_latent(monkeypatch: pytest.MonkeyPatch, name: str, call: str, dtype: str, device: str) -> None:
    monkeypatch.setattr(cuda, "query", lambda _: LATENT_DEVICES[device])
    check(Inputs.make(LATENTS[name], dtype, *LATENT_CALLS[call]))


@gpu
@pytest.mark.parametrize("device", LATENT_DEVICES)
@pytest.mark.parametrize(("slots", "tokens"), [(5000, 1), (5000, 3), (9000, 1), (1500, 60)])
@pytest.mark.parametrize("name", ["deepseek-v2-lite", "deepseek-v3", "glm-4.7-flash", "window"])
def test_long_latents(monkeypatch: pytest.MonkeyPatch, name: str, slots: int, tokens: int, device: str) -> None:
    """Many splits, more than 64 too."""
    monkeypatch.setattr(cuda, "query", lambda _: LATENT_DEVICES[device])
    check(Inputs.make(LATENTS[name], "bf16", [(0, tokens, slots - tokens - 7)], tokens, slots))


@gpu
@pytest.mark.parametrize("slots", [0, 70])
@pytest.mark.parametrize("call", ["decode at 0", "decode", "prefill", "ragged prefill", "eight"])
@pytest.mark.parametrize("name", ["deepseek-v2-lite", "glm-4.7-flash"])
def test_a_latent_that_grows(name: str, call: str, slots: int) -> None:
    rows, tokens, _ = LATENT_CALLS[call]
    rows = [(begin, count, min(past, slots)) for begin, count, past in rows]
    check(Inputs.make(LATENTS[name], "f16", rows, tokens, slots, slots + 140))


@gpu
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("device", LATENT_DEVICES)
@pytest.mark.parametrize("tokens", [4, 40])
def test_a_latent_that_is_no_number(monkeypatch: pytest.MonkeyPatch, tokens: int, device: str, bad: float) -> None:
    """It reaches the tokens that see it, all of them, and no others."""
    monkeypatch.setattr(cuda, "query", lambda _: LATENT_DEVICES[device])
    inputs = Inputs.make(replace(LATENT, num_heads=20, sliding_window=30), "bf16", [(0, tokens, 100)], tokens, 200)
    inputs.tensors[0][0, -1, -3] = bad  # seen by the last token
    inputs.tensors[2][0, 0, 71, 5] = bad  # by the first
    inputs.tensors[1][0, 0, 72, 5] = bad  # by two; of a feature that is no value's
    with np.errstate(invalid="ignore"):
        want, *_ = inputs.want()
    got, *_ = inputs.run()
    assert not np.isfinite(want).all()
    assert np.isfinite(want).any()
    np.testing.assert_array_equal(np.isfinite(got), np.isfinite(want))
    got, want = got[np.isfinite(want)], want[np.isfinite(want)]
    assert np.linalg.norm(got - want) < ALL * UNIT["bf16"] * np.linalg.norm(want)
