"""Every registered scheme: its error bound, its zero, and the reading of zero points."""

import re
import runpy
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from quantmoe.custom_ops.expert import Expert
from quantmoe.custom_ops.layouts import LAYOUTS
from quantmoe.custom_ops.matrix import SCALE_DTYPES, QuantizedMatrix
from quantmoe.custom_ops.op import enum
from quantmoe.custom_ops.schemes import SCHEMES


@pytest.mark.parametrize(
    "kind", [k for k, scheme in SCHEMES.items() if scheme.bits < 16 and SCALE_DTYPES[scheme.scale_type].names is None]
)
@given(
    n=st.integers(1, 9),
    k=st.integers(1, 150),
    group_size=st.sampled_from([-1, 16, 32, 64]),
    scale_type=st.sampled_from(["f32", "f16", "bf16", "own"]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=40, deadline=None)
@example(n=8, k=1, group_size=-1, scale_type="own", seed=64)  # a scale that e4m3 rounds to zero
def test_error_bound(kind: str, n: int, k: int, group_size: int, scale_type: str, seed: int) -> None:
    scheme = SCHEMES[kind]
    dtype = SCALE_DTYPES[scheme.scale_type if scale_type == "own" else scale_type]
    w = np.random.default_rng(seed).normal(0, 1, (n, k))
    w[0] = 0
    codes, scales = scheme.quantize(w, group_size, dtype)
    m = QuantizedMatrix(kind=kind, codes=codes, scales=scales, group_size=group_size)
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
    m = QuantizedMatrix(
        kind="int4",
        codes=codes,
        scales=np.ones((1, 2), np.float32),
        group_size=2,
        zero_points=np.array([[5, 0]], np.uint8),
    )
    assert m.dequantize().tolist() == [[-5, 0, 15, 7]]


def test_an_unknown_kind_is_named() -> None:
    m = QuantizedMatrix(
        kind="int9", codes=np.zeros((1, 1), np.uint8), scales=np.ones((1, 1), np.float32), group_size=-1
    )
    with pytest.raises(ValueError, match="'int9'; known: int4, int8"):
        m.dequantize()


def test_contributings_scheme(monkeypatch: pytest.MonkeyPatch) -> None:
    """It can be quantized to and read back, its code is free in op.def, and layouts refuse it by name."""
    text = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    example = runpy.run_path(str(Path(__file__).parents[1] / "examples" / "acme3.py"))
    monkeypatch.setitem(SCHEMES, "acme3", example["SCHEME"])
    name, code = re.search(r"QM_VALUE\(format, (\w+), (\d+)\)", text).groups()
    assert name == "acme3"
    assert int(code) == len(enum("format")), "CONTRIBUTING.md's acme3 has the first code that is free"
    w = np.random.default_rng(0).normal(0, 1, (6, 128))
    codes, scales = SCHEMES["acme3"].quantize(w, 64, SCALE_DTYPES["f16"])
    m = QuantizedMatrix(kind="acme3", codes=codes, scales=scales, group_size=64)
    assert (np.abs(m.dequantize() - w) <= m.expand(SCHEMES["acme3"].error_bound(scales))).all()
    for layout in LAYOUTS.values():
        with pytest.raises(ValueError, match="acme3"):
            layout.describe(Expert(m, m, m), "none", "none")
