"""cpu_panel: the native packer writes the reference's bytes, and unpack gives the expert back bit for bit."""

import dataclasses

import numpy as np
import pytest
from cases import CASES, WEIGHTS, Case
from hypothesis import given, settings
from hypothesis import strategies as st
from panels import reference_panels

from quantmoe.custom_ops import native
from quantmoe.custom_ops.layouts import cpu_panel
from quantmoe.custom_ops.matrix import QuantizedMatrix
from quantmoe.custom_ops.schemes import SCHEMES

cases = st.builds(
    Case,
    hidden=st.integers(1, 200),
    intermediate=st.integers(1, 100),
    experts=st.integers(1, 2),
    weights=st.sampled_from(WEIGHTS),
    group_size=st.sampled_from([-1, 16, 32, 64, 96, 128]),
    activation_format=st.sampled_from(["none", "fp8_tensor", "nvfp4"]),
    pre_scale=st.booleans(),
    gated=st.booleans(),
    bias=st.booleans(),
    act_order=st.sampled_from(["none", "shared", "split"]),
    seed=st.integers(0, 1000),
)


def equal(a: QuantizedMatrix | None, b: QuantizedMatrix | None) -> None:
    if a is None or b is None:
        assert a is b
        return
    for field in dataclasses.fields(QuantizedMatrix):
        x, y = getattr(a, field.name), getattr(b, field.name)
        if isinstance(x, np.ndarray):
            if field.name == "perm" and y is None:
                y = np.arange(len(x), dtype=np.int32)  # the identity comes back as None
            if field.name == "zero_points" and y is None:
                y = np.full_like(x, SCHEMES[a.kind].zero)  # and so do zero points that are all the midpoint
            if field.name == "pre_scale" and y is None:
                y = np.ones_like(x)  # and pre-scales of 1
            assert x.dtype.itemsize == y.dtype.itemsize
            assert x.tobytes() == np.asarray(y, x.dtype).tobytes(), field.name
        else:
            assert x == y, field.name


@given(cases)
@settings(max_examples=150, deadline=None)
def test_round_trip(case: Case) -> None:
    layer = case.build()
    for expert, w13, w2 in zip(layer.experts, layer.w13, layer.w2, strict=True):
        back = cpu_panel.unpack(layer.spec, w13, w2)
        equal(expert.gate, back.gate)
        equal(expert.up, back.up)
        equal(expert.down, back.down)


@given(cases, st.integers(1, 3))
@settings(max_examples=150, deadline=None)
def test_native_packer_writes_the_reference_bytes(case: Case, step: int) -> None:
    rng = np.random.default_rng(case.seed)
    m = case.matrix(rng, case.intermediate, case.hidden)
    want = reference_panels(m)
    stride = want.shape[1]
    got = np.full((len(want) * step, stride), 0xA5, np.uint8)
    native.pack_panels(m, got.reshape(-1), panel_step=step)
    assert got[::step].tobytes() == want.tobytes()
    gaps = np.delete(got, np.s_[::step], axis=0)
    assert (gaps == 0xA5).all()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_row_bytes_agree_with_the_c_abi(case: Case) -> None:
    layer = case.build()
    layer.native()  # validates the shapes against the C++ formula
    with pytest.raises(ValueError, match=r"w13 has .* int32 words a row, expected"):
        native.NativeMoE(layer.spec, layer.w13[:, :-4], layer.w2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"group_size": 8, "scales": np.ones((8, 8), np.float32)}, "group_size must be -1, 16 or a multiple of 32"),
        ({"global_scale": 2.0}, "carries a global scale for nvfp4 only, found int4"),
        ({"block_n": 2, "scales": np.ones((4, 2), np.float32)}, "block_n must be 1, or for fp8_e4m3 1 to 65536"),
        ({"kind": "int3"}, 'format is "int3", the operator defines: int4, int8, mxfp4, nvfp4, fp8_e4m3'),
        ({"kind": "mxfp4"}, "mxfp4 has e8m0 scales"),
    ],
)
def test_what_the_layout_cannot_carry_is_refused_by_name(change: dict, message: str) -> None:
    case = Case(hidden=64, intermediate=8)
    expert = case.expert(np.random.default_rng(0))
    bad = dataclasses.replace(expert, up=dataclasses.replace(expert.up, **change))
    with pytest.raises(ValueError, match=f"up: .*{message}"):
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
        native.panel_row(dataclasses.replace(w13, group_size=group_size), *shape, 1)
