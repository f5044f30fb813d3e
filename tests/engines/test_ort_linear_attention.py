"""CausalConv, GatedDelta and StateSpace in ONNX Runtime: the C ABI's bytes, states in place, shapes, errors that name
the node."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from support.models.one_layer import session
from support.operators.linear_attention import Conv, Delta, Space, assert_bytes, conv_inputs, delta_inputs, space_inputs
from support.operators.specs import conv_spec, delta_spec, space_spec

from quantmoe.custom_ops.op import DOMAIN
from quantmoe.custom_ops.op import inputs as inputs_of
from quantmoe.custom_ops.op import outputs as outputs_of

NODE = "model.layers.0.linear_attn"
CONV, DELTA = conv_spec(40), delta_spec(2, 4, 24, v_head_size=16, decay_per_key=1)
TYPES = {np.float32: "FLOAT", np.float16: "FLOAT16", ml_dtypes.bfloat16: "BFLOAT16"}
SPACE = space_spec(2, 4, 24, 16)
ROWS = [[0, 3, 50], [1, 2, 0]]


def feeds(a: Conv | Delta | Space) -> dict[str, np.ndarray]:
    """float32 where the node has T."""
    names = inputs_of(a.spec.OP)
    return {n: t if k == "int32" else t.astype(np.float32) for (n, k), t in zip(names, a.tensors, strict=True)}


def write(path: Path, a: Conv | Delta | Space, dtype: Any = np.float32, shapes: bool = True) -> Path:
    """One node; what is of type T is float32, cast to and from ``dtype``: ONNX Runtime takes no bfloat16 from NumPy."""
    op = a.spec.OP
    float_type, typed = ir.TensorType(ir.DataType.FLOAT), ir.DataType[TYPES[dtype]]

    def value(name: str, kind: str, array: np.ndarray) -> ir.Value:
        type_ = ir.TensorType(ir.DataType.INT32) if kind == "int32" else float_type
        batched = kind == "T" or name in ("past_state", "rows")
        state = name in ("past_conv", "past_state")
        dims: list[Any] = [*("BS" if kind == "T" and array.ndim == 3 and not state else "B" if batched else "")]
        if state and a.spec.state_window > 1:
            dims = [a.spec.state_window, *dims]
        return ir.Value(name=name, type=type_, shape=ir.Shape([*dims, *array.shape[len(dims) :]]) if shapes else None)

    given = [value(name, kind, array) for (name, kind), array in zip(inputs_of(op), a.tensors, strict=True)]
    casts, used = [], []
    for (_, kind), v in zip(inputs_of(op), given, strict=True):
        if kind == "T":
            casts.append(ir.node("Cast", [v], {"to": int(typed)}))
        used.append(casts[-1].outputs[0] if kind == "T" else v)
    node = ir.node(op, used, a.spec.attributes(), domain=DOMAIN, name=NODE, num_outputs=2)
    results, backs = [], []
    for (name, kind), output in zip(outputs_of(op), node.outputs, strict=True):
        if kind == "T":
            backs.append(ir.node("Cast", [output], {"to": int(ir.DataType.FLOAT)}))
            output = backs[-1].outputs[0]
        output.name, output.type = name, float_type
        results.append(output)
    nodes = [*casts, node, *backs]
    graph = ir.Graph(given, results, nodes=nodes, opset_imports={"": 20, DOMAIN: 1}, name="linear_attention")
    ir.save(ir.Model(graph, ir_version=10), path / "model.onnx")
    return path / "model.onnx"


def make(op: str, rows: list[list[int]] = ROWS, tokens: int = 3, dtype: Any = np.float32) -> Any:
    made: dict[str, Any] = {"conv": (conv_inputs, CONV), "delta": (delta_inputs, DELTA), "space": (space_inputs, SPACE)}
    inputs, spec = made[op]
    return inputs(spec, rows, tokens, dtype)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("op", ["conv", "delta", "space"])
def test_types(tmp_path: Path, op: str, dtype: Any) -> None:
    """Every T gives the C ABI's bytes, on one thread and on two."""
    a = make(op, dtype=dtype)
    y, state = a.run()
    for threads in (1, 2):
        got = session(write(tmp_path, a, dtype), threads).run(None, feeds(a))
        assert_bytes(got, (y.astype(np.float32), state.astype(np.float32)))


