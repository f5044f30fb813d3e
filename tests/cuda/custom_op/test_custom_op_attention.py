"""CachedAttention in the CUDA custom-op library."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.cuda.attention_cases import Inputs
from support.cuda.built import TORCH, UNIT
from support.cuda.ort import ATTENTION, LATENT, STREAM, attention_shapes, gpu, run, value


@pytest.mark.parametrize(
    ("name", "new", "message"),
    [
        ("softcap", None, "attribute softcap of kind f is required"),
        ("qk_norm", "all", 'qk_norm is "all", the operator defines: none, head, row'),
        ("head_size", 80, "head_size is 80 and v_head_size 64, the CUDA kernels take 64, 96, 128"),
        ("num_heads", 7, "kv_num_heads is 2, expected a divisor of num_heads 7"),
        (
            "key_split",
            32,
            "head_size is 64 and key_split 32, of keys that are their values the CUDA kernels take 512 and 0 or 256",
        ),
    ],
)
def test_wrong_attention(driver, fake, name, new, message):
    fake()
    attributes = {k: v for k, v in (ATTENTION.attributes() | {name: new}).items() if v is not None}
    assert driver.create(driver.op("f16", "f16", name="CachedAttention"), attributes, []) is None
    assert driver.error.startswith('CachedAttention node "moe": ')
    assert message in driver.error


@pytest.mark.parametrize(
    ("spec", "at", "shape", "message"),
    [
        (ATTENTION, 0, (2, 3, 700), "qkv has shape [2, 3, 700], expected [2, 3, 768]"),
        (ATTENTION, 2, (2, 2, 63, 64), "past_value has shape [2, 2, 63, 64], expected [2, 2, 64, 64]"),
        (ATTENTION, 3, (2, 2), "rows has shape [2, 2], expected [2, 3]"),
        (ATTENTION, 4, (64,), "attention_mask has shape [64], expected [2, L]"),
        (ATTENTION, 6, (2, 3, 64), "sin has shape [2, 3, 64], expected [2, 3, 32]"),
        (ATTENTION, 7, (64,), "q_norm has shape [64], expected [0]"),
        (ATTENTION, 9, (2,), "sinks has shape [2], expected [8]"),
        (LATENT, 0, (2, 3, 12608), "qkv has shape [2, 3, 12608], expected [2, 3, 12096]"),
        (LATENT, 1, (2, 1, 64, 576), "past_key has shape [2, 1, 64, 576], expected [2, 1, 64, 288]"),
        (LATENT, 2, (2, 1, 64, 512), "past_value has shape [2, 1, 64, 512], expected [2, 1, 64, 288]"),
    ],
)
def test_wrong_attention_inputs(driver, fake, spec, at, shape, message):
    fake()
    op = driver.op("bf16", "bf16", name="CachedAttention")
    kernel = driver.create(op, spec.attributes(), [])
    assert kernel is not None, driver.error
    shapes = attention_shapes(spec, 2, 3, 64, 60)
    shapes[at] = shape
    values = [value(s) for s in shapes]
    assert driver.run(op, kernel, values[:10], values[10:], STREAM) != 0
    assert driver.error.startswith('CachedAttention node "moe": ')
    assert message in driver.error
    driver.lib.driver_destroy(op, kernel)


@gpu
@pytest.mark.parametrize("spec", [ATTENTION, LATENT], ids=["grouped", "latent"])
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_run_attention(driver, dtype, spec):
    """In place, and into other memory with more slots."""
    op = driver.op(dtype, dtype, name="CachedAttention")
    kernel = driver.create(op, spec.attributes(), [])
    assert kernel is not None, driver.error
    for rows, tokens, past, length in (
        ([(0, 1, 40), (0, 1, 99)], 1, 100, 0),
        ([(0, 30, 0), (5, 20, 0)], 30, 0, 30),
        ([(0, 3, 40), (1, 2, 41)], 3, 50, 60),
    ):
        made = Inputs.make(spec, dtype, rows, tokens, past, length)
        inputs = made.on_device()
        inputs.insert(4, torch.empty(0))  # the mask, of which nothing is read
        shapes = attention_shapes(spec, len(rows), tokens, past, length)
        output, *present = (torch.full(s, float("nan"), dtype=TORCH[dtype], device="cuda") for s in shapes[10:])
        if length <= past:
            present = inputs[1:3]
        assert run(driver, op, kernel, inputs, shapes, [output, *present]) == 0, driver.error
        assert driver.lib.driver_live_scratch() == 0
        for got, want in zip((output, *present), made.want(), strict=True):
            got = got.double().cpu().numpy()
            np.testing.assert_array_equal(np.isfinite(got), np.isfinite(want))
            got, want = got[np.isfinite(want)], want[np.isfinite(want)]
            assert np.linalg.norm(got - want) < 1.5 * UNIT[dtype] * np.linalg.norm(want)
    driver.lib.driver_destroy(op, kernel)
