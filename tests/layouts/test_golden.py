"""Our packers against KleidiAI's bytes, and FORMAT.md 4.1 and 4.2 against its quantizer and kernels.

tests/golden/generate says how the files were made; tests/arm holds the kernels to KleidiAI's directly.
"""

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


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """f32 a * b + c rounded once: the exact product, then a sum rounded to odd, which float32 cannot double-round."""
    product, c = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    total = product + c
    part = total - product
    error = (product - (total - part)) + (c - part)
    even = total.view(np.int64) & 1 == 0
    odd = np.where(even & (error != 0), np.nextafter(total, np.where(error > 0, np.inf, -np.inf)), total)
    return odd.astype(np.float32)


def test_products(golden: dict[str, np.ndarray]) -> None:
    """FORMAT.md 4.2 in NumPy, bit for bit."""
    m = matrix(golden)
    n, k = m.shape
    tail = cpu_panel.reference_panels(m)
    nr = cpu_panel.ROWS[m.kind]
    values = m.values().astype(np.int64)
    q, step = golden["q"].astype(np.int64), golden["step"][:, None]
    z = golden["zero_point"].astype(np.int64)[:, None]
    if m.group_size > 0:
        row_sum = tail[:, -8 * nr : -4 * nr].copy().view(np.float32).reshape(-1)[:n]
        acc = np.zeros((len(q), n), np.float32)
        for b in range(k // m.group_size):
            block = slice(b * m.group_size, (b + 1) * m.group_size)
            dot = (q[:, block] @ values[:, block].T).astype(np.float32)
            acc = fma(dot, m.scales[:, b].astype(np.float32)[None], acc)
        y = fma(row_sum[None], (-z).astype(np.float32), acc) * step + m.bias
    else:
        factor = 16 if m.kind == "int4" else 1
        dot = factor * (q @ values.T - values.sum(1) * z)
        y = dot.astype(np.float32) * (m.scales[:, 0] / np.float32(factor) * step) + m.bias
    np.testing.assert_array_equal(y.view(np.int32), golden["y"].view(np.int32))
