"""QuantLinear and MoERouting in ONNX Runtime: the C ABI's bytes, shapes, errors that name the node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
from support.models.one_layer import session
from support.operators import native_kernels as native
from support.operators.cases import Case
from support.operators.specs import linear_spec, routing_spec

from quantmoe.custom_ops.layouts import LAYOUTS
from quantmoe.custom_ops.op import DOMAIN, LinearSpec, NormSpec, RoutingSpec, Spec, outputs

FLOATS = {"FLOAT": np.float32, "FLOAT16": np.float16, "BFLOAT16": ml_dtypes.bfloat16}
ROUTING = routing_spec(16, 4, "sigmoid_topk", 1, 4, 2, 2.5)
SHARED = routing_spec(16, 4, "sigmoid_topk", 1, 4, 2, 2.5, shared_experts=3, shared_gate=1)


def write(path: Path, spec: Spec, last: int, constant: np.ndarray, float_type: str = "FLOAT", **changed: Any) -> Path:
    """One node between casts: x f32 [batch, rows, last] -> the node's outputs in f32; the weight in a data file."""
    dtype = ir.DataType[float_type]
    attributes: Mapping[str, Any] = spec.attributes() | changed
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["batch", "rows", last]))
    typed = ir.node("Cast", [x], {"to": int(dtype)})
    typed.outputs[0].type = ir.TensorType(dtype)
    onnx_type = ir.DataType.from_numpy(constant.dtype)
    weight = ir.Value(name="weight", type=ir.TensorType(onnx_type), shape=ir.Shape(constant.shape))
    path.with_suffix(".bin").write_bytes(constant.tobytes())
    weight.const_value = ir.ExternalTensor(
        path.with_suffix(".bin").name,
        0,
        constant.nbytes,
        onnx_type,
        shape=weight.shape,
        name="weight",
        base_dir=path.parent,
    )
    node = ir.node(spec.OP, [typed.outputs[0], weight], attributes, domain=DOMAIN, name="the.node",
                   num_outputs=len(outputs(spec.OP)))  # fmt: skip
    backs: Sequence[ir.Node] = [ir.node("Cast", [value], {"to": int(ir.DataType.FLOAT)}) for value in node.outputs]
    for i, back in enumerate(backs):
        back.outputs[0].name, back.outputs[0].type = f"y{i}", ir.TensorType(ir.DataType.FLOAT)
    graph = ir.Graph([x], [back.outputs[0] for back in backs], nodes=[typed, node, *backs], initializers=[weight],
                     opset_imports={"": 20, DOMAIN: 1}, name="one")  # fmt: skip
    ir.save(ir.Model(graph, ir_version=10), path)
    return path


@pytest.fixture(scope="module")
def linear() -> tuple[LinearSpec, np.ndarray]:
    layout, case = LAYOUTS["cpu_panel"], Case(bias=True)
    m = case.matrix(np.random.default_rng(0), 80, 96)
    spec = linear_spec(96, 80, layout.describe_down(m, "int8_token_asym"))
    row = native.aligned(layout.row_bytes(spec.moe, "w2"))
    layout.pack_down(m, spec.moe, row)
    return spec, row[None]


@pytest.mark.parametrize("float_type", FLOATS)
def test_linear(tmp_path: Path, linear: tuple[LinearSpec, np.ndarray], float_type: str) -> None:
    spec, w = linear
    s = session(write(tmp_path / "m.onnx", spec, 96, w.view(np.int32), float_type), threads=2)
    assert s.get_outputs()[0].shape == ["batch", "rows", 80]
    for shape in ((1, 1), (2, 3), (3, 40), (2, 0)):
        x = np.random.default_rng(1).normal(0, 1, (*shape, 96)).astype(np.float32)
        want = native.NativeLinear(spec, w)(x.reshape(-1, 96).astype(FLOATS[float_type])).astype(np.float32)
        np.testing.assert_array_equal(s.run(None, {"x": x})[0], want.reshape(*shape, 80))


