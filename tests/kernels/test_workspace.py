"""What a call needs beside its tensors: bounded by what it can use at one time, whatever its length and the machine."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest
from support.operators import native_kernels as native
from support.operators.cases import FLOAT_ACTIVATIONS, FP8, INT4, INT8_ACTIVATIONS, NVFP4, ROUTERS, Case
from support.operators.specs import linear_spec

from quantmoe.custom_ops.layouts import cpu_panel
from quantmoe.custom_ops.op import MoESpec

ACTIVATIONS = ("none", *INT8_ACTIVATIONS, *FLOAT_ACTIVATIONS)


@pytest.fixture
def slice_bytes() -> Iterator[ctypes.c_int64]:
    """The library's bytes of a slice; restored at the end."""
    found = ctypes.c_int64.in_dll(native.library(), "qm_slice_bytes")
    before = found.value
    yield found
    found.value = before


def linear(case: Case) -> native.NativeLinear:
    rng = np.random.default_rng(case.seed)
    perm = rng.permutation(case.intermediate).astype(np.int32) if case.act_order != "none" else None
    m = case.matrix(rng, case.hidden, case.intermediate, perm)
    spec = linear_spec(case.intermediate, case.hidden, cpu_panel.describe_down(m, case.activation_format))
    row = native.aligned(cpu_panel.row_bytes(spec.moe, "w2"))
    cpu_panel.pack_down(m, spec.moe, row)
    return native.NativeLinear(spec, row[None])


@pytest.mark.parametrize("options", [{}, {"act_order": "split", "pre_scale": True}], ids=["plain", "act-order"])
@pytest.mark.parametrize(("activation_format", "static"), [*((a, True) for a in ACTIVATIONS), ("fp8_tensor", False)])
@pytest.mark.parametrize("weights", [INT4, NVFP4, FP8], ids=lambda w: w[0])
def test_slices_give_the_same_bytes(
    weights: tuple[str, str, bool], activation_format: str, static: bool, options: dict, slice_bytes: ctypes.c_int64
) -> None:
    """Also where a scale is found from all rows of an expert, whose largest value is in one slice."""
    case = Case(
        weights=weights,
        group_size=16,
        activation_format=activation_format,
        static=static,
        on_input=not static,
        **options,
    )
    layer, t = case.build(), 101
    hidden, ids, weights_of = case.tokens(t)
    hidden[70] *= 100
    hidden[40, 3] = np.nan
    ids[3:9] = -1
    x = np.random.default_rng(2).normal(0, 1, (t, case.intermediate)).astype(np.float32)
    x[50, 1] = np.inf
    moe, dense = layer.native(), linear(case)
    before = slice_bytes.value
    for dtype in (np.float32, np.float16):
        want = moe(hidden.astype(dtype), ids, weights_of), dense(x.astype(dtype))
        whole = native.workspace(layer.spec, t, 1, dtype, case.top_k, case.experts)
        for size in (1, 20_000, whole // 2):
            slice_bytes.value = size
            assert native.workspace(layer.spec, t, 1, dtype, case.top_k, case.experts) < whole
            for lanes in (1, 3):
                got = moe(hidden.astype(dtype), ids, weights_of, lanes=lanes), dense(x.astype(dtype), lanes=lanes)
                for a, b in zip(want, got, strict=True):
                    assert a.tobytes() == b.tobytes(), (size, lanes)
        slice_bytes.value = before


def test_an_id_of_the_last_slice_is_refused_before_anything_is_written(slice_bytes: ctypes.c_int64) -> None:
    case = Case()
    slice_bytes.value = 1
    hidden, ids, weights = case.tokens(9)
    ids[8, 1] = 4
    memory = []

    def buffer(size: int) -> np.ndarray:
        memory.append(native.aligned(size))
        memory[-1][:] = 7
        return memory[-1]

    with pytest.raises(ValueError, match="token 8, slot 1 is 4, expected -1 to 3"):
        case.build().native()(hidden, ids, weights, buffer=buffer)
    assert (memory[0] == 7).all()


def sized(case: Case, experts: int, hidden: int, intermediate: int) -> MoESpec:
    """The case's attributes at sizes whose weights need not exist."""
    return dataclasses.replace(
        case.build().spec, num_experts=experts, hidden_size=hidden, intermediate_size=intermediate
    )


CASES = [
    *(Case(activation_format=a, experts=1) for a in ACTIVATIONS),
    *(Case(activation_format=a, experts=1, act_order="split", pre_scale=True) for a in ACTIVATIONS),
    Case(experts=1, weights=NVFP4, group_size=16, activation_format="nvfp4"),
    Case(experts=1, on_input=True),
]
MIB = 2**20


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_call_of_any_length_needs_the_stated_amount(case: Case, dtype: type) -> None:
    """That of quant_moe.h."""
    for experts, hidden, intermediate, top_k, tokens in (
        (2, 64, 32768, 2, 600_000),
        (128, 2048, 768, 8, 100_000),
        (65536, 1, 1, 8, 2**31 // 8 - 1),
    ):
        spec = sized(case, experts, hidden, intermediate)
        features = -(-max(hidden, intermediate) // 32) * 32
        for lanes in (1, 256):
            stated = 264 * MIB + lanes * 1024 * (features + 128)
            size = native.workspace(spec, tokens, lanes, dtype, top_k, experts)
            assert size <= stated
            one = linear_spec(intermediate, hidden, spec.w2)
            assert native.workspace(one, tokens, lanes, dtype) <= stated


@pytest.mark.parametrize("case", CASES, ids=str)
def test_one_token_needs_a_row_a_lane(case: Case) -> None:
    """Of f32 to gather from, f32 and codes to prepare, and the tiles of gate and up; 2 MiB for what all share."""
    spec = sized(case, 256, 7168, 2048)
    rows = 256 * 7168 * (4 + 4 + 1 + 1 + 2 * 4)
    assert native.workspace(spec, 1, 256, np.float32, 8, 256) < rows + 2 * MIB
    # Which a linear needs once: its lanes share the rows.
    assert native.workspace(linear_spec(7168, 2048, spec.w2), 1, 256) < 1 * MIB


def test_lanes_of_the_usual_formats_share_rows() -> None:
    spec = sized(Case(experts=1), 256, 7168, 2048)
    assert native.workspace(spec, 1, 256, np.float32, 8, 256) < 4 * MIB


@pytest.mark.parametrize("case", CASES, ids=str)
def test_many_lanes_give_the_same_bytes(case: Case) -> None:
    case = dataclasses.replace(case, experts=8, hidden=200, intermediate=300)
    moe, dense = case.build().native(), linear(case)
    for t in (1, 2, 17):
        tokens = case.tokens(t)
        assert moe(*tokens, lanes=64).tobytes() == moe(*tokens).tobytes()
        x = np.random.default_rng(3).normal(0, 1, (t, case.intermediate)).astype(np.float32)
        assert dense(x, lanes=64).tobytes() == dense(x).tobytes()


def test_routing_has_scratch_for_the_lanes_that_work() -> None:
    spec = ROUTERS["groups"]
    one = native.workspace(spec, 1, 1)
    assert native.workspace(spec, 32, 256) == one
    assert native.workspace(spec, 33, 256) == 2 * one
    logits = np.random.default_rng(0).normal(0, 1, (70, 256)).astype(np.float32)
    for a, b in zip(native.route(spec, logits), native.route(spec, logits, lanes=64), strict=True):
        assert a.tobytes() == b.tobytes()