def test_a_convolution_without_a_bias(tmp_path: Path) -> None:
    a = dataclasses.replace(make("conv"), bias=np.zeros(0, np.float32))
    assert_bytes(session(write(tmp_path, a)).run(None, feeds(a)), a.run())


@pytest.mark.parametrize("op", ["conv", "delta", "space"])
def test_a_state_in_place(tmp_path: Path, op: str) -> None:
    """Past and present bound to one OrtValue, a token a run."""
    a = make(op, [[0, 8, 0]], 8)
    want, state = a.run()
    path = write(tmp_path, a)
    s, (past, present) = session(path, threads=2), (inputs_of(a.spec.OP)[-2][0], outputs_of(a.spec.OP)[1][0])
    memory = ort.OrtValue.ortvalue_from_numpy(np.full(a.past.shape, np.nan, np.float32))
    for i in range(8):
        binding = s.io_binding()
        for name, array in feeds(a.tokens(slice(i, i + 1), [[0, 1, i]])).items():
            if name != past:
                binding.bind_cpu_input(name, np.ascontiguousarray(array))
        binding.bind_ortvalue_input(past, memory)
        binding.bind_ortvalue_output(present, memory)
        binding.bind_output("y")
        s.run_with_iobinding(binding)
        assert_bytes((binding.get_outputs()[-1].numpy(),), (want[:, i : i + 1],))
    assert_bytes((memory.numpy(),), (state,))


@pytest.mark.parametrize("op", ["conv", "delta"])
def test_a_file_of_op_version_1(tmp_path: Path, op: str) -> None:
    """As exports before windows wrote them."""
    a = make(op)
    path = write(tmp_path, a)
    model = ir.load(path)
    node = next(n for n in model.graph if n.domain == DOMAIN)
    del node.attributes["state_window"]
    node.attributes["op_version"] = ir.AttrInt64("op_version", 1)
    ir.save(model, path)
    assert_bytes(session(path).run(None, feeds(a)), a.run())


@pytest.mark.parametrize("op", ["conv", "delta", "space"])
def test_a_window_of_states(tmp_path: Path, op: str) -> None:
    a = make(op)
    past = np.stack([np.full_like(a.past, np.nan), a.past])
    windowed = dataclasses.replace(a, spec=dataclasses.replace(a.spec, state_window=2), past=past)
    s = session(write(tmp_path, windowed))
    assert s.get_outputs()[1].shape == [2, "B", *a.past.shape[1:]]
    got = s.run(None, feeds(windowed))
    assert_bytes(got, windowed.run())
    assert_bytes((got[0], got[1][-1]), a.run())
    with pytest.raises(Exception, match=rf'"{NODE}": past_.* has shape .*, expected \[2, 2, '):
        session(write(tmp_path, windowed, shapes=False)).run(None, feeds(a))


@pytest.mark.parametrize("op", ["conv", "delta", "space"])
def test_shapes_are_inferred(tmp_path: Path, op: str) -> None:
    a = make(op)
    found = {o.name: o.shape for o in session(write(tmp_path, a)).get_outputs()}
    assert list(found.values()) == [["B", "S", a.run()[0].shape[2]], ["B", *a.past.shape[1:]]]


