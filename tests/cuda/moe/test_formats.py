"""Plans of the CUDA kernels' formats, which the CPU kernels' library has, too: needs no CUDA library."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from support.cuda import cuda_kernels as cuda
from support.cuda.formats import FLOATS, FORMATS, spec_of
from support.operators.cases import K_QUANTS
from support.operators.specs import linear_spec

from quantmoe.custom_ops import native

ROWS = Path(__file__).parents[3] / "custom_ops/src/cuda/formats/formats.inc"
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


@pytest.mark.parametrize(
    ("device", "tokens", "paths"),
    [
        (cuda.H200, 8, ("decode", "decode")),
        (cuda.H200, 4096, ("stream", "dense")),  # mma.sync: wgmma reads codes of up to 8 bits
        (SM89, 4096, ("stream", "stream")),
    ],
)
@pytest.mark.parametrize("kind", FLOATS)
def test_floats_are_planned(monkeypatch, kind, device, tokens, paths):
    monkeypatch.setattr(cuda, "library", native.library)
    weights, group_size, _ = FLOATS[kind]
    spec = spec_of(2048, 768, 8, group_size, weights)
    assert cuda.refusal(spec) == cuda.refusal(linear_spec(768, 2048, spec.w2)) == ""
    layer = cuda.plan(cuda.problem(spec, kind, tokens, 2, 8), device)
    linear = cuda.plan(cuda.linear_problem(linear_spec(768, 2048, spec.w2), kind, tokens), device)
    assert (cuda.PATHS[layer.path], cuda.PATHS[linear.path]) == paths


@pytest.mark.parametrize("projection", ["w13", "w2"])
def test_floats_are_of_the_activations_type(monkeypatch, projection):
    """The other projection's codes are multiplied with either."""
    monkeypatch.setattr(cuda, "library", native.library)
    floats = spec_of(2048, 768, 8, -1, FLOATS["f16"][0])
    spec = replace(spec_of(2048, 768, 8), **{projection: floats.w2})
    assert cuda.refusal(spec) == ""
    cuda.plan(cuda.problem(spec, "f16", 3, 2, 8))
    with pytest.raises(ValueError, match=f"{projection}_format is f16 and activations are bfloat16; .* of one type"):
        cuda.plan(cuda.problem(spec, "bf16", 3, 2, 8))
    both = replace(floats, **{projection: spec_of(64, 64, 1, -1, FLOATS["bf16"][0]).w2})
    assert "_format is bf16 and activations are float16" in cuda.refusal(both) or (
        "_format is f16 and activations are bfloat16" in cuda.refusal(both)
    )


def test_each_of_the_kernels_is_here():
    """But Int4, which most tests have, and Float, which FLOATS are of."""
    rows = re.findall(r"^QM_CUDA_FORMAT\((\w+)\)", ROWS.read_text(encoding="utf-8"), re.MULTILINE)
    here = {(kind, zero_points) for (kind, _, zero_points), *_ in FORMATS.values()}
    assert len(rows) - 2 == len(here), f"formats.inc has {rows}, FORMATS {here}"


def test_one_of_two_projections_has_scales_of_two_levels(monkeypatch):
    """Layers of mixed files have such pairs, and both are on wgmma."""
    monkeypatch.setattr(cuda, "library", native.library)
    spec = spec_of(2048, 768, 8)
    two = spec_of(2048, 768, 8, 256, K_QUANTS["q6_k"])
    for layer in (replace(spec, w2=two.w2), replace(spec, w13=two.w13)):
        assert cuda.PATHS[cuda.plan(cuda.problem(layer, "bf16", 4096, 2, 8), cuda.H200).path] == "wgmma"


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (("q4_k", "k32", False), "group_size is 32, the CUDA kernels take 256 for q4_k with k32 scales"),
        (("q5_k", "f16", False), "scale_type is f16, the CUDA kernels take k32 for q5_k"),
        (("q6_k", "k32", False), "scale_type is k32, the CUDA kernels take k16 for q6_k"),
        (("int4", "k32", False), "scale_type is k32, the CUDA kernels take f16, bf16 for int4"),
        (("q6_k", "k16", True), "zero_points is 1, the CUDA kernels take 0, and 1 with int4, int8"),
        (("mxfp4", "e8m0", True), "zero_points is 1, the CUDA kernels take 0, and 1 with int4, int8"),
    ],
)
def test_others_are_named(weights, message):
    spec = spec_of(256, 128, 8, 32, weights)
    assert cuda.refusal(spec).startswith(f"w13_{message}")
    assert cuda.refusal(linear_spec(128, 256, spec.w2)).startswith(f"w_{message}")
