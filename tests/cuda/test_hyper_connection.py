"""HyperConnection on CUDA, beside the reference, and what the kernel refuses. Launches are skipped where no GPU is."""

from __future__ import annotations

import numpy as np
import pytest
from support.cuda import cuda_kernels as cuda
from support.cuda.built import NUMPY, SM80, TORCH, gpu, torch
from support.operators.hyper_connection import Inputs, assert_near, inputs

from quantmoe.custom_ops.op_def.nodes import HyperConnection


def spec_of(streams: int, features: int, iterations: int, epsilon: float = 1e-6) -> HyperConnection:
    return HyperConnection(num_streams=streams, hidden_size=features, iterations=iterations, epsilon=epsilon)


def on_gpu(given: Inputs, dtype: str) -> list[torch.Tensor]:
    streams = torch.from_numpy(given.streams.view(np.int16).copy()).view(TORCH[dtype])
    return [t.cuda() for t in (streams, *map(torch.from_numpy, given.tensors[1:]))]


def on_cpu(found: tuple[torch.Tensor, ...]) -> tuple[np.ndarray, ...]:
    return tuple(t.float().cpu().numpy() for t in found)


@gpu
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize(
    ("tokens", "streams", "features", "iterations"),
    [((1, 1), 4, 4096, 20), ((3, 67), 4, 1032, 20), ((5,), 5, 64, 4), ((9,), 1, 8, 3), ((2, 3), 3, 1024, 1),
     ((700,), 2, 3072, 7), ((0, 2), 4, 64, 20)],
)  # fmt: skip
def test_kernel(tokens: tuple[int, ...], streams: int, features: int, iterations: int, dtype: str) -> None:
    given = inputs(spec_of(streams, features, iterations), tokens, NUMPY[dtype])
    tensors = on_gpu(given, dtype)
    found = cuda.run_node(given.spec, *tensors)
    assert_near(on_cpu(found), given)
    for own, again in zip(found, cuda.run_node(given.spec, *tensors), strict=True):
        assert torch.equal(own, again)


@gpu
@pytest.mark.parametrize("spread", [0.0, 1e-20, 10.0, 40.0, 1e4, 1e30])
@pytest.mark.parametrize("epsilon", [1e-6, 1.0])
def test_logits_of_all_sizes(spread: float, epsilon: float) -> None:
    given = inputs(spec_of(4, 64, 20, epsilon), (50,), NUMPY["f16"], spread)
    assert_near(on_cpu(cuda.run_node(given.spec, *on_gpu(given, "f16"))), given)


@gpu
def test_numbers_that_are_not_finite_stay_in_their_token() -> None:
    given = inputs(spec_of(4, 64, 20), (5,), NUMPY["bf16"])
    given.streams[1, 2, 5] = np.nan
    given.mixes[2, 1] = given.mixes[3, 11] = np.nan
    collapsed, post, comb = on_cpu(cuda.run_node(given.spec, *on_gpu(given, "bf16")))
    assert np.argwhere(np.isnan(collapsed[1])).tolist() == [[5]]
    assert np.isnan(collapsed[2]).all()
    assert np.isnan(comb[3]).all()
    assert np.isfinite(post).all()
    whole = [0, 4]
    part = Inputs(given.spec, given.streams[whole], given.mixes[whole], given.base, given.scale)
    assert_near((collapsed[whole], post[whole], comb[whole]), part)


def test_refusals() -> None:
    shapes = [(2, 4, 64), (2, 24), (24,), (3,)]
    for device in (SM80, cuda.H200):
        plan = cuda.plan_shapes(spec_of(4, 64, 20), "f16", shapes, device=device)
        assert not plan.workspace_bytes
        with pytest.raises(ValueError, match="streams are of type 0, the CUDA kernel takes float16"):
            cuda.plan_shapes(spec_of(4, 64, 20), "f32", shapes, device=device)
        with pytest.raises(ValueError, match="num_streams is 6, the CUDA kernel takes up to 5"):
            cuda.plan_shapes(spec_of(6, 64, 20), "f16", [(2, 6, 64), (2, 48), (48,), (3,)], device=device)
        with pytest.raises(ValueError, match="hidden_size is 60, the CUDA kernel takes multiples of 8"):
            cuda.plan_shapes(spec_of(4, 60, 20), "bf16", [(2, 4, 60), (2, 24), (24,), (3,)], device=device)
        with pytest.raises(ValueError, match="iterations is 0, expected 1 to 1024"):
            cuda.plan_shapes(spec_of(4, 64, 0), "bf16", shapes, device=device)
