"""Every architecture's router is recognised, and MoERouting gives its ids and weights."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.models.tiny import COMMON, SIZES
from support.operators import native_kernels as native
from support.operators.specs import routing_spec
from transformers import AutoConfig, AutoModelForCausalLM

from quantmoe.exporter.graph.modules.routers import attach, attach_standard, is_product, recognise

EXPECTED = {
    "qwen3_moe": routing_spec(16, 4, "topk_softmax"),
    "mixtral": routing_spec(8, 2, "topk_softmax"),
    "olmoe": routing_spec(16, 4, "softmax_topk", 0),
    "gpt_oss": routing_spec(8, 2, "topk_softmax"),
    "deepseek_v3": routing_spec(16, 4, "sigmoid_topk", 1, 4, 2, 2.5),
    "glm4_moe": routing_spec(16, 4, "sigmoid_topk", 1),
    "ernie4_5_moe": routing_spec(64, 6, "softmax_topk", 1),
}


def routers(architecture: str, **sizes: object) -> list[torch.nn.Module]:
    fields = (
        COMMON | SIZES.get(architecture, {}) | {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2} | sizes
    )
    config = AutoConfig.for_model(architecture, **fields | sizes, pad_token_id=None)
    model = AutoModelForCausalLM.from_config(config)
    return [m for m in model.modules() if type(m).__name__.endswith("Router")]


@pytest.mark.parametrize("architecture", EXPECTED)
def test_recognised_and_equal(architecture):
    router = routers(architecture)[-1]
    spec = recognise(router)
    assert spec == EXPECTED[architecture]
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        router.weight.copy_(torch.randn(router.weight.shape, generator=generator))
        bias = None
        for name, tensor in (*router.named_parameters(), *router.named_buffers()):
            if name.endswith("e_score_correction_bias"):
                bias = tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.3).flatten()
        logits, weights, ids = router(torch.randn(500, 64, generator=generator) / 4)
    found_ids, found = native.route(spec, logits.numpy(), None if bias is None else bias.numpy())
    a, b = np.argsort(ids.numpy(), 1), np.argsort(found_ids, 1)
    np.testing.assert_array_equal(np.take_along_axis(ids.numpy(), a, 1), np.take_along_axis(found_ids, b, 1))
    difference = np.take_along_axis(weights.numpy(), a, 1) - np.take_along_axis(found, b, 1)
    assert np.abs(difference).max() < 1e-6


@pytest.mark.parametrize("method", [None, "topk_sigmoid"])
@pytest.mark.parametrize("architecture", EXPECTED)
def test_of_onnxruntimes_own_operators(architecture, method):
    """Equal to MoERouting, also with a method that no architecture here has."""
    router = routers(architecture)[-1]
    spec = EXPECTED[architecture] if method is None else replace(EXPECTED[architecture], method=method, renormalize=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _, tensor in (*router.named_parameters(), *router.named_buffers()):
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.5)
        attach(router, spec)
        x = torch.randn(500, 64, generator=generator) / 4
        _, weights, ids = router(x)
        attach_standard(router, spec)
        _, found, found_ids = router(x)
    a, b = np.argsort(ids.numpy(), 1), np.argsort(found_ids.numpy(), 1)
    np.testing.assert_array_equal(np.take_along_axis(ids.numpy(), a, 1), np.take_along_axis(found_ids.numpy(), b, 1))
    np.testing.assert_allclose(
        np.take_along_axis(found.numpy(), b, 1), np.take_along_axis(weights.numpy(), a, 1), rtol=3e-6, atol=1e-7
    )


def test_a_router_without_groups():
    """DeepSeek-V2-Lite's configuration has null for them."""
    sizes = {"n_group": None, "topk_group": None, "topk_method": "greedy", "n_routed_experts": 16}
    (router, *_) = routers("deepseek_v2", **sizes, num_experts_per_tok=4, moe_intermediate_size=32)
    assert recognise(router) == routing_spec(16, 4, "softmax_topk", 0)


@pytest.mark.parametrize("architecture", EXPECTED)
def test_logits_are_a_product(architecture):
    router = routers(architecture)[-1]
    assert is_product(router)

    class Scaled(type(router)):
        def forward(self, hidden_states):
            return super().forward(hidden_states * 2)

    router.__class__ = Scaled
    assert not is_product(router)


def test_llama4():
    router = routers("llama4_text")[0]
    with torch.no_grad():
        router.weight.normal_()
        scores, logits = router(torch.randn(300, 64))
    ids, weights = native.route(routing_spec(8, 1, "topk_sigmoid"), logits.numpy())
    np.testing.assert_array_equal(ids[:, 0], scores.argmax(1).numpy())
    assert np.abs(weights[:, 0] - scores.max(1).values.numpy()).max() < 1e-6


def test_others_are_left_alone():
    router = routers("qwen3_moe")[0]

    class StrangeRouter(type(router)):
        def forward(self, hidden_states):
            logits, weights, ids = super().forward(hidden_states)
            return logits, weights**2, ids

    router.__class__ = StrangeRouter
    assert recognise(router) is None
    assert recognise(torch.nn.Linear(4, 4)) is None


def test_a_router_whose_weight_is_a_linear_of_its_own_is_left_alone():
    (router, *_) = routers("afmoe", num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, num_dense_layers=1)
    assert recognise(router) is None
