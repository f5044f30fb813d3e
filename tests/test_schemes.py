"""Every registered scheme: its error bound, its zero, and the reading of zero points."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantmoe.custom_ops.matrix import SCALE_DTYPES, QuantizedMatrix
from quantmoe.custom_ops.op import enum
from quantmoe.custom_ops.schemes import SCHEMES


@pytest.mark.parametrize("kind", [kind for kind, scheme in SCHEMES.items() if scheme.bits < 16])
@given(
    n=st.integers(1, 9),
    k=st.integers(1, 150),
    group_size=st.sampled_from([-1, 16, 32, 64]),
    scale_type=st.sampled_from(["f32", "f16", "bf16", "own"]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=40, deadline=None)
def test_error_bound(kind: str, n: int, k: int, group_size: int, scale_type: str, seed: int) -> None:
    scheme = SCHEMES[kind]
    dtype = SCALE_DTYPES[scheme.scale_type if scale_type == "own" else scale_type]
    w = np.random.default_rng(seed).normal(0, 1, (n, k))
    w[0] = 0
    codes, scales = scheme.quantize(w, group_size, dtype)
    m = QuantizedMatrix(kind, codes, scales, group_size)
    error = np.abs(m.dequantize() - w)
    # half the widest gap, plus what a rounded scale clips at the ends of the table
    assert (error <= m.expand(scheme.error_bound(scales))).all()
    assert (error <= np.abs(w).max()).all()
    assert not m.dequantize()[0].any()


@pytest.mark.parametrize("kind", SCHEMES)
def test_the_scheme_is_a_format_of_the_op_and_its_zero_is_zero(kind: str) -> None:
    assert kind in enum("format")
    assert SCHEMES[kind].table[SCHEMES[kind].zero] == 0
    assert len(SCHEMES[kind].table) == 2 ** SCHEMES[kind].bits


def test_zero_points_shift_whole_groups() -> None:
    codes = np.array([[0, 5, 15, 7]], np.uint8)
    m = QuantizedMatrix("int4", codes, np.ones((1, 2), np.float32), 2, zero_points=np.array([[5, 0]], np.uint8))
    assert m.dequantize().tolist() == [[-5, 0, 15, 7]]


def test_an_unknown_kind_is_named() -> None:
    m = QuantizedMatrix("int3", np.zeros((1, 1), np.uint8), np.ones((1, 1), np.float32), -1)
    with pytest.raises(ValueError, match="'int3'; known: int4, int8"):
        m.dequantize()
