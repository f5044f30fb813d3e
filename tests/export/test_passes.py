"""Each pass over the traced graph on a graph of a few nodes; tests of whole models are beside this file. Passes that
change transformers' modules before the trace have theirs in test_module_passes.py."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime as ort
import onnxscript.optimizer
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from onnxscript.rewriter._matcher import SimplePatternMatcher
from specs import attention_spec
from transformers.exporters.utils import patch_attributes

from quantmoe.custom_ops.layouts import cpu_panel
from quantmoe.custom_ops.matrix import QuantizedMatrix
from quantmoe.custom_ops.op import LinearSpec, NormSpec
from quantmoe.custom_ops.reference import add_norm
from quantmoe.exporter.graph.lowering.embeddings import keep_tables
from quantmoe.exporter.graph.lowering.matmul_nbits import to_matmul_nbits
from quantmoe.exporter.graph.lowering.weights import Weight, place_weights
from quantmoe.exporter.graph.modules.norms import RMSNorm, plain_norms
from quantmoe.exporter.graph.passes.add_norms import add_norms
from quantmoe.exporter.graph.passes.defaults import drop_defaults
from quantmoe.exporter.graph.passes.divided_norms import divide_by_roots
from quantmoe.exporter.graph.passes.fused_norms import type_fused_norms
from quantmoe.exporter.graph.passes.interface import drop_traces, name_interface, set_cache_type, set_state_type
from quantmoe.exporter.graph.passes.last_logits import keep_last_logits, output_hidden
from quantmoe.exporter.graph.passes.placement import place_experts
from quantmoe.exporter.graph.passes.rank_collectives import meet_around_experts, norm_sums
from quantmoe.exporter.graph.passes.repeated_layers import RepeatError, repeat_layers
from quantmoe.exporter.graph.passes.reshapes import drop_repeated_reshapes
from quantmoe.exporter.graph.passes.rewrite_rules import only_their_operator
from quantmoe.exporter.graph.passes.tables import narrow_tables
from quantmoe.exporter.reading.slices import Slice

RNG = np.random.default_rng(0)


def parsed(text: str, placeholders: tuple[str, ...] = ()) -> ir.Model:
    """A model in ONNX's text format, its types inferred.

    Args:
        placeholders: inputs that are weights, as the trace leaves them.
    """
    proto = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21, "quantmoe" : 1]>\n{text}')
    model = ir.from_proto(onnx.shape_inference.infer_shapes(proto))
    model.meta["placeholders"] = [value for value in model.graph.inputs if value.name in placeholders]
    for value in model.meta["placeholders"]:
        model.graph.inputs.remove(value)
    return model


def ops(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph]


def run(model: ir.Model, **inputs: np.ndarray) -> np.ndarray:
    return ReferenceEvaluator(ir.to_proto(model)).run(None, inputs)[0]


def test_a_reshape_to_the_shape_that_is_there_is_left_out() -> None:
    model = parsed("""g (float[2, 3, 4] x, float[6, 4] u) => (float[2, 12] y, float[6, 4] z, float[6, 4] w) {
        rows = Constant <value = int64[2] {-1, 4}> ()
        other = Constant <value = int64[2] {2, 12}> ()
        a = Reshape <allowzero = 1> (x, rows)
        b = Reshape <allowzero = 1> (a, rows)
        c0 = Reshape (b, rows)
        c = Reshape <allowzero = 0> (c0, rows)
        y = Reshape (c, other)
        d = Mul (c, u)
        z = Reshape (d, rows)
        w = Reshape (z, rows)
    }""")
    inputs = {"x": RNG.random((2, 3, 4), np.float32), "u": RNG.random((6, 4), np.float32)}
    before = ReferenceEvaluator(ir.to_proto(model)).run(None, inputs)
    drop_repeated_reshapes(model)
    assert ops(model) == ["Constant"] * 2 + ["Reshape"] * 3 + ["Mul", "Reshape", "Reshape"]  # w is an output
    for found, expected in zip(ReferenceEvaluator(ir.to_proto(model)).run(None, inputs), before, strict=True):
        np.testing.assert_array_equal(found, expected)


def test_defaults_are_left_out() -> None:
    model = parsed("""g (float[3, 4] x, int64[2, 1] i, float[2, 4] u, int64[2] j) => (float[2, 4] y, float[3, 2] z) {
        s = ScatterND <reduction = "none"> (x, i, u)
        y = Gather <axis = 0> (s, j)
        z = Gather <axis = 1> (s, j)
    }""")
    drop_defaults(model)
    assert [dict(node.attributes.items()).keys() for node in model.graph] == [set(), set(), {"axis"}]


NORM = """g (float16[b, 4] x, float16[b, 4] r, float16[4] w) => (float16[b, 4] out, float16[b, 4] sum) {{
    two = Constant <value = float {{2.0}}> ()
    last = Constant <value_ints = [-1]> ()
    epsilon = Constant <value = float {{0.01}}> ()
    t = {sum}
    wide = Cast <to = 1> (t)
    square = Pow (wide, two)
    mean = ReduceMean (square, last)
    shifted = Add (mean, epsilon)
    root = Sqrt (shifted)
    one_by = Reciprocal (root)
    normed = Mul (wide, one_by)
    {weighted}
    out = Identity (y)
    sum = Identity (t)
}}"""
AFTER = "narrow = Cast <to = 10> (normed)\n y = Mul (w, narrow)"
BEFORE = "w32 = Cast <to = 1> (w)\n product = Mul (w32, normed)\n y = Cast <to = 10> (product)"


@pytest.mark.parametrize("weighted", [AFTER, BEFORE])
def test_norms_divide_by_roots(weighted: str) -> None:
    model = parsed(NORM.format(sum="Add (x, r)", weighted=weighted))
    given = {name: RNG.normal(size=(3, 4)).astype(np.float16) for name in "xr"} | {"w": np.float16([1, 2, -1, 0.5])}
    before = run(model, **given)
    divide_by_roots(model)
    assert [op for op in ops(model) if op in ("Reciprocal", "Div", "Mul")] == ["Div", "Mul"]
    product = model.graph.outputs[0].producer().inputs[0].producer()
    assert [value.producer() and value.producer().op_type for value in product.inputs] == [None, "Cast"]
    # one rounding to float16 in another place
    np.testing.assert_allclose(run(model, **given), before, rtol=2**-10 if weighted == BEFORE else 2**-11, atol=0)


def test_another_reciprocal_stays() -> None:
    model = parsed("g (float[4] x) => (float[4] y) { r = Reciprocal (x)\n y = Mul (x, r) }")
    divide_by_roots(model)
    assert ops(model) == ["Reciprocal", "Mul"]


def test_a_sum_and_its_norm_are_one_node() -> None:
    model = parsed(NORM.format(sum="Add (x, r)", weighted=AFTER))
    divide_by_roots(model)
    add_norms(model)
    (node,) = (node for node in model.graph if node.op_type not in ("Constant", "Identity"))
    assert (node.domain, node.op_type) == ("quantmoe", "AddRMSNorm")
    assert [value.name for value in node.inputs] == ["x", "r", "w"]
    assert [output.producer().inputs[0] for output in model.graph.outputs] == [*node.outputs]
    assert node.attributes["norm_epsilon"].as_float() == pytest.approx(0.01)


def test_embeddings_and_their_norm_are_two_nodes() -> None:
    text = NORM.format(sum="Gather <axis = 0> (table, ids)", weighted=AFTER)
    model = parsed(text.replace("float16[b, 4] x, float16[b, 4] r", "int64[b] ids, float16[9, 4] table"))
    divide_by_roots(model)
    add_norms(model)
    gather, node = (node for node in model.graph if node.op_type not in ("Constant", "Identity"))
    assert [n.op_type for n in (gather, node)] == ["Gather", "AddRMSNorm"]
    assert [*node.inputs[:2]] == [gather.outputs[0]] * 2
    assert [output.producer().inputs[0] for output in model.graph.outputs] == [node.outputs[0], gather.outputs[0]]


SUMS = """g (float16[b, 4] a, float16[b, 4] c, float16[b, 4] e, float16[4] w) => (float16[b, 4] out{more}) {{
    shape = Constant <value_ints = [-1, 4]> ()
    s1 = quantmoe.AllReduce <op_version = 2, rank = 1, world = 2, export_id = 7> (a)
    y1, t1 = quantmoe.AddRMSNorm <op_version = 1, norm_epsilon = 0.5> (e, s1, w)
    s2 = quantmoe.AllReduce <op_version = 2, rank = 1, world = 2, export_id = 7> (c)
    r2 = Reshape (s2, shape)
    y2, t2 = quantmoe.AddRMSNorm <op_version = 1, norm_epsilon = 0.25> (t1, r2, w)
    m = Add (y1, y2)
    out = {last} (m)
}}"""


def test_sums_of_ranks_and_their_norms_are_one_node() -> None:
    model = parsed(SUMS.format(more="", last="Identity"))
    norm_sums(model)
    assert ops(model) == ["Constant", "AllReduceAddRMSNorm", "Reshape", "AllReduceAddRMSNorm", "Add", "Identity"]
    first, second = (node for node in model.graph if node.domain == "quantmoe")
    assert [value.name for value in first.inputs] == ["a", "e", "w"]
    assert [second.inputs[0].producer().op_type, second.inputs[1]] == ["Reshape", first.outputs[1]]
    assert second.inputs[0].producer().inputs[0].name == "c"
    assert [value.producer() for value in model.graph[-2].inputs] == [first, second]
    attributes = {"op_version": 1, "rank": 1, "world": 2, "export_id": 7}
    for node, epsilon in ((first, 0.5), (second, 0.25)):
        assert {name: a.value for name, a in node.attributes.items()} == attributes | {"norm_epsilon": epsilon}


def test_a_sum_that_something_else_takes_stays_whole() -> None:
    """The second node's, and so the first one's, whose sum it adds to."""
    for more, last in ((", float16[b, 4] t2", "Identity"), ("", "Add")):
        text = SUMS.format(more=more, last=last)
        model = parsed(text if more else text.replace("Add (m)", "Add (m, t2)"))
        norm_sums(model)
        assert [op for op in ops(model) if op.startswith("A") and op != "Add"] == ["AllReduce", "AddRMSNorm"] * 2
    model = parsed(SUMS.format(more=", float16[b, 4] s2", last="Identity"))
    norm_sums(model)
    assert [op for op in ops(model) if op.startswith("A") and op != "Add"] == ["AllReduce", "AddRMSNorm"] * 2


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_the_norm_of_a_sum_with_itself(dtype: type) -> None:
    """Of an embedding: to the last bit that of the embedding, with four times epsilon, also where that is most."""
    x = (RNG.normal(size=(50, 64)) * 2.0 ** RNG.integers(-12, 9, (50, 1))).astype(dtype)
    epsilon, weight = float(np.float32(1e-6)), RNG.normal(size=64).astype(dtype)
    twice, _ = add_norm(NormSpec(norm_epsilon=4 * epsilon), x, x, weight)
    once, total = add_norm(NormSpec(norm_epsilon=epsilon), x, np.zeros_like(x), weight)
    np.testing.assert_array_equal(total, x)
    np.testing.assert_array_equal(twice, once)


ROTARY = """g (int64[b, s] p, float[1, 1, 4] f) => (float[b, s, 4] c, float[b, s, {width}] n) {{
    zero = Constant <value_ints = [0]> ()
    one = Constant <value_ints = [1]> ()
    two = Constant <value_ints = [2]> ()
    three = Constant <value_ints = [3]> ()
    half = Constant <value_ints = [{end}]> ()
    axis = Constant <value = int64 {{{axis}}}> ()
    scale = Constant <value = float {{1.25}}> ()
    axes = Unsqueeze (p, zero)
    sizes = Shape (p)
    shape = Concat <axis = 0> (three, sizes)
    each = Expand (axes, shape)
    some = Slice (each, one, three, zero, one)
    own = Gather <axis = 0> (some, axis)
    column = Unsqueeze (own, two)
    wide = Cast <to = 1> (column)
    angles = Mul (wide, f)
    twice = Concat <axis = -1> ({joined})
    cos = Cos (twice)
    scaled = Mul (cos, scale)
    sin = Sin (twice)
    cut = Slice (scaled, zero, half, two, one)
    c = Identity (cut)
    other = {last}
    n = Identity (other)
}}"""
HALF = "Slice (sin, zero, half, two, one)"


def test_half_of_a_table_and_one_of_equal_axes() -> None:
    model = parsed(ROTARY.format(width=4, end=4, axis=1, joined="angles, angles", last=HALF))
    given = {"p": RNG.integers(0, 99, (2, 5)), "f": RNG.normal(size=(1, 1, 4)).astype(np.float32)}
    before = ReferenceEvaluator(ir.to_proto(model)).run(None, given)
    (each,) = (node.outputs[0] for node in model.graph if node.op_type == "Expand")
    each.shape = ir.Shape([3, "b", "s"])  # as the trace says
    narrow_tables(model)
    left = [op for op in ops(model) if op not in ("Constant", "Identity", "Shape")]
    # what made a shape is dropped where nothing reads it any more
    assert [op for op in left if op != "Concat"] == ["Unsqueeze", "Cast", "Mul", "Cos", "Mul", "Sin"]
    for found, want in zip(ReferenceEvaluator(ir.to_proto(model)).run(None, given), before, strict=True):
        np.testing.assert_array_equal(found, want)


@pytest.mark.parametrize(
    ("left", "other"),
    [
        (["Concat", "Slice"], {"last": "Identity (sin)", "width": 8}),
        (["Concat", "Slice", "Slice"], {"joined": "angles, wide2"}),
        (["Concat", "Slice", "Slice"], {"end": 3}),
    ],
    ids=["the whole is read", "two values", "less than half"],
)
def test_other_tables_stay(left: list[str], other: dict[str, Any]) -> None:
    text = ROTARY.format(**{"width": 4, "end": 4, "axis": 0, "joined": "angles, angles", "last": HALF} | other)
    model = parsed(text.replace("twice = ", "wide2 = Neg (angles)\n    twice = "))
    narrow_tables(model)
    tail = ops(model)[ops(model).index("Neg") :]
    assert [op for op in tail if op in ("Concat", "Slice")] == left


@pytest.mark.parametrize(
    ("shape", "change"),
    [
        ([3, "b", "s"], ("Unsqueeze (p, zero)", "Unsqueeze (p, one)")),
        ([3, "c", "s"], ("", "")),
        ([3, None, "s"], ("", "")),
        ([3, "b", "s"], ("Slice (each, one, three, zero, one)", "Slice (each, zero, two)")),
        ([3, "b", "s"], ("Gather <axis = 0> (some", "Gather <axis = 1> (some")),
    ],
    ids=["another axis", "another size", "an unknown size", "all axes are cut", "one of another axis"],
)
def test_other_axes_stay(shape: list[int | str | None], change: tuple[str, str]) -> None:
    text = ROTARY.format(width=4, end=4, axis=0, joined="angles, angles", last=HALF).replace(*change)
    model = parsed(text)
    (each,) = (node.outputs[0] for node in model.graph if node.op_type == "Expand")
    each.shape = ir.Shape(shape)
    narrow_tables(model)
    assert [op for op in ops(model) if op in ("Expand", "Gather")] == ["Expand", "Gather"]


def test_equal_axes_that_something_else_reads() -> None:
    text = ROTARY.format(width=4, end=4, axis=0, joined="angles, angles", last=HALF)
    model = parsed(text.replace("=> (", "=> (int64[t, b, s] each, ", 1))
    (each,) = (node.outputs[0] for node in model.graph if node.op_type == "Expand")
    each.shape = ir.Shape([3, "b", "s"])
    narrow_tables(model)
    assert [op for op in ops(model) if op in ("Expand", "Gather")] == ["Expand"]


@pytest.mark.parametrize("text", [NORM.format(sum="Identity (x)", weighted=AFTER),
                                  NORM.format(sum="Add (x, w)", weighted=AFTER),
                                  NORM.format(sum="Add (x, r)", weighted=AFTER).replace("2.0", "3.0"),
                                  NORM.format(sum="Add (x, r)", weighted=AFTER).replace("[-1]", "[0]")],
                         ids=["no sum", "a row added", "another power", "another axis"])  # fmt: skip
def test_other_norms_stay(text: str) -> None:
    model = parsed(text)
    divide_by_roots(model)
    before = ops(model)
    add_norms(model)
    assert ops(model) == before


TABLE = """g (int64[2] i, float[9, 4] table) => (float[2, 4] y{more}) {{
    y = Gather <axis = 0> (table, i)
    {other}
}}"""


def test_tables_stay_in_the_checkpoints_type() -> None:
    model = parsed(TABLE.format(more="", other=""), ("table",))
    (table,) = model.meta["placeholders"]
    keep_tables([Weight(table, "embed.weight")], {"embed.weight": ir.DataType.BFLOAT16}.get)
    assert table.dtype == ir.DataType.BFLOAT16
    assert ops(model) == ["Gather", "Cast"]
    assert model.graph.outputs[0].producer().attributes["to"].as_int() == ir.DataType.FLOAT


@pytest.mark.parametrize(("stored", "other"), [(None, ""), (ir.DataType.FLOAT, ""),
                                               (ir.DataType.BFLOAT16, "z = Neg (table)")])  # fmt: skip
def test_other_tables_are_of_the_graphs_type(stored: ir.DataType | None, other: str) -> None:
    """Of a type that is not stored, of the graph's own, and one that is also multiplied."""
    model = parsed(TABLE.format(more=", float[9, 4] z" if other else "", other=other), ("table",))
    keep_tables([Weight(model.meta["placeholders"][0], "embed.weight")], lambda name: stored)
    assert model.meta["placeholders"][0].dtype == ir.DataType.FLOAT
    assert "Cast" not in ops(model)


