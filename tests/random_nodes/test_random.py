"""`make test-random`, a stage of CI, notices what it is for: other weights, row sums that are wrong, other routes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
from random_nodes import reference, run
from support.operators import native_kernels as native
from support.operators.arithmetic import Weights
from support.operators.cases import WEIGHTS, Case
from support.operators.specs import routing_spec

from quantmoe.custom_ops.op import RoutingSpec, enum

ROUTERS = [
    routing_spec(32, 4, method, renormalize, n_group, n_group // 2 or 1, 2.5)
    for method in enum("routing_method")
    for renormalize in (0, 1)
    for n_group in (1, 4)
] + [routing_spec(32, 4, "topk_softmax", shared_experts=2, shared_gate=gate) for gate in (0, 1)]


def out_of_bounds(kind: str, patch: Callable[[Callable[[Weights], Weights]], None], factor: float) -> set[str]:
    """Return the nodes out of bounds beside a reference with all weights of a matrix times ``factor``."""
    patch(lambda m: dataclasses.replace(m, values=m.values * factor))
    found = set()
    for node in (run.draw_node(3, i) for i in range(150)):
        if node.label.startswith(kind) and node.text.endswith("float32"):
            try:
                node.check()
            except AssertionError as error:
                if "out of bounds" not in str(error):
                    raise
                found.add(node.text)
    return found


def test_linears_of_other_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each node that uses its weights; not those without tokens, or whose tokens are all NaN or zero."""
    decode = reference.linear

    def patch(larger: Callable[[Weights], Weights]) -> None:
        monkeypatch.setattr(reference, "linear", lambda spec, w: larger(decode(spec, w)))

    found = out_of_bounds("QuantLinear", patch, 2)
    assert len(found) >= 8
    assert out_of_bounds("QuantLinear", patch, 1 + 2.0**-10) == found


def test_layers_of_other_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each node that uses its experts; not those whose tokens chose none of them."""
    decode = reference.moe

    def patch(larger: Callable[[Weights], Weights]) -> None:
        replaced = lambda spec, *rows: [(g, u, larger(d)) for g, u, d in decode(spec, *rows)]  # noqa: E731
        monkeypatch.setattr(reference, "moe", replaced)

    found = out_of_bounds("QuantMoE", patch, 2)
    assert len(found) >= 8
    assert out_of_bounds("QuantMoE", patch, 1 + 2.0**-10) == found


def test_each_format_is_drawn() -> None:
    assert run.FORMATS.keys() == {kind for kind, *_ in WEIGHTS}


@pytest.mark.parametrize("weights", ["int4", "int8"])
@pytest.mark.parametrize("group_size", [-1, 32])
def test_row_sums_that_are_not_those_of_the_codes(weights: str, group_size: int) -> None:
    layer = Case(weights=(weights, "bf16", False), group_size=group_size).build()
    reference.moe(layer.spec, layer.w13, layer.w2)
    changed = layer.w2.copy()
    changed[0, 2] ^= 0x40  # a code
    with pytest.raises(AssertionError, match="row sums"):
        reference.moe(layer.spec, layer.w13, changed)
    with pytest.raises(AssertionError, match=r"FORMAT\.md gives"):
        reference.moe(layer.spec, layer.w13, np.pad(layer.w2, ((0, 0), (0, 64))))


@pytest.mark.parametrize("spec", ROUTERS, ids=str)
def test_other_routes(spec: RoutingSpec) -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 1, (6, spec.logits)).astype(np.float32)
    bias = rng.uniform(0, 0.1, spec.num_experts).astype(np.float32)
    ids, weights = native.route(spec, logits, bias)
    reference.check_routing(spec, logits, bias, ids, weights)

    def refused(ids: np.ndarray, weights: np.ndarray, match: str) -> None:
        with pytest.raises(AssertionError, match=match):
            reference.check_routing(spec, logits, bias, ids, weights)

    order = [1, 0, *range(2, spec.slots)]
    refused(ids, weights * np.float32(1 + 2.0**-18), "out of bounds|shared")
    refused(ids[:, order], weights[:, order], "descending")
    refused(np.where(ids == ids[:, :1], ids[:, 1:2], ids), weights, "not different")
    for at in range(spec.top_k, spec.slots):
        changed, of = ids.copy(), weights.copy()
        changed[0, at] -= 1
        refused(changed, weights, "shared")
        of[0, at] *= np.float32(1 + 2.0**-18)
        refused(ids, of, "out of bounds|shared")
    for other in set(range(spec.num_experts)) - set(ids[0].tolist()):
        changed = ids.copy()
        changed[0, spec.top_k - 1] = other
        refused(changed, weights, "lack better ones|groups that are not kept")