@pytest.mark.parametrize(
    ("op", "name", "shape", "message"),
    [
        ("conv", "x", (2, 3, 41), r"x has shape \[2, 3, 41\], expected \[2, 3, 40\]"),
        ("conv", "x", (3, 40), r"x has shape \[3, 40\], expected \[B, S, 40\]"),
        ("conv", "weight", (40, 5), r"weight has shape \[40, 5\], expected \[40, 4\]"),
        ("conv", "bias", (39,), r"bias has shape \[39\], expected \[40\] or, for none, \[0\]"),
        ("conv", "past_conv", (2, 40, 4), r"past_conv has shape \[2, 40, 4\], expected \[2, 40, 3\]"),
        ("conv", "rows", (3, 3), r"rows has shape \[3, 3\], expected \[2, 3\]"),
        ("delta", "qkv", (2, 3, 100), r"qkv has shape \[2, 3, 100\], expected \[2, 3, 160\]"),
        ("delta", "a", (2, 3, 4), r"a has shape \[2, 3, 4\], expected \[2, 3, 96\]"),
        ("delta", "b", (2, 2, 4), r"b has shape \[2, 2, 4\], expected \[2, 3, 4\]"),
        ("delta", "z", (2, 3, 63), r"z has shape \[2, 3, 63\], expected \[2, 3, 64\]"),
        ("delta", "a_log", (2,), r"a_log has shape \[2\], expected \[4\]"),
        ("delta", "dt_bias", (4,), r"dt_bias has shape \[4\], expected \[96\]"),
        ("delta", "norm", (24,), r"norm has shape \[24\], expected \[16\]"),
        ("delta", "past_state", (2, 4, 16, 24), r"past_state has shape .*, expected \[2, 4, 24, 16\]"),
        ("delta", "rows", (2, 2), r"rows has shape \[2, 2\], expected \[2, 3\]"),
        ("space", "xbc", (2, 3, 161), r"xbc has shape \[2, 3, 161\], expected \[2, 3, 160\]"),
        ("space", "dt", (2, 3, 5), r"dt has shape \[2, 3, 5\], expected \[2, 3, 4\]"),
        ("space", "z", (2, 2, 64), r"z has shape \[2, 2, 64\], expected \[2, 3, 64\]"),
        ("space", "a_log", (2,), r"a_log has shape \[2\], expected \[4\]"),
        ("space", "dt_bias", (5,), r"dt_bias has shape \[5\], expected \[4\]"),
        ("space", "d", (64,), r"d has shape \[64\], expected \[4\]"),
        ("space", "norm", (16,), r"norm has shape \[16\], expected \[64\]"),
        ("space", "past_state", (2, 4, 16, 24), r"past_state has shape .*, expected \[2, 4, 24, 16\]"),
        ("space", "rows", (2, 2), r"rows has shape \[2, 2\], expected \[2, 3\]"),
    ],
)
def test_wrong_shapes_are_named(tmp_path: Path, op: str, name: str, shape: tuple[int, ...], message: str) -> None:
    a = make(op)
    given = feeds(a)
    given[name] = np.zeros(shape, given[name].dtype)
    with pytest.raises(Exception, match=f'{a.spec.OP} node "{NODE}": {message}'):
        session(write(tmp_path, a, shapes=False)).run(None, given)


@pytest.mark.parametrize("op", ["conv", "delta", "space"])
def test_rows_that_cannot_be_are_named(tmp_path: Path, op: str) -> None:
    a = make(op, [[0, 3, 50], [2, 2, 5]])
    with pytest.raises(Exception, match=rf'"{NODE}": rows\[1\] is \[2, 2, 5\] .*: the call\'s tokens are 3'):
        session(write(tmp_path, a)).run(None, feeds(a))


@pytest.mark.parametrize(
    ("op", "attribute", "message"),
    [
        ("conv", "width", "width is 1, expected 2 to 128"),
        ("delta", "num_k_heads", "num_v_heads is 4, expected a multiple"),
        ("space", "num_groups", "num_heads is 4, expected a multiple"),
    ],
)
def test_bad_attributes_are_named(tmp_path: Path, op: str, attribute: str, message: str) -> None:
    path = write(tmp_path, make(op))
    model = ir.load(path)
    node = next(n for n in model.graph if n.domain == DOMAIN)
    node.attributes[attribute] = ir.AttrInt64(attribute, 1 if op == "conv" else 3)
    ir.save(model, path)
    with pytest.raises(Exception, match=f'"{NODE}": {message}'):
        session(path)
