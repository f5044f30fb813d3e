"""CachedAttention in the TensorRT plug-in."""

from __future__ import annotations

import ctypes

import pytest
import torch
from support.cuda import cuda_kernels as cuda
from support.cuda.attention_cases import Inputs, check_results
from support.cuda.built import TORCH
from support.cuda.plugin_layers import ATTENTION, DEVICES, LATENT, attention_tensors
from support.cuda.trt import RUNTIME, TYPES, attributes_of
from support.operators.specs import attention_spec

from quantmoe.custom_ops import native
from quantmoe.custom_ops.op_def.structs import STRUCTS, Tensor, node


def test_attention_types(others):
    others.select("CachedAttention")
    made = others.create(attributes_of(ATTENTION))
    others.log()
    for x in TYPES:
        for cache in TYPES:
            supported = [made.call("supports", attention_tensors(dtype=x, cache=cache), at) for at in range(13)]
            assert all(supported) == (x == cache and x in ("f16", "bf16")), (x, cache)
    assert others.log() == (
        '2 CachedAttention layer "experts": does not run with float32 qkv, the kernels take float16 and bfloat16\n'
    )
    fresh = others.create(attributes_of(ATTENTION))
    assert not fresh.call("supports", attention_tensors(dtype="bf16", cache="f16"), 1)
    assert others.log() == '2 CachedAttention layer "experts": does not run with a cache that is not of qkv\'s type\n'
    for at, good in {3: "i32", 4: "i64", 5: "f32", 6: "f32", 7: "f32", 8: "f32", 9: "f32"}.items():
        for name in TYPES:
            given = attention_tensors()
            given[at].type = TYPES[name]
            assert made.call("supports", given, at) == (name == good)


@pytest.mark.parametrize("past", [0, 5, 64])
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_attention_outputs(others, dtype, past):
    """The cache grows where the mask is longer than it, and stays where it is not."""
    others.select("CachedAttention")
    made = others.create(attributes_of(ATTENTION))
    cache = (dtype, (2, 4, max(past, 12), 128))
    given = attention_tensors(tokens=7, past=past, length=12, dtype=dtype)
    assert made.outputs(given) == [(dtype, (2, 7, 4096)), cache, cache]
    for name in ("qkv", "past_key", "past_value", "attention_mask"):
        assert made.outputs(attention_tensors(**{name: (2,)})) is None
        assert f'1 CachedAttention layer "experts": {name} has shape [2], expected ' in others.log()


def test_attention_shapes(others):
    others.select("CachedAttention")
    made = others.create(attributes_of(ATTENTION))
    for given in ((1, 1, 0, 1), (3, 5, 64, 10), (1, 2048, 0, 2048), (64, 1, 4096, 4096), (0, 1, 0, 1)):
        assert made.call("configure", attention_tensors(*given)) == 0, others.log()
    for change, message in (
        ({"qkv": (2, 1, 5000)}, "qkv has shape [2, 1, 5000], expected [2, 1, 5120], which is [B, S, gates_size"),
        ({"qkv": (2, 5120)}, "qkv has shape [2, 5120], expected"),
        ({"past_key": (2, 8, 64, 128)}, "past_key has shape [2, 8, 64, 128], expected [2, 4, P, 128]"),
        ({"past_key": (1, 4, 64, 128)}, "past_key has shape [1, 4, 64, 128], expected [2, 4, P, 128]"),
        ({"past_value": (2, 4, 63, 128)}, "past_value has shape [2, 4, 63, 128], expected [2, 4, 64, 128]"),
        ({"rows": (2, 2)}, "rows has shape [2, 2], expected [2, 3]"),
        ({"attention_mask": (3, 64)}, "attention_mask has shape [3, 64], expected [2, L]"),
        ({"cos": (2, 1, 32)}, "cos has shape [2, 1, 32], expected [2, 1, 64]"),
        ({"sin": (1, 1, 64)}, "sin has shape [1, 1, 64], expected [2, 1, 64]"),
        ({"q_norm": (0,)}, "q_norm has shape [0], expected [128]"),
        ({"k_norm": (512,)}, "k_norm has shape [512], expected [128]"),
        ({"sinks": (4,)}, "sinks has shape [4], expected [32]"),
    ):
        for call in ("configure", "shape_change"):
            assert made.call(call, attention_tensors(**change)) != 0
            assert f'1 CachedAttention layer "experts": {message}' in others.log()


def test_latent_shapes(others):
    others.select("CachedAttention")
    made = others.create(attributes_of(LATENT))
    given = attention_tensors(2, 7, 5, 12, spec=LATENT)
    assert made.outputs(given) == [("bf16", (2, 7, 20 * 512))] + [("bf16", (2, 1, 12, 288))] * 2
    assert made.call("configure", given) == 0, others.log()
    for change, message in (
        ({"qkv": (2, 1, 12608)}, "qkv has shape [2, 1, 12608], expected [2, 1, 12096]"),
        ({"past_key": (2, 1, 64, 576)}, "past_key has shape [2, 1, 64, 576], expected [2, 1, 64, 288]"),
        ({"past_value": (2, 1, 64, 512)}, "past_value has shape [2, 1, 64, 512], expected [2, 1, 64, 288]"),
    ):
        assert made.call("shape_change", attention_tensors(spec=LATENT, **change)) != 0
        assert f'1 CachedAttention layer "experts": {message}' in others.log()


