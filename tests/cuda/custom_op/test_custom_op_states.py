"""CausalConv, GatedDelta and StateSpace in the CUDA custom-op library."""

from __future__ import annotations

import ctypes

import pytest
import torch
from cuda.test_linear_attention import conv_inputs, delta_inputs, space_inputs, tensor
from support.cuda import cuda_kernels as cuda
from support.cuda.ort import CONV, DELTA, FAKE, SPACE, STREAM, WINDOW, gpu, run, value
from support.operators.specs import state_shapes

from quantmoe.custom_ops import native
from quantmoe.custom_ops.op_def.structs import STRUCTS, Tensor, node


@pytest.mark.parametrize(
    ("spec", "name", "new", "message"),
    [
        (CONV, "width", None, "attribute width of kind i is required"),
        (CONV, "state_window", 65, "state_window is 65, expected 1 to 64"),
        (CONV, "width", 129, "width is 129, expected 2 to 128"),
        (CONV, "channels", 63, "channels is 63, the CUDA kernel takes even numbers"),
        (CONV, "activation", "tanh", 'activation is "tanh", the operator defines: none, silu'),
        (DELTA, "norm_epsilon", None, "attribute norm_epsilon of kind f is required"),
        (DELTA, "k_head_size", 96, "k_head_size is 96 and v_head_size 64, the CUDA kernels take 64 and 128"),
        (DELTA, "num_k_heads", 3, "num_v_heads is 4, expected a multiple of num_k_heads 3"),
        (SPACE, "state_window", None, "attribute state_window of kind i is required"),
        (SPACE, "state_size", 96, "state_size is 96, the CUDA kernels take 64, 128 and 256"),
        (SPACE, "head_size", 16, "head_size is 16, the CUDA kernels take multiples of 32"),
    ],
)
def test_wrong_states(driver, fake, spec, name, new, message):
    fake()
    op = spec.OP
    attributes = {k: v for k, v in (spec.attributes() | {name: new}).items() if v is not None}
    assert driver.create(driver.op("f16", name=op), attributes, []) is None
    assert driver.error.startswith(f'{op} node "moe": ')
    assert message in driver.error


@pytest.mark.parametrize(
    ("spec", "at", "shape", "message"),
    [
        (CONV, 0, (2, 512), "x has shape [2, 512], expected [B, S, 512]"),
        (CONV, 1, (512, 1, 4), "weight has shape [512, 1, 4], expected [512, 4]"),
        (CONV, 2, (4,), "bias has shape [4], expected [512] or, for none, [0]"),
        (CONV, 3, (2, 512, 4), "past_conv has shape [2, 512, 4], expected [2, 512, 3]"),
        (WINDOW, 3, (2, 512, 3), "past_conv has shape [2, 512, 3], expected [3, 2, 512, 3]"),
        (CONV, 4, (1, 3), "rows has shape [1, 3], expected [2, 3]"),
        (DELTA, 0, (2, 3, 500), "qkv has shape [2, 3, 500], expected [2, 3, 512]"),
        (DELTA, 1, (2, 3, 256), "a has shape [2, 3, 256], expected [2, 3, 4]"),
        (DELTA, 3, (2, 3, 4), "z has shape [2, 3, 4], expected [2, 3, 256]"),
        (DELTA, 6, (256,), "norm has shape [256], expected [64]"),
        (DELTA, 7, (1, 4, 64, 64), "past_state has shape [1, 4, 64, 64], expected [2, 4, 64, 64]"),
        (SPACE, 0, (2, 3, 256), "xbc has shape [2, 3, 256], expected [2, 3, 384]"),
        (SPACE, 1, (2, 3, 128), "dt has shape [2, 3, 128], expected [2, 3, 4]"),
        (SPACE, 2, (2, 3, 4), "z has shape [2, 3, 4], expected [2, 3, 128]"),
        (SPACE, 5, (2,), "d has shape [2], expected [4]"),
        (SPACE, 6, (64,), "norm has shape [64], expected [128]"),
        (SPACE, 7, (2, 4, 32, 64), "past_state has shape [2, 4, 32, 64], expected [2, 4, 64, 32]"),
    ],
)
def test_wrong_state_inputs(driver, fake, spec, at, shape, message):
    fake()
    name = spec.OP
    op = driver.op("bf16", name=name)
    kernel = driver.create(op, spec.attributes(), [])
    assert kernel is not None, driver.error
    shapes = state_shapes(spec, 2, 3)
    shapes[at] = shape
    values = [value(s) for s in shapes]
    assert driver.run(op, kernel, values[:-2], values[-2:], STREAM) != 0
    assert driver.error.startswith(f'{name} node "moe": ')
    assert message in driver.error
    driver.lib.driver_destroy(op, kernel)


@pytest.mark.parametrize("bias", [True, False])
def test_states_are_launched_as_they_are_bound(driver, fake, bias):
    """Sizes and addresses of a call; present is past's memory."""
    fake()
    lib = ctypes.CDLL(FAKE)
    for spec in (CONV, DELTA, SPACE):
        op = driver.op("f16", name=spec.OP)
        kernel = driver.create(op, spec.attributes(), [])
        assert kernel is not None, driver.error
        shapes = state_shapes(spec, 2, 8)
        addresses = [4096 * (i + 1) for i in range(len(shapes))]
        addresses[-1] = addresses[-4]
        if spec is CONV and not bias:
            shapes[2] = (0,)
        values = [value(s, data=at) for s, at in zip(shapes, addresses, strict=True)]
        assert driver.run(op, kernel, values[:-2], values[-2:], STREAM) == 0, driver.error
        driver.lib.driver_destroy(op, kernel)
        attributes, inputs, outputs = STRUCTS[spec.OP](), (Tensor * (len(shapes) - 2))(), (Tensor * 2)()
        lib.driver_launched(ctypes.byref(attributes), inputs, outputs, ctypes.byref(ctypes.c_void_p()))
        assert bytes(attributes) == bytes(node(native.library(), spec))
        if spec is CONV and not bias:
            addresses[2] = None
        tensors = [*inputs, *outputs]
        assert [tensor.data for tensor in tensors] == addresses
        assert [tuple(tensor.shape.sizes[: tensor.shape.rank]) for tensor in tensors] == shapes
        assert {tensor.type for tensor in tensors} == {1}


@gpu
@pytest.mark.parametrize("call", ["one token", "ragged few", "65"])
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_run_states(driver, dtype, call):
    """In place, and into other memory: the bytes of the kernels, which test_linear_attention.py checks."""
    for spec, make in ((CONV, conv_inputs), (DELTA, delta_inputs), (SPACE, space_inputs)):
        op = driver.op(dtype, name=spec.OP)
        kernel = driver.create(op, spec.attributes(), [])
        assert kernel is not None, driver.error
        made = make(spec, dtype, call)
        want = cuda.run_node(spec, *(tensor(x, dtype) for x in made))
        for in_place in (False, True):
            inputs = [tensor(x, dtype) for x in made]
            outputs = [torch.full_like(x, float("nan")) for x in want]
            if in_place:
                outputs[1] = inputs[-2]
            shapes = [tuple(x.shape) for x in (*inputs, *outputs)]
            assert run(driver, op, kernel, inputs, shapes, outputs) == 0, driver.error
            assert driver.lib.driver_live_scratch() == 0
            for found, expected in zip(outputs, want, strict=True):
                assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
        driver.lib.driver_destroy(op, kernel)
