"""QuantLinear, MoERouting, MoERouter, AddRMSNorm and TokenRows in the CUDA custom-op library."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.cuda.built import TORCH, UNIT
from support.cuda.layers import build_linear
from support.cuda.ort import LINEAR_CASE, NORM, ROUTER, ROUTER_SHAPES, ROUTING, STREAM, fails, gpu, run, value

from quantmoe.custom_ops import reference
from quantmoe.custom_ops.op import RowsSpec


@pytest.mark.parametrize(
    ("shape", "constant", "message"),
    [
        ((1, 7), True, "w has shape [1, 7], expected [experts, "),
        ((2, None), True, "w has 2 rows, expected 1"),
        ((1, None), False, "w is computed or fed at run time, expected an initializer"),
    ],
)
def test_wrong_linear(driver, shape, constant, message):
    _, spec, w = build_linear(LINEAR_CASE)
    shape = (shape[0], shape[1] or w.shape[1] // 4)
    values = [value(()), value(shape, constant)]
    assert driver.create(driver.op("f16", name="QuantLinear"), spec.attributes(), values) is None
    assert driver.error.startswith('QuantLinear node "moe": ')
    assert message in driver.error


def test_wrong_routing(driver, fake):
    fake()
    attributes = replace(ROUTING, top_k=25).attributes()
    assert driver.create(driver.op("f32", name="MoERouting"), attributes, []) is None
    assert driver.error == 'MoERouting node "moe": top_k is 25, the CUDA kernel takes 1 to 24'


@gpu
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_run_linear(driver, dtype):
    m, spec, w = build_linear(LINEAR_CASE)
    op = driver.op(dtype, name="QuantLinear")
    kernel = driver.create(op, spec.attributes(), [value(()), value((1, w.shape[1] // 4), True)])
    assert kernel is not None, driver.error
    packed = torch.from_numpy(w).cuda()
    for leading in ((1,), (3, 50), (0, 5)):
        rows = int(np.prod(leading))
        x = torch.from_numpy(np.random.default_rng(1).normal(0, 1, (rows, 512)).astype(np.float32)).to(TORCH[dtype])
        y = torch.full((rows, 264), float("nan"), dtype=x.dtype, device="cuda")
        shapes = [(*leading, 512), (1, w.shape[1] // 4), (*leading, 264)]
        assert run(driver, op, kernel, [x.cuda(), packed], shapes, [y]) == 0, driver.error
        assert driver.lib.driver_live_scratch() == 0
        if rows:
            want = reference.linear(x.float().numpy(), m, "none")
            assert np.linalg.norm(y.double().cpu().numpy() - want) < 1.2 * UNIT[dtype] * np.linalg.norm(want)
    driver.lib.driver_destroy(op, kernel)


@gpu
def test_run_routing(driver):
    op = driver.op("f32", name="MoERouting")
    kernel = driver.create(op, ROUTING.attributes(), [])
    assert kernel is not None, driver.error
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.normal(0, 2, (18, 65)).astype(np.float32))
    bias = torch.from_numpy(rng.uniform(0, 1, 64).astype(np.float32))
    ids, weights = torch.full((18, 8), -1, dtype=torch.int32).cuda(), torch.full((18, 8), float("nan")).cuda()
    shapes = [(2, 9, 65), (64,), (2, 9, 8), (2, 9, 8)]
    assert run(driver, op, kernel, [logits.cuda(), bias.cuda()], shapes, [ids, weights]) == 0, driver.error
    want_ids, want = reference.route(ROUTING, logits.numpy(), bias.numpy())
    np.testing.assert_array_equal(ids.cpu().numpy(), want_ids)
    np.testing.assert_allclose(weights.cpu().numpy(), want, rtol=4e-6)
    shapes[1] = (63,)
    assert run(driver, op, kernel, [logits.cuda(), bias.cuda()], shapes, [ids, weights]) != 0
    assert (
        driver.error == 'MoERouting node "moe": correction_bias has shape [63], expected [64], which is [num_experts]'
    )
    driver.lib.driver_destroy(op, kernel)


@pytest.mark.parametrize(
    ("change", "weight", "message"),
    [
        ({"top_k": 25}, value((65, 96), True), "top_k is 25, the CUDA kernel takes 1 to 24"),
        ({"hidden_size": 0}, value((65, 0), True), "hidden_size is 0, the CUDA kernels take 1 to 16777216"),
        (
            {},
            value((96, 64), True),
            "weight has shape [96, 64], expected [65, 96], which is [num_experts + shared_gate, hidden_size]",
        ),
        ({}, value((65, 96)), "weight is computed or fed at run time, expected an initializer"),
    ],
)
def test_wrong_router(driver, fake, change, weight, message):
    fake()
    attributes = replace(ROUTER, **change).attributes()
    assert driver.create(driver.op("f16", name="MoERouter"), attributes, [value(()), weight]) is None
    assert driver.error.startswith('MoERouter node "moe": ')
    assert message in driver.error


@pytest.mark.parametrize(
    ("at", "shape", "message"),
    [
        (0, (2, 9, 95), "hidden_states has shape [2, 9, 95], expected [2, 9, 96]"),
        (2, (64,), "bias has shape [64], expected [65]"),
        (3, (1, 64), "correction_bias has shape [1, 64], expected [64]"),
    ],
)
def test_wrong_router_inputs(driver, fake, at, shape, message):
    fake()
    op = driver.op("bf16", name="MoERouter")
    kernel = driver.create(op, ROUTER.attributes(), [value(()), value((65, 96), True)])
    shapes = [*ROUTER_SHAPES[:at], shape, *ROUTER_SHAPES[at + 1 :]]
    assert message in fails(driver, op, kernel, shapes, 4)
    driver.lib.driver_destroy(op, kernel)


def test_wrong_norm(driver, fake):
    fake()
    op = driver.op("f16", name="AddRMSNorm")
    for weight, message in (
        (value((64, 1), True), "weight has shape [64, 1], expected [H]"),
        (value((64,)), "weight is computed or fed at run time, expected an initializer"),
    ):
        assert driver.create(op, NORM.attributes(), [value(()), value(()), weight]) is None
        assert message in driver.error
    kernel = driver.create(op, NORM.attributes(), [value(()), value(()), value((64,), True)])
    same = (3, 64)
    for shapes, message in (
        ([(3, 63), same], "residual has shape [3, 64], expected [3, 63], which is [.., H]"),
        ([same, (1, 64)], "residual has shape [1, 64], expected [3, 64]"),
    ):
        assert message in fails(driver, op, kernel, [*shapes, (64,), same, same], 3)
    driver.lib.driver_destroy(op, kernel)


def test_wrong_rows(driver, fake):
    fake()
    op = driver.op("f16", name="TokenRows")
    kernel = driver.create(op, RowsSpec().attributes(), [])
    good = [(2, 4, 8, 64), (2, 1), (2, 8), (2, 3), (2, 1, 1)]
    for at, shape, message in (
        (0, (3, 4, 8, 64), "input_ids has shape [2, 1], expected [3, S]"),
        (1, (2,), "input_ids has shape [2], expected [2, S]"),
        (2, (8,), "attention_mask has shape [8], expected [2, L]"),
    ):
        assert message in fails(driver, op, kernel, [*good[:at], shape, *good[at + 1 :]], 3)
    driver.lib.driver_destroy(op, kernel)


def test_the_number_of_logits_is_in_host_memory(driver, fake):
    assert fake(one_logit="2") == -1
    assert driver.error == 'quantmoe: quantmoe.one_logit is "2", expected 0 or 1'
    number = np.zeros(1, np.int64)
    for entries, wrong, message in (
        ({}, 0, "input 3 is 0, expected 1 or more"),
        ({"one_logit": "1"}, 5, "input 3 is 5, but the session entry quantmoe.one_logit is 1"),
    ):
        fake(**entries)
        op = driver.op("f16", name="TokenRows")
        assert [driver.lib.driver_in_host_memory(op, i) for i in range(4)] == [0, 0, 0, 1]
        kernel = driver.create(op, RowsSpec().attributes(), [], count=4)
        number[0] = wrong
        inputs = [value(s) for s in ((2, 4, 8, 64), (2, 1), (2, 8))] + [value((1,), data=number.ctypes.data)]
        assert driver.run(op, kernel, inputs, [value((2, 3)), value((2, 1, 1))], STREAM) != 0
        assert driver.error == f'TokenRows node "moe": {message}'
        driver.lib.driver_destroy(op, kernel)


@gpu
def test_run_router_norm_and_rows(driver):
    rng, dtype = np.random.default_rng(0), torch.float16
    x, residual, weight = (torch.from_numpy(rng.normal(0, 1, s)).to(dtype) for s in ((2, 9, 96), (2, 9, 96), (65, 96)))
    correction = torch.from_numpy(rng.uniform(0, 1, 64).astype(np.float32))
    ids, weights = torch.full((18, 8), -1, dtype=torch.int32).cuda(), torch.full((18, 8), float("nan")).cuda()
    op = driver.op("f16", name="MoERouter")
    kernel = driver.create(op, ROUTER.attributes(), [value(()), value((65, 96), True)])
    inputs = [x.cuda(), weight.cuda(), torch.zeros(1).cuda(), correction.cuda()]
    assert run(driver, op, kernel, inputs, ROUTER_SHAPES, [ids, weights]) == 0, driver.error
    flat = (t.double().numpy() for t in (x.reshape(18, 96), weight, torch.zeros(0), correction))
    want_ids, want = reference.router(ROUTER, *flat)
    np.testing.assert_array_equal(ids.cpu().numpy(), want_ids)
    np.testing.assert_allclose(weights.cpu().numpy(), want, rtol=1e-5)
    driver.lib.driver_destroy(op, kernel)

    op = driver.op("f16", name="AddRMSNorm")
    kernel = driver.create(op, NORM.attributes(), [value(()), value(()), value((96,), True)])
    y, total = (torch.full((2, 9, 96), float("nan"), dtype=dtype).cuda() for _ in range(2))
    inputs = [x.cuda(), residual.cuda(), weight[0].cuda()]
    shapes = [x.shape, x.shape, (96,), x.shape, x.shape]
    assert run(driver, op, kernel, inputs, shapes, [y, total]) == 0, driver.error
    want, sums = reference.add_norm(NORM, x.numpy(), residual.numpy(), weight[0].numpy())
    np.testing.assert_array_equal(total.cpu().numpy(), sums)
    np.testing.assert_allclose(y.double().cpu().numpy(), want, rtol=2.0**-10, atol=2.0**-24)
    driver.lib.driver_destroy(op, kernel)

    op = driver.op("f16", name="TokenRows")
    kernel = driver.create(op, RowsSpec().attributes(), [])
    mask = torch.tensor([[0, 1, 1, 1, 1, 0, 0, 0], [1, 1, 0, 0, 1, 0, 0, 0]])
    rows, last = torch.full((2, 3), -1, dtype=torch.int32).cuda(), torch.full((2, 1, 1), -9).cuda()
    shapes = [(2, 4, 8, 64), (2, 1), (2, 8), (2, 3), (2, 1, 1)]
    inputs = [torch.zeros(1).cuda(), torch.zeros(1).cuda(), mask.cuda()]
    assert run(driver, op, kernel, inputs, shapes, [rows, last]) == 0, driver.error
    assert rows.tolist() == [[0, 1, 3], [0, 1, 2]]
    assert last.flatten().tolist() == [0, 0]
    driver.lib.driver_destroy(op, kernel)

    kernel = driver.create(op, RowsSpec().attributes(), [], count=4)
    last = torch.full((2, 2, 1), -9).cuda()
    shapes = [(2, 4, 8, 64), (2, 3), (2, 8), (1,), (2, 3), (2, 2, 1)]
    inputs = [*inputs[:2], mask.cuda(), torch.tensor([2])]
    assert run(driver, op, kernel, inputs, shapes, [rows, last]) == 0, driver.error
    assert rows.tolist() == [[0, 3, 1], [2, 1, 2]]
    assert last.tolist() == [[[1], [2]], [[1], [2]]]
    driver.lib.driver_destroy(op, kernel)
