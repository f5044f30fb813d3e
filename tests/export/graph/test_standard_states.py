"""CausalConv, GatedDelta and StateSpace as ONNX Runtime's own operators (lowering/standard_states.py): each node, with
padding on either side, against the operators' references in float64. Only tokens that count are compared."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from support.harness.sweeps import every
from support.operators.linear_attention import (
    CONVS,
    DELTAS,
    RAGGED,
    SPACES,
    Conv,
    Delta,
    Rows,
    Space,
    conv_inputs,
    delta_inputs,
    space_inputs,
)

from quantmoe.custom_ops.op import inputs
from quantmoe.exporter.graph.lowering.qmoe import check_domains
from quantmoe.exporter.graph.lowering.standard_states import to_standard_states

#: as test_target_ort.py's: f32 sums of other orders
BOUND = 2e-5
TOKENS = 11
#: com.microsoft's operators; Conv and Scan; ai.onnx's operators
OPSETS = (None, 20, 27)


def lowered(given: Rows, opset: int | None, dtype: ir.DataType = ir.DataType.FLOAT) -> ir.Model:
    """Return a model of one node, replaced."""
    (op,) = [
        kind.__name__
        for kind in type(given.spec).__mro__
        if kind.__name__ in ("CausalConv", "GatedDelta", "StateSpace")
    ]
    kinds = {"float": ir.DataType.FLOAT, "int32": ir.DataType.INT32, "T": dtype}
    values = []
    for (name, kind), tensor in zip(inputs(op), given.tensors, strict=True):
        values.append(ir.Value(name=name, type=ir.TensorType(kinds[kind]), shape=ir.Shape(tensor.shape)))
    node = ir.node(op, values, given.spec.attributes(), domain="quantmoe", num_outputs=2)
    for output, (name, kind) in zip(node.outputs, (("y", dtype), ("present", values[-2].dtype)), strict=True):
        output.name, output.type = name, ir.TensorType(kind)
    graph = ir.Graph(values, node.outputs, nodes=[node], opset_imports={"": opset or 20, "quantmoe": 1}, name=op)
    model = ir.Model(graph, ir_version=10)
    to_standard_states(model, opset)
    check_domains(model)
    return model


def run(model: ir.Model, given: Rows) -> tuple[np.ndarray, np.ndarray]:
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    names = {i.name for i in session.get_inputs()}
    feed = {value.name: tensor for value, tensor in zip(model.graph.inputs, given.tensors, strict=True)}
    return tuple(session.run(None, {name: tensor for name, tensor in feed.items() if name in names}))


def check(given: Any, found: tuple[np.ndarray, np.ndarray], bound: float = BOUND) -> None:
    for b, (y, want) in enumerate(zip(found[0], given.reference()[0], strict=True)):
        begin, count, _ = given.rows[b].tolist()
        own = slice(begin, begin + count)
        np.testing.assert_allclose(y[own], want[own], rtol=0, atol=bound * np.abs(want).max())
    state = given.reference()[1]
    np.testing.assert_allclose(found[1], state, rtol=0, atol=bound * np.abs(state).max())


CASES = {
    **{f"conv-{name}": conv_inputs(spec, RAGGED, TOKENS) for name, spec in CONVS.items()},
    "conv-no-bias": conv_inputs(CONVS["4"], RAGGED, TOKENS, bias=False),
    **{f"delta-{name}": delta_inputs(spec, RAGGED, TOKENS) for name, spec in DELTAS.items()},
    **{f"space-{name}": space_inputs(spec, RAGGED, TOKENS) for name, spec in SPACES.items()},
}


@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize("name", CASES)
def test_a_node(name: str, opset: int | None) -> None:
    given = CASES[name]
    model = lowered(given, opset)
    domains = {node.domain for node in model.graph}
    assert domains == ({""} if opset else {"", "com.microsoft"})
    check(given, run(model, given))


@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize(
    ("spec", "make"),
    every([(CONVS["4"], conv_inputs), (DELTAS["plain"], delta_inputs), (SPACES["plain"], space_inputs)], 1),
)
def test_f16_graphs_compute_in_f32(spec: Any, make: Any, opset: int | None) -> None:
    given = make(spec, RAGGED, TOKENS, np.float16)
    found = run(lowered(given, opset, ir.DataType.FLOAT16), given)
    assert found[0].dtype == np.float16
    assert found[1].dtype == given.tensors[-2].dtype
    check(given, found, 2**-11)  # half a unit in the last place of the largest output


def test_tokens_that_do_not_count_may_be_anything() -> None:
    """Padding of 10,000 changes no bit of what counts."""
    for given in (CASES["conv-4"], CASES["delta-plain"], CASES["space-plain"]):
        a = run(lowered(given, None), given)
        padded = {name: getattr(given, name).copy() for name in given.PER_TOKEN}
        for b, (begin, count, _) in enumerate(given.rows.tolist()):
            for tensor in padded.values():
                tensor[b, :begin] = tensor[b, begin + count :] = 1e4
        other: Conv | Delta | Space = type(given)(**(vars(given) | padded))
        b = run(lowered(other, None), other)
        assert a[1].tobytes() == b[1].tobytes()
        for y, z, (begin, count, _) in zip(a[0], b[0], given.rows.tolist(), strict=True):
            assert y[begin : begin + count].tobytes() == z[begin : begin + count].tobytes()
