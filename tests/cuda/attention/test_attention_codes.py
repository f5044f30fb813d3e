"""CachedAttention on CUDA whose cache holds codes, as test_attention.py."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.cuda import cuda_kernels as cuda
from support.cuda.attention_cases import CALLS, HEADS, SPEC, Inputs, check
from support.cuda.built import SM80, gpu
from support.operators.specs import attention_spec

CODES = ["int8", "fp8_e4m3"]


@gpu
@pytest.mark.parametrize("cache", CODES)
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", HEADS)
def test_caches_of_codes(name: str, call: str, dtype: str, cache: str) -> None:
    check(Inputs.make(HEADS[name], dtype, *CALLS[call], cache_format=cache))


@gpu
@pytest.mark.parametrize("cache", CODES)
@pytest.mark.parametrize(("slots", "tokens"), [(5000, 1), (5000, 3), (1500, 60)])
@pytest.mark.parametrize("name", ["qwen3", "window-128", "qwen3.5", "mimo"])
def test_long_caches_of_codes(name: str, slots: int, tokens: int, cache: str) -> None:
    check(Inputs.make(HEADS[name], "bf16", [(0, tokens, slots - tokens - 7)], tokens, slots, cache_format=cache))


@gpu
@pytest.mark.parametrize("cache", CODES)
@pytest.mark.parametrize("call", ["decode at 0", "decode", "prefill", "ragged prefill"])
def test_a_cache_of_codes_that_grows(call: str, cache: str) -> None:
    rows, tokens, _ = CALLS[call]
    rows = [(begin, count, min(past, 70)) for begin, count, past in rows]
    check(Inputs.make(HEADS["mimo"], "bf16", rows, tokens, 70, 170, cache))


@gpu
@pytest.mark.parametrize("call", ["decode", "ragged decode", "prefill", "prefill after", "ragged prefill"])
@pytest.mark.parametrize("name", ["qwen3", "three of 96", "softcap", "qwen3.5", "192", "deepseek"])
def test_int8_on_mma_sync(monkeypatch: pytest.MonkeyPatch, name: str, call: str) -> None:
    monkeypatch.setattr(cuda, "query", lambda _: SM80)
    check(Inputs.make(HEADS[name], "bf16", *CALLS[call], cache_format="int8"))


@gpu
@pytest.mark.parametrize("tokens", [1, 40])
@pytest.mark.parametrize("scale", [2.0**-40, 1.0, 2.0**40])
@pytest.mark.parametrize("cache", CODES)
def test_codes_of_any_scale(cache: str, scale: float, tokens: int) -> None:
    """New keys vanish or saturate."""
    spec = replace(HEADS["three of 96"], rotary_size=0)
    inputs = Inputs.make(spec, "bf16", [(0, tokens, 50)], tokens, 100, cache_format=cache)
    inputs.tensors[0][0, 0, 6 * 96 : 6 * 96 + 4] = [np.inf, -np.inf, 1e30, -0.0]  # keys: saturate
    inputs = replace(
        inputs, spec=replace(inputs.spec, scale=inputs.spec.scale / scale, k_scale=inputs.spec.k_scale * scale)
    )
    check(inputs)


@gpu
@pytest.mark.parametrize("tokens", [2, 40])
def test_a_code_that_is_no_number(tokens: int) -> None:
    """It reaches the tokens that see it and no others."""
    spec, at = attention_spec(8, 2, 64, rotary_size=64, sliding_window=30), tokens // 2
    inputs = Inputs.make(spec, "bf16", [(0, tokens, 100)], tokens, 200, cache_format="fp8_e4m3")
    inputs.tensors[0][0, at, -3] = np.nan  # of the last head's values
    inputs.tensors[2][0, 0, 95, 5] = 0xFF
    with np.errstate(invalid="ignore"):
        want, *_ = inputs.want()
    got, *_ = inputs.run()
    assert np.array_equal(np.isnan(got), np.isnan(want))
    assert np.isnan(want).any()
    assert not np.isnan(want).all()


@pytest.mark.parametrize(
    ("cache", "device", "message"),
    [
        ("int8_token", cuda.H200, "cache_format is .int8_token., the CUDA kernels take none, int8 and fp8_e4m3"),
        ("fp8_e4m3", SM80, "cache_format is .fp8_e4m3., which needs compute capability 9.0 or later, found 8.0"),
    ],
)
def test_codes_that_do_not_run_are_named(cache: str, device: cuda.Device, message: str) -> None:
    spec = replace(SPEC, cache_format=cache)
    with pytest.raises(ValueError, match=message):
        cuda.plan_attention(cuda.attention_problem(spec, "bf16", 1, 1, 64, 64), device)
    assert bool(cuda.refusal(spec)) == (cache == "int8_token")
