"""Layout qmoe: unpack gives the expert back bit for bit; the bytes are what ONNX Runtime's documentation says, stated
once more here, and what onnxruntime-genai's builder writes."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models.checkpoints import same_matrix
from support.operators.specs import linear_spec, moe_spec

from quantmoe.custom_ops.expert import Expert
from quantmoe.custom_ops.layouts import qmoe
from quantmoe.custom_ops.matrix import SCALE_DTYPES, QuantizedMatrix
from quantmoe.custom_ops.op import LinearSpec, MoESpec
from quantmoe.custom_ops.schemes import SCHEMES

FORMATS = [("int4", "f16"), ("int4", "bf16"), ("int8", "f32"), ("mxfp4", "e8m0")]


def matrix(
    rng: np.random.Generator,
    kind: str,
    scales: str,
    n: int,
    k: int,
    group: int,
    zeros: bool = False,
    bias: bool = False,
) -> QuantizedMatrix:
    top, shape = 1 << SCHEMES[kind].bits, (n, 1 if group == -1 else -(-k // group))
    values = rng.uniform(0.5, 1.5, shape) if scales != "e8m0" else 2.0 ** rng.integers(-3, 4, shape)
    return QuantizedMatrix(
        kind=kind,
        codes=rng.integers(0, top, (n, k), np.uint8),
        scales=values.astype(SCALE_DTYPES[scales]),
        group_size=group,
        zero_points=rng.integers(0, top, shape, np.uint8) if zeros else None,
        bias=rng.normal(0, 1, n).astype(np.float32) if bias else None,
    )


def layer(expert: Expert) -> tuple[MoESpec, list[np.ndarray]]:
    w13, w2 = qmoe.describe(expert, "none")
    spec = moe_spec(1, expert.hidden_size, expert.intermediate_size, w13, w2, gated=1)
    rows = [np.full(qmoe.row_bytes(spec, p), 0xA5, np.uint8) for p in ("w13", "w2")]
    qmoe.pack(expert, spec, *rows)
    return spec, rows


def dequantized(spec: MoESpec, projection: str, tensors: dict[str, np.ndarray]) -> np.ndarray:
    """An expert's weights as QMoE's schema says: (quantized - zero point) * scale of blocks along K."""
    bits, block = SCHEMES[spec.w13.format].bits, spec.w13.group_size

    def unpacked(packed: np.ndarray) -> np.ndarray:
        return packed if bits == 8 else np.stack([packed & 15, packed >> 4], -1).reshape(len(packed), -1)

    q = unpacked(tensors["codes"]).astype(np.float64)
    scales = tensors["scales"].astype(np.float64)
    zeros = np.full(scales.shape, 2.0 ** (bits - 1))
    if "zero_points" in tensors:
        zeros = unpacked(tensors["zero_points"])[:, : scales.shape[1]].astype(np.float64)
    each = q.shape[1] if block == -1 else block
    return (q - np.repeat(zeros, each, 1)) * np.repeat(scales, each, 1)


@given(
    st.sampled_from(FORMATS),
    st.sampled_from([-1, 16, 32, 64]),
    st.integers(1, 3),
    st.integers(1, 3),
    st.booleans(),
    st.booleans(),
    st.integers(0, 1000),
)
@settings(max_examples=100, deadline=None)
def test_round_trip(format, group, h, i, zeros, bias, seed):
    kind, scales = format
    if kind == "mxfp4":
        group, zeros = 32, False
    zeros = zeros and group != -1
    size, rng = 64 if group == -1 else group, np.random.default_rng(seed)
    h, i = h * size, i * size
    gate, up = (matrix(rng, kind, scales, i, h, group, zeros, bias) for _ in range(2))
    down = matrix(rng, kind, scales, h, i, group, zeros, bias)
    expert = Expert(gate, up, down)
    spec, rows = layer(expert)
    back = qmoe.unpack(spec, *rows)
    for role in ("gate", "up", "down"):
        same_matrix(getattr(back, role), getattr(expert, role))
    assert qmoe.from_attributes(MoESpec, spec.attributes()) == spec
    for projection, row in zip(("w13", "w2"), rows, strict=True):
        tensors = qmoe.stored(spec, projection, row, np.dtype(np.float32))
        assert np.array_equal(qmoe.restored(spec, projection, tensors), row)
        if kind == "mxfp4":
            continue
        found = dequantized(spec, projection, tensors)
        want = [down.dequantize()] if projection == "w2" else [gate.dequantize(), up.dequantize()]
        for at, w in enumerate(want):
            assert np.array_equal(found[at :: len(want)], w)


def test_a_node_says_what_its_layer_is():
    rng = np.random.default_rng(0)
    for kind, scales in FORMATS:
        for zeros in (False, kind != "mxfp4"):
            three = [matrix(rng, kind, scales, *size, 32, zeros, True) for size in ((64, 96), (64, 96), (96, 64))]
            spec, _ = layer(Expert(*three))
            shapes = {
                index: qmoe.shape(spec, projection, part)
                for (projection, part), index in qmoe.INPUTS.items()
                if part in qmoe.parts(spec, projection)
            }
            own = qmoe.attributes(spec)
            assert qmoe.moe_spec(own, shapes, {"w13": scales, "w2": scales}) == spec
            with pytest.raises(ValueError, match="activation_beta is 2"):
                qmoe.moe_spec(own | {"activation_beta": 2.0}, shapes, {"w13": scales, "w2": scales})
            with pytest.raises(ValueError, match=r"input 5 has shape \[1, 2, 3\]"):
                qmoe.moe_spec(own, shapes | {5: (1, 2, 3)}, {"w13": scales, "w2": scales})


def test_mxfp4_as_onnxruntime_genai_packs_it():
    """Its builder rounds; weights that are MXFP4 already it packs as they are, but for the sign of zero."""
    builder = pytest.importorskip("onnxruntime_genai.models.builders.base").Model
    rng, (h, i) = np.random.default_rng(0), (64, 96)
    codes = rng.integers(0, 16, (h, i), np.uint8)
    codes[codes == 8] = 0
    codes[:, ::32] = 7  # 6, the largest, in every block: the builder finds the same scale
    scales = (2.0 ** rng.integers(-3, 4, (h, i // 32))).astype(ml_dtypes.float8_e8m0fnu)
    down = QuantizedMatrix(kind="mxfp4", codes=codes, scales=scales, group_size=32)
    spec, rows = layer(Expert(*(matrix(rng, "mxfp4", "e8m0", i, h, 32) for _ in range(2)), down))
    found = qmoe.stored(spec, "w2", rows[1], np.dtype(np.float16))
    theirs = SimpleNamespace(FP4_E2M1_MAX=6.0, FP4_E2M1_POS_VALUES=(0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))
    theirs.fp4_e2m1_codes = lambda values: builder.fp4_e2m1_codes(theirs, values)
    packed, exponents, factor = builder.make_mxfp4_weights(theirs, torch.from_numpy(down.dequantize()))
    assert factor == 1
    assert np.array_equal(found["codes"], packed.numpy())
    assert np.array_equal(found["scales"].view(np.uint8), exponents.numpy())


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("kind", ["int4", "int8"])
def test_a_linear_of_part_of_a_block(kind, zeros):
    m = matrix(np.random.default_rng(0), kind, "bf16", 24, 80, 32, zeros, True)
    spec = linear_spec(80, 24, qmoe.describe_down(m, "none"))
    row = np.full(qmoe.row_bytes(spec.moe, "w2"), 0xA5, np.uint8)
    qmoe.pack_down(m, spec.moe, row)
    same_matrix(qmoe.unpack_down(spec.moe, row), m)
    assert qmoe.from_attributes(LinearSpec, spec.attributes()) == spec
    tensors = qmoe.stored(spec.moe, "w2", row, np.dtype(np.float32))
    assert np.array_equal(dequantized(spec.moe, "w2", tensors)[:, :80], m.dequantize())
    node = {"K": 80, "N": 24, "bits": SCHEMES[kind].bits, "block_size": 32}
    assert qmoe.linear_spec(node, "bf16", zeros, True) == spec


BASE = QuantizedMatrix(
    kind="int4", codes=np.zeros((64, 96), np.uint8), scales=np.ones((64, 3), np.float32), group_size=32
)


@pytest.mark.parametrize(
    ("change", "activations", "text"),
    [
        ({"perm": np.arange(96)[::-1].astype(np.int32)}, "none", "up: QMoE has no act-order"),
        ({"pre_scale": np.full(96, 2, np.float32)}, "none", "up: QMoE has no pre-scales"),
        ({"scales": np.ones((32, 3), np.float32), "block_n": 2}, "none", "a scale a row and group, found blocks of 2"),
        ({"scales": np.ones((64, 1), np.float32), "group_size": 96}, "none", "power of two from 16 for int4, found 96"),
        ({"scales": np.ones((64, 12), np.float32), "group_size": 8}, "none", "power of two from 16 for int4, found 8"),
        ({"scales": np.ones((64, 2), np.float32), "group_size": 64}, "none", r"whole groups of 64, found \[64, 96\]"),
        ({"kind": "mxfp4"}, "none", "mxfp4 with scales e8m0, found f32"),
        ({"kind": "fp8_e4m3"}, "none", "QMoE is exported with int4, int8, mxfp4, found fp8_e4m3"),
        ({}, "int8_token", r"as the checkpoint says \(int8_token\); with --activations float"),
    ],
)  # fmt: skip
def test_refused_by_name(change, activations, text):
    other = dataclasses.replace(BASE, **change)
    down = QuantizedMatrix(
        kind="int4", codes=np.zeros((96, 64), np.uint8), scales=np.ones((96, 2), np.float32), group_size=32
    )
    with pytest.raises(ValueError, match=text):
        qmoe.describe(Expert(None, other, down), activations)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"activation": "gelu"}, "gated gelu"),
        ({"gated": 0, "activation": "relu2"}, "ungated relu2"),
        ({"apply_router_weight_on_input": 1}, "the layer its inputs"),
    ],
)
def test_layers_that_qmoe_does_not_compute(change, text):
    rng = np.random.default_rng(0)
    spec, _ = layer(Expert(*(matrix(rng, "int4", "f16", 64, 64, 32) for _ in range(3))))
    assert qmoe.refusal(spec) == ""
    assert text in qmoe.refusal(dataclasses.replace(spec, **change))


def test_scales_that_float16_does_not_hold():
    rng = np.random.default_rng(0)
    three = [matrix(rng, "int4", "f32", 64, 64, 32) for _ in range(3)]
    spec, rows = layer(Expert(*three))
    with pytest.raises(ValueError, match="scales that float16 does not hold; use --dtype f32"):
        qmoe.stored(spec, "w13", rows[0], np.dtype(np.float16))
