"""MoERouting through the C ABI against the float64 reference and against transformers' own routers."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import pytest
from support.operators import native_kernels as native
from support.operators.cases import ROUTERS, assert_routed

from quantmoe.custom_ops.op import RoutingSpec
from quantmoe.custom_ops.reference import route


@pytest.mark.parametrize("spec", ROUTERS.values(), ids=ROUTERS)
def test_the_reference(spec: RoutingSpec) -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 2, (200, spec.logits)).astype(np.float32)
    bias = rng.uniform(0, 1, spec.num_experts).astype(np.float32)
    for b in (None, bias):
        ids, weights = native.route(spec, logits, b)
        assert_routed((ids, weights), route(spec, logits, b), 1e-6, 1e-7 * spec.routed_scaling_factor)
        again = native.route(spec, logits, b, lanes=2)
        np.testing.assert_array_equal(again[0], ids)
        np.testing.assert_array_equal(again[1], weights)


@pytest.mark.parametrize("spec", ROUTERS.values(), ids=ROUTERS)
def test_equal_scores_go_to_the_lower_id(spec: RoutingSpec) -> None:
    logits = np.random.default_rng(0).integers(0, 3, (50, spec.logits)).astype(np.float32)
    ids, _ = native.route(spec, logits)
    np.testing.assert_array_equal(ids, route(spec, logits)[0])
    if spec.topk_group == spec.n_group:
        order = np.argsort(-logits[:, : spec.num_experts], axis=1, kind="stable")
        np.testing.assert_array_equal(ids[:, : spec.top_k], order[:, : spec.top_k])
    flat, _ = native.route(spec, np.zeros((1, spec.logits), np.float32))
    np.testing.assert_array_equal(flat[0, : spec.top_k], np.arange(spec.top_k))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_types(dtype: type) -> None:
    spec = ROUTERS["renormalized"]
    logits = np.random.default_rng(0).normal(0, 2, (5, spec.num_experts)).astype(dtype)
    for a, b in zip(native.route(spec, logits), native.route(spec, logits.astype(np.float32)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_logits_that_are_not_numbers() -> None:
    for spec in ROUTERS.values():
        logits = np.zeros((3, spec.logits), np.float32)
        logits[1, spec.num_experts - 1] = np.nan
        ids, weights = native.route(spec, logits)
        assert (ids[1] == [*range(spec.top_k), *range(spec.num_experts, spec.num_experts + spec.shared_experts)]).all()
        assert np.isnan(weights[1, : spec.top_k]).all()
        assert (weights[1, spec.top_k :] == (0.5 if spec.shared_gate else 1)).all()
        assert np.isfinite(weights[[0, 2]]).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"top_k": 65}, "top_k is 65, expected 1 to 24"),
        ({"n_group": 7}, "n_group is 7, expected a divisor of num_experts 64"),
        ({"topk_group": 9}, "topk_group is 9, expected 1 to 8"),
        ({"renormalize": 2}, "renormalize is 2"),
        ({"shared_experts": 65536}, "shared_experts is 65536, expected 0 to 65472"),
        ({"shared_experts": 1, "shared_gate": 2}, "shared_gate is 2, expected 0 to 1"),
        ({"shared_gate": 1}, "shared_gate is 1, expected 0 to 0"),
        ({"method": "hash"}, 'method is "hash", the operator defines: softmax_topk'),
    ],
)
def test_bad_attributes_are_named(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        native.route(dataclasses.replace(ROUTERS["few-groups"], **change), np.zeros((1, 64), np.float32))


def test_a_shared_gate_that_is_no_number_is_its_own_weight_alone() -> None:
    spec = ROUTERS["shared-gate"]
    logits = np.random.default_rng(0).normal(0, 2, (3, spec.logits)).astype(np.float32)
    of = native.route(spec, logits)
    logits[:, -1] = np.nan, np.inf, -np.inf
    ids, weights = native.route(spec, logits)
    np.testing.assert_array_equal(ids, of[0])
    np.testing.assert_array_equal(weights[:, :-1], of[1][:, :-1])
    assert np.isnan(weights[0, -1])
    assert weights[1, -1] == 1
    assert 0 <= weights[2, -1] < 1e-37
