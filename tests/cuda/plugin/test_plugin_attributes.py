"""The TensorRT plug-in's attributes: serialized, and refused where they are missing, damaged or out of range."""

from __future__ import annotations

import pytest
from support.cuda.plugin_layers import ATTENTION, CONV, DELTA, LINEAR, NORM, ROUTER, ROUTING, SPACE, SPEC, TOKEN_ROWS
from support.cuda.trt import BUILD, FIELD_TYPES, RUNTIME, Attribute, attributes_of

from quantmoe.custom_ops.op import IndexerSpec, attribute_kinds


def test_serializes_exactly_the_attributes(driver, plugin):
    fields = plugin.serialize()
    assert {n: a.value for n, a in fields.items()} == SPEC.attributes()
    again = driver.create(fields, RUNTIME)
    assert again is not None
    assert {n: a.value for n, a in again.attach().serialize().items()} == SPEC.attributes()


@pytest.mark.parametrize("name", attribute_kinds())
def test_missing_attribute(driver, name):
    fields = attributes_of(SPEC)
    del fields[name]
    for phase in (BUILD, RUNTIME):
        assert driver.create(fields, phase) is None
        assert driver.log() == f'1 QuantMoE layer "experts": attribute {name} is required\n'


@pytest.mark.parametrize("name", attribute_kinds())
@pytest.mark.parametrize("kind", FIELD_TYPES)
def test_attribute_of_another_type(driver, name, kind):
    fields = attributes_of(SPEC)
    if fields[name].type == FIELD_TYPES[kind]:
        return
    fields[name] = Attribute(name, FIELD_TYPES[kind], "1" if kind == "s" else 1)
    assert driver.create(fields) is None
    assert f"attribute {name} is of field type" in driver.log()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("op_version", 99, "op_version is 99, this library knows 1"),
        ("w13_layout_version", 1, "marlin version 2: export the model again"),
        ("w2_layout", "cpu_panel", "marlin version 2"),
        ("w13_format", "int7", 'w13_format is "int7", the operator defines: int4, int8'),
        ("w13_format", "bf16", "w13_group_size is 128, the CUDA kernels take -1 for floats"),
        ("activation", "", 'activation is "", the operator defines: silu'),
        ("activation", "x" * 100_000, 'activation is "xxx'),
        ("w2_group_size", 48, "w2_group_size is 48"),
        ("hidden_size", -8, "hidden_size is -8"),
        ("intermediate_size", 0, "intermediate_size is 0"),
        ("num_experts", 0, "num_experts = 0"),
        ("expert_offset", 16, "num_experts = 16"),
        ("expert_offset", -(2**31), "experts [-2147483648, -2147483632) are not inside num_experts = 16"),
        ("num_experts", -(2**31), "num_experts = -2147483648"),
        ("w13_pre_scale", 2, "w13_pre_scale is 2"),
        ("w2_perm", 2, "w2_perm is 2"),
        ("w13_bias", 2, "w13_bias is 2, expected 0 or 1"),
        ("gated", 2, "gated is 2, expected 0 or 1"),
        ("apply_router_weight_on_input", -1, "apply_router_weight_on_input is -1, expected 0 or 1"),
    ],
)  # fmt: skip
def test_bad_attribute(driver, name, value, message):
    fields = attributes_of(SPEC)
    fields[name] = Attribute(name, fields[name].type, value)
    assert driver.create(fields) is None
    log = driver.log()
    assert log.startswith('1 QuantMoE layer "experts": ')
    assert message in log


def test_damaged_fields(driver):
    """A plan's bytes may be anything: text without its NUL, no memory, no name, no fields, ones of a later version."""
    fields = attributes_of(SPEC)
    fields["activation"].length = 4  # "swig": cut, no NUL
    assert driver.create(fields) is None
    assert 'activation is "swig"' in driver.log()
    fields["activation"].length = 0
    assert driver.create(fields) is None
    assert "of field type 6 and length 0" in driver.log()
    fields = attributes_of(SPEC) | {"w3_format": Attribute("w3_format", FIELD_TYPES["s"], "int4")}
    assert driver.create(fields, RUNTIME) is None
    assert "unknown attribute w3_format" in driver.log()
    assert driver.create({}) is None
    assert "op_version is required" in driver.log()
    future = fields | {"op_version": Attribute("op_version", FIELD_TYPES["i"], 7)}
    assert driver.create(future, RUNTIME) is None
    assert driver.log() == '1 QuantMoE layer "experts": op_version is 7, this library knows 1 to 2\n'
    made = attributes_of(SPEC)
    made["nameless"] = Attribute(None, FIELD_TYPES["i"], 1)
    assert driver.create(made) is None
    assert "an attribute has no name" in driver.log()


