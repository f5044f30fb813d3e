"""QuantLinear on CUDA against reference.py; skipped where no GPU is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.cuda import cuda_kernels as cuda
from support.cuda.built import TORCH, UNIT, gpu
from support.cuda.layers import BASE, EXACT, LINEARS, SM120, build_linear, of_format

from quantmoe.custom_ops import reference


@gpu
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("rows", [0, 1, 8, 9, 30, 128, 1000])
@pytest.mark.parametrize("name", LINEARS)
def test_linear(name, rows, dtype):
    m, spec, w = build_linear(LINEARS[name])
    x = torch.from_numpy(np.random.default_rng(1).normal(0, 1, (rows, spec.in_features)).astype(np.float32))
    x = x.to(TORCH[dtype])
    linear = cuda.CudaLinear(spec, torch.from_numpy(w).cuda())
    y = linear(x.cuda())
    assert torch.equal(y, linear(x.cuda()))
    want = reference.linear(x.float().numpy(), m, "none")
    got = y.double().cpu().numpy()
    assert got.shape == want.shape
    assert np.isfinite(got).all()
    assert np.linalg.norm(got - want) <= 1.2 * UNIT[dtype] * np.linalg.norm(want)
    y = linear(torch.full_like(x, float("nan")).cuda())
    assert y.isnan().all()


@gpu
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("rows", [0, 1, 9, 128, 1000])
@pytest.mark.parametrize("act_order", ["none", "shared"])
@pytest.mark.parametrize("activation_format", [*EXACT, "packed"])
def test_rounded_linear(activation_format, act_order, rows, dtype):
    """Rows of every size: where the scale is not stored all are as exact. packed: as test_packed_activations."""
    packed = activation_format == "packed"
    if packed and (act_order != "none" or torch.cuda.get_device_capability() != (9, 0)):
        pytest.skip("nothing is packed")
    activation_format = "nvfp4" if packed else activation_format
    case = of_format(EXACT[activation_format], replace(BASE, hidden=1032, intermediate=520, bias=act_order == "none"))
    case = replace(case, activation_format=activation_format, act_order=act_order, pre_scale=act_order != "none")
    m, spec, w = build_linear(case)
    rng = np.random.default_rng(1)
    x = rng.normal(0, 1, (rows, spec.in_features)).astype(np.float32)
    if not case.stored_scale and m.bias is None:
        x *= np.float32(2.0) ** (rng.integers(-8, 8, (rows, 1)) * (8 if dtype == "bf16" else 1))
        x[2:3] = 0
    x = torch.from_numpy(x).to(TORCH[dtype])
    linear = cuda.CudaLinear(spec, torch.from_numpy(w).cuda())
    if packed:
        linear.device = SM120
    y = linear(x.cuda())
    assert torch.equal(y, linear(x.cuda()))
    want = reference.linear(x.float().numpy(), m, activation_format)
    got = y.double().cpu().numpy()
    assert np.isfinite(got).all()
    error, size = np.linalg.norm(got - want, axis=1), np.linalg.norm(want, axis=1)
    assert (error <= 1.2 * UNIT[dtype] * size).all()
    y = linear(torch.full_like(x, float("nan")).cuda())
    assert y.isnan().all()