def test_weights_are_placed_as_they_are_read() -> None:
    """One transposed twice is one weight; one that is also read as it is, is two; one that nobody reads is none."""
    model = parsed("""g (float[2, 4] x, float[3, 4] a, float[3, 4] b, float[3] c) => (float[2, 3] y, float[3, 4] z) {
        t = Transpose <perm = [1, 0]> (a)
        u = Transpose <perm = [1, 0]> (a)
        v = Transpose <perm = [1, 0]> (b)
        p = MatMul (x, t)
        q = MatMul (x, u)
        r = MatMul (x, v)
        s = Sum (p, q, r)
        y = Identity (s)
        z = Identity (b)
    }""", ("a", "b", "c"))  # fmt: skip
    found = place_weights(model)
    assert [(w.value.name, w.parameter, w.transposed, list(w.value.shape)) for w in found] == [
        ("a.T", "a", True, [4, 3]),
        ("b.T", "b", True, [4, 3]),
        ("b", "b", False, [3, 4]),
    ]
    assert "Transpose" not in ops(model)
    assert [node.inputs[1].name for node in model.graph if node.op_type == "MatMul"] == ["a.T", "a.T", "b.T"]


def test_a_weight_that_nothing_provides() -> None:
    model = parsed("g (float[2] x, float[2] a) => (float[2] y) { y = Add (x, a) }", ("a",))
    model.meta["placeholders"] = []
    with pytest.raises(AssertionError, match="reads a, which nothing provides"):
        place_weights(model)


