"""Plans of the CUDA kernels' formats, which the CPU kernels' library has, too: needs no CUDA library."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from cuda.formats import FORMATS, spec_of
from specs import linear_spec

from quantmoe.custom_ops import cuda, native

ROWS = Path(__file__).parents[2] / "custom_ops/src/cuda/formats/formats.inc"
SM89 = cuda.Device(89, 132, 102400)


@pytest.mark.parametrize(
    ("device", "tokens", "paths"),  # of a layer, of a linear
    [
        (cuda.H200, 1, ("decode", "decode")),
        (cuda.H200, 4096, ("wgmma", "dense")),
        (SM89, 4096, ("stream", "stream")),
    ],
)
@pytest.mark.parametrize("name", FORMATS)
def test_each_is_planned(monkeypatch, name, device, tokens, paths):
    monkeypatch.setattr(cuda, "library", native.library)
    weights, group_size, _ = FORMATS[name]
    spec = spec_of(2048, 768, 8, group_size, weights)
    layer = cuda.plan(cuda.problem(spec, "bf16", tokens, 2, 8), device)
    linear = cuda.plan(cuda.linear_problem(linear_spec(768, 2048, spec.w2), "bf16", tokens), device)
    assert (cuda.PATHS[layer.path], cuda.PATHS[linear.path]) == paths


def test_each_of_the_kernels_is_here():
    """But Int4, which most tests have, and Float, of linears alone."""
    rows = re.findall(r"^QM_CUDA_FORMAT\((\w+)\)", ROWS.read_text(), re.MULTILINE)
    here = {(kind, zero_points) for (kind, _, zero_points), *_ in FORMATS.values()}
    assert len(rows) - 2 == len(here), f"formats.inc has {rows}, FORMATS {here}"


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (("q4_k", "k32", False), "format is q4_k, the CUDA kernels take int4, int8, mxfp4, "),
        (("mxfp4", "e8m0", True), "zero_points is 1, the CUDA kernels take 0, and 1 with int4, int8"),
    ],
)
def test_others_are_named(weights, message):
    spec = spec_of(256, 128, 8, 32, weights)
    assert cuda.refusal(spec).startswith(f"w13_{message}")
    assert cuda.refusal(linear_spec(128, 256, spec.w2)).startswith(f"w_{message}")
