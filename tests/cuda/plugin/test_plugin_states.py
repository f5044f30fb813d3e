"""CausalConv, GatedDelta and StateSpace in the TensorRT plug-in."""

from __future__ import annotations

import ctypes

import pytest
import torch
from cuda.test_linear_attention import conv_inputs, delta_inputs, space_inputs
from cuda.test_linear_attention import tensor as on_device
from support.cuda import cuda_kernels as cuda
from support.cuda.plugin_layers import CONV, DELTA, DEVICES, SPACE, WINDOW, state_tensors
from support.cuda.trt import RUNTIME, TYPES, attributes_of
from support.operators.specs import state_shapes

from quantmoe.custom_ops import native
from quantmoe.custom_ops.op import inputs
from quantmoe.custom_ops.op_def.structs import STRUCTS, Tensor, node


@pytest.mark.parametrize("spec", [CONV, DELTA, SPACE], ids=lambda spec: spec.OP)
def test_types_of_states(others, spec):
    others.select(spec.OP)
    made = others.create(attributes_of(spec))
    count = len(state_tensors(spec))
    for x in TYPES:
        supported = [made.call("supports", state_tensors(spec, dtype=x), at) for at in range(count)]
        assert all(supported) == (x in ("f16", "bf16") or (x == "f32" and spec.OP == "CausalConv")), x
    for at, good in {i: t.type for i, t in enumerate(state_tensors(spec))}.items():
        for code in TYPES.values():
            given = state_tensors(spec)
            given[at].type = code
            assert at == 0 or made.call("supports", given, at) == (code == good)


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("spec", [CONV, WINDOW, DELTA, SPACE], ids=lambda spec: f"{spec.OP}-{spec.state_window}")
def test_outputs_of_states(others, spec, dtype):
    others.select(spec.OP)
    made = others.create(attributes_of(spec))
    y, state = state_shapes(spec, 2, 7)[-2:]
    given = state_tensors(spec, 2, 7, dtype)
    assert made.outputs(given) == [(dtype, y), (dtype if spec.OP == "CausalConv" else "f32", state)]
    names = [name for name, _ in inputs(spec.OP)]
    for name in (names[0], names[-2]):
        assert made.outputs(state_tensors(spec, **{name: (2,)})) is None
        assert f'1 {spec.OP} layer "experts": {name} has shape [2], expected ' in others.log()


@pytest.mark.parametrize(
    ("spec", "name", "dims", "message"),
    [
        (
            CONV,
            "x",
            (2, 3, 511),
            "x has shape [2, 3, 511], expected [2, 3, 512], which is [B, S, where(x_size, x_size, channels)]",
        ),
        (CONV, "weight", (512, 3), "weight has shape [512, 3], expected [512, 4]"),
        (CONV, "bias", (4,), "bias has shape [4], expected [512]"),
        (CONV, "past_conv", (1, 512, 3), "past_conv has shape [1, 512, 3], expected [2, 512, 3]"),
        (WINDOW, "past_conv", (2, 512, 3), "past_conv has shape [2, 512, 3], expected [3, 2, 512, 3]"),
        (CONV, "rows", (2, 2), "rows has shape [2, 2], expected [2, 3]"),
        (DELTA, "qkv", (2, 512), "qkv has shape [2, 512], expected [B, S, 512]"),
        (DELTA, "a", (2, 3, 256), "a has shape [2, 3, 256], expected [2, 3, 4]"),
        (DELTA, "b", (2, 2, 4), "b has shape [2, 2, 4], expected [2, 3, 4]"),
        (DELTA, "z", (1, 3, 256), "z has shape [1, 3, 256], expected [2, 3, 256]"),
        (DELTA, "a_log", (2,), "a_log has shape [2], expected [4]"),
        (DELTA, "dt_bias", (256,), "dt_bias has shape [256], expected [4]"),
        (DELTA, "norm", (256,), "norm has shape [256], expected [64]"),
        (DELTA, "past_state", (2, 4, 64, 32), "past_state has shape [2, 4, 64, 32], expected [2, 4, 64, 64]"),
        (SPACE, "xbc", (2, 384), "xbc has shape [2, 384], expected [B, S, 384]"),
        (SPACE, "dt", (2, 3, 128), "dt has shape [2, 3, 128], expected [2, 3, 4]"),
        (SPACE, "z", (1, 3, 128), "z has shape [1, 3, 128], expected [2, 3, 128]"),
        (SPACE, "a_log", (2,), "a_log has shape [2], expected [4]"),
        (SPACE, "dt_bias", (128,), "dt_bias has shape [128], expected [4]"),
        (SPACE, "d", (128,), "d has shape [128], expected [4]"),
        (SPACE, "norm", (64,), "norm has shape [64], expected [128]"),
        (SPACE, "past_state", (2, 4, 64, 64), "past_state has shape [2, 4, 64, 64], expected [2, 4, 64, 32]"),
        (SPACE, "rows", (3, 3), "rows has shape [3, 3], expected [2, 3]"),
    ],
)
def test_shapes_of_states(others, spec, name, dims, message):
    others.select(spec.OP)
    made = others.create(attributes_of(spec))
    for batch, tokens in ((1, 1), (3, 300), (0, 1), (40, 0)):
        assert made.call("configure", state_tensors(spec, batch, tokens)) == 0, others.log()
    for call in ("configure", "shape_change"):
        assert made.call(call, state_tensors(spec, **{name: dims})) != 0
        assert f'1 {spec.OP} layer "experts": {message}' in others.log()


