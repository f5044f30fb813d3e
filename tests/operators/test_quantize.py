"""`--quantize`: the search of src/quantize against round to nearest, an exhaustive search, and its promises."""

from __future__ import annotations

from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest

from quantmoe.custom_ops import native
from quantmoe.custom_ops.matrix import SCALE_DTYPES, QuantizedMatrix
from quantmoe.custom_ops.schemes import SCHEMES
from quantmoe.exporter.reading.checkpoint import outline
from quantmoe.exporter.reading.weights.rounding import quantized

#: kind, group size, type of scales, zero points
FORMATS = [
    ("int4", 32, "bf16", False),
    ("int4", 32, "bf16", True),
    ("int4", 24, "f16", True),
    ("int4", -1, "f32", False),
    ("int8", -1, "bf16", False),
    ("int8", 32, "f16", True),
    ("mxfp4", 32, "e8m0", False),
    ("nvfp4", 16, "e4m3", False),
    ("q4_k", 256, "k32", False),
    ("q5_k", 256, "k32", False),
    ("q6_k", 256, "k16", False),
]


def weights(n: int, k: int, seed: int = 0, dtype: type = ml_dtypes.bfloat16) -> np.ndarray:
    """Return weights like those of trained models: normal, rows of different size, a few large ones."""
    rng = np.random.default_rng(seed)
    w = rng.normal(0, 0.02, (n, k)) * rng.uniform(0.5, 2, (n, 1))
    w[rng.random((n, k)) < 0.002] *= 6
    return w.astype(dtype)


def errors(m: QuantizedMatrix, w: np.ndarray, importance: np.ndarray | None = None) -> np.ndarray:
    """Weighted square errors by group, [N, groups]."""
    squares = (m.dequantize() - w.astype(np.float64)) ** 2
    squares *= 1 if importance is None else importance
    g = w.shape[1] if m.group_size == -1 else m.group_size
    padded = np.pad(squares, ((0, 0), (0, -w.shape[1] % g)))
    return padded.reshape(len(w), -1, g).sum(-1)


def to_nearest(w: np.ndarray, kind: str, group_size: int, scale_type: str, factor: float | None) -> QuantizedMatrix:
    scaled = w.astype(np.float64) / (factor or 1)
    codes, scales = SCHEMES[kind].quantize(scaled, group_size, SCALE_DTYPES[scale_type])
    return QuantizedMatrix(kind=kind, codes=codes, scales=scales, group_size=group_size, global_scale=factor)


@pytest.mark.parametrize(("kind", "group_size", "scale_type", "zero_points"), FORMATS[:8])
@pytest.mark.parametrize("k", [512, 150])
def test_no_group_is_worse_than_to_nearest(
    kind: str, group_size: int, scale_type: str, zero_points: bool, k: int
) -> None:
    """The largest magnitude at the largest code is one of the scales that are tried, but for an ulp of bf16."""
    w = weights(40, k)
    factor = float(np.abs(w.astype(np.float64)).max() / (4 * 448)) if kind == "nvfp4" else None
    found = errors(
        native.quantize(
            w, kind, group_size, scale_type=scale_type, zero_points=zero_points, importance=None, global_scale=factor
        ),
        w,
    )
    nearest = errors(to_nearest(w, kind, group_size, scale_type, factor), w)
    if not zero_points:
        assert (found <= nearest * (1 + 2**-8)).all()
    assert found.sum() < nearest.sum() * (1 if kind == "int8" else 0.95)