def test_inputs_and_outputs_have_their_names() -> None:
    model = parsed("""g (int64[s0, s1] input_ids, float[s0, 2, s2, 8] k, float[s0, 4, 3] c)
        => (float[s0, s1, 9] logits, float[s0, 2, s3, 8] l, float[s0, 4, 3] d) {
        logits = Dummy (input_ids)
        l = Identity (k)
        d = Identity (c)
    }""")
    names = ["input.cache.layers.3.keys", "input.cache.layers.4.conv_states.0"]
    for values, prefix in ((model.graph.inputs, "input"), (model.graph.outputs, "output")):
        for value, name in zip(values[1:], names, strict=True):
            value.name = name.replace("input", prefix)
    name_interface(model)
    shapes = {value.name: [str(size) for size in value.shape] for value in [*model.graph.inputs, *model.graph.outputs]}
    assert shapes == {
        "input_ids": ["batch_size", "sequence_length"],
        "past_key_values.3.key": ["batch_size", "2", "past_sequence_length", "8"],
        "past_key_values.4.conv_state": ["batch_size", "4", "3"],
        "logits": ["batch_size", "sequence_length", "9"],
        "present.3.key": ["batch_size", "2", "total_sequence_length", "8"],
        "present.4.conv_state": ["batch_size", "4", "3"],
    }


