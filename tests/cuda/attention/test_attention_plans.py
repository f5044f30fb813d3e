"""CachedAttention's plans on CUDA, and what they refuse; no GPU is needed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.cuda import cuda_kernels as cuda
from support.cuda.attention_cases import EQUAL, EQUALS, HEADS, LATENT, LATENT_DEVICES, SPEC
from support.cuda.built import SM80

from quantmoe.custom_ops.op import AttentionSpec


def plan(spec: AttentionSpec, *shape: int, dtype: str = "f16", device: cuda.Device = cuda.H200) -> cuda.AttentionPlan:
    return cuda.plan_attention(cuda.attention_problem(spec, dtype, *shape), device)


def test_plans() -> None:
    qwen3 = HEADS["qwen3"]

    def few(*shape: int, spec: AttentionSpec = qwen3, device: cuda.Device = cuda.H200) -> tuple[int, int, int]:
        found = plan(spec, *shape, device=device)
        return found.tile_rows, found.splits, found.cluster

    assert few(1, 1, 2048, 2048) == (16, 16, 16)
    assert few(1, 1, 300, 300) == (16, 4, 4)
    assert few(1, 1, 190, 190) == few(1, 1, 4096, 4096, spec=HEADS["window-128"]) == (16, 1, 1)
    assert few(2, 1, 2048, 2048) == (16, 8, 8)
    assert few(2, 1, 4096, 4096) == (16, 8, 8)
    assert few(2, 1, 8192, 8192) == (16, 16, 1)  # a block of a cluster would read too much
    assert [plan(qwen3, 1, 1, n, n).stages for n in (2048, 16384, 40960)] == [3, 6, 6]
    assert plan(qwen3, 1, 1, 12288, 12288).stages == plan(HEADS["qwen3.5"], 8, 1, 4096, 4096).stages == 6
    assert plan(qwen3, 32, 1, 4096, 4096).stages == 6  # 128 blocks
    assert plan(qwen3, 64, 1, 4096, 4096).stages == 3
    assert few(1, 1, 40960, 40960) == (16, 33, 1)  # more than a cluster has
    assert few(8, 1, 512, 512) == (16, 4, 4)
    assert few(8, 1, 40960, 40960) == (16, 4, 4)  # no more splits than that
    assert plan(qwen3, 8, 1, 40960, 40960).stages == 3
    assert few(64, 1, 4096, 4096) == (16, 1, 1)
    assert few(1, 1, 2048, 2048, device=SM80) == (16, 16, 1)
    sm120 = cuda.Device(120, 170, 102400)  # too little shared memory to have a cluster of these heads
    assert few(1, 1, 2048, 2048, device=sm120) == (16, 16, 1)
    assert few(1, 1, 1024, 1024, spec=HEADS["sixteen"], device=sm120) == (16, 8, 8)
    assert few(1, 1, 2048, 2048, spec=HEADS["qwen3.5"]) == (16, 16, 16)
    assert (plan(qwen3, 1, 2048, 2048, 2048).tile_rows, plan(qwen3, 1, 2048, 2048, 2048).splits) == (128, 1)
    assert [plan(qwen3, 1, n, n, n).tile_rows for n in (512, 600)] == [64, 128]
    # A block for each multiprocessor takes tile after tile where there are more of them; of codes not.
    assert [plan(qwen3, 1, n, n, n).ring for n in (512, 600, 2048)] == [0, 132, 132]
    assert plan(replace(qwen3, cache_format="int8"), 1, 2048, 2048, 2048).ring == 0
    narrow = HEADS["each its own"]
    assert [(plan(narrow, 8, n, n, n).tile_rows, plan(narrow, 8, n, n, n).ring) for n in (1024, 2048)] == [
        (128, 0),
        (192, 132),
    ]
    assert plan(qwen3, 1, 2048, 2048, 2048, device=SM80).ring == 0
    assert plan(qwen3, 1, 16, 4096, 4096).splits == 16  # of 8 tiles
    assert [plan(qwen3, 1, n, 4096, 4096).wgmma for n in (1, 2, 3, 300)] == [0, 0, 1, 1]
    assert plan(HEADS["three of 96"], 1, 300, 4096, 4096).wgmma == 0
    assert plan(qwen3, 1, 300, 4096, 4096, device=SM80).wgmma == 0
    assert [plan(HEADS[name], 1, 300, 300, 300, device=SM80).tile_rows for name in ("qwen3", "mimo")] == [128, 64]
    assert plan(qwen3, 1, 0, 64, 64).workspace_bytes == plan(qwen3, 0, 1, 64, 64).workspace_bytes == 0
    # With any number of multiprocessors at most what a plan for none says.
    for sms in (1, 28, 132, 188):
        for shape in ((1, 1, 2048, 2048), (2, 16, 0, 300), (1, 700, 0, 700)):
            of_none = plan(qwen3, *shape, device=cuda.Device(90, 0, 233472))
            assert plan(qwen3, *shape, device=cuda.Device(90, sms, 233472)).workspace_bytes <= of_none.workspace_bytes


def test_plans_of_latents() -> None:
    def found(heads: int, *shape: int, device: cuda.Device = cuda.H200) -> tuple[int, ...]:
        chosen = plan(replace(LATENT, num_heads=heads), *shape, device=device)
        assert chosen.cluster == 1
        assert bool(chosen.workspace_bytes) == (chosen.splits > 1)
        return chosen.wgmma, chosen.tile_rows, chosen.splits, chosen.stages

    assert found(16, 1, 1, 16384, 16384) == (0, 16, 128, 4)
    assert found(16, 1, 1, 2048, 2048) == (0, 16, 64, 4)
    assert found(16, 1, 1, 33, 33) == (0, 16, 2, 4)
    assert found(16, 1, 2, 16384, 16384) == (1, 64, 128, 2)
    assert found(128, 1, 1, 16384, 16384) == (1, 64, 65, 2)
    assert found(128, 1, 1, 2048, 2048) == (1, 64, 32, 2)
    assert found(128, 32, 1, 16384, 16384) == (1, 64, 2, 2)
    assert found(128, 1, 512, 512, 512) == (1, 64, 1, 2)
    assert found(128, 1, 1, 16384, 16384, device=SM80) == (0, 16, 13, 4)
    assert found(128, 1, 1, 16384, 16384, device=LATENT_DEVICES["mma, two stages"]) == (0, 16, 10, 2)


def test_plans_of_keys_that_are_their_values() -> None:
    """A tile has heads of one token, and splits are of what a token sees."""

    def found(name: str, *shape: int, device: cuda.Device = cuda.H200, **lists: Any) -> tuple[int, ...]:
        problem = cuda.attention_problem(EQUALS[name], "f16", *shape, **lists)
        chosen = cuda.plan_attention(problem, device)
        return chosen.wgmma, chosen.tile_rows, chosen.splits, chosen.stages

    assert found("deepseek-v4", 1, 1, 16384, 16384) == (1, 64, 65, 2)
    assert found("deepseek-v4, heavily", 1, 1, 16384, 16384) == (1, 64, 10, 2)
    assert found("deepseek-v4, a window", 1, 1, 16384, 16384) == (1, 64, 1, 2)
    assert found("glm-5.3-flash", 1, 1, 16384, 16384) == (1, 64, 128, 2)
    assert found("glm-5.3-flash", 1, 40, 16384, 16384) == (1, 64, 3, 2)
    assert found("ten", 1, 1, 2048, 2048) == found("ten", 1, 1, 2048, 2048, lists=(1, 50)) == (0, 16, 86, 4)
    assert found("deepseek-v4", 1, 1, 2048, 2048, device=SM80) == (0, 16, 18, 4)

    def bytes_of(**lists: Any) -> int:
        problem = cuda.attention_problem(EQUALS["deepseek-v4"], "f16", 3, 7, 90, 90, **lists)
        return cuda.plan_attention(problem, cuda.H200).workspace_bytes

    assert bytes_of(lists=(1, 50)) - bytes_of() == -(-3 * 7 * 51 * 4 // 256) * 256


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key_split": 128}, "head_size is 512 and key_split 128, of keys that are their values the CUDA kernels take"),
        ({"key_split": 256, "chunk_size": 8}, "chunk_size is 8, of keys that are their values the CUDA kernels take 0"),
        ({"compress_rate": 4, "qk_norm": "row"}, "qk_norm is .row., of keys that are their values the CUDA kernels"),
        ({"compress_rate": 4, "key_split": 256}, "key_split is 256, expected 0 with a compress_rate"),
    ],
)
def test_keys_that_are_their_values_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(replace(EQUAL, **change), 1, 1, 64, 64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key_split": 64}, "head_size is 576, v_head_size 512 and key_split 64, of latent attention the CUDA kernels"),
        ({"head_size": 320, "v_head_size": 256}, "head_size is 320, v_head_size 256 and key_split 288, of latent"),
        ({"rotary_size": 24}, "rotary_size is 24, of latent attention the CUDA kernels take multiples of 16"),
        ({"qk_norm": "head"}, "qk_norm is .head., of latent attention the CUDA kernels take none"),
        ({"cache_format": "int8"}, "key_split is 288, expected 0 where cache_format is int8"),
    ],
)
def test_latents_that_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(replace(LATENT, **change), 1, 1, 64, 64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_size": 80, "v_head_size": 80}, "head_size is 80 and v_head_size 80, the CUDA kernels take 64, 96, 128"),
        ({"v_head_size": 128}, "head_size is 64 and v_head_size 128, the CUDA kernels take 64, 96, 128"),
        (
            {"compress_rate": 4},
            "head_size is 64 and key_split 0, of keys that are their values the CUDA kernels take 512",
        ),
        ({"kv_num_heads": 3}, "kv_num_heads is 3, expected a divisor of num_heads 8"),
        ({"kv_num_heads": 0}, "kv_num_heads is 0, expected 1 to 8"),
        ({"rotary_size": 66}, "rotary_size is 66, expected 0 to 64"),
        ({"rotary_size": 7}, "rotary_size is 7, expected an even number"),
        ({"sliding_window": -1}, "sliding_window is -1"),
        ({"chunk_size": -1}, "chunk_size is -1"),
        ({"rotary_interleaved": 2}, "rotary_interleaved is 2, expected 0 to 1"),
        ({"softcap": -1.0}, "softcap is -1, expected 0 or a positive number"),
        ({"norm_epsilon": float("inf")}, "norm_epsilon is inf, expected 0 or a positive number"),
        ({"scale": float("nan")}, "scale is nan, expected a number"),
        ({"op_version": 9}, "op_version is 9"),
    ],
)
def test_attributes_that_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(replace(SPEC, **change), 1, 1, 64, 64)


def test_shapes_that_are_refused() -> None:
    for shape, message in (
        ((1, 1, 64, 2**30), "the cache has 1073741824 slots, expected up to 536870911"),
        (
            (2, 2**26, 64, 64),
            "a batch of 2 with 67108864 tokens and 64 slots each, the CUDA kernels take up to 67108863",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            plan(SPEC, *shape)
    with pytest.raises(ValueError, match="qkv is of type 0"):
        plan(SPEC, 1, 1, 64, 64, dtype="f32")
    with pytest.raises(ValueError, match=r"compute capability 7\.5"):
        plan(SPEC, 1, 1, 64, 64, device=cuda.Device(75, 40, 65536))


def test_present_in_pasts_memory_cannot_grow() -> None:
    p = cuda.attention_problem(SPEC, "f16", 1, 1, 64, 65)
    tensors = [torch.zeros(1) for _ in range(14)]
    tensors[11], tensors[12] = tensors[1], tensors[2]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "current_stream", lambda: type("Stream", (), {"cuda_stream": 0}))
        with pytest.raises(ValueError, match="present is past's memory, whose 64 slots are to become 65"):
            cuda.launch_attention(p, cuda.plan_attention(p), *tensors)


@pytest.mark.parametrize("sizes", [(64, 64), (96, 96), (128, 128), (48, 48), (192, 128), (256, 256), (128, 192)])
def test_the_exporter_knows_what_the_plan_takes(sizes: tuple[int, int]) -> None:
    """cuda.refusal, which needs no library, says what the plan says."""
    spec = replace(SPEC, head_size=sizes[0], v_head_size=sizes[1], rotary_size=32)
    found = ""
    try:
        plan(spec, 1, 1, 64, 64)
    except ValueError as error:
        found = str(error)
    assert cuda.refusal(spec) == found
