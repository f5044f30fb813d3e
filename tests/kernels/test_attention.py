"""CachedAttention through the C ABI: every kernel within its bound; all of them, however they run, the same bytes."""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from attention import SPECS, assert_bytes, check, inputs, ragged
from specs import attention_spec

from quantmoe.custom_ops import native
from quantmoe.custom_ops.op import AttentionSpec

USABLE = [name for name, usable in native.kernels().items() if usable]


@pytest.fixture(params=USABLE)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("QUANTMOE_FORCE_KERNEL", request.param)
    return request.param


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_every_kernel_is_within_its_bound(kernel: str, spec: AttentionSpec) -> None:
    a = ragged(spec, cache=np.float16)
    check(a, a.run())


@pytest.mark.parametrize("cache", [np.float32, np.float16])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_types(kernel: str, dtype: Any, cache: Any) -> None:
    a = ragged(SPECS["norm-head"], dtype=dtype, cache=cache)
    got = a.run()
    assert [x.dtype for x in got] == [dtype, cache, cache]
    check(a, got)


@pytest.mark.parametrize("cache", [np.float32, np.float16])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_kernels_lanes_and_memory_give_the_same_bytes(
    spec: AttentionSpec, cache: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One lane does whole tiles, many split them by blocks; present in past's memory, or apart."""
    a = ragged(spec, cache=cache)
    a = dataclasses.replace(a, length=1)
    a.rows[:, 1] = np.minimum(a.rows[:, 1], 260 - a.rows[:, 2])
    want = a.run()
    for name in USABLE:
        monkeypatch.setenv("QUANTMOE_FORCE_KERNEL", name)
        for lanes in (1, 2, 64):
            assert_bytes(a.run(lanes=lanes), want)
    output, *present = want
    past = tuple(cache.copy() for cache in a.past)
    again, *_ = dataclasses.replace(a, past=past).run(present=past, lanes=3)
    assert_bytes((again,), (output,))
    for b, (_, count, before) in enumerate(a.rows.tolist()):
        assert_bytes([x[b, :, : before + count] for x in past], [x[b, :, : before + count] for x in present])


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_a_row_has_the_bytes_that_it_has_alone(spec: AttentionSpec) -> None:
    a = ragged(spec, cache=np.float16)
    output, *present = a.run(lanes=2)
    for b, (begin, count, past) in enumerate(a.rows.tolist()):
        alone, *caches = a.row(b).run()
        assert_bytes((output[b, begin : begin + count],), (alone[0],))
        assert_bytes([x[b, :, : past + count] for x in present], [x[0] for x in caches])
        assert not np.delete(output[b], np.s_[begin : begin + count], 0).any()
        assert not any(x[b, :, past + count :].any() for x in present)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("sizes", [(1,), (7,), (255, 1, 1), (64, 200)], ids=str)
def test_prefill_in_chunks_has_the_bytes_of_prefill_at_once(spec: AttentionSpec, sizes: tuple[int, ...]) -> None:
    a = inputs(spec, [[0, 262, 0]], tokens=262, past=0, length=262, cache=np.float16)
    output, *present = a.run()
    past = tuple(np.full(x.shape, np.nan, np.float16) for x in present)
    at, pieces = 0, []
    while at < 262:
        count = min(sizes[len(pieces) % len(sizes)], 262 - at)
        part = dataclasses.replace(a, past=past).tokens(slice(at, at + count), [[0, count, at]])
        pieces.append(part.run(present=past, lanes=1 + len(pieces) % 3)[0])
        at += count
    assert_bytes((np.concatenate(pieces, 1), *past), (output, *present))


@pytest.mark.parametrize("window", [0, 1, 255, 256, 257, 300])
def test_borders_of_blocks(kernel: str, window: int) -> None:
    spec = attention_spec(4, 2, 16, sliding_window=window)
    for past in (254, 255, 256, 257, 511, 512):
        a = inputs(spec, [[0, 1, past]], tokens=1, past=past, length=past + 1)
        check(a, a.run(lanes=2))


def test_a_long_cache() -> None:
    """32,768 slots, in float16, split over lanes."""
    a = inputs(attention_spec(8, 2, 64), [[0, 2, 32766]], tokens=2, past=32768, length=32768, cache=np.float16)
    got = a.run(lanes=3)
    check(a, got)
    assert_bytes(a.run(), got)


@pytest.mark.parametrize("lanes", [1, 2, 64])
@pytest.mark.parametrize(("tokens", "past"), [(1, 0), (1, 32767), (300, 5000)])
def test_the_workspace_is_what_the_header_states(tokens: int, past: int, lanes: int) -> None:
    spec, sizes = attention_spec(32, 2, 16, v_head_size=24, qk_norm="row"), []

    def buffer(size: int) -> np.ndarray:
        sizes.append(size)
        return native.aligned(size)

    inputs(spec, [[0, tokens, past]], tokens, past, past + tokens, cache=np.float16).run(lanes=lanes, buffer=buffer)
    parts, lane = 64 << 20, 4 * (128 * 16 + 32 * 16 + 256 * 32 + 128 * (2 * 32 + 304))
    assert lanes * lane <= sizes[-1] <= lanes * lane + 4 * tokens + 64 + (parts if lanes > 1 else 0)


@pytest.mark.parametrize("sink", [-np.inf, -1000.0, 1000.0])
def test_sinks(kernel: str, sink: float) -> None:
    a = ragged(SPECS["plain"])
    a = dataclasses.replace(a, sinks=np.full_like(a.sinks, sink))
    got = a.run()
    check(a, got)
    if sink == 1000:
        assert np.abs(got[0]).max() < 1e-30


def test_nothing_to_do() -> None:
    for rows, tokens in (([[0, 0, 3]], 0), ([[1, 0, 3]], 2), ([], 2)):
        a = inputs(SPECS["plain"], rows, tokens=tokens, past=4, length=6)
        check(a, a.run(lanes=2))
    a = inputs(SPECS["plain"], [[0, 1, 0]], tokens=1, past=0, length=1)
    check(a, a.run())


@pytest.mark.parametrize("lanes", [1, 4])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_a_number_stays_in_its_reach(kernel: str, bad: float, lanes: int) -> None:
    """A token's key or value that is not a number reaches those that see it, no other row."""
    spec = attention_spec(4, 2, 16, sliding_window=5)
    a = inputs(spec, [[0, 40, 250], [0, 40, 3]], tokens=40, past=300, length=300)
    want, *_ = a.run()
    for at in (4 * 16 + 3, 6 * 16 + 7):  # in the first group's key, in its value
        qkv = a.qkv.copy()
        qkv[0, 10, at] = bad
        got, *_ = dataclasses.replace(a, qkv=qkv).run(lanes=lanes)
        reached = np.zeros(got.shape, bool)
        reached[0, 10:15, : 2 * 16] = True
        assert_bytes((got[~reached],), (want[~reached],))
        found = got[0, 10:15, : 2 * 16]
        if at > 6 * 16:
            assert np.array_equal(~np.isfinite(found), np.broadcast_to(np.arange(32) % 16 == 7, found.shape))
        elif np.isnan(bad):
            assert np.isnan(found).all()
        if np.isnan(bad):
            assert {x.tobytes() for x in found[np.isnan(found)]} == {np.float32(np.nan).tobytes()}


def test_what_lies_beyond_the_tokens_is_not_read(kernel: str) -> None:
    """Slots after the last token, before the window and in other rows may hold anything, as 0xff, a NaN."""
    for spec in (SPECS["plain"], SPECS["window"], SPECS["chunks"]):
        a = ragged(spec, cache=np.float16)
        want, *_ = a.run()
        past = tuple(np.full((5, 2, 300, 32), np.nan, np.float16) for _ in range(2))
        for cache, from_ in zip(past, a.past, strict=True):
            cache.view(np.uint16)[:] = 0xFFFF
            for b, (_, _, before) in enumerate(a.rows.tolist()):
                low = before - spec.sliding_window + 1 if spec.sliding_window else 0
                low = before // spec.chunk_size * spec.chunk_size if spec.chunk_size else max(low, 0)
                cache[b, :, low:before] = from_[b, :, low:before]
        got, *_ = dataclasses.replace(a, past=past).run(present=past, lanes=2)
        assert_bytes((got,), (want,))


def test_float16_ends_at_65504(kernel: str) -> None:
    a = inputs(attention_spec(2, 1, 16), [[0, 2, 0]], tokens=2, past=0, length=2, cache=np.float16)
    a.qkv[0, 1, 32:48] = 65519.99, 65520, -1e6, *[1] * 13
    _, key, _ = a.run()
    np.testing.assert_array_equal(key[0, 0, 1, :4], np.array([65504, np.inf, -np.inf, 1], np.float16))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([-1, 1, 0], r"rows\[1\] is \[-1, 1, 0\] .*: expected numbers of at least 0"),
        ([0, -1, 0], r"rows\[1\] .*: expected numbers of at least 0"),
        ([0, 1, -1], r"rows\[1\] .*: expected numbers of at least 0"),
        ([2, 2, 0], r"rows\[1\] .*: the call's tokens are 3"),
        ([2147483647, 2147483647, 2147483647], r"rows\[1\] .*: the call's tokens are 3"),
        ([0, 1, 6], r"rows\[1\] .*: the cache before the call has slots 5"),
        ([0, 3, 5], r"rows\[1\] .*: the cache has slots 7"),
    ],
)
def test_rows_that_cannot_be(row: list[int], message: str) -> None:
    a = inputs(SPECS["plain"], [[0, 1, 0], row], tokens=3, past=5, length=7)
    with pytest.raises(ValueError, match=message):
        a.run()
    with pytest.raises(ValueError, match=r"rows\[1\]"):
        a.reference()


