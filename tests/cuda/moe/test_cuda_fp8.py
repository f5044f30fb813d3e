"""Products of e4m3 codes on both sides, on wgmma and on mma.sync, against reference.py; skipped where no GPU is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.cuda import cuda_kernels as cuda
from support.cuda.built import UNIT, gpu
from support.cuda.layers import (
    FP8,
    FP8_CASES,
    SM89,
    assert_rounded,
    build,
    build_linear,
    codes_of_halves,
    rounding_bound,
    run,
)
from support.operators.cases import Case

from quantmoe.custom_ops import reference
from quantmoe.custom_ops.expert import Expert

# fp8 activations on wgmma. By token h is rounded to 16 bits before it is quantized (relative u / 2 on average),
# and the tensor cores keep 14 bits of a sum: such a change of d flips a code, by a spacing s of e4m3 (2^-3 to 2^-4), in
# d / s of the cases: sqrt(d s) of the norm, d = 2^-10 + 2^-12 for bf16. A token whose h is mostly one value may change
# by a spacing.
FLIPS = {"bf16": 2.0**-6, "f16": 2.0**-6.5}


def check_fp8(case: Case, tokens: int, dtype: str, keep=None, **options) -> None:
    got, want = run(case, tokens, dtype, **options)
    keep = np.ones(tokens, bool) if keep is None else keep
    assert np.isnan(got[~keep]).all()
    assert np.isfinite(got[keep]).all()
    got, want = got[keep], want[keep]
    error = np.linalg.norm(got - want) / np.linalg.norm(want)
    assert error < FLIPS[dtype], f"relative error {error:.2e}"
    rows = np.linalg.norm(got - want, axis=1) / np.maximum(np.linalg.norm(want, axis=1), 1e-30)
    assert rows.max() < 2.0**-3, f"token {rows.argmax()}: relative error {rows.max():.2e}"
    assert np.quantile(rows, 0.9) < 2 * FLIPS[dtype]


@gpu
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("tokens", [40, 95, 270, 600, 1100])
@pytest.mark.parametrize("name", FP8_CASES)
def test_fp8_activations(name, tokens, dtype):
    check_fp8(FP8_CASES[name], tokens, dtype)


@gpu
def test_fp8_activations_of_many_features():
    """More columns of h than a quantizing thread asks for at once."""
    check_fp8(replace(FP8_CASES["token"], hidden=256, intermediate=14336, experts=2), 40, "bf16")


# On mma.sync: the plans of the H200 for few tokens, and sm_89's, with tiles of 8, 16 and 32 tokens.
FEW = [(1, None), (3, None), (8, None), (13, None), (8, SM89), (9, SM89), (23, SM89), (64, SM89), (200, SM89)]


@gpu
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize(("tokens", "device"), FEW)
@pytest.mark.parametrize("name", [*FP8_CASES, "ungated"])
def test_e4m3_products_of_few_tokens(name, tokens, device, dtype, monkeypatch):
    """Where the product is of f16 that e4m3 codes become (sm_90, sm_100) sums are f32, else of 14 bits."""
    capability = torch.cuda.get_device_capability()
    if capability < (8, 9):
        pytest.skip("no e4m3 products")
    case = FP8_CASES.get(name) or replace(FP8, gated=False, activation="relu2", intermediate=392, bias=True)
    codes_of_halves(monkeypatch, dtype)
    got, want = run(case, tokens, dtype, device=device)
    assert_rounded(got, want, rounding_bound("fp8", dtype, 2.0**-18 if capability[0] in (9, 10) else 2.0**-13))


@gpu
@pytest.mark.parametrize("device", [None, SM89])
@pytest.mark.parametrize("name", ["blocks", "token", "tensor"])
def test_e4m3_products_that_are_not_finite_stay_alone(name, device, monkeypatch):
    def spoil(x):
        x[2, 7], x[4, 0], x[7, 500] = float("nan"), float("inf"), -float("inf")
        x[5], x[6, 128:256] = 0, 0

    codes_of_halves(monkeypatch, "bf16")
    for tokens in (8, 13):
        keep = np.ones(tokens, bool)
        keep[[2, 4, 7]] = False
        got, want = run(FP8_CASES[name], tokens, "bf16", mutate=spoil, device=device)
        assert np.isnan(got[~keep]).all()
        assert not got[5].any()
        assert_rounded(got[keep], want[keep], rounding_bound("fp8", "bf16"))


@gpu
@pytest.mark.parametrize("rows", [1, 8, 9, 30, 64])
@pytest.mark.parametrize("device", [None, SM89])
@pytest.mark.parametrize("name", ["blocks", "token", "tensor", "odd-token", "f16-256"])
def test_e4m3_linear(name, device, rows):
    m, spec, w = build_linear(replace(FP8_CASES[name], hidden=1032))
    x = torch.from_numpy(np.random.default_rng(1).normal(0, 1, (rows, spec.in_features)).astype(np.float32)).half()
    linear = cuda.CudaLinear(spec, torch.from_numpy(w).cuda())
    linear.device = device or linear.device
    got = linear(x.cuda()).double().cpu().numpy()
    want = reference.linear(x.float().numpy(), m, spec.w.activation_format)
    error, size = np.linalg.norm(got - want, axis=1), np.linalg.norm(want, axis=1)
    assert (error <= 1.2 * UNIT["f16"] * size).all()


@gpu
@pytest.mark.parametrize("name", ["blocks", "odd-token"])
def test_fp8_activations_of_crowds_and_of_no_one(name):
    case = FP8_CASES[name]
    # Tiles of up to 64 tokens, and of more.
    for tokens in (32, 33, 57, 64, 65, 88, 96, 100, 128, 130):
        check_fp8(case, tokens, "bf16", ids=np.full((tokens, 2), 3))
    ids = np.random.default_rng(5).integers(-3, 6, (500, 2))
    check_fp8(case, 500, "bf16", ids=np.where(ids < 4, ids, 2**31 - 1), id_type=np.int32)
    got, _ = run(case, 200, "bf16", ids=np.full((200, 2), -1))
    assert not got.any()


@gpu
@pytest.mark.parametrize("name", ["blocks", "token", "tensor"])
def test_fp8_activations_that_are_not_finite_stay_alone(name):
    keep = np.ones(300, bool)
    keep[[2, 4, 299]] = False

    def spoil(x):
        x[2, 7], x[4, 0], x[299, 500] = float("nan"), float("inf"), -float("inf")
        x[5], x[6, 128:256] = 0, 0

    case = FP8_CASES[name]
    got, _ = run(case, 300, "bf16", mutate=spoil)
    assert not got[5].any()
    check_fp8(replace(case, bias=True), 300, "bf16", keep=keep, mutate=spoil)


@gpu
@pytest.mark.parametrize("name", ["blocks", "token", "f16-256"])
def test_fp8_activations_of_every_size(name):
    """Tokens differ by 2^24, groups of one by 2^12; a row's scales by 2^4, some are zero."""
    case = replace(FP8_CASES[name], bias=False)

    def sizes(x):
        x *= 2.0 ** torch.randint(-20, 4, (len(x), 1), generator=torch.Generator().manual_seed(0))
        x[:, 128:256] *= 2.0**-12

    def wild(m, rng):
        s = (m.scales.astype(np.float64) * 2.0 ** rng.integers(-4, 1, m.scales.shape)).astype(m.scales.dtype)
        s[rng.random(s.shape) < 0.1] = 0
        return replace(m, scales=s)

    _, experts, *_ = build(case)
    rng = np.random.default_rng(7)
    experts = [Expert(*(wild(m, rng) for m in (e.gate, e.up, e.down))) for e in experts]
    got, want = run(case, 400, "bf16", experts=experts, mutate=sizes)
    rows = np.linalg.norm(got - want, axis=1) / np.maximum(np.linalg.norm(want, axis=1), 1e-30)
    assert np.quantile(rows, 0.9) < 4 * FLIPS["bf16"], rows


@gpu
def test_fp8_activations_beyond_f32_in_steps_are_the_largest_code():
    case = FP8_CASES["tensor"]
    _, experts, *_ = build(case)
    x = 2.0**30 * experts[0].up.input_scale
    far = [
        Expert(replace(e.gate, input_scale=x), replace(e.up, input_scale=x), replace(e.down, input_scale=2.0**-99))
        for e in experts
    ]
    got, want = run(case, 95, "bf16", experts=far, mutate=lambda x: x.mul_(2.0**30))
    # h is only its sign. That of a sum which is less than 2^-14 of its terms may differ: about 0.8 * 2^-14 of gate's
    # and of up's, and each is a change by 2.
    assert np.linalg.norm(got - want) < np.sqrt(4 * 1.6 * 2.0**-14) * np.linalg.norm(want)
