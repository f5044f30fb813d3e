"""QuantLinear, MoERouting, MoERouter, AddRMSNorm, HyperConnection and TokenRows in the TensorRT plug-in."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.cuda import cuda_kernels as cuda
from support.cuda.built import UNIT
from support.cuda.layers import BASE, build_linear
from support.cuda.plugin_layers import (
    CONNECTION,
    DEVICES,
    LINEAR,
    LINEAR_WORDS,
    NORM,
    ROUTER,
    ROUTING,
    TOKEN_ROWS,
    connection_tensors,
    linear_tensors,
    norm_tensors,
    router_tensors,
    routing_tensors,
    rows_tensors,
)
from support.cuda.trt import RUNTIME, TYPES, attributes_of

from quantmoe.custom_ops import reference


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_linears_of_floats(others, dtype):
    others.select("QuantLinear")
    w = replace(LINEAR.w, format=dtype, scale_type="f32", group_size=-1)
    assert others.create(attributes_of(replace(LINEAR, w=w))) is not None, others.log()


def test_linear_shapes_and_workspace(others):
    others.select("QuantLinear")
    made = others.create(attributes_of(LINEAR))
    for dtype in TYPES:
        supported = [made.call("supports", linear_tensors(dtype=dtype), at) for at in range(3)]
        assert all(supported) == (dtype in ("f16", "bf16"))
    others.log()
    for rows in ((0,), (3, 5)):
        assert made.call("configure", linear_tensors(rows)) == 0, others.log()
    for change, message in (
        ({"x": (4, 511)}, "x has shape [4, 511], expected [4, 512]"),
        ({"w": (2, LINEAR_WORDS)}, f"w has shape [2, {LINEAR_WORDS}], expected [1, {LINEAR_WORDS}"),
        ({"w": (1, 7)}, "w has shape [1, 7]"),
    ):
        assert made.call("configure", linear_tensors(**change)) != 0
        assert message in others.log()
    given = made.call("workspace", linear_tensors((300,)))
    for rows in range(301):
        for device in DEVICES:
            assert cuda.plan(cuda.linear_problem(LINEAR, "bf16", rows), device).workspace_bytes <= given


def test_routing_shapes(others):
    others.select("MoERouting")
    made = others.create(attributes_of(ROUTING))
    for dtype in TYPES:
        supported = [made.call("supports", routing_tensors(dtype=dtype), at) for at in range(4)]
        assert all(supported) == (dtype in ("f32", "f16", "bf16"))
    assert made.call("configure", routing_tensors((3, 5))) == 0
    assert made.call("workspace", routing_tensors()) == 0
    for change, message in (
        ({"logits": (4, 64)}, "logits has shape [4, 64], expected [4, 65]"),
        ({"bias": (4, 64)}, "correction_bias has shape [4, 64], expected [64]"),
    ):
        assert made.call("configure", routing_tensors(**change)) != 0
        assert message in others.log()


def test_router_shapes_and_workspace(others):
    others.select("MoERouter")
    made = others.create(attributes_of(ROUTER))
    for dtype in TYPES:
        supported = [made.call("supports", router_tensors(dtype=dtype), at) for at in range(6)]
        assert all(supported) == (dtype in ("f16", "bf16"))
    others.log()
    assert made.outputs(router_tensors((3, 5))) == [("i32", (3, 5, 8)), ("f32", (3, 5, 8))]
    for good in ({}, {"bias": (65,)}, {"correction": (0,)}):
        assert made.call("configure", router_tensors((3, 5), **good)) == 0, others.log()
    for change, message in (
        ({"hidden": (4, 95)}, "hidden_states has shape [4, 95], expected [4, 96]"),
        ({"weight": (96, 64)}, "weight has shape [96, 64], expected [65, 96]"),
        ({"bias": (64,)}, "bias has shape [64], expected [65]"),
        ({"correction": (1, 64)}, "correction_bias has shape [1, 64], expected [64]"),
    ):
        assert made.call("configure", router_tensors(**change)) != 0
        assert message in others.log()
    given = made.call("workspace", router_tensors((70,)))
    for rows in range(71):
        for device in DEVICES:
            assert cuda.plan_node(ROUTER, "bf16", 1, tokens=rows, device=device).workspace_bytes <= given


def test_norm_shapes(others):
    others.select("AddRMSNorm")
    made = others.create(attributes_of(NORM))
    for dtype in TYPES:
        supported = [made.call("supports", norm_tensors(dtype=dtype), at) for at in range(5)]
        assert all(supported) == (dtype in ("f16", "bf16"))
    others.log()
    assert made.outputs(norm_tensors()) == [("bf16", (3, 5, 64))] * 2
    assert made.call("configure", norm_tensors()) == 0, others.log()
    assert made.call("workspace", norm_tensors()) == 0
    for change, message in (
        ({"weight": (63,)}, "weight has shape [63], expected [64]"),
        ({"residual": (5, 64)}, "residual has shape [5, 64], expected [3, 5, 64]"),
    ):
        assert made.call("configure", norm_tensors(**change)) != 0
        assert message in others.log()


def test_connection_shapes(others):
    others.select("HyperConnection")
    made = others.create(attributes_of(CONNECTION))
    for dtype in TYPES:
        supported = [made.call("supports", connection_tensors(dtype=dtype), at) for at in range(7)]
        assert all(supported) == (dtype in ("f16", "bf16"))
    others.log()
    assert made.outputs(connection_tensors()) == [("bf16", (2, 3, 64)), ("f32", (2, 3, 4)), ("f32", (2, 3, 4, 4))]
    assert made.call("configure", connection_tensors()) == 0, others.log()
    assert made.call("workspace", connection_tensors()) == 0
    for change, message in (
        ({"streams": (2, 3, 5, 64)}, "streams has shape [2, 3, 5, 64], expected [2, 3, 4, 64]"),
        ({"mixes": (2, 3, 25)}, "mixes has shape [2, 3, 25], expected [2, 3, 24]"),
        ({"scale": (2,)}, "scale has shape [2], expected [3]"),
    ):
        assert made.call("configure", connection_tensors(**change)) != 0
        assert message in others.log()
    for change, message in (
        ({"num_streams": 6}, "num_streams is 6, the CUDA kernel takes up to 5"),
        ({"hidden_size": 60}, "hidden_size is 60, the CUDA kernel takes multiples of 8"),
    ):
        assert others.create(attributes_of(replace(CONNECTION, **change))) is None
        assert message in others.log()


def test_rows_shapes(others):
    others.select("TokenRows")
    made = others.create(attributes_of(TOKEN_ROWS))
    assert all(made.call("supports", rows_tensors(), at) for at in range(5))
    assert not made.call("supports", rows_tensors(types=("f16", "i32", "i64", "i32", "i64")), 1)
    assert not made.call("supports", rows_tensors(types=("f16", "i64", "i64", "i32", "i32")), 4)
    assert made.outputs(rows_tensors()) == [("i32", (2, 3)), ("i64", (2, 1, 1))]
    assert made.call("configure", rows_tensors()) == 0, others.log()
    others.select("TokenRows", optional=1)  # with the number of logits, which is 1 here
    more = {"more": ((1,),), "types": ("f16", "i64", "i64", "i64", "i32", "i64")}
    assert all(made.call("supports", rows_tensors(**more), at) for at in range(6))
    assert made.outputs(rows_tensors(ids=(2, 5), **more)) == [("i32", (2, 3)), ("i64", (2, 1, 1))]
    assert made.call("configure", rows_tensors(**more)) == 0, others.log()
    others.select("TokenRows")
    for change, message in (
        ({"past": (3, 4, 8, 64)}, "input_ids has shape [2, 1], expected [3, S]"),
        ({"ids": (2,)}, "input_ids has shape [2], expected [2, S]"),
        ({"mask": (8,)}, "attention_mask has shape [8], expected [2, L]"),
    ):
        assert made.call("configure", rows_tensors(**change)) != 0
        assert message in others.log()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_enqueue_others(others):
    rng = np.random.default_rng(0)
    stream = torch.cuda.Stream()

    def enqueue(spec, described, inputs, outputs):
        others.select(spec.OP)
        running = others.create(others.create(attributes_of(spec)).serialize(), RUNTIME).attach()
        size = running.call("workspace", described)
        workspace = torch.full((max(1, size),), 0xFF, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        assert running.call("shape_change", described) == 0, others.log()
        pointers = [(ctypes.c_void_p * len(t))(*(x.data_ptr() for x in t)) for t in (inputs, outputs)]
        tail = [ctypes.c_void_p(p) for p in (workspace.data_ptr(), stream.cuda_stream)]
        assert running.call("enqueue", described, *pointers, *tail) == 0, others.log()
        torch.cuda.synchronize()

    m, spec, w = build_linear(replace(BASE, hidden=264, intermediate=512, group_size=128))
    assert spec == LINEAR
    for rows in (1, 100):
        x = torch.from_numpy(rng.normal(0, 1, (rows, 512)).astype(np.float32)).bfloat16()
        y = torch.full((rows, 264), float("nan"), dtype=torch.bfloat16, device="cuda")
        enqueue(LINEAR, linear_tensors((rows,)), [x.cuda(), torch.from_numpy(w).cuda()], [y])
        want = reference.linear(x.float().numpy(), m, "none")
        assert np.linalg.norm(y.double().cpu().numpy() - want) < 1.2 * UNIT["bf16"] * np.linalg.norm(want)

    logits = torch.from_numpy(rng.normal(0, 2, (9, 65)).astype(np.float32))
    bias = torch.from_numpy(rng.uniform(0, 1, 64).astype(np.float32))
    ids = torch.full((9, 8), -1, dtype=torch.int32, device="cuda")
    weights = torch.full((9, 8), float("nan"), device="cuda")
    enqueue(ROUTING, routing_tensors((9,), "f32"), [logits.cuda(), bias.cuda()], [ids, weights])
    want_ids, want = reference.route(ROUTING, logits.numpy(), bias.numpy())
    np.testing.assert_array_equal(ids.cpu().numpy(), want_ids)
    np.testing.assert_allclose(weights.cpu().numpy(), want, rtol=4e-6)