@pytest.mark.parametrize("spec", [ATTENTION, LATENT], ids=["qwen3", "latent"])
def test_attention_workspace(others, spec):
    """Of the profile's maxima, and enough for fewer tokens, rows and slots, which have more splits."""
    others.select("CachedAttention")
    made = others.create(attributes_of(spec))
    given = made.call("workspace", attention_tensors(4, 300, 5000, 5300, spec=spec))
    needed = 0
    for device in DEVICES:
        for batch in range(1, 5):
            for tokens in range(1, 301):
                for slots in (1, 700, 5000, 5300):
                    problem = cuda.attention_problem(spec, "bf16", batch, tokens, 0, slots)
                    needed = max(needed, cuda.plan_attention(problem, device).workspace_bytes)
    most = cuda.plan_attention(cuda.attention_problem(spec, "bf16", 4, 300, 0, 5300)).workspace_bytes
    assert most < needed <= given


@pytest.mark.parametrize("spec", [ATTENTION, attention_spec(4, 4, 64), LATENT], ids=["qwen3", "plain", "latent"])
@pytest.mark.parametrize(("past", "length"), [(64, 64), (64, 9), (0, 7), (20, 64)])
def test_attention_is_launched_with_what_it_is_given(fake, spec, past, length):
    """Each tensor where the kernels look for it; present is past's memory where the caller binds them so."""
    fake.select("CachedAttention")
    running = fake.create(fake.create(attributes_of(spec)).serialize(), RUNTIME).attach()
    shapes = attention_tensors(3, 2, past, length, "f16", spec=spec)
    assert running.call("shape_change", shapes) == 0, fake.log()
    given = [0x1000 * (i + 1) for i in range(10)]
    results = [0xA0000, given[1], given[2]] if past == max(past, length) else [0xA0000, 0xB0000, 0xC0000]
    pointers = [(ctypes.c_void_p * len(p))(*p) for p in (given, results)]
    before = fake.lib.driver_count(1)
    assert running.call("enqueue", shapes, *pointers, ctypes.c_void_p(0xD0000), None) == 0, fake.log()
    assert fake.lib.driver_count(1) == before + 1
    attributes, memory = STRUCTS[spec.OP](), ctypes.c_void_p()
    tensors_ = (Tensor * 10)(), (Tensor * 3)()
    fake.lib.driver_launched(ctypes.byref(attributes), *tensors_, ctypes.byref(memory))
    assert bytes(attributes) == bytes(node(native.library(), spec))
    assert [tensor.data for tensor in (*tensors_[0], *tensors_[1])] == [
        None if 0 in described.dims[: described.rank] and described.rank == 1 else address
        for address, described in zip(given, shapes, strict=False)
    ] + results
    for tensor, described in zip(tensors_[0], shapes, strict=False):
        assert tensor.shape.sizes[: tensor.shape.rank] == described.dims[: described.rank]
    assert tensors_[0][0].type == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("spec", [ATTENTION, LATENT], ids=["qwen3", "latent"])
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_enqueue_attention(others, dtype, spec):
    """In place and growing, with one plug-in, against the reference."""
    others.select("CachedAttention")
    built = others.create(attributes_of(spec))
    size = built.call("workspace", attention_tensors(2, 40, 200, 240, dtype, spec=spec))
    running = others.create(built.serialize(), RUNTIME).attach()
    workspace = torch.empty(size, dtype=torch.uint8, device="cuda")
    for rows, tokens, past, length in (
        ([(0, 40, 0), (5, 30, 0)], 40, 200, 0),
        ([(0, 1, 40), (0, 1, 199)], 1, 200, 200),
        ([(0, 1, 40), (0, 1, 200)], 1, 200, 201),
        ([(0, 40, 0), (0, 40, 0)], 40, 0, 40),
    ):
        made = Inputs.make(spec, dtype, rows, tokens, past, length)
        shapes = attention_tensors(2, tokens, past, length, dtype, spec=spec)
        on_device = made.on_device()
        mask = torch.zeros(2, max(1, length), dtype=torch.int64, device="cuda")
        tensors_ = [*on_device[:4], mask, *on_device[4:]]
        width = spec.num_heads * spec.v_head_size
        output = torch.full((2, tokens, width), float("nan"), dtype=TORCH[dtype], device="cuda")
        present = on_device[1:3]
        if length > past:
            present = [
                output.new_full((2, spec.kv_num_heads, length, width), float("nan")) for width in spec.cache_widths
            ]
        workspace.fill_(0xFF)
        torch.cuda.synchronize()
        assert running.call("shape_change", shapes) == 0, others.log()
        pointers = [(ctypes.c_void_p * len(t))(*(x.data_ptr() for x in t)) for t in (tensors_, [output, *present])]
        assert running.call("enqueue", shapes, *pointers, ctypes.c_void_p(workspace.data_ptr()), None) == 0
        torch.cuda.synchronize()
        check_results(made, [x.cpu().double().numpy() for x in (output, *present)])
