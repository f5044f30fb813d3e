"""What the CUDA kernels refuse, and that an export knows it. Needs no GPU."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from support.cuda import cuda_kernels as cuda
from support.cuda.formats import FLOATS, FORMATS, spec_of
from support.cuda.layers import CASES, EXACT, FORMAT_SHAPES, build, of_format
from support.operators.marlin_rows import GROUPED
from support.operators.specs import linear_spec

from quantmoe.custom_ops import native
from quantmoe.custom_ops.op import enum


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "f32"}, "float16"),
        ({"device": cuda.Device(75, 40, 65536)}, "7.5"),
        ({"hidden": 2049}, "hidden_size is 2049"),
        ({"local": 200}, "num_experts = 128"),
        ({"group_size": 96}, "group_size is 96"),
        ({"group_size": 192}, "group_size is 192"),
        ({"layout": "cpu_panel"}, "w2_layout is cpu_panel version 2, the CUDA kernels read marlin"),
        ({"layout_version": 1}, "w2_layout is marlin version 1, .* marlin version 2: export the model again"),
        ({"op_version": 99}, "op_version is 99"),
        ({"id_bytes": 2}, "topk_ids are of another type than int32 and int64"),
        ({"tokens": 2**61}, r"topk_ids is \[2305843009213693952, 8\], expected .* at most 1073741823 ids"),
        ({"intermediate": 2**31 - 1}, r"w13 has rows of \d+ bytes, the CUDA kernels take less than 2\^32"),
        ({"hidden": 2**31 - 8}, "less than 2"),
        ({"gated": 2}, "gated is 2, expected 0 or 1"),
        ({"gated": -1}, "gated is -1, expected 0 or 1"),
        ({"apply_router_weight_on_input": 2}, "apply_router_weight_on_input is 2, expected 0 or 1"),
        ({"w2_hadamard": 32}, "w2_hadamard is 32 .* no CUDA kernel does: export with --target cpu"),
    ],
)
def test_refusals(change, message):
    sizes = change.get("hidden", 2048), change.get("intermediate", 768), 128, change.get("group_size", 128)
    flags = {n: change[n] for n in ("gated", "apply_router_weight_on_input", "w2_hadamard") if n in change}
    spec = spec_of(*sizes, **flags)
    assert not flags or re.search(message, cuda.refusal(spec))
    layout = {name: value for name, value in change.items() if name.startswith("layout")}
    spec = replace(spec, w2=replace(spec.w2, **layout))
    p = cuda.problem(spec, change.get("dtype", "bf16"), change.get("tokens", 4), 8, change.get("local", 128))
    p.id_bytes = change.get("id_bytes", 8)
    p.moe.op_version = change.get("op_version", 1)
    with pytest.raises(ValueError, match=message):
        cuda.plan(p, change.get("device", cuda.H200))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"zero_points": 1, "format": "fp8_e4m3"}, r"w\d+_zero_points is 1"),
        ({"scale_type": "e8m0"}, r"w\d+_scale_type is e8m0"),
        ({"scale_type": "f32"}, r"w\d+_scale_type is f32.* for int4: export with --scales bf16"),
        ({"scale_type": "f32", "format": "int8", "group_size": 32}, r"w\d+_scale_type is f32 .*--scales bf16"),
        ({"group_size": 16}, r"w\d+_group_size is 16"),
        ({"group_size": 64, "format": "fp8_e4m3", "scale_type": "e8m0"}, r"w\d+_group_size is 64"),
        ({"group_size": 32, "format": "nvfp4", "scale_type": "e4m3"}, r"w\d+_group_size is 32"),
        ({"pre_scale": 2}, r"w\d+_pre_scale is 2"),
        ({"perm": 3}, r"w\d+_perm is 3"),
        ({"bias": 2}, r"w\d+_bias is 2"),
        ({"bias": -1}, r"w\d+_bias is -1"),
    ],
)
@pytest.mark.parametrize("projection", ["w13", "w2"])
def test_the_exporter_knows_what_is_refused(projection, change, message):
    spec = spec_of(2048, 768, 8)
    assert cuda.refusal(spec) == ""
    spec = replace(spec, **{projection: replace(spec.w13, **change)})
    with pytest.raises(ValueError, match=message):
        cuda.plan(cuda.problem(spec, "bf16", 1, 1, 8))
    assert cuda.refusal(spec).startswith(f"{projection}_{next(iter(change))} is {next(iter(change.values()))}")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"group_size": 128}, "_group_size is 128, the CUDA kernels take -1 for floats"),
        ({"scale_type": "bf16"}, "_scale_type is bf16, the CUDA kernels take f32 for floats"),
        ({"pre_scale": 1}, "_pre_scale is 1, the CUDA kernels take 0 for floats"),
        ({"perm": 1}, "_perm is 1, the CUDA kernels take 0 for floats"),
        ({"zero_points": 1}, "_zero_points is 1, the CUDA kernels take 0 for floats"),
        ({"activation_format": "fp8_token"}, "_activation_format is fp8_token, the CUDA kernels take none for floats"),
        ({"bias": 2}, "_bias is 2, expected 0 or 1"),
    ],
)
@pytest.mark.parametrize("projection", ["w13", "w2"])
def test_what_floats_cannot_have(projection, change, message):
    spec = spec_of(2048, 768, 8, *FLOATS["bf16"][1::-1])
    spec = replace(spec, **{projection: replace(spec.w2, **change)})
    assert cuda.refusal(spec) == projection + message


def test_two_orders_are_of_a_gated_w13():
    spec = spec_of(2048, 768, 8)
    two = replace(spec.w13, perm=2)
    assert cuda.refusal(replace(spec, w13=two)) == ""
    cuda.plan(cuda.problem(replace(spec, w13=two), "bf16", 1, 1, 8))
    for wrong in (replace(spec, w2=two), replace(spec, w13=two, gated=0, activation="relu2")):
        assert "_perm is 2" in cuda.refusal(wrong)
        with pytest.raises(ValueError, match="_perm is 2"):
            cuda.plan(cuda.problem(wrong, "bf16", 1, 1, 8))


def test_activations_in_groups_are_refused():
    spec = spec_of(2048, 768, 8)
    spec = replace(spec, w13=replace(spec.w13, activation_format="int8_group"))
    message = "w13_activation_format is int8_group, .*: export with --activations float or int8-token"
    assert re.match(message, cuda.refusal(spec))
    with pytest.raises(ValueError, match=message):
        cuda.plan(cuda.problem(spec, "bf16", 1, 1, 8))


@pytest.mark.parametrize("activation_format", sorted({*enum("activation_format")} - {"int8_group"}))
def test_an_act_order_of_w2_is_refused_where_marlin_refuses_it(activation_format):
    spec = spec_of(2048, 768, 8)
    ordered = replace(spec.w2, perm=1, activation_format=activation_format)
    spec, message = replace(spec, w2=ordered), "w2_perm is 1 with w2_activation_format .* --activations float"
    if activation_format not in GROUPED:
        assert cuda.refusal(spec) == ""
        cuda.plan(cuda.problem(spec, "bf16", 1, 1, 8))
        return
    assert re.match(message, cuda.refusal(spec))
    with pytest.raises(ValueError, match=message):
        cuda.plan(cuda.problem(spec, "bf16", 1, 1, 8))


def test_rows_that_share_a_scale_do_not_take_an_act_order_of_w2():
    weights, group_size, block_n = FORMATS["fp8"]
    spec = spec_of(2048, 768, 8, group_size, weights)
    spec = replace(spec, w2=replace(spec.w2, perm=1))
    assert cuda.refusal(spec) == ""
    spec = replace(spec, w13=replace(spec.w13, block_n=block_n))
    assert cuda.refusal(spec).startswith("w2_perm is 1 with w13_block_n 128; rows of w13 that share a scale cannot")


@pytest.mark.parametrize("activation", ["swiglu_oai", "swiglu_step", "swiglu_clamp", "swiglu_tanh"])
def test_an_activation_without_its_gate_is_refused_as_on_the_cpu(activation):
    spec = replace(spec_of(2048, 768, 8), activation=activation, gated=0)
    assert cuda.refusal(spec).startswith(f"activation is {activation} with gated = 0, expected silu, ")
    assert native.refusal(spec, {"w13": 0, "w2": 0}) == cuda.refusal(spec)


@pytest.mark.parametrize("name", [*CASES, *FORMATS, *FLOATS, *EXACT])
def test_row_bytes_agree_with_the_layout(name):
    case = CASES[name] if name in CASES else FORMAT_SHAPES["odd"]
    if name in FORMATS or name in FLOATS:
        case = of_format(name, case)
    elif name in EXACT:
        act_order = "split" if name == "nvfp4" else "shared"
        case = replace(case, activation_format=name, act_order=act_order, pre_scale=True)
    spec, _, w13, w2 = build(replace(case, experts=1, top_k=1))
    assert cuda.refusal(spec) == ""
    for which, rows in (("w13", w13), ("w2", w2)):
        assert native.row_of(*spec.matrices(which)).bytes == rows.shape[1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"in_features": 1028}, "in_features is 1028"),
        ({"out_features": 0}, "out_features is 0"),
        ({"op_version": 99}, "op_version is 99"),
        ({"w": {"format": "f16"}}, "w_format is f16 and activations are bfloat16"),
        ({"w": {"format": "bf16"}}, "w_group_size is 128, the CUDA kernels take -1 for floats"),
        ({"w": {"perm": 2}}, "w_perm is 2"),
        ({"w": {"bias": 2}}, "w_bias is 2"),
    ],
)
def test_linear_refusals(change, message):
    spec = linear_spec(1024, 512, spec_of(64, 64, 1).w2)
    spec = replace(spec, **change) if "w" not in change else replace(spec, w=replace(spec.w, **change["w"]))
    with pytest.raises(ValueError, match=message):
        cuda.plan(cuda.linear_problem(spec, "bf16", 4))