@pytest.mark.parametrize("zero_points", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_groups_of_int4_are_as_good_as_an_exhaustive_search(zero_points: bool, weighted: bool) -> None:
    """Every zero point, and scales 0.25 % apart. The search may miss a little in a group, and 1 % in all."""
    w, rng = weights(30, 32, 1, np.float32), np.random.default_rng(2)
    importance = rng.exponential(1, 32).astype(np.float32) if weighted else None
    found = errors(
        native.quantize(w, "int4", 32, scale_type="f32", zero_points=zero_points, importance=importance), w, importance
    )[:, 0]
    best, x = np.full(len(w), np.inf), w.astype(np.float64)
    for size in np.linspace(0.4, 1.3, 361):
        for zero in range(16) if zero_points else (8,):
            reach = (x.max(1) - x.min(1)) / 15 if zero_points else np.abs(x).max(1) / 7
            for sign in (1,) if zero_points else (1, -1):
                scale = sign * size * reach[:, None]
                values = scale * (np.clip(np.rint(x / scale), -zero, 15 - zero))
                own = ((values - x) ** 2 * (1 if importance is None else importance)).sum(1)
                best = np.minimum(best, own)
    assert (found < 1.15 * best).all()
    assert found.sum() < 1.01 * best.sum()


@pytest.mark.parametrize(("kind", "levels"), [("q4_k", 15), ("q5_k", 31)])
def test_k_quants_are_near_what_floats_would_give(kind: str, levels: int) -> None:
    """Beside sub-blocks whose scales and minima are floats, found by alternating least squares from forty starts."""
    w = weights(12, 512, 3, np.float32)
    found = errors(native.quantize(w, kind, 256, scale_type="k32"), w).sum()
    x, best = w.astype(np.float64).reshape(-1, 32), np.inf
    low, high = np.minimum(x.min(1), 0)[:, None], x.max(1)[:, None]
    for size in np.linspace(0.5, 1.2, 40):
        scale, offset = (high - low) / levels * size, low
        for _ in range(4):
            q = np.clip(np.rint((x - offset) / scale), 0, levels)
            mean_q, mean_x = q.mean(1, keepdims=True), x.mean(1, keepdims=True)
            scale = ((q - mean_q) * (x - mean_x)).sum(1, keepdims=True) / ((q - mean_q) ** 2).sum(1, keepdims=True)
            offset = mean_x - scale * mean_q
        best = np.minimum(best, ((scale * q + offset - x) ** 2).sum(1))
    assert found < 1.10 * best.sum()  # scales and minima have 6 bits


def test_more_bits_lose_less() -> None:
    w = weights(16, 1024, 4)
    lost = []
    for i in (0, 1, 8, 9, 10):
        kind, group_size, scale_type, zero_points = FORMATS[i]
        found = native.quantize(w, kind, group_size, scale_type=scale_type, zero_points=zero_points)
        lost.append(errors(found, w).sum())
    assert all(a > b for a, b in pairwise(lost))


def test_weights_on_a_grid_come_back() -> None:
    rng = np.random.default_rng(5)
    for kind, group_size, scale_type, zero_points in (FORMATS[1], FORMATS[6]):
        if kind == "int4":
            zeros, scales = rng.integers(0, 16, (20, 4)), 2.0 ** rng.integers(-9, -4, (20, 4))
            codes = rng.integers(0, 16, (20, 4, 32))
            codes[..., :2] = (0, 15)
            w = ((codes - zeros[..., None]) * scales[..., None]).reshape(20, 128)
        else:
            codes = rng.integers(0, 16, (20, 4, 32))
            codes[..., 0] = 7
            w = (SCHEMES[kind].table[codes] * 2.0 ** rng.integers(-9, -4, (20, 4, 1))).reshape(20, 128)
        m = native.quantize(w.astype(np.float32), kind, group_size, scale_type=scale_type, zero_points=zero_points)
        assert (m.dequantize() == w).all()


@pytest.mark.parametrize(("kind", "group_size", "scale_type", "zero_points"), FORMATS)
def test_the_same_bytes_for_any_number_of_threads(
    kind: str, group_size: int, scale_type: str, zero_points: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    w, made = weights(67, 300, 6, np.float16), []
    for threads in (1, 2, 7):
        monkeypatch.setattr(native, "pack_threads", lambda threads=threads: threads)
        m = native.quantize(
            w,
            kind,
            group_size,
            scale_type=scale_type,
            zero_points=zero_points,
            importance=None,
            global_scale=0.001 if kind == "nvfp4" else None,
        )
        zeros = b"" if m.zero_points is None else m.zero_points.tobytes()
        made.append((m.codes.tobytes(), m.scales.tobytes(), zeros))
    assert made[0] == made[1] == made[2]


@pytest.mark.parametrize(("kind", "group_size", "scale_type", "zero_points"), FORMATS)
def test_importance_is_what_errors_are_weighted_with(
    kind: str, group_size: int, scale_type: str, zero_points: bool
) -> None:
    w, importance = weights(24, 512, 7), np.random.default_rng(8).exponential(1, 512).astype(np.float32) ** 2
    factor = 0.0001 if kind == "nvfp4" else None
    plain, own = (
        native.quantize(
            w, kind, group_size, scale_type=scale_type, zero_points=zero_points, importance=i, global_scale=factor
        )
        for i in (None, importance)
    )
    assert errors(own, w, importance).sum() < errors(plain, w, importance).sum()


@pytest.mark.parametrize(("kind", "group_size", "scale_type", "zero_points"), FORMATS)
def test_nothing_and_next_to_nothing(kind: str, group_size: int, scale_type: str, zero_points: bool) -> None:
    """Groups of zeros, of one weight, of the smallest numbers, of numbers without a negative one."""
    w = np.zeros((5, 300), np.float32)
    w[1, 7], w[2], w[3] = 1.5, 1e-42, np.linspace(1, 2, 300)
    m = native.quantize(
        w,
        kind,
        group_size,
        scale_type=scale_type,
        zero_points=zero_points,
        importance=None,
        global_scale=1.0 if kind == "nvfp4" else None,
    )
    found = m.dequantize()
    assert np.isfinite(found).all()
    assert not found[0].any()
    assert abs(found[1, 7] - 1.5) < 0.1
    assert not found[1, :7].any()
    assert np.abs(found[3] - w[3]).max() < 0.5


def test_outlines_are_quantized_once() -> None:
    """A dry run's matrices are ones without memory; what is made of them has none either."""
    m = quantized(outline((1 << 20, 512), ml_dtypes.bfloat16), None, "int4", group_size=32, where="w")
    assert m.shape == (1 << 20, 512)
    assert m.zero_points is not None
    assert not any(array.strides[0] for array in (m.codes, m.scales, m.zero_points))


def test_what_is_refused() -> None:
    w = weights(4, 64)
    with pytest.raises(ValueError, match="floats are quantized to integers, e2m1 and K-quants, not to format 4"):
        native.quantize(w, "fp8_e4m3", -1, scale_type="f32")
    with pytest.raises(ValueError, match="group_size is 64, expected 256"):
        native.quantize(w, "q4_k", 64, scale_type="k32")
    with pytest.raises(ValueError, match="zero points are of integers"):
        native.quantize(w, "mxfp4", 32, scale_type="e8m0", zero_points=True)
    with pytest.raises(ValueError, match=r"importance has shape \[63\], expected \[64\]"):
        native.quantize(w, "int4", 32, scale_type="bf16", zero_points=False, importance=np.ones(63, np.float32))
