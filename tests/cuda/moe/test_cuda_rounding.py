"""Activations that the CUDA kernels round, against reference.py; skipped where no GPU is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.cuda.built import gpu
from support.cuda.layers import (
    BASE,
    EXACT,
    FORMAT_SHAPES,
    SM120,
    assert_rounded,
    codes_of_halves,
    half_of,
    of_format,
    one_input,
    rounding_bound,
    run,
)
from support.operators.cases import Case

from quantmoe.custom_ops import reference
from quantmoe.custom_ops.expert import Expert

ROUNDED = {
    "odd": (None, FORMAT_SHAPES["odd"]),
    "split-k": (None, replace(FORMAT_SHAPES["split-k"], pre_scale=True)),
    "ungated": (None, FORMAT_SHAPES["ungated"]),
    "act-order": ("int4-zero", replace(BASE, act_order="shared", pre_scale=True, offset=2, total_experts=12)),
    "two-orders": ("int4-zero", replace(BASE, act_order="split", pre_scale=True, offset=2, total_experts=12)),
    "int4": ("int4", replace(BASE, hidden=520, intermediate=264, top_k=3)),
}


def powers_of_two(e: Expert) -> Expert:
    def make(m):
        if m is None or m.kind != "int4":
            return m
        return replace(m, scales=(2.0 ** np.floor(np.log2(m.scales.astype(np.float64)))).astype(m.scales.dtype))

    return one_input(Expert(make(e.gate), make(e.up), make(e.down)))


def rounded(activation_format: str, shape: str) -> tuple[Case, list[Expert]]:
    weights, case = ROUNDED[shape]
    if weights != "int4":
        case = of_format(weights or EXACT[activation_format], case)
    case = replace(case, activation_format=activation_format)
    rng = np.random.default_rng(case.seed)
    return case, [powers_of_two(case.expert(rng)) for _ in range(case.experts)]


def rounding_reference(monkeypatch, case: Case, dtype: str) -> None:
    """The reference with what the kernels have in 16 bits: h before it is rounded to the format, and products with a
    step that is no power of two. h would else have other codes wherever these put it on the other side of a middle.
    """
    exact, half = reference.quantize_activations, half_of(dtype)
    in_values = case.weights[0] == "int4" and not case.weights[2]  # a stored scale is

    def quantize(x, activation_format, stored=None):
        q = exact(x, activation_format, stored)
        stored_outside = activation_format in ("fp8_tensor", "nvfp4") and not in_values
        return q if stored_outside or activation_format.startswith("mx") else half(q)

    codes_of_halves(monkeypatch, dtype)
    monkeypatch.setattr(reference, "quantize_activations", quantize)


@gpu
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("tokens", [0, 1, 7, 13, 70, 600])
@pytest.mark.parametrize("shape", ROUNDED)
@pytest.mark.parametrize("activation_format", EXACT)
def test_rounded_activations(activation_format, shape, tokens, dtype, monkeypatch):
    check_rounded(activation_format, shape, tokens, dtype, monkeypatch)


@gpu
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("tokens", [1, 7, 13, 70, 600])
@pytest.mark.parametrize("shape", ["odd", "split-k", "ungated"])
def test_packed_activations(shape, tokens, dtype, monkeypatch):
    """sm_120a's plan on sm_90, whose kernels have the block-scaled instruction from shuffles (ptx.cuh)."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("test_rounded_activations on sm_120, nothing elsewhere")
    check_rounded("nvfp4", shape, tokens, dtype, monkeypatch, SM120)


def check_rounded(activation_format, shape, tokens, dtype, monkeypatch, device=None):
    case, experts = rounded(activation_format, shape)
    rounding_reference(monkeypatch, case, dtype)
    got, want = run(case, tokens, dtype, experts=experts, device=device)
    assert_rounded(got, want, rounding_bound(activation_format, dtype))


@gpu
@pytest.mark.parametrize("tokens", [5, 40, 600])
@pytest.mark.parametrize("activation_format", EXACT)
def test_non_finite_token_stays_alone_when_rounded(activation_format, tokens, monkeypatch):
    def spoil(x):
        x[2, 7] = float("nan")
        x[4, 0] = -float("inf")

    case, experts = rounded(activation_format, "odd")
    rounding_reference(monkeypatch, case, "bf16")
    got, want = run(case, tokens, "bf16", mutate=spoil, experts=experts)
    keep = np.ones(tokens, bool)
    keep[[2, 4]] = False
    assert np.isnan(got[~keep]).all()
    bound, _ = rounding_bound(activation_format, "bf16")
    assert np.linalg.norm(got[keep] - want[keep]) <= bound * np.linalg.norm(want[keep])
