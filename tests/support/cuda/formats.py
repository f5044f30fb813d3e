"""Formats of the CUDA tests, and layers' attributes; needs no CUDA library."""

from support.operators.cases import INT4, K_QUANTS
from support.operators.specs import moe_spec, projection

from quantmoe.custom_ops.layouts import LAYOUTS

#: other than symmetric int4: (kind, scale type, zero points), group_size, block_n
FORMATS = {
    "int4-zero": (("int4", "bf16", True), 32, 1),
    "int4-zero-f16": (("int4", "f16", True), 128, 1),
    "int4-zero-channel": (("int4", "bf16", True), -1, 1),
    "int8": (("int8", "bf16", False), -1, 1),
    "int8-f16": (("int8", "f16", False), 32, 1),
    "int8-f32": (("int8", "f32", False), 128, 1),
    "int8-zero": (("int8", "bf16", True), 32, 1),
    "int8-zero-f16": (("int8", "f16", True), 128, 1),
    "int8-zero-f32": (("int8", "f32", True), -1, 1),
    "fp8": (("fp8_e4m3", "f32", False), 128, 128),
    "fp8-bf16": (("fp8_e4m3", "bf16", False), -1, 1),
    "fp8-f16": (("fp8_e4m3", "f16", False), 32, 1),
    "fp8-e8m0": (("fp8_e4m3", "e8m0", False), 32, 1),
    "mxfp4": (("mxfp4", "e8m0", False), 32, 1),
    "nvfp4": (("nvfp4", "e4m3", False), 16, 1),
    **{kind: (weights, 256, 1) for kind, weights in K_QUANTS.items()},
}
#: the same of floats, which are multiplied with activations of their type alone
FLOATS = {kind: ((kind, "f32", False), -1, 1) for kind in ("bf16", "f16")}


def spec_of(hidden, intermediate, experts, group_size=128, weights=INT4, **changes):
    kind, scale_type, zero_points = weights
    layout = {"layout": "marlin", "layout_version": LAYOUTS["marlin"].VERSION}
    w = projection(kind, group_size, scale_type, "none", **layout, zero_points=int(zero_points))
    return moe_spec(experts, hidden, intermediate, w, w, **changes)
