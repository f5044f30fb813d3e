"""What is no number is refused by every layout, in the same words, whatever holds it."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np
import pytest
from support.operators.cases import Case
from support.operators.specs import linear_spec, moe_spec

from quantmoe.custom_ops.expert import Expert
from quantmoe.custom_ops.layouts import LAYOUTS
from quantmoe.custom_ops.matrix import QuantizedMatrix

SCALES, CODES = "scales that are NaN or infinite", "weights that are NaN or infinite"
NAN, INF = np.nan, np.inf


def scale(value: float) -> Any:
    def change(m: QuantizedMatrix) -> dict[str, Any]:
        scales = m.scales.copy()
        scales[-1, -1] = value
        return {"scales": scales}

    return change


def code(value: int) -> Any:
    def change(m: QuantizedMatrix) -> dict[str, Any]:
        codes = m.codes.copy()
        codes[-1, -1] = value
        return {"codes": codes}

    return change


def vector(field: str, axis: int, value: float) -> Any:
    def change(m: QuantizedMatrix) -> dict[str, Any]:
        values = np.ones(m.shape[axis], np.float32)
        values[-1] = value
        return {field: values}

    return change


def number(field: str, value: float) -> Any:
    return lambda m: {field: value}


#: weights, what is changed, the words after the matrix' name
DAMAGE = [
    *((("int4", kind, False), scale(value), SCALES) for kind in ("f32", "f16", "bf16") for value in (NAN, INF, -INF)),
    (("mxfp4", "e8m0", False), scale(NAN), SCALES),
    (("nvfp4", "e4m3", False), scale(NAN), SCALES),
    *((("fp8_e4m3", "f32", False), code(value), f"fp8_e4m3 {CODES}") for value in (0x7F, 0xFF)),
    *((("bf16", "f32", False), code(value), f"bf16 {CODES}") for value in (0x7F80, 0xFF80, 0x7FC0, 0xFFFF)),
    *((("f16", "f32", False), code(value), f"f16 {CODES}") for value in (0x7C00, 0xFC00, 0x7E00, 0xFFFF)),
    *(
        (("int4", "f16", False), vector("pre_scale", 1, value), "pre-scales that are NaN or inf")
        for value in (NAN, INF)
    ),
    *((("int8", "f16", False), vector("bias", 0, value), "biases that are NaN or infinite") for value in (NAN, -INF)),
    *(
        (("nvfp4", "e4m3", False), number("global_scale", value), f"the global scale {value}, expected a positive")
        for value in (NAN, INF, 0.0, -1.0, 1e39)
    ),
    *(
        (("nvfp4", "e4m3", False), number("input_scale", value), f"the input scale {value}, expected a positive")
        for value in (NAN, INF, -1.0)
    ),
]


def case(weights: tuple[str, str, bool]) -> Case:
    group_size = 16 if weights[0] == "nvfp4" else 32
    activations = "nvfp4" if weights[0] == "nvfp4" else "none"
    return Case(
        weights=weights, group_size=group_size, activation_format=activations, pre_scale=weights[1] == "f16", bias=True
    )


def carries(layout: str, weights: tuple[str, str, bool]) -> bool:
    if layout == "qmoe":  # of linears no mxfp4, and no pre-scales, which cases of f16 scales have
        return weights[0] in ("int4", "int8") and weights[1] != "f16"
    return layout == "cpu_panel" or weights[0] not in ("bf16", "f16")


def same_inputs(expert: Expert) -> Expert:
    """gate's input scale and pre-scales are up's: marlin stores one of both."""
    assert expert.gate is not None
    shared = {name: getattr(expert.up, name) for name in ("input_scale", "pre_scale")}
    return dataclasses.replace(expert, gate=dataclasses.replace(expert.gate, **shared))


@pytest.mark.parametrize("role", ["gate", "up", "down"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("weights", "change", "words"), DAMAGE)
def test_refused_in_the_same_words(weights: Any, change: Any, words: str, layout: str, role: str) -> None:
    if not carries(layout, weights):
        pytest.skip("not a format of this layout")
    c, module = case(weights), LAYOUTS[layout]
    expert = same_inputs(c.expert(np.random.default_rng(0)))
    w13, w2 = module.describe(expert, c.activation_format)
    spec = moe_spec(1, expert.hidden_size, expert.intermediate_size, w13, w2, gated=1)
    rows = [np.zeros(module.row_bytes(spec, p), np.uint8) for p in ("w13", "w2")]
    module.pack(expert, spec, *rows)
    changed = change(getattr(expert, role))
    bad = {role: dataclasses.replace(getattr(expert, role), **changed)}
    if set(changed) & {"input_scale", "pre_scale"} and role != "down":  # marlin stores one of both
        bad = {name: dataclasses.replace(getattr(expert, name), **changed) for name in ("gate", "up")}
    with pytest.raises(ValueError, match=f"^({'|'.join(bad)}): {re.escape(words)}"):
        module.pack(dataclasses.replace(expert, **bad), spec, *rows)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("weights", "change", "words"), DAMAGE)
def test_a_linear_too(weights: Any, change: Any, words: str, layout: str) -> None:
    if not carries(layout, weights):
        pytest.skip("not a format of this layout")
    c, module = case(weights), LAYOUTS[layout]
    m = c.matrix(np.random.default_rng(0), 24, 64)
    spec = linear_spec(64, 24, module.describe_down(m, c.activation_format))
    row = np.zeros(module.row_bytes(spec.moe, "w2"), np.uint8)
    module.pack_down(m, spec.moe, row)
    with pytest.raises(ValueError, match=f"^down: {re.escape(words)}"):
        module.pack_down(dataclasses.replace(m, **change(m)), spec.moe, row)


@pytest.mark.parametrize(("weights", "largest"), [("fp8_e4m3", 0xFE), ("bf16", 0xFF7F), ("f16", 0xFBFF)])
def test_the_largest_number_is_one(weights: str, largest: int) -> None:
    m = case((weights, "f32", False)).matrix(np.random.default_rng(0), 24, 64)
    dataclasses.replace(m, **code(largest)(m)).check_finite("it")