@pytest.mark.parametrize(
    ("dtype", "codes", "types", "width"),
    [
        (None, {}, ["FLOAT", "FLOAT"], 16),
        (ir.DataType.FLOAT16, {}, ["FLOAT16", "FLOAT16"], 16),
        (ir.DataType.FLOAT16, {3: ("fp8_e4m3", 0.5, 0.25)}, ["UINT8", "FLOAT16"], 16),
        (None, {4: ("int8_token", 1.0, 1.0)}, ["FLOAT", "INT8"], 20),
    ],
)
def test_caches_have_their_layers_type(dtype, codes, types, width) -> None:
    """Codes of a layer, and floats of the other; those of int8_token have four more bytes, of their scale."""
    model = parsed("""g (float[b, s, 64] x, float[b, 1, p, 16] k3, float[b, 1, p, 16] v3, float[b, 1, p, 16] k4,
        float[b, 1, p, 16] v4) => (float[b, s, 32] y, float[b, 1, t, 16] k5, float[b, 1, t, 16] v5, float[b, s, 32] z,
        float[b, 1, t, 16] k6, float[b, 1, t, 16] v6) {
        y, k5, v5 = quantmoe.CachedAttention (x, k3, v3)
        z, k6, v6 = quantmoe.CachedAttention (x, k4, v4)
    }""")
    for value in model.graph.inputs[1:]:
        value.name = f"input.cache.layers.{value.name[1]}.{value.name[0]}"
    spec = attention_spec(2, 1, 16)
    for node in model.graph:
        for name, value in spec.attributes().items():
            node.attributes[name] = ir.convenience.convert_attribute(name, value)
    set_cache_type(model, dtype, codes)
    for layer, node, want in zip((3, 4), model.graph, types, strict=True):
        caches = [*node.inputs[1:3], *node.outputs[1:3]]
        assert {value.dtype.name for value in caches} == {want}
        assert {value.shape[3] for value in caches} == {width if layer in codes else 16}
        found = [node.attributes[name].value for name in ("cache_format", "k_scale", "v_scale")]
        assert found == list(codes.get(layer, ("none", 1.0, 1.0)))
        assert node.outputs[0].dtype == ir.DataType.FLOAT