@pytest.mark.parametrize("spec", [ROUTING, SHARED], ids=["routed", "shared"])
@pytest.mark.parametrize("float_type", FLOATS)
def test_routing(tmp_path: Path, float_type: str, spec: RoutingSpec) -> None:
    bias = np.random.default_rng(0).uniform(-0.2, 0.2, 16).astype(np.float32)
    s = session(write(tmp_path / "m.onnx", spec, spec.logits, bias, float_type), threads=2)
    assert [output.shape for output in s.get_outputs()] == [["batch", "rows", spec.slots]] * 2
    for shape in ((1, 1), (3, 50), (0, 2)):
        x = np.random.default_rng(1).normal(0, 2, (*shape, spec.logits)).astype(np.float32)
        found = s.run(None, {"x": x})
        rows = x.reshape(-1, spec.logits).astype(FLOATS[float_type])
        for a, b in zip(found, native.route(spec, rows, bias), strict=True):
            np.testing.assert_array_equal(a.reshape(-1, spec.slots), b)


def test_errors_name_the_node(tmp_path: Path, linear: tuple[LinearSpec, np.ndarray]) -> None:
    spec, w = linear
    words = w.view(np.int32)
    bias = np.zeros(16, np.float32)
    for made, message in (
        ((spec, 96, words[:, 16:]), 'QuantLinear node "the.node": w has .* words a row, expected'),
        ((spec, 96, words.repeat(2, 0)), 'QuantLinear node "the.node": w has 2 rows, expected 1'),
    ):
        with pytest.raises(Exception, match=message):
            session(write(tmp_path / "m.onnx", *made))
    with pytest.raises(Exception, match=r'MoERouting node "the.node": top_k is 9, expected 1 to 8'):
        session(write(tmp_path / "m.onnx", ROUTING, 16, bias, top_k=9))
    with pytest.raises(Exception, match=r'"the.node": logits has shape \[1, 1, 8\], expected \[1, 1, 16\]'):
        session(write(tmp_path / "m.onnx", ROUTING, 8, bias)).run(None, {"x": np.zeros((1, 1, 8), np.float32)})
    with pytest.raises(
        Exception,
        match=r'"the.node": logits has shape .*, expected \[1, 1, 17\], which is \[.., num_experts \+ shared_gate\]',
    ):
        session(write(tmp_path / "m.onnx", SHARED, 16, bias)).run(None, {"x": np.zeros((1, 1, 16), np.float32)})
    with pytest.raises(Exception, match=r'"the.node": x has shape \[1, 1, 8\], expected \[1, 1, 96\]'):
        session(write(tmp_path / "m.onnx", spec, 8, words)).run(None, {"x": np.zeros((1, 1, 8), np.float32)})


def test_nodes_of_a_file_for_gpus_say_so(tmp_path: Path) -> None:
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT16), shape=ir.Shape([2, 8]))
    weight = ir.Value(
        name="w", type=x.type, shape=ir.Shape([8]), const_value=ir.tensor(np.ones(8, np.float16), name="w")
    )
    attributes = NormSpec(norm_epsilon=1e-6).attributes()
    node = ir.node("AddRMSNorm", [x, x, weight], attributes, domain=DOMAIN, name="the.node", num_outputs=2)
    for i, value in enumerate(node.outputs):
        value.name, value.type = f"y{i}", x.type
    opsets = {"": 20, DOMAIN: 1}
    graph = ir.Graph([x], node.outputs, nodes=[node], initializers=[weight], opset_imports=opsets, name="one")
    ir.save(ir.Model(graph, ir_version=10), tmp_path / "m.onnx")
    with pytest.raises(Exception, match=r'AddRMSNorm node "the.node": the model is exported for NVIDIA GPUs: register'):
        session(tmp_path / "m.onnx")
