"""The bounds are tight: a reference with one number or one rule changed a little is outside of them.

What is changed is custom_ops/reference.py or its matrices, rounded to float32 as a kernel's output is.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable

import numpy as np
import pytest
from support.operators import attention
from support.operators.arithmetic import activate, assert_within, exactly
from support.operators.bounds import check, check_linear
from support.operators.cases import (
    FLOAT_ACTIVATIONS,
    FLOATS,
    GGML,
    INT4,
    INT8_ACTIVATIONS,
    NVFP4,
    ONE_OF_EACH,
    ONE_PLANE_EACH,
    TABLES,
    WEIGHTS,
    Case,
    Layer,
)
from support.operators.specs import attention_spec

from quantmoe.custom_ops import reference
from quantmoe.custom_ops.expert import Expert
from quantmoe.custom_ops.layouts.cpu_panel import describe_down
from quantmoe.custom_ops.matrix import QuantizedMatrix

GROUPS = ("fp8_group128", "nvfp4", "mxfp8", "mxfp4")
CASES = [
    Case(
        hidden=96,
        intermediate=160,
        experts=2,
        weights=weights,
        group_size=16 if weights == NVFP4 else 32,
        activation_format=activation_format,
        bias=True,
    )
    for weights in (*ONE_OF_EACH, *WEIGHTS[-2:], *GGML.values(), *TABLES, *ONE_PLANE_EACH)
    for activation_format in ("none", *INT8_ACTIVATIONS, *FLOAT_ACTIVATIONS)
    if not (weights[0] in FLOATS and activation_format in INT8_ACTIVATIONS)
]
Change = Callable[[QuantizedMatrix], QuantizedMatrix]


def scaled(m: QuantizedMatrix, rows: slice) -> QuantizedMatrix:
    """The last scale of some rows off by 2^-10; with f32 minima by 2^-9, for q5_1's gates and mxfp4's h."""
    if m.scales.dtype.names and m.scales["d"].dtype == np.float16:  # by one of f16's steps, which are that large
        scales = m.scales.copy()
        scales["d"][rows, -1] = np.nextafter(scales["d"][rows, -1], np.float16(2))
        return dataclasses.replace(m, scales=scales)
    if m.scales.dtype.names:
        scales = m.scales.copy()
        scales["d"][rows, -1] *= np.float32(1 + 2.0**-9)
        return dataclasses.replace(m, scales=scales)
    scales = m.scales.astype(np.float32)
    scales[rows, -1] *= np.float32(1 + 2.0**-10)
    return dataclasses.replace(m, scales=scales)


def swapped(m: QuantizedMatrix, rows: slice) -> QuantizedMatrix:
    """The scales, or minima, of two groups exchanged."""
    scales = m.scales.copy()
    last = (scales.dtype.names or ("d",))[-1]
    if last not in ("d", "d_min"):
        of_groups = scales[last]
        of_groups[rows, :, :2] = of_groups[rows, :, 1::-1]
        return dataclasses.replace(m, scales=scales)
    scales[rows, :2] = scales[rows, 1::-1]
    return dataclasses.replace(m, scales=scales)


def result(layer: Layer, tokens: tuple, change: Callable[[Expert], Expert] = lambda e: e) -> np.ndarray:
    return reference.quant_moe(layer.spec, [change(e) for e in layer.experts], *tokens).astype(np.float32)


def assert_noticed(layer: Layer, tokens: tuple, got: np.ndarray) -> None:
    with pytest.raises(AssertionError, match="values out of bounds"):
        check(layer, tokens, got)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_numbers(case: Case) -> None:
    """One scale of one row of w2; of gate or up one of every row, as h rounds most of such a change away."""
    layer, tokens = case.build(), case.tokens(30)
    check(layer, tokens, result(layer, tokens))
    for change in (scaled, swapped):
        if change is swapped and layer.experts[0].up.scales.shape[1] == 1:
            continue
        for side, rows in (("down", slice(1)), ("gate", slice(None)), ("up", slice(None))):
            changed = result(
                layer,
                tokens,
                lambda e, side=side, rows=rows, change=change: dataclasses.replace(
                    e, **{side: change(getattr(e, side), rows)}
                ),
            )
            assert_noticed(layer, tokens, changed)


def gathered_first(x: np.ndarray, m: QuantizedMatrix, activation_format: str) -> np.ndarray:
    """The product of activations that are rounded in act-order."""
    x = x if m.pre_scale is None else x * m.pre_scale
    return LINEAR(x[:, m.perm], dataclasses.replace(m, perm=None, pre_scale=None), activation_format)


LINEAR = reference.linear


@pytest.mark.parametrize("activation_format", GROUPS)
@pytest.mark.parametrize("weights", [INT4, NVFP4], ids=lambda w: w[0])
@pytest.mark.parametrize("pre_scale", [False, True])
def test_a_gather_before_the_rounding(
    activation_format: str, weights: tuple[str, str, bool], pre_scale: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(
        hidden=288,
        intermediate=160,
        experts=1,
        top_k=1,
        weights=weights,
        activation_format=activation_format,
        act_order="split",
        pre_scale=pre_scale,
    )
    layer, tokens = case.build(), case.tokens(3)
    for m in vars(layer.experts[0]).values():
        x = np.random.default_rng(0).normal(0, 1, (3, m.shape[1])).astype(np.float32)
        x *= np.exp2(-(np.arange(m.shape[1]) % 20), dtype=np.float32)  # mxfp8 rounds most alike in any group
        p = describe_down(m, activation_format)
        check_linear(x, m, p, LINEAR(x, m, activation_format).astype(np.float32))
        with pytest.raises(AssertionError, match="values out of bounds"):
            check_linear(x, m, p, gathered_first(x, m, activation_format).astype(np.float32))
        if activation_format == "mxfp8":  # h has nothing that small
            continue
        with monkeypatch.context() as patch:
            patch.setattr(
                reference, "linear", lambda x, n, a, m=m: (gathered_first if n.perm is m.perm else LINEAR)(x, n, a)
            )
            changed = result(layer, tokens)
        assert_noticed(layer, tokens, changed)


@pytest.mark.parametrize("weights", [INT4, NVFP4, ("int8", "f16", True)], ids=lambda w: w[0])
@pytest.mark.parametrize(
    ("activation_format", "function", "rule", "other"),
    [
        ("int8_token", "quantize_activations", "np.float32(127.5)", "np.float32(127)"),
        ("int8_token_asym", "quantize_activations", "np.float32(255) /", "np.float32(254) /"),
        ("int8_group", "quantize_groups", "largest / np.float32(127)", "largest / np.float32(126)"),
        ("fp8_token", "round_activations", "largest / limit", "largest / np.float32(447)"),
        ("fp8_group128", "round_activations", "largest / limit", "largest / np.float32(447)"),
        ("fp8_tensor", "round_activations", "largest / np.float32(448)", "largest / np.float32(447)"),
        ("nvfp4", "round_activations", "largest / np.float32(6)", "largest / np.float32(5.75)"),
        ("mxfp8", "round_activations", "np.uint32(1 << 21)", "np.uint32(0)"),
        ("mxfp4", "round_activations", "np.uint32(1 << 21)", "np.uint32(0)"),
    ],
)
def test_rules_of_rounding(
    activation_format: str,
    function: str,
    rule: str,
    other: str,
    weights: tuple[str, str, bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer = Case(
        hidden=160, intermediate=160, experts=2, weights=weights, activation_format=activation_format, static=False
    ).build()
    tokens = layer.case.tokens(12)
    check(layer, tokens, result(layer, tokens))
    source = inspect.getsource(getattr(reference, function))
    assert rule in source
    changed = dict(vars(reference))
    exec(source.replace(rule, other), changed)
    with monkeypatch.context() as patch:
        patch.setattr(reference, function, changed[function])
        got = result(layer, tokens)
    assert_noticed(layer, tokens, got)


def test_what_an_activation_function_loses_of_subnormal_numbers() -> None:
    """gelu halves them, and up multiplies what was rounded."""
    spec = Case(activation="gelu").build().spec
    z = np.arange(1, 10, dtype=np.uint32).view(np.float32)[None]
    up = np.full_like(z, 1000)
    assert_within(np.float32(0.5) * z * up, activate(spec, exactly(z), exactly(up)))


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"scale": 32**-0.5 * (1 + 2.0**-10)},
        {"softcap": 5 * (1 + 2.0**-10)},
        {"sliding_window": 99},
        {"chunk_size": 129},
        {"rotary_size": 14},
        {"rotary_interleaved": 1},
        {"qk_norm": "none"},
        {"norm_epsilon": 2e-3},
        {"sinks": 1 + 2.0**-10},
        {"k_norm": 1 + 2.0**-10},
        {"sin": -1},
    ],
    ids=str,
)
def test_attention(change: dict) -> None:
    """Keys and values of the changed operator are checked as well as its output."""
    features = {"softcap": 5.0, "sliding_window": 100, "chunk_size": 130, "rotary_size": 16, "qk_norm": "head"}
    a = attention.ragged(attention_spec(4, 2, 32, norm_epsilon=1e-3, **features))
    arrays = {
        name: (getattr(a, name) * factor).astype(np.float32) for name, factor in change.items() if hasattr(a, name)
    }
    spec = dataclasses.replace(a.spec, **{name: value for name, value in change.items() if name not in arrays})
    wrong = dataclasses.replace(a, spec=spec, **arrays)
    if change.get("qk_norm") == "none":
        wrong = dataclasses.replace(wrong, q_norm=a.q_norm[:0], k_norm=a.k_norm[:0])
    if "rotary_size" in change:
        wrong = dataclasses.replace(wrong, cos=a.cos[:, :, :7], sin=a.sin[:, :, :7])
    output, *present = wrong.reference()
    got = output.astype(np.float32), *present
    if not change:
        return attention.check(a, got)
    with pytest.raises(AssertionError, match="out of bounds"):
        attention.check(a, got)