def test_states_are_floats_of_32_bits() -> None:
    model = parsed("""g (float16[2] a, float16[2] s) => (float16[2] y, float16[2] t) {
        y, t = quantmoe.GatedDelta (a, a, a, a, a, a, a, s)
    }""")
    state, output = model.graph.inputs[1], model.graph.outputs[1]
    state.name, output.name = (f"{way}.cache.layers.3.recurrent_states.0" for way in ("input", "output"))
    set_state_type(model)
    assert [value.dtype.name for value in model.graph.inputs] == ["FLOAT16", "FLOAT"]
    assert [value.dtype.name for value in model.graph.outputs] == ["FLOAT16", "FLOAT"]


def test_traces_are_dropped() -> None:
    model = parsed("g (float[2] x) => (float[2] y) { y = Neg (x) }")
    (node,) = model.graph
    node.metadata_props.update(
        {"pkg.torch.onnx.stack_trace": "/home/me", "namespace": "model/layer <f at 0x7f00>", "own": "1"}
    )
    node.outputs[0].metadata_props["pkg.onnxscript"] = "2"
    drop_traces(model)
    assert node.metadata_props == {"namespace": "model/layer <f>", "own": "1"}
    assert not node.outputs[0].metadata_props


LOGITS = """g (int64[b, s] input_ids, int64[b, t] attention_mask, float[b, s, 4] hidden, float[4, 5] w)
    => (float[b, s, 5] logits) {
    product = MatMul (hidden, w)
    cap = Constant <value = float {3.0}> ()
    capped = Div (product, cap)
    logits = Mul (capped, cap)
}"""


@pytest.mark.parametrize("count", [1, 2, 9])
def test_logits_of_last_tokens(count: int) -> None:
    """Rows that end with padding, begin with it, and have none; the mask also has a past of two tokens."""
    mask = np.array([[1, 1, 1, 1, 0], [1, 1, 0, 1, 1], [1, 1, 1, 1, 1]])
    given = {"input_ids": np.zeros((3, 3), np.int64), "attention_mask": mask,
             "hidden": RNG.integers(-9, 9, (3, 3, 4)).astype(np.float32),
             "w": RNG.integers(-9, 9, (4, 5)).astype(np.float32)}  # fmt: skip
    model = parsed(LOGITS)
    every = run(model, **given)
    assert keep_last_logits(model, count)
    kept = min(count, 3)
    rows = [np.clip(np.arange(last + 1 - kept, last + 1), 0, None) for last in (1, 2, 2)]
    np.testing.assert_array_equal(run(model, **given), np.stack([y[i] for y, i in zip(every, rows, strict=True)]))


def test_logits_of_a_head_that_onnxscript_fuses() -> None:
    """An LM head in f32, with the transpose of its weight."""
    model = parsed(LOGITS)
    (head,) = (node for node in model.graph if node.op_type == "MatMul")
    head.domain, head.op_type = "com.microsoft", "FusedMatMul"
    assert keep_last_logits(model, 1)
    assert head.inputs[0].producer().op_type == "GatherND"


def test_hidden_states_are_an_output() -> None:
    model = parsed(LOGITS)
    assert output_hidden(model, "hidden_states", 4)
    assert [value.name for value in model.graph.outputs] == ["logits", "hidden_states"]
    assert model.graph.outputs[1].producer().inputs[0].name == "hidden"


def test_logits_of_no_product_stay() -> None:
    model = parsed(LOGITS.replace("MatMul (", 'Einsum <equation = "bsh,hv->bsv"> ('))
    before = ops(model)
    assert not keep_last_logits(model)
    assert not output_hidden(model, "hidden_states", 4)
    assert ops(model) == before