def test_present_in_pasts_memory_cannot_have_more_slots() -> None:
    a = inputs(SPECS["plain"], [[0, 1, 0]], tokens=1, past=5, length=7)
    with pytest.raises(ValueError, match="present is past's memory, which has 5 slots, and is to have 7"):
        a.run(present=a.past)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 0}, "num_heads is 0, expected 1 to"),
        ({"kv_num_heads": 3}, "kv_num_heads is 3, expected a divisor of num_heads 4"),
        ({"kv_num_heads": 5}, "kv_num_heads is 5, expected 1 to 4"),
        ({"head_size": 0}, "head_size is 0"),
        ({"v_head_size": -1}, "v_head_size is -1"),
        ({"sliding_window": -1}, "sliding_window is -1"),
        ({"chunk_size": -1}, "chunk_size is -1"),
        ({"rotary_size": 34}, "rotary_size is 34, expected 0 to 32"),
        ({"rotary_size": 3}, "rotary_size is 3, expected an even number"),
        ({"rotary_interleaved": 2}, "rotary_interleaved is 2"),
        ({"softcap": -1.0}, "softcap is -1, expected 0 or a positive number"),
        ({"norm_epsilon": float("nan")}, "norm_epsilon is nan"),
        ({"scale": float("inf")}, "scale is inf, expected a number"),
        ({"qk_norm": "layer"}, 'qk_norm is "layer", the operator defines: none, head, row'),
    ],
)
def test_bad_attributes_are_named(change: dict, message: str) -> None:
    assert message in native.refusal(dataclasses.replace(SPECS["plain"], **change), {})


def test_bfloat16_caches_are_refused() -> None:
    a = ragged(SPECS["plain"], cache=ml_dtypes.bfloat16)
    with pytest.raises(ValueError, match="the cache's type is bfloat16, the CPU kernels take float and float16"):
        a.run()
