"""Nodes and their tensors for tests of the TensorRT plug-in."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import permutations

import pytest
from support.operators.specs import (
    attention_spec,
    conv_spec,
    delta_spec,
    linear_spec,
    moe_spec,
    projection,
    routing_spec,
    space_spec,
    state_shapes,
)

from quantmoe.custom_ops import cuda
from quantmoe.custom_ops.layouts import LAYOUTS
from quantmoe.custom_ops.op import NormSpec, RouterSpec, RowsSpec, inputs, outputs
from quantmoe.custom_ops.op_def.nodes import HyperConnection
from quantmoe.custom_ops.op_def.schema import schema

if "QUANTMOE_TRT_DRIVER" not in os.environ:
    pytest.skip("make test-cuda builds the driver", allow_module_level=True)
pytest.importorskip("torch")
from support.cuda.trt import tensor

OPERATORS = len(schema().operators)
W = projection("int4", 128, "bf16", "none", layout="marlin", layout_version=LAYOUTS["marlin"].VERSION)
W2 = replace(W, group_size=64, scale_type="f16")
SPEC = moe_spec(16, 2048, 768, W, W2, activation="swiglu_oai", swiglu_limit=7.5)
ROWS = {p: LAYOUTS["marlin"].row_bytes(SPEC, p) // 4 for p in ("w13", "w2")}


def tensors(
    tokens: tuple[int, ...] = (4,), dtype: str = "bf16", ids: str = "i64", top_k: int = 8, experts: int = 16, **changes
):
    """The six tensors; a change replaces the dimensions of one."""
    dims = {
        "hidden_states": (*tokens, 2048), "topk_ids": (*tokens, top_k), "topk_weights": (*tokens, top_k),
        "w13": (experts, ROWS["w13"]), "w2": (experts, ROWS["w2"]), "output": (*tokens, 2048),
    } | changes  # fmt: skip
    types = (dtype, ids, "f32", "i32", "i32", dtype)
    return [tensor(t, d) for t, d in zip(types, dims.values(), strict=True)]


DEVICES = [
    cuda.Device(80, 108, 167936),
    cuda.Device(86, 84, 102400),
    cuda.Device(89, 128, 102400),
    *(cuda.Device(90, n, 233472) for n in (16, 60, 78, 114, 132)),  # MIG, H20, H100 PCIe, H200
    cuda.Device(100, 148, 233472),
    cuda.Device(120, 188, 102400),
    cuda.Device(121, 48, 102400),
]
NVFP4 = replace(W, format="nvfp4", group_size=16, scale_type="e4m3", activation_format="nvfp4")
FP8 = replace(W, format="fp8_e4m3", group_size=-1, scale_type="f32", activation_format="fp8_token")


# Activations are codes in either product, or rounded, by format and GPU.
SPECS = {
    "int4": SPEC,
    **{f"{a.format}-{b.format}": replace(SPEC, w13=a, w2=b) for a, b in permutations((W, NVFP4, FP8), 2)},
}
LINEAR = linear_spec(512, 264, W)
LINEAR_WORDS = LAYOUTS["marlin"].row_bytes(LINEAR.moe, "w2") // 4
ROUTING = routing_spec(64, 6, "sigmoid_topk", 1, 8, 3, routed_scaling_factor=2.5, shared_experts=2, shared_gate=1)
ROUTER = RouterSpec(hidden_size=96, **{n: v for n, v in ROUTING.attributes().items() if n != "op_version"})
TOKEN_ROWS = RowsSpec()
CONNECTION = HyperConnection(num_streams=4, hidden_size=64, iterations=20, epsilon=2.0**-20)


# numbers that f32 has
NORM = NormSpec(norm_epsilon=2.0**-20)
ATTENTION = attention_spec(32, 4, 128, rotary_size=128, qk_norm="head", scale=0.125, norm_epsilon=2.0**-20)
LATENT = attention_spec(20, 1, 576, v_head_size=512, key_split=288, rotary_size=64, scale=0.125, norm_epsilon=0.0)


def attention_tensors(batch=2, tokens=1, past=64, length=64, dtype="bf16", cache=None, spec=ATTENTION, **changes):
    heads, groups, d, v = spec.num_heads, spec.kv_num_heads, spec.head_size, spec.v_head_size
    slots, table = max(past, length), (batch, tokens, spec.rotary_size // 2)
    key, value = spec.cache_widths
    norms = {"none": (0, 0), "head": (d, d), "row": (heads * d, groups * d)}[spec.qk_norm]
    cache = cache or dtype
    found = {
        "qkv": (dtype, (batch, tokens, (heads + groups) * d + (0 if spec.key_split else groups * v))),
        "past_key": (cache, (batch, groups, past, key)), "past_value": (cache, (batch, groups, past, value)),
        "rows": ("i32", (batch, 3)), "attention_mask": ("i64", (batch, length)),
        "cos": ("f32", table), "sin": ("f32", table),
        "q_norm": ("f32", norms[:1]), "k_norm": ("f32", norms[1:]), "sinks": ("f32", (heads,)),
        "output": (dtype, (batch, tokens, heads * v)),
        "present_key": (cache, (batch, groups, slots, key)), "present_value": (cache, (batch, groups, slots, value)),
    }  # fmt: skip
    return [tensor(t, changes.get(n, dims)) for n, (t, dims) in found.items()]


def linear_tensors(rows=(4,), dtype="bf16", **changes):
    dims = {"x": (*rows, 512), "w": (1, LINEAR_WORDS), "y": (*rows, 264)} | changes
    return [tensor(t, d) for t, d in zip((dtype, "i32", dtype), dims.values(), strict=True)]


def routing_tensors(rows=(4,), dtype="bf16", **changes):
    dims = {"logits": (*rows, 65), "bias": (64,), "ids": (*rows, 8), "weights": (*rows, 8)} | changes
    return [tensor(t, d) for t, d in zip((dtype, "f32", "i32", "f32"), dims.values(), strict=True)]


# numbers that f32 has, as above
CONV = conv_spec(512)
WINDOW = conv_spec(512, state_window=3)
DELTA = delta_spec(2, 4, 64, l2_epsilon=2.0**-20, norm_epsilon=2.0**-20)
SPACE = space_spec(2, 4, 64, 32, norm_epsilon=2.0**-20)


def state_tensors(spec, batch=2, tokens=3, dtype="bf16", **changes):
    """Of CausalConv, GatedDelta or StateSpace; a change replaces the dimensions of one."""
    slots = {name: kind for name, kind in [*inputs(spec.OP), *outputs(spec.OP)]}
    types = [{"T": dtype, "float": "f32", "int32": "i32"}[kind] for kind in slots.values()]
    shapes = zip(slots, types, state_shapes(spec, batch, tokens), strict=True)
    return [tensor(type_, changes.get(name, dims)) for name, type_, dims in shapes]


def router_tensors(rows=(4,), dtype="bf16", **changes):
    dims = {"hidden": (*rows, 96), "weight": (65, 96), "bias": (0,), "correction": (64,)}
    dims |= {"ids": (*rows, 8), "weights": (*rows, 8)} | changes
    return [tensor(t, d) for t, d in zip((dtype, dtype, "f32", "f32", "i32", "f32"), dims.values(), strict=True)]


def norm_tensors(x=(3, 5, 64), residual=(3, 5, 64), weight=(64,), dtype="bf16"):
    return [tensor(dtype, dims) for dims in (x, residual, weight, x, x)]


def connection_tensors(rows=(2, 3), dtype="bf16", **changes):
    dims = {"streams": (*rows, 4, 64), "mixes": (*rows, 24), "base": (24,), "scale": (3,)}
    dims |= {"collapsed": (*rows, 64), "post": (*rows, 4), "comb": (*rows, 4, 4)}
    types = (dtype, "f32", "f32", "f32", dtype, "f32", "f32")
    return [tensor(t, d) for t, d in zip(types, (dims | changes).values(), strict=True)]


def rows_tensors(past=(2, 4, 8, 64), ids=(2, 1), mask=(2, 8), types=("f16", "i64", "i64", "i32", "i64"), more=()):
    sizes = (past, ids, mask, *more, (2, 3), (2, 1, 1))
    return [tensor(t, dims) for t, dims in zip(types, sizes, strict=True)]