@pytest.mark.parametrize(
    "spec", [LINEAR, ROUTING, ROUTER, NORM, TOKEN_ROWS, ATTENTION, CONV, DELTA, SPACE], ids=lambda spec: spec.OP
)
def test_others_serialize_and_name_what_is_missing(others, spec):
    others.select(spec.OP)
    made = others.create(attributes_of(spec))
    assert made is not None, others.log()
    assert {n: a.value for n, a in others.create(made.serialize(), RUNTIME).attach().serialize().items()} == (
        spec.attributes()
    )
    for name in attribute_kinds(spec.OP):
        fields = attributes_of(spec)
        del fields[name]
        assert others.create(fields) is None
        assert others.log() == f'1 {spec.OP} layer "experts": attribute {name} is required\n'


def test_sparse_attention(others):
    others.select("SparseIndexer")
    assert others.create(attributes_of(IndexerSpec(num_heads=4, head_size=32, top_k=8))) is None
    said = "the plug-in has no attention to selected tokens: run the model in ONNX Runtime"
    assert others.log() == f'1 SparseIndexer layer "experts": {said}\n'


@pytest.mark.parametrize(
    ("spec", "name", "value", "message"),
    [
        (LINEAR, "op_version", 99, "op_version is 99, this library knows 1"),
        (LINEAR, "in_features", 500, "in_features is 500"),
        (CONV, "width", 129, "width is 129, expected 2 to 128"),
        (DELTA, "k_head_size", 96, "k_head_size is 96 and v_head_size 64, the CUDA kernels take 64 and 128"),
        (SPACE, "state_size", 96, "state_size is 96, the CUDA kernels take 64, 128 and 256"),
        (SPACE, "norm_size", 48, "norm_size is 48, expected whole heads of 32, and a divisor of all heads' 128"),
        (DELTA, "gate", "tanh", 'gate is "tanh", the operator defines: silu, sigmoid'),
        (LINEAR, "w_format", "f16", "w_group_size is 128, the CUDA kernels take -1 for floats"),
        (LINEAR, "w_layout", "cpu_panel", "w_layout is cpu_panel"),
        (ROUTING, "op_version", 99, "op_version is 99, this library knows 1"),
        (ROUTING, "method", "hash", 'method is "hash", the operator defines: softmax_topk'),
        (ROUTING, "top_k", 25, "top_k is 25, the CUDA kernel takes 1 to 24"),
        (ROUTING, "n_group", 0, "n_group is 0"),
        (ROUTER, "hidden_size", 0, "hidden_size is 0, the CUDA kernels take 1 to 16777216"),
        (ROUTER, "top_k", 25, "top_k is 25, the CUDA kernel takes 1 to 24"),
        (NORM, "op_version", 99, "op_version is 99, this library knows 1"),
        (NORM, "norm_epsilon", -1.0, "norm_epsilon is -1"),
        (ATTENTION, "op_version", 99, "op_version is 99, this library knows 1"),
        (ATTENTION, "qk_norm", "rms", 'qk_norm is "rms", the operator defines: none, head, row'),
        (ATTENTION, "head_size", 160, "head_size is 160 and v_head_size 128, the CUDA kernels take 64, 96, 128"),
        (ATTENTION, "v_head_size", 64, "head_size is 128 and v_head_size 64, the CUDA kernels take 64, 96, 128"),
        (ATTENTION, "kv_num_heads", 3, "kv_num_heads is 3, expected a divisor of num_heads 32"),
    ],
)
def test_bad_attribute_of_others(others, spec, name, value, message):
    others.select(spec.OP)
    fields = attributes_of(spec)
    fields[name] = Attribute(name, fields[name].type, value)
    assert others.create(fields) is None
    log = others.log()
    assert log.startswith(f'1 {spec.OP} layer "experts": ')
    assert message in log