def test_norms_by_one_more_than_their_weight() -> None:
    class OneMoreRMSNorm(RMSNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return RMSNorm(self.weight + 1, self.eps)(x)

    model = torch.nn.ModuleDict({"a": OneMoreRMSNorm(torch.ones(4), 1e-6), "b": RMSNorm(torch.ones(4), 1e-6)})
    assert plain_norms(model) == ["a.weight"]
    assert type(model["a"]) is RMSNorm


@pytest.mark.parametrize("zero_points", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_of_onnx_runtime(zero_points: bool, bias: bool) -> None:
    m = QuantizedMatrix(
        kind="int4",
        codes=RNG.integers(0, 16, (6, 40), dtype=np.uint8),
        scales=RNG.uniform(0.5, 1, (6, 3)).astype(np.float32),
        group_size=16,
        zero_points=RNG.integers(0, 16, (6, 3), dtype=np.uint8) if zero_points else None,
        bias=RNG.normal(size=6).astype(np.float32) if bias else None,
    )
    model = parsed("g (float[b, 40] x, int32[1, 9] w) => (float[b, 6] y) { y = quantmoe.QuantLinear (x, w) }", ("w",))
    spec = LinearSpec(in_features=40, out_features=6, w=cpu_panel.describe_down(m, "none"))
    model.meta["placeholders"][0].name = "q_proj.w"
    made = to_matmul_nbits(model.meta.pop("placeholders")[0], m, spec)
    for value, array in made:
        value.const_value = ir.Tensor(array, name=value.name)
    assert ops(model) == ["MatMulNBits", *(["Add"] if bias else [])]
    x = RNG.normal(size=(3, 40)).astype(np.float32)
    (y,) = ort.InferenceSession(ir.to_proto(model).SerializeToString()).run(None, {"x": x})
    want = x.astype(np.float64) @ m.dequantize().astype(np.float64).T + (m.bias if bias else 0)
    np.testing.assert_allclose(y, want, rtol=0, atol=40 * 2**-23 * np.abs(want).max())


def chain(nodes: str, count: int = 3) -> ir.Model:
    """The first layers and the last, as they are traced: each adds its weight to the hidden states and has a cache."""
    ends = "".join(f", float[b] k{i}" for i in range(count)), ", ".join(f"float[b] l{i}" for i in range(count))
    weights, names = "".join(f", float[b] w{i}" for i in range(count)), tuple(f"w{i}" for i in range(count))
    model = parsed(f"g (float[b] x{ends[0]}{weights}) => (float[b] y, {ends[1]}) {{ {nodes} }}", names)
    for i, value in enumerate(model.meta["placeholders"]):
        value.name = f"model.layers.{i}.weight"
    for values, prefix in ((model.graph.inputs, "input"), (model.graph.outputs, "output")):
        for i, value in enumerate(values[1:]):
            value.name = f"{prefix}.cache.layers.{i}.keys"
    return model


LAYERS = "\n".join(f"h{i} = Add ({'x' if i == 0 else f'h{i - 1}'}, w{i})\n l{i} = Mul (k{i}, h{i})" for i in range(3))


def test_layers_are_repeated() -> None:
    model = chain(f"{LAYERS}\n y = Neg (h2)")
    repeat_layers(model, "model.layers", [[0], [1], [5]])
    assert sorted(value.name for value in model.meta["placeholders"]) == [f"model.layers.{i}.weight" for i in range(6)]
    for values, prefix in ((model.graph.inputs, "input"), (model.graph.outputs, "output")):
        assert [v.name for v in values][1:] == [f"{prefix}.cache.layers.{i}.keys" for i in range(6)]
    weights = {v.name: np.float32([10 ** int(v.name.split(".")[2])]) for v in model.meta["placeholders"]}
    model.graph.inputs.extend(model.meta["placeholders"])
    caches = {f"input.cache.layers.{i}.keys": np.float32([2]) for i in range(6)}
    found = ReferenceEvaluator(ir.to_proto(model)).run(None, {"x": np.float32([0])} | caches | weights)
    assert [int(value[0]) for value in found] == [-111111, 2, 22, 222, 2222, 22222, 222222]


def test_what_stands_between_layers_belongs_to_the_later_one() -> None:
    """Nothing stands behind the last layer."""
    adds = [f"h{i} = Add ({'x' if i == 0 else f'g{i - 1}'}, w{i})" for i in range(3)]
    lines = [f"{add}\n l{i} = Mul (k{i}, h{i})" for i, add in enumerate(adds)]
    model = chain("\n".join([lines[0], "g0 = Neg (h0)", lines[1], "g1 = Neg (h1)", lines[2], "y = Abs (h2)"]))
    repeat_layers(model, "model.layers", [[0], [1], [5]])
    assert ops(model).count("Neg") == 5
    weights = {v.name: np.float32([10 ** int(v.name.split(".")[2])]) for v in model.meta["placeholders"]}
    model.graph.inputs.extend(model.meta["placeholders"])
    caches = {f"input.cache.layers.{i}.keys": np.float32([2]) for i in range(6)}
    found = ReferenceEvaluator(ir.to_proto(model)).run(None, {"x": np.float32([0])} | caches | weights)
    assert [int(value[0]) for value in found] == [90909, 2, 18, 182, 1818, 18182, 181818]


def test_layers_before_another_last_one_are_repeated() -> None:
    """Three alike are traced, and the last."""
    adds = f"{LAYERS}\n h3 = Sub (h2, w3)\n l3 = Mul (k3, h3)\n y = Neg (h3)"
    with pytest.raises(RepeatError):
        repeat_layers(chain(adds, 4), "model.layers", [[0], [1], [2], [6]])
    model = chain(adds, 4)
    repeat_layers(model, "model.layers", [[0], [1], [2], [6]], before=True)
    weights = {v.name: np.float32([10 ** int(v.name.split(".")[2])]) for v in model.meta["placeholders"]}
    model.graph.inputs.extend(model.meta["placeholders"])
    caches = {f"input.cache.layers.{i}.keys": np.float32([2]) for i in range(7)}
    found = ReferenceEvaluator(ir.to_proto(model)).run(None, {"x": np.float32([0])} | caches | weights)
    assert [int(value[0]) for value in found] == [888889, 2, 22, 222, 2222, 22222, 222222, -1777778]


def test_layers_read_parameters_of_the_layer_before() -> None:
    """What JetMoE adds to a layer's result."""
    nodes = ["h0 = Add (x, w0)", *(f"h{i} = Sum (h{i - 1}, w{i - 1}, w{i})" for i in (1, 2))]
    model = chain("\n".join([*nodes, *(f"l{i} = Mul (k{i}, h{i})" for i in range(3)), "y = Neg (h2)"]))
    repeat_layers(model, "model.layers", [[0], [1], [5]])
    weights = {v.name: np.float32([10 ** int(v.name.split(".")[2])]) for v in model.meta["placeholders"]}
    model.graph.inputs.extend(model.meta["placeholders"])
    given = {f"input.cache.layers.{i}.keys": np.float32([1]) for i in range(6)}
    found = ReferenceEvaluator(ir.to_proto(model)).run(None, {"x": np.float32([0])} | given | weights)
    assert [int(value[0]) for value in found] == [-122222, 1, 12, 122, 1222, 12222, 122222]


def test_layers_share_what_sizes_decide() -> None:
    """Ones of the size of the first layer's hidden states, which the trace makes once."""
    ones = "size = Shape (h0)\n ones = ConstantOfShape <value = float[1] {1}> (size)"
    adds = [f"h{i} = Add ({'x' if i == 0 else f'h{i - 1}'}, w{i})" for i in range(3)]
    caches = [f"m{i} = Add (k{i}, ones)\n l{i} = Mul (m{i}, h{i})" for i in range(3)]
    model = chain("\n".join([adds[0], ones, caches[0], adds[1], caches[1], adds[2], caches[2], "y = Neg (h2)"]))
    repeat_layers(model, "model.layers", [[0], [1], [5]])
    assert ops(model).count("Shape") == 1
    weights = {v.name: np.float32([10 ** int(v.name.split(".")[2])]) for v in model.meta["placeholders"]}
    model.graph.inputs.extend(model.meta["placeholders"])
    given = {f"input.cache.layers.{i}.keys": np.float32([2]) for i in range(6)}
    found = ReferenceEvaluator(ir.to_proto(model)).run(None, {"x": np.float32([0])} | given | weights)
    assert [int(value[0]) for value in found] == [-111111, 3, 33, 333, 3333, 33333, 333333]


def looping(last: str) -> ir.Model:
    """Layers whose caches are multiplied by what a Loop makes of the hidden states in two rounds.

    Args:
        last: the operator in the body of the last layer.
    """
    lines = ["two = Constant <value = int64 {2}> ()", "yes = Constant <value = bool {1}> ()"]
    for i, operator in enumerate(("Add", "Add", last)):
        body = f"o{i} = Identity (c{i})\n r{i} = {operator} (m{i}, m{i})"
        ends = f"(int64 j{i}, bool c{i}, float[b] m{i}) => (bool o{i}, float[b] r{i})"
        lines += [
            f"h{i} = Add ({'x' if i == 0 else f'h{i - 1}'}, w{i})",
            f"t{i} = Loop <body = body{i} {ends} {{ {body} }}> (two, yes, h{i})",
            f"l{i} = Mul (k{i}, t{i})",
        ]
    return chain("\n".join([*lines, "y = Neg (h2)"]))


def test_layers_with_loops_are_repeated() -> None:
    """Each copy has a body of its own."""
    model = looping("Add")
    repeat_layers(model, "model.layers", [[0], [1], [5]])
    bodies = [node.attributes["body"].as_graph() for node in model.graph if node.op_type == "Loop"]
    assert len({id(body) for body in bodies}) == 6
    weights = {v.name: np.float32([10 ** int(v.name.split(".")[2])]) for v in model.meta["placeholders"]}
    model.graph.inputs.extend(model.meta["placeholders"])
    given = {f"input.cache.layers.{i}.keys": np.float32([2]) for i in range(6)}
    found = ReferenceEvaluator(ir.to_proto(model)).run(None, {"x": np.float32([0])} | given | weights)
    assert [int(value[0]) for value in found] == [-111111, 8, 88, 888, 8888, 88888, 888888]


def test_layers_with_other_loops_are_not_repeated() -> None:
    with pytest.raises(RepeatError):
        repeat_layers(looping("Mul"), "model.layers", [[0], [1], [5]])


def test_layers_that_are_no_chain_are_not_repeated() -> None:
    model = chain(f"{LAYERS.replace('Add (h1, w2)', 'Sub (h1, w2)')}\n y = Neg (h2)")
    before = ops(model)
    with pytest.raises(RepeatError):
        repeat_layers(model, "model.layers", [[0], [1], [5]])
    assert ops(model) == before


def test_rewrite_rules_are_tried_on_their_operators() -> None:
    """They make the same graph, and see no other nodes than those that they end with."""
    text = """g (float[2, 3] x) => (float[2, 3] y) {
        a = Identity (x)
        b = Transpose <perm = [1, 0]> (a)
        c = Transpose <perm = [1, 0]> (b)
        d = Relu (c)
        y = Relu (d)
    }"""
    made, tried = [], []

    def watched(match: Any) -> Any:
        def call(self: Any, model: ir.Model, graph: Any, node: ir.Node, **others: Any) -> Any:
            tried[-1].append((self.pattern.output_nodes[0].op_identifier(), (node.domain, node.op_type)))
            return match(self, model, graph, node, **others)

        return call

    for factories in ([watched], [watched, only_their_operator]):
        tried.append([])
        model = parsed(text)
        with patch_attributes([(SimplePatternMatcher, "match", factory) for factory in factories]):
            onnxscript.optimizer.optimize_ir(model)
        made.append(ir.to_proto(model).SerializeToString())
    assert made[0] == made[1]
    assert ops(model) == ["Relu"]
    assert any(rule and rule[:2] != node for rule, node in tried[0])
    assert tried[1]
    assert all(rule is None or rule[:2] == node for rule, node in tried[1])


MIXTURE = """g (float[T, 8] x, float[8, 4] router, float[8, 8] shared, int32[4, 16] w13, int32[4, 16] w2) =>
  (float[T, 8] y{extra}) {{
    wide = Cast <to = 1> (x)
    logits = MatMul (wide, router)
    k = Constant <value = int64[1] {{2}}> ()
    weights, ids = TopK (logits, k)
    beside = MatMul ({beside}, shared)
    routed = quantmoe.QuantMoE (x, ids, weights, w13, w2)
    y = Add (routed, beside)
}}"""


def test_tokens_meet_before_experts_and_their_router() -> None:
    """Not before what is beside them."""
    model = parsed(MIXTURE.format(extra="", beside="x"))
    meet_around_experts(model, Slice(rank=1, world=4, export_id=7))
    made = {node.op_type: node for node in model.graph}
    assert ops(model) == [
        "AllGather", "Cast", "MatMul", "Constant", "TopK", "MatMul", "QuantMoE", "ReduceScatter", "Add"
    ]  # fmt: skip
    every, own = made["AllGather"], made["ReduceScatter"]
    assert every.attributes["axis"].as_int() == 0
    for node in (every, own):
        assert [node.attributes[name].as_int() for name in ("rank", "world", "export_id")] == [1, 4, 7]
    assert made["QuantMoE"].inputs[0] is made["Cast"].inputs[0] is every.outputs[0]
    assert made["MatMul"].inputs[0] is every.inputs[0] is model.graph.inputs[0]
    assert made["Add"].inputs[0] is own.outputs[0]


@pytest.mark.parametrize(
    ("extra", "beside", "message"),
    [
        (", float[T, 4] logits", "x", "what routes  has other uses: logits"),
        ("", "wide", "what routes  has other uses: wide"),
    ],
)
def test_routers_with_other_uses_do_not_meet(extra: str, beside: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        meet_around_experts(parsed(MIXTURE.format(extra=extra, beside=beside)), Slice(rank=0, world=2))


def test_ids_of_something_else_do_not_meet() -> None:
    model = parsed(MIXTURE.format(extra="", beside="x").replace("(x, ids, weights", "(beside, ids, weights"))
    with pytest.raises(ValueError, match="ids and weights of  are not made of its input"):
        meet_around_experts(model, Slice(rank=0, world=2))


@pytest.mark.parametrize("kind", ["int32", "int64"])
def test_ids_become_rows_of_a_ranks_file_by_turns(kind: str) -> None:
    model = parsed(f"""g (float[5, 4] x, {kind}[5, 2] ids, float[5, 2] weights, int64[1, 5] position_ids,
                        int32[2, 8] "mlp.w13", int32[2, 8] "mlp.w2") => ({kind}[5, 2] y) {{
        y = quantmoe.QuantMoE (x, ids, weights, "mlp.w13", "mlp.w2")
    }}""")
    table = np.array([[0, -1, 1], [-1, 0, 1]])  # experts 0 and 1 take turns, 2 is here for every token
    place_experts(model, {"mlp": table})
    (node,) = (node for node in model.graph if node.op_type == "QuantMoE")
    assert ops(model) == ["Reshape", "Mod", "Mul", *["Cast"] * (kind == "int32"), "Add", "Gather", "QuantMoE"]
    (rows,) = node.inputs[1:2]
    assert isinstance(rows, ir.Value)
    assert rows.type == model.graph.inputs[1].type
    node.replace_input_with(1, None)
    rows.shape = model.graph.outputs[0].shape
    model.graph.outputs[0] = rows
    model.graph.remove(node)
    ids, positions = np.array([[0, 2], [0, 1], [1, 2], [1, 0], [2, 0]], kind), np.array([[0, 1, 2, 3, 4]])
    found = run(model, ids=ids, position_ids=positions)
    np.testing.assert_array_equal(found, table[positions.reshape(-1, 1) % 2, ids])


def test_a_layer_without_a_table_is_left() -> None:
    model = parsed("""g (float[5, 4] x, int64[5, 2] ids, float[5, 2] weights,
                        int32[2, 8] "mlp.w13", int32[2, 8] "mlp.w2") => (float[5, 4] y) {
        y = quantmoe.QuantMoE (x, ids, weights, "mlp.w13", "mlp.w2")
    }""")
    place_experts(model, {"other": np.array([[0, 1]])})
    assert ops(model) == ["QuantMoE"]


@pytest.mark.parametrize("reader", ["Cast", "Neg", "none"])
def test_fused_norms_have_the_type_of_their_weights(reader: str) -> None:
    """As onnxscript leaves them: of float32, which ONNX Runtime refuses; what reads another type reads a Cast."""
    read = {"Cast": "z = Cast <to: int = 10> (y)", "Neg": "z = Neg (y)", "none": ""}[reader]
    kind, last = ("float16", "z") if reader == "Cast" else ("float", "z" if reader == "Neg" else "y")
    model = parsed(f"""g (float16[2, 4] x, float16[4] weight) => ({kind}[2, 4] {last}) {{
        y = SimplifiedLayerNormalization <axis: int = -1, epsilon: float = 0.00001, stash_type: int = 1> (x, weight)
        {read}
    }}""")
    norm = model.graph[0]
    norm.outputs[0].dtype, norm.outputs[0].shape = ir.DataType.FLOAT, ir.Shape([2, 4])
    x = RNG.normal(size=(2, 4)).astype(np.float16)
    with pytest.raises(Exception, match="Type Error"):
        ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    type_fused_norms(model)
    assert ops(model) == [
        "SimplifiedLayerNormalization",
        *{"Cast": ["Cast"], "Neg": ["Cast", "Neg"], "none": ["Cast"]}[reader],
    ]
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"x": x, "weight": np.ones(4, np.float16)})
    want = x.astype(np.float64) / np.sqrt((x.astype(np.float64) ** 2).mean(1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(found, -want if reader == "Neg" else want, rtol=1e-3)
    assert [value.name for value in model.graph.outputs] == [last]