def test_workspace_of_states(others):
    """The convolution needs none; of the profile's maxima, and enough for fewer tokens and rows."""
    others.select("CausalConv")
    assert others.create(attributes_of(CONV)).call("workspace", state_tensors(CONV, 4, 300)) == 0
    for spec in (DELTA, SPACE):
        others.select(spec.OP)
        given = others.create(attributes_of(spec)).call("workspace", state_tensors(spec, 4, 300))
        plans = (
            cuda.plan_node(spec, "bf16", batch, tokens=tokens, device=device)
            for batch in range(1, 5)
            for tokens in range(1, 301)
            for device in DEVICES
        )
        assert 0 < max(plan.workspace_bytes for plan in plans) <= given


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("spec", [CONV, DELTA, SPACE], ids=lambda spec: spec.OP)
def test_states_are_launched_with_what_they_are_given(fake, spec, in_place, bias):
    """As test_attention_is_launched_with_what_it_is_given."""
    fake.select(spec.OP)
    running = fake.create(fake.create(attributes_of(spec)).serialize(), RUNTIME).attach()
    shapes = state_tensors(spec, 3, 20, "f16", **({} if bias else {"bias": (0,)}))
    assert running.call("shape_change", shapes) == 0, fake.log()
    count, past = len(inputs(spec.OP)), -2
    given = [0x1000 * (i + 1) for i in range(count)]
    results = [0xA0000, given[past] if in_place else 0xB0000]
    pointers = [(ctypes.c_void_p * len(p))(*p) for p in (given, results)]
    before = fake.lib.driver_count(1)
    assert running.call("enqueue", shapes, *pointers, ctypes.c_void_p(0xD0000), None) == 0, fake.log()
    assert fake.lib.driver_count(1) == before + 1
    attributes, memory = STRUCTS[spec.OP](), ctypes.c_void_p()
    tensors = (Tensor * count)(), (Tensor * 2)()
    fake.lib.driver_launched(ctypes.byref(attributes), *tensors, ctypes.byref(memory))
    assert bytes(attributes) == bytes(node(native.library(), spec))
    if spec is CONV and not bias:
        given[2] = None
    assert [tensor.data for tensor in (*tensors[0], *tensors[1])] == [*given, *results]
    for tensor, described in zip(tensors[0], shapes, strict=False):
        assert tensor.shape.sizes[: tensor.shape.rank] == described.dims[: described.rank]
    assert tensors[0][0].type == 1
    assert memory.value == (None if spec is CONV else 0xD0000)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("call", ["one token", "ragged few", "65"])
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_enqueue_states(others, dtype, call):
    """In place, with one plug-in: the bytes of the kernels, which test_linear_attention.py checks."""
    for spec, make in ((CONV, conv_inputs), (DELTA, delta_inputs), (SPACE, space_inputs)):
        others.select(spec.OP)
        made = make(spec, dtype, call)
        described = state_tensors(spec, *made[0].shape[:2], dtype)
        built = others.create(attributes_of(spec))
        size = built.call("workspace", described)
        running = others.create(built.serialize(), RUNTIME).attach()
        want = cuda.run_node(spec, *(on_device(x, dtype) for x in made))
        given = [on_device(x, dtype) for x in made]
        results = [torch.full_like(want[0], float("nan")), given[-2]]
        workspace = torch.full((max(1, size),), 0xFF, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        assert running.call("shape_change", described) == 0, others.log()
        pointers = [(ctypes.c_void_p * len(t))(*(x.data_ptr() for x in t)) for t in (given, results)]
        assert running.call("enqueue", described, *pointers, ctypes.c_void_p(workspace.data_ptr()), None) == 0
        torch.cuda.synchronize()
        for found, expected in zip(results, want, strict=True):
            assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
