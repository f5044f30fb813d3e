"""HyperConnection through the C ABI, beside the reference and transformers."""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from support.operators import native_kernels as native
from support.operators.hyper_connection import Inputs, assert_near, inputs
from transformers import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HyperConnection

from quantmoe.custom_ops.op_def.nodes import HyperConnection
from quantmoe.custom_ops.ops.hyper_connection import hyper_connection

TYPES = (np.float32, np.float16, ml_dtypes.bfloat16)
#: tokens, streams, features, iterations
SHAPES = {
    "a token of DeepSeek-V4": ((1, 1), 4, 4096, 20),
    "a prompt": ((2, 67), 4, 96, 20),
    "no batch": ((5,), 4, 64, 20),
    "a token without dimensions": ((), 2, 8, 3),
    "one stream": ((9,), 1, 7, 5),
    "odd sizes": ((3, 5), 3, 13, 4),
    "one iteration": ((8,), 4, 33, 1),
    "the most streams": ((2,), 16, 5, 3),
    "no tokens": ((0, 3), 4, 64, 20),
}


def spec_of(streams: int, features: int, iterations: int, epsilon: float = 1e-6) -> HyperConnection:
    return HyperConnection(num_streams=streams, hidden_size=features, iterations=iterations, epsilon=epsilon)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("tokens", "streams", "features", "iterations"), SHAPES.values(), ids=SHAPES)
def test_kernel(tokens: tuple[int, ...], streams: int, features: int, iterations: int, dtype: Any) -> None:
    given = inputs(spec_of(streams, features, iterations), tokens, dtype)
    found = native.run(given.spec, *given.tensors)
    assert_near(found, given)
    for lanes in (2, 5):
        for own, once in zip(native.run(given.spec, *given.tensors, lanes=lanes), found, strict=True):
            assert own.tobytes() == once.tobytes()


@pytest.mark.parametrize("spread", [0.0, 1e-20, 10.0, 40.0, 1e4, 1e30])
@pytest.mark.parametrize("epsilon", [1e-6, 0.01, 1.0])
def test_logits_of_all_sizes(spread: float, epsilon: float) -> None:
    given = inputs(spec_of(4, 24, 20, epsilon), (50,), spread=spread)
    found = native.run(given.spec, *given.tensors)
    assert_near(found, given)
    assert all(np.isfinite(own).all() for own in found)


def test_equal_logits_are_exact() -> None:
    """Check that nothing is rounded where all numbers of comb are 1 / 4."""
    given = inputs(spec_of(4, 40, 20, 0.0), (3,), spread=0.0)
    streams = np.random.default_rng(0).integers(-64, 65, given.streams.shape).astype(np.float32)
    collapsed, post, comb = native.run(given.spec, streams, *given.tensors[1:])
    np.testing.assert_array_equal(comb, 0.25)
    np.testing.assert_array_equal(post, 1.0)
    np.testing.assert_array_equal(collapsed, streams.sum(-2) / 2)


@pytest.mark.parametrize(
    "change",
    [
        {"iterations": 2},
        {"iterations": 4},
        {"epsilon": 0.0},
        {"epsilon": 2e-5},
    ],
)
def test_the_bound_tells_a_small_mistake(change: dict[str, Any]) -> None:
    given = inputs(spec_of(4, 24, 3, 1e-5), (20,), spread=4.0)
    wrong = hyper_connection(dataclasses.replace(given.spec, **change), *given.tensors)
    with pytest.raises(AssertionError, match="times the bound"):
        assert_near(wrong, given)
    assert_near(native.run(given.spec, *given.tensors), given)


def test_numbers_that_are_not_finite_stay_in_their_token() -> None:
    given = inputs(spec_of(4, 24, 20), (8,))
    given.streams[1, 2, 5], given.streams[2, 0, 7] = np.nan, -np.inf
    given.mixes[3, 1], given.mixes[4, 6], given.mixes[5, 11], given.mixes[6, 9] = np.nan, np.inf, np.nan, np.inf
    found = native.run(given.spec, *given.tensors)
    with np.errstate(invalid="ignore"):
        want = hyper_connection(given.spec, *given.tensors)
    for own, exact in zip(found, want, strict=True):
        np.testing.assert_array_equal(np.isnan(own), np.isnan(exact))
        np.testing.assert_array_equal(np.isinf(own), np.isinf(exact))
        own.view(np.uint32)[np.isnan(own)] ^= 0x7FC00000  # quiet NaNs of the operators
        assert (own.view(np.uint32)[np.isnan(exact)] == 0).all()
    whole = [0, 7]
    part = Inputs(given.spec, given.streams[whole], given.mixes[whole], given.base, given.scale)
    assert_near(tuple(own[whole] for own in found), part)


def test_deepseek_v4() -> None:
    """Compare the node after a projection with the module of transformers."""
    config = DeepseekV4Config(hidden_size=64, hc_mult=4)
    module = DeepseekV4HyperConnection(config)
    draw = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=draw)
    streams = torch.randn(2, 9, 4, 64, generator=draw)
    with torch.no_grad():
        post, comb, collapsed = module(streams)
        mixes = module.input_norm(streams.flatten(2)) @ module.fn.T
    spec = spec_of(4, 64, config.hc_sinkhorn_iters, config.hc_eps)
    tensors = (t.detach().numpy() for t in (streams, mixes, module.base, module.scale))
    for own, want in zip(native.run(spec, *tensors), (collapsed, post, comb), strict=True):
        np.testing.assert_allclose(own, want.numpy(), rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("streams", "features", "iterations", "epsilon", "text"),
    [
        (0, 8, 20, 1e-6, "num_streams is 0, expected 1 to 16"),
        (17, 8, 20, 1e-6, "num_streams is 17, expected 1 to 16"),
        (4, 0, 20, 1e-6, "hidden_size is 0, expected 1 to"),
        (4, 8, 0, 1e-6, "iterations is 0, expected 1 to 1024"),
        (4, 8, 20, -1.0, "epsilon is -1, expected 0 or a positive number"),
        (4, 8, 20, float("nan"), "epsilon is nan, expected 0 or a positive number"),
    ],
)
def test_refusals(streams: int, features: int, iterations: int, epsilon: float, text: str) -> None:
    given = inputs(spec_of(4, 8, 1), (2,))
    with pytest.raises(ValueError, match=text):
        native.run(spec_of(streams, features, iterations, epsilon), *given.tensors)
