"""Every kernel against the float64 reference, and against each other bit for bit."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.operators import native_kernels as native
from support.operators.bounds import check
from support.operators.cases import (
    CASES,
    FLOAT_ACTIVATIONS,
    FP8,
    GGML,
    INT4,
    INT8_ACTIVATIONS,
    NVFP4,
    ONE_OF_EACH,
    ONE_PLANE_EACH,
    WEIGHTS,
    Case,
    Layer,
)

from quantmoe.custom_ops import reference
from quantmoe.custom_ops.matrix import QuantizedMatrix
from quantmoe.custom_ops.op import enum
from quantmoe.custom_ops.schemes import SCHEMES

USABLE = [name for name, usable in native.kernels().items() if usable]


def run(layer: Layer, tokens: tuple, kernel: str, monkeypatch: pytest.MonkeyPatch, lanes: int = 1) -> np.ndarray:
    monkeypatch.setenv("QUANTMOE_FORCE_KERNEL", kernel)
    return layer.native()(*tokens, lanes=lanes)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("kernel", USABLE)
def test_against_reference(case: Case, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = case.build()
    for t in (1, 2, 7, 33):
        tokens = case.tokens(t)
        check(layer, tokens, run(layer, tokens, kernel, monkeypatch))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("kernel", USABLE)
def test_16_bit_activations(dtype: type, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(hidden=72, intermediate=64)
    layer = case.build()
    hidden, ids, weights = case.tokens(9)
    tokens = hidden.astype(dtype), ids.astype(np.int32), weights
    got = run(layer, tokens, kernel, monkeypatch)
    assert got.dtype == dtype
    check(layer, tokens, got)


@given(
    case=st.builds(
        Case,
        hidden=st.integers(1, 150),
        intermediate=st.integers(1, 150),
        experts=st.integers(1, 9),
        top_k=st.integers(1, 4),
        weights=st.sampled_from(WEIGHTS),
        group_size=st.sampled_from([-1, 16, 32, 64, 128]),
        activation_format=st.sampled_from(["none", *INT8_ACTIVATIONS, *FLOAT_ACTIVATIONS]),
        pre_scale=st.booleans(),
        static=st.booleans(),
        activation=st.sampled_from(list(enum("activation"))),
        bias=st.booleans(),
        act_order=st.sampled_from(["none", "shared", "split"]),
        on_input=st.booleans(),
        seed=st.integers(0, 10**6),
    ),
    t=st.integers(0, 70),
    lanes=st.integers(1, 5),
    skew=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_kernels_and_thread_counts_agree_bit_for_bit(case: Case, t: int, lanes: int, skew: bool) -> None:
    layer = case.build()
    hidden, ids, weights = case.tokens(t, case.seed)
    if skew:
        ids[:] = case.seed % case.experts  # all tokens on one expert, repeated ids within a token
    with pytest.MonkeyPatch.context() as patch:
        want = run(layer, (hidden, ids, weights), "panel_portable", patch)
        for kernel in USABLE:
            for n in {1, lanes}:
                got = run(layer, (hidden, ids, weights), kernel, patch, lanes=n)
                assert got.tobytes() == want.tobytes(), f"{kernel} with {n} lanes"


@pytest.mark.parametrize("activation_format", ["none", *INT8_ACTIVATIONS, *FLOAT_ACTIVATIONS])
@pytest.mark.parametrize("kernel", USABLE)
def test_extreme_activations(activation_format: str, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(activation_format=activation_format, experts=2)
    layer = case.build()
    hidden, ids, weights = case.tokens(9)
    hidden[0] = 0
    hidden[1] = 3.5  # constant
    hidden[2, 5] = np.nan
    hidden[3, 0] = -np.inf
    hidden[4] *= 1e-42  # subnormal
    hidden[5] *= 1e10
    hidden[6, 1:] = 0  # one outlier
    hidden[7] = -np.abs(hidden[7])
    weights[8] = 0
    got = run(layer, (hidden, ids, weights), kernel, monkeypatch)
    check(layer, (hidden, ids, weights), got)
    assert np.isnan(got[2:4]).all()
    assert np.isfinite(got[[0, 1, 4, 5, 6, 7, 8]]).all()


@pytest.mark.parametrize("activation_format", ["int8_token", "int8_group"])
@pytest.mark.parametrize("weights", [*ONE_OF_EACH[:-1], *GGML.values(), *ONE_PLANE_EACH], ids=str)
@pytest.mark.parametrize("kernel", USABLE)
def test_the_largest_products_do_not_saturate(
    kernel: str, weights: tuple[str, str, bool], activation_format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Largest(Case):
        def matrix(self, *args: object) -> QuantizedMatrix:
            m = super().matrix(*args)
            table = SCHEMES[m.kind].table
            codes = np.full_like(m.codes, table.argmin())  # rows of the lowest code, then of the highest
            codes[1::2] = table.argmax()
            zeros = (
                None if m.zero_points is None else m.zero_points * 0 + np.uint8(table.argmax()) * (codes[:, :1] == 0)
            )
            return dataclasses.replace(m, codes=codes, zero_points=zeros)

    layer = Largest(hidden=256, intermediate=64, weights=weights, activation_format=activation_format).build()
    hidden, ids, weights = layer.case.tokens(12)
    hidden[:6], hidden[6:] = -1, 1  # every value quantizes to the first code, to the last
    got = run(layer, (hidden, ids, weights), kernel, monkeypatch)
    check(layer, (hidden, ids, weights), got)
    assert got.tobytes() == run(layer, (hidden, ids, weights), "panel_portable", monkeypatch).tobytes()


@pytest.mark.parametrize("pre_scale", [False, True], ids=["plain", "pre-scale"])
@pytest.mark.parametrize("activation_format", ["fp8_token", "fp8_tensor", "fp8_group128", "nvfp4", "mxfp8", "mxfp4"])
@pytest.mark.parametrize("weights", [INT4, NVFP4, FP8], ids=lambda w: w[0])
def test_act_order_keeps_the_groups_of_activations(
    weights: tuple[str, str, bool], activation_format: str, pre_scale: bool
) -> None:
    """Of w2 as well, whose h is computed in the order of the packed columns.

    An f32 sum of K products errs in the mean by about sqrt(K) 2^-24 of their root mean square, 1e-6 for these K. Other
    groups set every token off by more than 1e-2. A value that f32 and float64 round apart (one in 10^5) sets its token
    off by as much, but not the median one.
    """
    case = Case(
        hidden=176,
        intermediate=300,
        group_size=32,
        weights=weights,
        activation_format=activation_format,
        pre_scale=pre_scale,
        act_order="split",
        experts=2,
    )
    layer = case.build()
    tokens = case.tokens(5)
    want = reference.quant_moe(layer.spec, layer.experts, *tokens)
    got = layer.native()(*tokens)
    assert np.median(np.linalg.norm(got - want, axis=1) / np.linalg.norm(want, axis=1)) < 1e-5


@pytest.mark.parametrize("matrix", ["w13", "w2"])
@pytest.mark.parametrize("column", [-1, 96, 2**31 - 1])
def test_an_act_order_out_of_range_is_named(matrix: str, column: int) -> None:
    layer = Case(hidden=96, act_order="shared", activation_format="mxfp4").build()
    rows = getattr(layer, matrix)
    order = rows[1].view(np.int32)[-96:]
    assert sorted(order) == list(range(96))
    order[5] = column
    tokens = layer.case.tokens(20)
    with pytest.raises(ValueError, match=f"{matrix}'s act-order of expert 1 has columns outside 0 to 95"):
        layer.native()(*tokens)
    order[5] = order[6]  # a column twice, another never: some number, the same with any threads
    got = layer.native()(*tokens)
    assert got.tobytes() == layer.native()(*tokens, lanes=2).tobytes()


@pytest.mark.parametrize("weight", [np.nan, np.inf])
@pytest.mark.parametrize("on_input", [False, True])
@pytest.mark.parametrize("activation_format", ["none", "int8_token_asym", "int8_group", "fp8_tensor", "nvfp4"])
def test_the_weight_of_an_id_that_contributes_zero_may_be_anything(
    activation_format: str, on_input: bool, weight: float
) -> None:
    case = Case(
        experts=2, offset=3, total_experts=8, top_k=3, on_input=on_input, activation_format=activation_format,
        static=False,
    )  # fmt: skip
    layer = case.build()
    hidden, ids, weights = case.tokens(6)
    ids[:] = [[-1, 3, 7], [3, -1, 4], [-1, 5, 6], [4, 4, 4], [4, -1, 3], [-1, -1, -1]]
    outside = (ids < 3) | (ids > 4)
    hidden[5, 7] = np.nan  # the token itself
    weights[3, 1] = np.nan
    clean = layer.native()(hidden, ids, np.where(outside, 0, weights).astype(np.float32))
    weights[outside] = weight
    got = layer.native()(hidden, ids, weights)
    assert got.tobytes() == clean.tobytes()
    check(layer, (hidden, ids, weights), got)
    assert np.isnan(got[[3, 5]]).all()
    assert np.isfinite(got[[0, 1, 2, 4]]).all()
    assert not got[2].any()


@pytest.mark.parametrize("kernel", USABLE)
def test_ids_outside_the_slice_contribute_zero(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(experts=2, offset=3, total_experts=8, top_k=3)
    layer = case.build()
    hidden, ids, weights = case.tokens(5)
    ids[:] = [[-1, 0, 7], [3, -1, 4], [2, 5, 6], [4, 4, 4], [-1, -1, -1]]
    got = run(layer, (hidden, ids, weights), kernel, monkeypatch)
    check(layer, (hidden, ids, weights), got)
    assert not got[[0, 2, 4]].any()
    assert got[[1, 3]].all()


@pytest.mark.parametrize("kernel", USABLE)
def test_a_product_and_a_sum_are_rounded_once(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Case(experts=2, top_k=2).build()
    hidden, _, _ = layer.case.tokens(5)

    def outputs(ids: list[int], weights: list[float]) -> np.ndarray:
        rows = np.tile(np.array(ids, np.int64), (5, 1)), np.tile(np.array(weights, np.float32), (5, 1))
        return run(layer, (hidden, *rows), kernel, monkeypatch)

    first, second = outputs([0, -1], [1, 0]), outputs([-1, 1], [0, 1])
    exact = -1.5 * second.astype(np.float64)
    assert (exact != exact.astype(np.float32)).any(), "nothing lies halfway between two floats"
    # What the first expert adds is far below any last bit: it only says to which side a value halfway goes.
    want = np.nextafter(exact, np.copysign(np.inf, first)).astype(np.float32)
    assert outputs([0, 1], [1e-40, -1.5]).tobytes() == want.tobytes()


@pytest.mark.parametrize("bad", [-2, 8, 2**31, -(2**40)])
def test_an_id_out_of_range_names_token_slot_and_id(bad: int) -> None:
    case = Case(total_experts=8)
    layer = case.build()
    hidden, ids, weights = case.tokens(3)
    ids[2, 1] = bad
    with pytest.raises(ValueError, match=f"token 2, slot 1 is {bad}, expected -1 to 7"):
        layer.native()(hidden, ids, weights)


def test_slices_add_up_to_the_layer() -> None:
    """Expert parallelism: rows [0, 2) and [2, 4) as two nodes sum to the whole."""
    case = Case(activation_format="none")
    layer = case.build()
    tokens = case.tokens(6)
    whole = layer.native()(*tokens)
    parts = [
        native.NativeMoE(dataclasses.replace(layer.spec, expert_offset=o), layer.w13[o : o + 2], layer.w2[o : o + 2])(
            *tokens
        )
        for o in (0, 2)
    ]
    np.testing.assert_allclose(parts[0] + parts[1], whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("w13_layout_version", 2, "w13_layout_version is 2, expected 1 to 1"),
        ("w2_layout", "marlin", 'w2_layout is "marlin", this library supports: cpu_panel'),
        ("w2_format", "nvfp4", 'w2_format is "nvfp4", .*: nvfp4 has e4m3 scales'),
        ("w13_group_size", 48, "w13_group_size 48, .*: group_size must be -1, 16 or a multiple of 32"),
        ("w13_block_n", 128, "w13_block_n 128, .*: block_n must be 1"),
        ("w13_format", "fp8_e4m3", 'w13_activation_format is "int8_token_asym", w13_format "fp8_e4m3" needs'),
        ("w13_pre_scale", 3, "w13_pre_scale is 3, expected 0 to 2"),
        ("hidden_size", 0, "hidden_size is 0, expected 1 to"),
        ("w2_perm", 2, "w2_perm is 2, expected 0 to 1"),
        ("num_experts", 3, "w13 has 4 experts"),
        ("hidden_size", 65, "int32 words a row, expected"),
    ],
)
def test_invalid_attributes_are_named(name: str, value: object, message: str) -> None:
    layer = Case().build()
    spec = type(layer.spec).from_attributes(layer.spec.attributes() | {name: value})
    with pytest.raises(ValueError, match=message):
        native.NativeMoE(spec, layer.w13, layer.w2)


@pytest.mark.parametrize("name", ["swiglu_alpha", "swiglu_limit"])
@pytest.mark.parametrize("value", [0.0, -1.0, np.inf, np.nan])
def test_caps_are_positive(name: str, value: float) -> None:
    layer = Case(activation="swiglu_tanh").build()
    with pytest.raises(ValueError, match=f"{name} is .*{value:g}, expected a positive number"):
        native.NativeMoE(dataclasses.replace(layer.spec, **{name: value}), layer.w13, layer.w2)


def test_small_gates_and_their_factors_keep_their_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tanh that is 1 minus something loses them: the bound is relative."""
    case = Case(activation="swiglu_tanh", activation_format="none")
    layer, (hidden, *routed) = case.build(), case.tokens(5)
    tokens = (hidden * np.float32(2e-4), *routed)
    for kernel in USABLE:
        check(layer, tokens, run(layer, tokens, kernel, monkeypatch))


