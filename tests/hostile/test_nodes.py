"""Nodes of com.microsoft's QMoE and MatMulNBits that lie, and their caches: the provider leaves a node to ONNX Runtime,
gives its result or says what is wrong."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from support.models.existing import error, linear, moe, needs_provider, outputs, said, session, with_input
from support.operators.cases import Case

#: ONNX Runtime says what is wrong itself, in the graph or in its kernel.
REFUSED = "refused"
#: ONNX Runtime's own kernel ends the process: nothing is run. With fc1 of two dimensions it does so before it asks us.
ENDS = ("a limit below 0",)
MATRIX = Case(weights=("int4", "f32", True), group_size=32, bias=True).matrix(np.random.default_rng(0), 24, 64)
CASE = Case(weights=("int4", "f32", True), activation_format="none", bias=True, hidden=64, intermediate=96)
EXPERTS = [CASE.expert(np.random.default_rng(e)) for e in range(CASE.experts)]


def a_linear(**attributes: Any) -> ir.Model:
    return linear(MATRIX, np.float32, **attributes)


def a_layer(**attributes: Any) -> ir.Model:
    return moe(CASE, EXPERTS, np.float32, **attributes)


def node(model: ir.Model) -> ir.Node:
    return model.graph.node("the node")


def weight(model: ir.Model, index: int) -> np.ndarray:
    const = node(model).inputs[index].const_value
    assert const is not None
    return const.numpy()


def changed(make: Callable[[], ir.Model], index: int, change: Callable[[np.ndarray], np.ndarray]) -> ir.Model:
    """With another array for an input."""
    model = make()
    return with_input(model, index, np.ascontiguousarray(change(weight(model, index))))


def without(make: Callable[[], ir.Model], index: int) -> ir.Model:
    model = make()
    node(model).replace_input_with(index, None)
    return model


def with_attribute(make: Callable[[], ir.Model], attribute: ir.Attr) -> ir.Model:
    model = make()
    node(model).attributes[attribute.name] = attribute
    return model


def constant_x(make: Callable[[], ir.Model], index: int, columns: int) -> ir.Model:
    return with_input(make(), index, np.ones((3, columns), np.float32))


def as_graph_input(make: Callable[[], ir.Model], index: int) -> ir.Model:
    """An initializer that a run may replace."""
    model = make()
    given = node(model).inputs[index]
    assert given is not None
    model.graph.inputs.append(given)
    return model


HUGE = 2**31 + 32
LINEAR = {
    "K of other weights": (lambda: a_linear(K=96), "B has shape [24, 2, 16], expected [24, 3, 16]"),
    "N of other weights": (lambda: a_linear(N=25), "B has shape [24, 2, 16], expected [25, 2, 16]"),
    "K and N exchanged": (lambda: a_linear(K=24, N=64), "B has shape"),
    "block_size of other weights": (lambda: a_linear(block_size=16), "B has shape [24, 2, 16], expected [24, 4, 8]"),
    "one block, of a thousand": (lambda: a_linear(block_size=1024), "B has shape"),
    "block_size 0": (lambda: a_linear(block_size=0), "block_size is 0"),
    "block_size -32": (lambda: a_linear(block_size=-32), "block_size is -32"),
    "block_size 1": (lambda: a_linear(block_size=1), "B has shape"),
    "block_size of 33 bits": (lambda: a_linear(block_size=2**32 + 32), f"block_size is {2**32 + 32}"),
    "K 0": (lambda: a_linear(K=0), "K is 0"),
    "K -64": (lambda: a_linear(K=-64), "K is -64"),
    "K of 32 bits": (lambda: a_linear(K=HUGE), f"K is {HUGE}"),
    "K and N the most": (lambda: a_linear(K=2**31 - 1, N=2**31 - 1, block_size=2**31 - 2), "B has shape"),
    "N of 63 bits": (lambda: a_linear(N=2**63 - 1), f"N is {2**63 - 1}"),
    "3 bits": (lambda: a_linear(bits=3), "bits is 3, expected 2, 4 or 8"),
    "-4 bits": (lambda: a_linear(bits=-4), "bits is -4"),
    "8 bits of 4": (lambda: a_linear(bits=8), "B has shape [24, 2, 16], expected [24, 2, 32]"),
    "packed for another": (lambda: a_linear(weight_prepacked=1), "packed for another provider"),
    "B transposed": (lambda: changed(a_linear, 1, lambda b: b.transpose(1, 0, 2)), "B has shape [2, 24, 16]"),
    "B of two dimensions": (lambda: changed(a_linear, 1, lambda b: b.reshape(24, -1)), "B has shape [24, 32]"),
    "B without rows": (lambda: changed(a_linear, 1, lambda b: b[:0]), "B has shape [0, 2, 16]"),
    "B of one number": (lambda: changed(a_linear, 1, lambda b: b[0, 0, :1]), "B has shape [1]"),
    "B of int8": (lambda: changed(a_linear, 1, lambda b: b.view(np.int8)), REFUSED),
    "scales transposed": (lambda: changed(a_linear, 2, lambda s: s.T), "scales has shape [2, 24], expected [24, 2]"),
    "a scale too few": (lambda: changed(a_linear, 2, lambda s: s.reshape(-1)[1:]), "scales has shape [47]"),
    "scales of float16": (lambda: changed(a_linear, 2, lambda s: s.astype(np.float16)), REFUSED),
    "no scales": (lambda: without(a_linear, 2), REFUSED),
    "zero points of a row": (lambda: changed(a_linear, 3, lambda z: z[:1]), "zero_points has shape [1, 1]"),
    "zero points of float": (
        lambda: changed(a_linear, 3, lambda z: np.full((24, 2), 8, np.float32)),
        "zero_points has a type that the kernels do not take",
    ),
    "g_idx": (lambda: with_input(a_linear(), 4, np.repeat(np.int32([1, 0]), 32)), "it has g_idx"),
    "g_idx out of range": (lambda: with_input(a_linear(), 4, np.full(64, 99, np.int32)), "it has g_idx"),
    "a bias too short": (lambda: changed(a_linear, 5, lambda b: b[1:]), "bias has shape [23], expected [24]"),
    "a bias of two dimensions": (lambda: changed(a_linear, 5, lambda b: b[None]), "bias has shape [1, 24]"),
    "A an initializer": (lambda: constant_x(a_linear, 0, 64), "A is an initializer"),
    "B an input of the graph, too": (lambda: as_graph_input(a_linear, 1), "B is no constant initializer"),
    "bits a float": (lambda: with_attribute(a_linear, ir.AttrFloat32("bits", 4.0)), REFUSED),
    "K a text": (lambda: with_attribute(a_linear, ir.AttrString("K", "64")), REFUSED),
}
LAYER = {
    "k more than experts": (lambda: a_layer(k=5), "k is 5"),
    "k 0": (lambda: a_layer(k=0), "k is 0"),
    "k of 63 bits": (lambda: a_layer(k=2**63 - 1), f"k is {2**63 - 1}"),
    "block_size 0": (lambda: a_layer(block_size=0), "block_size is 0"),
    "block_size -2": (lambda: a_layer(block_size=-2), "block_size is -2"),
    "block_size of 33 bits": (lambda: a_layer(block_size=2**32 + 32), "block_size does not divide"),
    "block_size of other weights": (lambda: a_layer(block_size=16), "fc1_scales has shape"),
    "5 bits": (lambda: a_layer(expert_weight_bits=5), "expert_weight_bits is 5"),
    "fp4": (lambda: a_layer(quant_type="fp4"), "quant_type is fp4, expected int or nvfp4"),
    "nvfp4 of int4": (lambda: a_layer(quant_type="nvfp4"), "it has zero points"),
    "fc1 of other bits than fc3": (lambda: a_layer(fc1_expert_weight_bits=2), "expected that of fc3"),
    "8 bits of 4": (lambda: a_layer(expert_weight_bits=8), "fc1_scales has shape"),
    "an unknown activation": (lambda: a_layer(activation_type="tanh"), "activation_type is tanh"),
    "an activation of 100 letters": (lambda: a_layer(activation_type="swiglu" * 20), "activation_type cannot be read"),
    "swiglu_fusion 3": (lambda: a_layer(swiglu_fusion=3), "swiglu_fusion is 3"),
    "a limit below 0": (lambda: a_layer(activation_beta=1.0, swiglu_limit=-1.0), "swiglu_limit is -1"),
    "a limit of nan": (lambda: a_layer(activation_beta=1.0, swiglu_limit=float("nan")), "swiglu_limit is nan"),
    "alpha infinite": (lambda: a_layer(activation_beta=1.0, activation_alpha=float("inf")), "swiglu has alpha inf"),
    "fc1 without experts": (lambda: changed(a_layer, 2, lambda w: w[:0]), "fc1_experts_weights has shape [0, 192, 32]"),
    "fc1 with an odd row": (lambda: changed(a_layer, 2, lambda w: w[:, 1:]), "fc1_experts_weights has shape"),
    "fc1 of fewer columns": (lambda: changed(a_layer, 2, lambda w: w[..., :16]), "fc1_scales has shape"),
    "fc2 of fewer experts": (lambda: changed(a_layer, 5, lambda w: w[1:]), "fc2_scales has shape"),
    "fc1 scales transposed": (lambda: changed(a_layer, 3, lambda s: s.transpose(0, 2, 1)), "fc1_scales has shape"),
    "a bias too short": (lambda: changed(a_layer, 4, lambda b: b[:, 1:]), "fc1_experts_bias has shape [4, 191]"),
    "zero points of fc2 alone": (lambda: without(a_layer, 11), None),
    "zero points of an expert": (lambda: changed(a_layer, 11, lambda z: z[:1]), "fc1_zero_points has shape"),
    "zero points of float": (lambda: changed(a_layer, 11, lambda z: z.astype(np.float32)), REFUSED),
    "fc3": (lambda: with_input(a_layer(), 8, weight(a_layer(), 2)), "it has fc3"),
    "no router_probs": (lambda: without(a_layer, 1), REFUSED),
    "router_probs an initializer": (lambda: constant_x(a_layer, 1, 4), "router_probs is an initializer"),
    "x an initializer": (lambda: constant_x(a_layer, 0, 64), "input is an initializer"),
    "scales of float16": (lambda: changed(a_layer, 3, lambda s: s.astype(np.float16)), "fc1_scales has a type"),
    "k a float": (lambda: with_attribute(a_layer, ir.AttrFloat32("k", 2.0)), REFUSED),
}


def result(source: ir.Model, provider: bool) -> np.ndarray | str:
    try:
        return outputs(session(source, provider, severity=0 if provider else 3))
    except Exception as why:
        return str(why)


@needs_provider
@pytest.mark.parametrize("case", [f"MatMulNBits: {name}" for name in LINEAR] + [f"QMoE: {name}" for name in LAYER])
def test_a_node_that_lies(case, capfd):
    """Left to ONNX Runtime, which then says or gives what it does without the provider; or the same result."""
    op, name = case.split(": ", 1)
    make, why = (LINEAR if op == "MatMulNBits" else LAYER)[name]
    source = make()
    if name in ENDS:
        session(source, severity=0)
    else:
        want = result(source, provider=False)
        capfd.readouterr()
        found = result(source, provider=True)
        if isinstance(want, str):
            assert isinstance(found, str), f"taken, and ONNX Runtime says {want}"
            return
        assert why != REFUSED
        assert not isinstance(found, str), found
        assert error(found, want) < 1e-4
    lines = said(capfd)
    if why:
        assert any("the node stays with ONNX Runtime: " in line and why in line for line in lines), lines


@needs_provider
def test_one_tensor_is_both_inputs():
    """x and router_probs are one value, which has one place among the inputs of the node that ONNX Runtime makes."""
    case = Case(weights=("int4", "f32", True), activation_format="none", hidden=32, intermediate=32, experts=32)
    source = moe(case, [case.expert(np.random.default_rng(e)) for e in range(32)], np.float32, True)
    inner = source.graph.node("the node")
    inner.replace_input_with(1, inner.inputs[0])
    source.graph.inputs.pop(1)
    found, want = outputs(session(source)), outputs(session(source, provider=False))
    assert error(found, want) < 1e-4


@needs_provider
@pytest.mark.parametrize("shape", [(), (64,), (2, 3, 64), (3, 63), (3, 65), (0, 64), (2, 0, 64)])
def test_a_run_of_another_shape(shape):
    source = a_linear()
    source.graph.inputs[0].shape = source.graph.outputs[0].shape = None
    x = np.ones(shape, np.float32)
    if shape and shape[-1] == 64:
        (found,) = session(source).run(None, {"x": x})
        assert found.shape == (*shape[:-1], 24)
    else:
        with pytest.raises(Exception, match=r"the node: A has shape \[.*\], expected \[\.\., K 64\]"):
            session(source).run(None, {"x": x})


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "model.onnx"
    ir.save(a_layer(), path, external_data="model.onnx.data")
    return path


@needs_provider
def test_a_data_file_that_is_cut_off(saved):
    outputs(session(saved))  # its cache
    data = saved.with_name("model.onnx.data")
    data.write_bytes(data.read_bytes()[:-1000])
    with pytest.raises(Exception, match=r"w\d|model\.onnx\.data"):
        session(saved)


@needs_provider
def test_the_cache_of_another_model(saved, tmp_path, capfd):
    want = outputs(session(saved))
    other = tmp_path / "other.onnx"
    ir.save(a_linear(), other, external_data="other.onnx.data")
    expected = outputs(session(other))
    cache = other.with_name("other.onnx.quantmoe")
    cache.write_bytes(saved.with_name("model.onnx.quantmoe").read_bytes())
    capfd.readouterr()
    np.testing.assert_array_equal(outputs(session(other, severity=1)), expected)
    assert any(line.endswith("other.onnx.quantmoe is written anew: it is of other weights") for line in said(capfd))
    np.testing.assert_array_equal(outputs(session(saved)), want)


@needs_provider
@pytest.mark.parametrize(
    ("make", "why"),
    [(os.mkfifo, "it is no regular file"), (lambda path: path.symlink_to("/dev/null"), "it is a link")],
)
def test_a_cache_that_is_no_file(saved, capfd, make, why):
    """A pipe would be waited for, and a device replaced."""
    cache = saved.with_name("model.onnx.quantmoe")
    want = outputs(session(saved, cache="off"))
    make(cache)
    capfd.readouterr()
    np.testing.assert_array_equal(outputs(session(saved, severity=2)), want)
    assert any(
        line.endswith(f"cannot be written, weights are packed into memory each time: {why}") for line in said(capfd)
    )
    assert not cache.is_file()
