"""cpu_panel: the native packer writes the reference's bytes, and unpack gives the expert back bit for bit."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.operators import native_kernels as native
from support.operators.cases import CASES, WEIGHTS, Case, assert_same
from support.operators.panels import reference_row, reference_rows
from support.operators.specs import linear_spec, moe_spec

from quantmoe.custom_ops.expert import Expert
from quantmoe.custom_ops.layouts import cpu_panel, marlin

cases = st.builds(
    lambda weights, block_n, **fields: Case(
        weights=weights, block_n=block_n if weights[0] == "fp8_e4m3" else 1, **fields
    ),
    hidden=st.integers(1, 200),
    intermediate=st.integers(1, 100),
    experts=st.integers(1, 2),
    weights=st.sampled_from(WEIGHTS),
    group_size=st.sampled_from([-1, 16, 32, 64, 96, 128]),
    block_n=st.sampled_from([1, 5, 48]),
    activation_format=st.sampled_from(["none", "fp8_tensor", "nvfp4"]),
    static=st.booleans(),
    pre_scale=st.booleans(),
    gated=st.booleans(),
    bias=st.booleans(),
    act_order=st.sampled_from(["none", "shared", "split"]),
    seed=st.integers(0, 1000),
)


@given(cases)
@settings(max_examples=150, deadline=None)
def test_round_trip(case: Case) -> None:
    layer = case.build()
    for expert, w13, w2 in zip(layer.experts, layer.w13, layer.w2, strict=True):
        back = cpu_panel.unpack(layer.spec, w13, w2)
        assert_same(expert.gate, back.gate)
        assert_same(expert.up, back.up)
        assert_same(expert.down, back.down)


@given(cases)
@settings(max_examples=150, deadline=None)
def test_rows_are_the_reference_s(case: Case) -> None:
    layer = case.build()
    for expert in layer.experts:
        rows = [np.full(w.shape[1], 0xA5, np.uint8) for w in (layer.w13, layer.w2)]
        cpu_panel.pack(expert, layer.spec, *rows)
        for have, want in zip(rows, reference_rows(expert, layer.spec), strict=True):
            assert have.tobytes() == want.tobytes()
        spec = linear_spec(case.intermediate, case.hidden, layer.spec.w2)
        row = np.full(layer.w2.shape[1], 0xA5, np.uint8)
        cpu_panel.pack_down(expert.down, spec.moe, row)
        assert row.tobytes() == reference_row([expert.down], spec.w, packed_order=True).tobytes()
        assert_same(expert.down, cpu_panel.unpack_down(spec.moe, row))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_row_bytes_agree_with_the_c_abi(case: Case) -> None:
    layer = case.build()
    layer.native()  # validates the shapes against the C++ formula
    with pytest.raises(ValueError, match=r"w13 has .* int32 words a row, expected"):
        native.NativeMoE(layer.spec, layer.w13[:, :-4], layer.w2)


GROUPS = (
    "^up: the CPU's kernels do not take int4 weights with groups of 8 and f32 scales: group_size must be -1, 16 or a "
    "multiple of 32 up to 65536$"
)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"group_size": 8, "scales": np.ones((8, 8), np.float32)}, GROUPS),
        ({"global_scale": 2.0}, "take a global scale for nvfp4 only, found int4"),
        ({"block_n": 2, "scales": np.ones((4, 2), np.float32)}, "block_n must be 1, or for fp8_e4m3 1 to 65536"),
        ({"kind": "int9"}, 'format is "int9", the operator defines: int4, int8, mxfp4, nvfp4, fp8_e4m3'),
        ({"kind": "mxfp4"}, "mxfp4 has e8m0 scales"),
    ],
)
def test_what_the_layout_cannot_carry_is_refused_by_name(change: dict, message: str) -> None:
    case = Case(hidden=64, intermediate=8)
    expert = case.expert(np.random.default_rng(0))
    bad = dataclasses.replace(expert, up=dataclasses.replace(expert.up, **change))
    with pytest.raises(ValueError, match=message if message is GROUPS else f"up: .*{message}"):
        cpu_panel.describe(bad, "none")


def test_an_expert_unlike_its_layer_is_refused() -> None:
    layer = Case().build()
    w13, w2 = layer.w13[0].copy(), layer.w2[0].copy()
    ordered = Case(act_order="shared").expert(np.random.default_rng(0))
    with pytest.raises(ValueError, match="act-order"):
        cpu_panel.pack(ordered, layer.spec, w13, w2)
    other = Case(weights=("int4", "f16", False)).expert(np.random.default_rng(0))
    with pytest.raises(ValueError, match="the layer's node says"):
        cpu_panel.pack(other, layer.spec, w13, w2)


@pytest.mark.parametrize(
    ("group_size", "shape", "message"),
    [
        (2**32 + 32, (8, 64), "group_size is 4294967328, outside int32"),
        (32, (8, 2**32 + 64), "a matrix is .8, 4294967360., expected 1 to 2"),
        (32, (0, 64), "a matrix is .0, 64., expected 1 to 2"),
    ],
)
def test_numbers_that_do_not_fit_the_abi_are_refused(group_size: int, shape: tuple[int, int], message: str) -> None:
    w13, _ = cpu_panel.describe(Case().expert(np.random.default_rng(0)), "none")
    with pytest.raises(ValueError, match=message):
        native.row_of(dataclasses.replace(w13, group_size=group_size), *shape, 1)


@pytest.mark.parametrize("layout", [cpu_panel, marlin])
def test_an_order_that_is_none_is_refused_both_ways(layout: Any) -> None:
    """Packing and unpacking follow down's order: no row outside the matrix is read or written."""
    rng = np.random.default_rng(0)
    up, down = (Case().matrix(rng, n, k) for n, k in ((32, 64), (64, 32)))
    w13, w2 = layout.describe(Expert(None, up, dataclasses.replace(down, perm=np.arange(32)[::-1])), "none")
    spec = moe_spec(1, 64, 32, w13, w2, gated=0)
    rows = [np.zeros(layout.row_bytes(spec, p), np.uint8) for p in ("w13", "w2")]
    for wrong in (32, -1, 7, 2**31 - 1):
        perm = np.arange(32, dtype=np.int32)
        perm[4] = wrong
        message = (
            f"w2: the permutation has {7 if wrong == 7 else wrong} at {7 if wrong == 7 else 4}, expected each of 0"
        )
        with pytest.raises(ValueError, match=message):
            layout.pack(Expert(None, up, dataclasses.replace(down, perm=perm)), spec, *rows)
        layout.pack(Expert(None, up, down), spec, *rows)
        rows[1][native.row_of(*spec.matrices("w2")).part("perm")][: 32 * 4].view(np.int32)[:] = perm
        with pytest.raises(ValueError, match=message):
            layout.unpack(spec, *rows)


@pytest.mark.parametrize("layout", [cpu_panel, marlin])
@pytest.mark.parametrize("field", ["bias", "pre_scale", "perm"])
def test_arrays_of_another_length_are_refused(layout: Any, field: str) -> None:
    m = Case(bias=True, pre_scale=True).matrix(np.random.default_rng(0), 24, 64, np.arange(64, dtype=np.int32))
    spec = linear_spec(64, 24, layout.describe_down(m, "none"))
    short = dataclasses.replace(m, **{field: getattr(m, field)[:-1]})
    with pytest.raises(ValueError, match=f"{field} has shape .*, expected"):
        layout.pack_down(short, spec.moe, np.zeros(layout.row_bytes(spec.moe, "w2"), np.uint8))
