"""Our packers against KleidiAI's bytes, and FORMAT.md 4.1 against its quantizer (tests/golden; how they were made: golden/generate)."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from quantmoe.custom_ops import native
from quantmoe.custom_ops.layouts import cpu_panel
from quantmoe.custom_ops.matrix import QuantizedMatrix

FILES = sorted((Path(__file__).parents[1] / "golden").glob("*.npz"))
assert FILES, "tests/golden has no files"


@pytest.fixture(params=FILES, ids=lambda f: f.stem)
def golden(request: pytest.FixtureRequest) -> dict[str, np.ndarray]:
    return dict(np.load(request.param))


def matrix(golden: dict[str, np.ndarray]) -> QuantizedMatrix:
    scales, group_size = golden["scales"], int(golden["group_size"])
    return QuantizedMatrix(
        kind="int8" if golden["codes"].max() > 15 else "int4",
        codes=golden["codes"],
        scales=scales.view(ml_dtypes.bfloat16) if group_size > 0 else scales,
        group_size=group_size,
        bias=golden["bias"],
    )


def test_reference_panels(golden: dict[str, np.ndarray]) -> None:
    np.testing.assert_array_equal(cpu_panel.reference_panels(matrix(golden)).ravel(), golden["packed"])


def test_native_packer(golden: dict[str, np.ndarray]) -> None:
    out = np.full(len(golden["packed"]), 0xAA, np.uint8)
    native.pack_panels(matrix(golden), out)
    np.testing.assert_array_equal(out, golden["packed"])


def test_quantizer(golden: dict[str, np.ndarray]) -> None:
    """FORMAT.md 4.1 int8_token_asym, one rounding an operation."""
    f = np.float32
    for x, q, zero_point, step in zip(golden["x"], golden["q"], golden["zero_point"], golden["step"], strict=True):
        lo, hi = min(f(0), x.min()), max(f(0), x.max())
        s = f(1) if lo == hi else f(255) / (hi - lo)
        a, b = lo * s, hi * s
        z = f(-128) - a if (f(-128) + a) + (f(127) + b) > 0 else f(127) - b
        z = np.rint(np.clip(z, -128, 127))
        assert (zero_point, step) == (z, f(1) / s)
        np.testing.assert_array_equal(q, np.clip(np.rint(x * s) + z, -128, 127))


def test_products_are_near_the_dequantized_ones(golden: dict[str, np.ndarray]) -> None:
    """The golden outputs against float64. The kernels compare with them bit for bit in tests/kernels; this says they mean what we say."""
    w = matrix(golden).dequantize()
    x = (golden["q"].astype(np.float64) - golden["zero_point"][:, None]) * golden["step"].astype(np.float64)[:, None]
    exact = x @ w.T + golden["bias"]
    # Every term of |x| |w| meets at most one rounding a group and five more; z * rowsum cancels against terms as large.
    magnitude = (np.abs(golden["q"]) + np.abs(golden["zero_point"])[:, None]) * golden["step"][:, None].astype(np.float64)
    bound = 16 * 2.0**-24 * (magnitude @ np.abs(w).T + np.abs(golden["bias"]))
    assert (np.abs(golden["y"] - exact) <= bound).all()
