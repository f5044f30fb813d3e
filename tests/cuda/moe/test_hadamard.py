"""Hadamard on CUDA: the CPU's bytes, and what the kernel refuses. Launches are skipped where no GPU is."""

from __future__ import annotations

import numpy as np
import pytest
from support.cuda import cuda_kernels as cuda
from support.cuda.built import NUMPY, SM80, TORCH, gpu, torch
from support.operators import native_kernels as native

from quantmoe.custom_ops.op_def.nodes import Hadamard

SHAPES = [((1, 2048), 2048), ((3, 5, 96), 32), ((7, 3), 1), ((7, 6), 2), ((64,), 64), ((5, 8192), 8192),
          ((67, 192), 64), ((3, 1536), 512), ((0, 128), 128)]  # fmt: skip


@gpu
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize(("shape", "size"), SHAPES)
def test_kernel(shape: tuple[int, ...], size: int, dtype: str) -> None:
    """The order of sums is fixed, so the CPU gives the same bytes. Its tests have the bound."""
    spec = Hadamard(features=shape[-1], size=size)
    x = np.random.default_rng(0).normal(0, 3, shape).astype(NUMPY[dtype])
    given = torch.from_numpy(x.view(np.int16).copy()).view(TORCH[dtype]).cuda()
    for _ in range(2):
        (found,) = cuda.run_node(spec, given)
        assert found.cpu().view(torch.int16).numpy().tobytes() == native.run(spec, x)[0].tobytes()


def test_refusals() -> None:
    for device in (SM80, cuda.H200):
        cuda.plan_shapes(Hadamard(features=8192, size=8192), "f16", [(2, 8192)], device=device)
        with pytest.raises(ValueError, match="size is 16384, the CUDA kernel takes up to 8192"):
            cuda.plan_shapes(Hadamard(features=16384, size=16384), "f16", [(2, 16384)], device=device)
        with pytest.raises(ValueError, match="x is of type 0, the CUDA kernel takes float16"):
            cuda.plan_shapes(Hadamard(features=64, size=64), "f32", [(2, 64)], device=device)
        with pytest.raises(ValueError, match="size is 24, expected a power of two that divides features 96"):
            cuda.plan_shapes(Hadamard(features=96, size=24), "bf16", [(2, 96)], device=device)
