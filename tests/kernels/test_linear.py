"""QuantLinear through the C ABI: the reference's numbers, and QuantMoE's own w2 byte for byte."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import pytest
from support.operators import native_kernels as native
from support.operators.arithmetic import Span, assert_within, quant_linear
from support.operators.bounds import check_linear, weights
from support.operators.cases import (
    FLOAT_ACTIVATIONS,
    GGML,
    INT4,
    INT8,
    INT8_ACTIVATIONS,
    NVFP4,
    ONE_OF_EACH,
    ONE_PLANE_EACH,
    TABLES,
    Case,
)
from support.operators.specs import linear_spec

from quantmoe.custom_ops.layouts import LAYOUTS
from quantmoe.custom_ops.matrix import QuantizedMatrix
from quantmoe.custom_ops.op import LinearSpec
from quantmoe.custom_ops.reference import step_columns
from quantmoe.custom_ops.schemes import SCHEMES

LAYOUT = LAYOUTS["cpu_panel"]
CASES = [
    Case(),
    Case(weights=("int8", "bf16", False), group_size=-1, bias=True),
    Case(group_size=-1, activation_format="int8_token"),
    Case(activation_format="none", bias=True),
    Case(hidden=100, intermediate=70, act_order="shared"),
    Case(
        hidden=33,
        intermediate=7,
        weights=("int8", "bf16", False),
        group_size=-1,
        act_order="shared",
        activation_format="none",
    ),
    Case(weights=("int4", "f16", True), pre_scale=True, act_order="shared"),
    Case(weights=("mxfp4", "e8m0", False)),
    Case(intermediate=300, weights=("q5_k", "k32", False), bias=True),
    Case(intermediate=520, weights=("q6_k", "k16", False), act_order="shared"),
    Case(intermediate=520, weights=GGML["q2_k"], act_order="shared"),
    Case(intermediate=300, weights=GGML["q4_1"], bias=True),
    Case(intermediate=300, weights=GGML["q5_1"], activation_format="none"),
    # Rows longer than what AVX2's prompts unpack at a time: whole groups of it, and parts of groups.
    Case(intermediate=1100),
    Case(intermediate=1100, group_size=96, weights=("int4", "f16", True)),
    Case(intermediate=1100, group_size=-1, activation_format="int8_token"),
    Case(intermediate=1100, group_size=544, weights=("int8", "bf16", True)),
    Case(intermediate=1100, group_size=16, weights=INT8),
    Case(intermediate=1100, weights=("mxfp4", "e8m0", False)),
    Case(intermediate=1100, weights=NVFP4, group_size=16, activation_format="nvfp4"),
    Case(intermediate=1100, weights=GGML["q4_k"]),
    Case(intermediate=1100, weights=GGML["q2_k"]),
    Case(intermediate=1100, weights=GGML["q4_1"]),
    *(Case(intermediate=1100, weights=w, group_size=64) for w in (GGML["q4_1-f32"], *TABLES, *ONE_PLANE_EACH)),
    *(
        Case(intermediate=k, weights=w, group_size=g, activation_format="int8_group", act_order=order)
        for k, order in ((1100, "none"), (1120, "shared"))
        for w in (
            *(*ONE_OF_EACH[:-1], GGML["q4_k"], GGML["q6_k"], GGML["q2_k"], GGML["q5_1"], GGML["q4_1-f32"]),
            *ONE_PLANE_EACH,
        )
        for g in (-1, 16, 32, 128)
    ),
    Case(weights=("nvfp4", "e4m3", False), group_size=16, activation_format="none"),
    Case(weights=("fp8_e4m3", "f32", False), group_size=-1, activation_format="fp8_tensor", static=False),
    Case(hidden=200, weights=("fp8_e4m3", "f32", False), group_size=128, block_n=128, activation_format="none"),
    *(
        Case(intermediate=300, act_order="shared", activation_format=a, pre_scale=pre_scale)
        for a in FLOAT_ACTIVATIONS
        for pre_scale in (False, True)
    ),
]
CASES = list(dict.fromkeys(CASES))  # K-quants have one group size


def build(case: Case) -> tuple[QuantizedMatrix, LinearSpec, np.ndarray]:
    """A linear of case.intermediate inputs and case.hidden outputs, packed."""
    rng = np.random.default_rng(case.seed)
    perm = rng.permutation(case.intermediate).astype(np.int32) if case.act_order != "none" else None
    m = case.matrix(rng, case.hidden, case.intermediate, perm)
    spec = linear_spec(case.intermediate, case.hidden, LAYOUT.describe_down(m, case.activation_format))
    row = native.aligned(LAYOUT.row_bytes(spec.moe, "w2"))
    LAYOUT.pack_down(m, spec.moe, row)
    return m, spec, row[None]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("rows", [1, 15, 16, 130])
def test_the_reference(case: Case, rows: int) -> None:
    m, spec, w = build(case)
    x = np.random.default_rng(1).normal(0, 1, (rows, case.intermediate)).astype(np.float32)
    found = native.NativeLinear(spec, w)(x)
    check_linear(x, m, spec.w, found)
    np.testing.assert_array_equal(native.NativeLinear(spec, w)(x, lanes=2), found)


@pytest.mark.parametrize("kernel", [name for name, usable in native.kernels().items() if usable])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_same_bytes_on_every_kernel(case: Case, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, spec, w = build(case)
    x = np.random.default_rng(1).normal(0, 1, (40, case.intermediate)).astype(np.float32)
    monkeypatch.setenv("QUANTMOE_FORCE_KERNEL", "panel_portable")
    want = native.NativeLinear(spec, w)(x)
    monkeypatch.setenv("QUANTMOE_FORCE_KERNEL", kernel)
    np.testing.assert_array_equal(native.NativeLinear(spec, w)(x), want)


@pytest.mark.parametrize("kernel", [name for name, usable in native.kernels().items() if usable])
@pytest.mark.parametrize("rows", [5, 40])
@pytest.mark.parametrize("activation_format", ["int8_token", "int8_group"])
@pytest.mark.parametrize(
    ("weights", "group_size"),
    [
        (INT4, 32),
        (INT4, 16),
        (INT8, -1),
        (("int4", "bf16", True), 128),
        (("mxfp4", "e8m0", False), 32),
        (NVFP4, 16),
        *((weights, 32) for weights in (*GGML.values(), *ONE_PLANE_EACH)),
    ],
    ids=str,
)
def test_sums_of_extremes(
    weights: tuple[str, str, bool],
    group_size: int,
    activation_format: str,
    rows: int,
    kernel: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Codes and activations at the ends of their ranges: sums of 16 bits are as large as they can be."""
    case = Case(intermediate=1100, weights=weights, group_size=group_size, activation_format=activation_format)
    m, spec, w = build(case)
    top, zeros = (1 << SCHEMES[m.kind].bits) - 1, m.zero_points
    for code in (0, top // 2, top):
        opposite = None if zeros is None else np.full_like(zeros, 0 if code else top)
        LAYOUT.pack_down(
            dataclasses.replace(m, codes=np.full_like(m.codes, code), zero_points=opposite), spec.moe, w[0]
        )
        for sign in (-1, 1):
            x = np.full((rows, case.intermediate), sign, np.float32)
            monkeypatch.setenv("QUANTMOE_FORCE_KERNEL", "panel_portable")
            want = native.NativeLinear(spec, w)(x)
            monkeypatch.setenv("QUANTMOE_FORCE_KERNEL", kernel)
            np.testing.assert_array_equal(native.NativeLinear(spec, w)(x), want)


@pytest.mark.parametrize("kernel", [name for name, usable in native.kernels().items() if usable])
@pytest.mark.parametrize("rows", [1, 20])
@pytest.mark.parametrize(
    ("weights", "group_size"),
    [(INT4, 32), (INT4, 128), (INT8, -1), (NVFP4, 16), (("int4", "f16", True), 64), (("q4_k", "k32", False), 32)],
    ids=str,
)
def test_large_channels_cost_their_own_groups_alone(
    weights: tuple[str, str, bool], group_size: int, rows: int, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two channels that are 500 times as large, as trained models have them.

    A code is half a step from its activation at most, so y from the product of float activations by half of
    sum(step * |w|); float32 adds 2^-18 of sum(|x * w|) at most: some 20 roundings of each term.
    """
    k, large = 512, [70, 301]
    monkeypatch.setenv("QUANTMOE_FORCE_KERNEL", kernel)
    case = Case(intermediate=k, weights=weights, group_size=group_size, activation_format="int8_group")
    m, spec, w = build(case)
    x = np.random.default_rng(1).normal(0, 1, (rows, k)).astype(np.float32)
    usual = x.copy()
    x[:, large] *= 500
    found, columns, dense = native.NativeLinear(spec, w)(x), step_columns(m), m.dequantize()
    check_linear(x, m, spec.w, found)
    steps = np.repeat(np.abs(x).reshape(rows, -1, columns).max(2), columns, axis=1).astype(np.float64) / 127
    assert (np.abs(found - x @ dense.T) <= (steps / 2 + np.abs(x) * 2.0**-18) @ np.abs(dense).T).all()
    if m.kind == "q4_k":
        return  # no code of it is zero
    groups = np.isin(np.arange(k) // columns, [i // columns for i in large])
    zero = SCHEMES[m.kind].zero if m.zero_points is None else m.expand(m.zero_points)[:, groups]
    codes = m.codes.copy()
    codes[:, groups] = zero
    LAYOUT.pack_down(dataclasses.replace(m, codes=codes), spec.moe, w[0])
    np.testing.assert_array_equal(native.NativeLinear(spec, w)(x), native.NativeLinear(spec, w)(usual))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_types(dtype: type) -> None:
    _, spec, w = build(Case())
    x = np.random.default_rng(1).normal(0, 1, (5, 96)).astype(dtype)
    found = native.NativeLinear(spec, w)
    np.testing.assert_array_equal(found(x), found(x.astype(np.float32)).astype(dtype))


def test_a_row_that_is_not_finite_is_nan_alone() -> None:
    _, spec, w = build(Case(act_order="shared"))
    x = np.random.default_rng(1).normal(0, 1, (3, 96)).astype(np.float32)
    clean = native.NativeLinear(spec, w)(x)
    x[1, 5] = np.inf
    found = native.NativeLinear(spec, w)(x)
    assert np.isnan(found[1]).all()
    np.testing.assert_array_equal(found[[0, 2]], clean[[0, 2]])
    assert native.NativeLinear(spec, w)(x[:0]).shape == (0, 64)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_round_trip(case: Case) -> None:
    m, spec, w = build(case)
    found = LAYOUT.unpack_down(spec.moe, w[0])
    for name in ("codes", "scales", "bias", "perm"):
        a, b = getattr(found, name), getattr(m, name)
        assert (a is None) == (b is None), name
        assert a is None or a.tobytes() == b.tobytes(), name
    assert LinearSpec.from_attributes(spec.attributes()) == spec


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"out_features": 65}, "w has .* words a row, expected"),
        ({"in_features": 0}, "in_features is 0, expected 1 to"),
        ({"op_version": 99}, "op_version is 99"),
        ({"w": {"layout": "marlin"}}, 'w_layout is "marlin"'),
        ({"w": {"perm": 2}}, "w_perm is 2, expected 0 to 1"),
    ],
)
def test_bad_attributes_are_named(change: dict, message: str) -> None:
    _, spec, w = build(Case())
    if isinstance(change.get("w"), dict):
        change = {"w": dataclasses.replace(spec.w, **change["w"])}
    with pytest.raises(ValueError, match=message):
        native.NativeLinear(dataclasses.replace(spec, **change), w)


@pytest.mark.parametrize("activation_format", ["none", *INT8_ACTIVATIONS, *FLOAT_ACTIVATIONS])
@pytest.mark.parametrize(
    "magnitude", [1.0, 2.0**-120, *(units * 2.0**-149 for units in (0.5, 30, 100, 300, 1500, 10**6))]
)
@pytest.mark.parametrize("weights_and_group", [(INT4, 32), (INT4, -1), (INT8, 32), (INT8, -1), (NVFP4, 16)], ids=str)
def test_activations_known_up_to_an_error(
    weights_and_group: tuple[tuple[str, str, bool], int], magnitude: float, activation_format: str
) -> None:
    """As h is: whatever it is within its error, its product is within the bound. Steps that underflow, too."""
    of_weights, group_size = weights_and_group
    case = Case(
        hidden=24,
        intermediate=64,
        weights=of_weights,
        group_size=group_size,
        activation_format=activation_format,
        static=False,
    )
    m, spec, w = build(case)
    rng = np.random.default_rng(0)
    x = rng.normal(0, magnitude, (200, 64))
    error = np.full(x.shape, 2.0**-149 + magnitude * np.exp2(-rng.integers(1, 20, (200, 1))))
    want = quant_linear(Span(x, error), weights(m, spec.w), activation_format)
    for _ in range(5):
        near = (x + error * rng.uniform(-1, 1, x.shape)).astype(np.float32)
        near = np.where(np.abs(near - x) <= error, near, x.astype(np.float32))
        assert_within(native.NativeLinear(spec, w)(near), want)
    assert_within(native.NativeLinear(spec, w)(np.where(np.abs(x) <= error, np.float32(0), near)), want)