def test_an_op_version_that_the_library_does_not_know() -> None:
    layer = Case().build()
    with pytest.raises(ValueError, match="op_version is 99, this library knows 1"):
        native.NativeMoE(dataclasses.replace(layer.spec, op_version=99), layer.w13, layer.w2)


def test_an_unknown_forced_kernel_lists_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUANTMOE_FORCE_KERNEL", "panel_avx9000")
    with pytest.raises(ValueError, match=r'"panel_avx9000", kernels here: .*panel_portable'):
        Case().build().native()


def test_no_tokens() -> None:
    layer = Case(experts=2).build()
    assert layer.native()(
        np.empty((0, 64), np.float32), np.empty((0, 2), np.int64), np.empty((0, 2), np.float32)
    ).shape == (0, 64)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"w2_hadamard": 24}, "w2_hadamard is 24, expected a power of two that divides intermediate_size 96"),
        ({"w2_hadamard": 64}, "w2_hadamard is 64, expected a power of two that divides intermediate_size 96"),
        ({"w2_hadamard": -1}, "w2_hadamard is -1, expected a power of two"),
    ],
)
def test_blocks_of_h_that_are_refused(change: dict[str, int], text: str) -> None:
    layer = Case().build()
    with pytest.raises(ValueError, match=text):
        native.NativeMoE(dataclasses.replace(layer.spec, **change), layer.w13, layer.w2)


def test_blocks_of_h_in_act_order_are_refused() -> None:
    layer = Case(act_order="shared").build()
    with pytest.raises(ValueError, match="w2_hadamard is 32 with w2_perm 1, expected w2_perm 0"):
        native.NativeMoE(dataclasses.replace(layer.spec, w2_hadamard=32), layer.w13, layer.w2)
