"""Our packers against KleidiAI's bytes, and the arithmetic of quant_moe.def against its quantizer and kernels.

tests/golden/generate says how the files were made; tests/arm holds the kernels to KleidiAI's directly.
"""

import hashlib
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from support.operators.cases import Case
from support.operators.panels import ROWS, reference_panels
from support.operators.specs import linear_spec

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


def packed(m: QuantizedMatrix) -> np.ndarray:
    """The panels that the library makes of a linear's matrix, where its row begins: uint8 [bytes]."""
    n, k = m.shape
    spec = linear_spec(k, n, cpu_panel.describe_down(m, "none")).moe
    row = np.full(cpu_panel.row_bytes(spec, "w2"), 0xAA, np.uint8)
    cpu_panel.pack_down(m, spec, row)
    return row[: reference_panels(m).size]


def test_reference_panels(golden: dict[str, np.ndarray]) -> None:
    np.testing.assert_array_equal(reference_panels(matrix(golden)).ravel(), golden["packed"])


def test_native_packer(golden: dict[str, np.ndarray]) -> None:
    np.testing.assert_array_equal(packed(matrix(golden)), golden["packed"])


def test_quantizer(golden: dict[str, np.ndarray]) -> None:
    """Activations of quant_moe.def: int8_token_asym, one rounding an operation."""
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
    """Products of quant_moe.def in NumPy, bit for bit."""
    m = matrix(golden)
    n, k = m.shape
    tail = reference_panels(m)
    nr = ROWS[m.kind]
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


#: sha256 of the panels that KleidiAI does not have: (kind, scale type, zero points), group size -> first 16 digits
PINNED = {
    (("int4", "f16", True), 32): "2c718b84dbd57ca4",
    (("int4", "bf16", True), -1): "f2589cfd1959f2a5",
    (("int4", "f32", False), 16): "b2af2b473971c07c",
    (("int8", "f16", True), 64): "1419b1be783821e1",
    (("int8", "bf16", False), 16): "e746d0d7b8634041",
    (("mxfp4", "e8m0", False), 32): "3a9ef860b840a20f",
    (("nvfp4", "e4m3", False), 16): "a39cc1e0c825c9cd",
    (("fp8_e4m3", "f32", False), -1): "a53220e34b0eaecf",
    (("fp8_e4m3", "bf16", False), 128): "8fb714fed6ac88f4",
    (("fp8_e4m3", "e8m0", False), 32): "1e13415a9ded6f42",
}


@pytest.mark.parametrize(("weights", "group_size"), PINNED, ids=str)
def test_pinned_panels(weights: tuple[str, str, bool], group_size: int) -> None:
    """The bytes of files written by earlier releases."""
    case = Case(weights=weights, group_size=group_size, bias=True)
    m = case.matrix(np.random.default_rng(7), 21, 90)
    assert hashlib.sha256(packed(m)).hexdigest()[:16] == PINNED[weights, group_size]
