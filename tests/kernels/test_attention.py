"""CachedAttention through the C ABI: every kernel within its bound; all of them, however they run, the same bytes."""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from support.harness.sweeps import every
from support.operators.attention import (
    CACHES,
    CODES,
    SPECS,
    Inputs,
    alone,
    assert_bytes,
    check,
    in_blocks,
    inputs,
    ragged,
    selecting,
    selects,
)
from support.operators.specs import attention_spec

from quantmoe.custom_ops import native
from quantmoe.custom_ops.op import AttentionSpec

USABLE = [name for name, usable in native.kernels().items() if usable]


@pytest.fixture(params=USABLE)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("QUANTMOE_FORCE_KERNEL", request.param)
    return request.param


@pytest.mark.parametrize("cache", CACHES[1:], ids=str)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_every_kernel_is_within_its_bound(kernel: str, spec: AttentionSpec, cache: Any) -> None:
    a = ragged(spec, cache=cache)
    check(a, a.run())


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_types(kernel: str, dtype: Any, cache: Any) -> None:
    a = ragged(SPECS["norm-head"], dtype=dtype, cache=cache)
    got = a.run()
    assert [x.dtype for x in got] == [dtype, *(x.dtype for x in a.past)]
    check(a, got)


@pytest.mark.parametrize("cache", CACHES)
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


@pytest.mark.parametrize("cache", CACHES[1:])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_a_row_has_the_bytes_that_it_has_alone(spec: AttentionSpec, cache: Any) -> None:
    a = ragged(spec, cache=cache)
    output, *present = a.run(lanes=2)
    for b, (begin, count, past) in enumerate(a.rows.tolist()):
        alone, *caches = a.row(b).run()
        assert_bytes((output[b, begin : begin + count],), (alone[0],))
        assert_bytes([x[b, :, : past + count] for x in present], [x[0] for x in caches])
        assert not np.delete(output[b], np.s_[begin : begin + count], 0).any()
        assert not any(x[b, :, past + count :].any() for x in present)


#: new tokens and slots before, of requests: a block's borders, decode, prompts from the start and after others
LENGTHS = [(1, 255), (1, 256), (5, 0), (300, 211), (1, 0), (2, 511)]


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize(("name", "spec"), [(n, s) for n, s in SPECS.items() if not (s.nope_size or s.compress_rate)])
def test_requests_in_blocks_have_the_bytes_that_they_have_alone(name: str, spec: AttentionSpec, cache: Any) -> None:
    a = in_blocks(spec, LENGTHS, columns=3, blocks=21, cache=cache)
    before = [cache.copy() for cache in a.past]
    output, *present = a.run(lanes=2)
    assert_bytes(a.past, before)
    for b, (begin, count, past) in enumerate(a.rows.tolist()):
        want, *caches = alone(a, b).run()
        assert_bytes((output[:, begin : begin + count],), (want,))
        for found, own, old in zip(present, caches, before, strict=True):
            slots = found[a.block_table[b]].reshape(-1, *found.shape[2:])
            assert_bytes((slots[: past + count],), (np.ascontiguousarray(own[0].swapaxes(0, 1)),))
            assert_bytes((slots[past + count :],), (old[a.block_table[b]].reshape(slots.shape)[past + count :],))
    again, *_ = a.run(present=a.past)
    assert_bytes((again, *a.past), (output, *present))


def test_the_reference_takes_blocks() -> None:
    for name in ("rotary", "window", "norm-row"):
        a = in_blocks(SPECS[name], LENGTHS, columns=3, blocks=21, cache=np.float16)
        output, *present = a.reference()
        for b, (begin, count, past) in enumerate(a.rows.tolist()):
            want, *caches = alone(a, b).reference()
            np.testing.assert_array_equal(output[:, begin : begin + count], want)
            for found, own in zip(present, caches, strict=True):
                slots = found[a.block_table[b]].reshape(-1, *found.shape[2:])[: past + count]
                np.testing.assert_array_equal(slots, own[0].swapaxes(0, 1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": [[0, 1, 5], [2, 1, 0]]}, r"rows\[1\] is \[2, 1, 0\].*expected as the first token 1"),
        ({"rows": [[0, 3, 5], [3, 0, 0]]}, r"rows\[1\] is \[3, 0, 0\].*expected tokens of at least 1"),
        ({"rows": [[0, 1, 5], [1, 1, 0]]}, r"rows have 2 tokens: the call's tokens are 3"),
        ({"rows": [[0, 1, 512], [1, 2, 0]]}, r"rows\[0\] is \[0, 1, 512\].*the cache has slots 512"),
        ({"block_table": [[4, 0], [1, 2]]}, r"block_table\[0\]\[0\] is 4: the caches have 4 blocks"),
        ({"block_table": [[0, 3], [-1, 2]]}, r"block_table\[1\]\[0\] is -1: the caches have 4 blocks"),
        ({"cos": np.zeros((4, 16))}, r"rows\[0\] is \[0, 1, 5\].*cos and sin have slots 4"),
    ],
)
def test_requests_that_blocks_do_not_hold_are_refused(change: dict[str, Any], message: str) -> None:
    a = in_blocks(SPECS["rotary"], [(1, 5), (2, 0)], columns=2, blocks=4, positions=512)
    arrays = {name: np.array(value, getattr(a, name).dtype) for name, value in change.items()}
    bad = dataclasses.replace(a, **arrays)
    with pytest.raises(ValueError, match=message):
        bad.run()
    with pytest.raises((ValueError, IndexError)):
        bad.reference()


def test_sizes_of_blocks() -> None:
    a = in_blocks(SPECS["plain"], [(1, 5)], columns=1, blocks=1)
    for size in (128, -256, 255):
        with pytest.raises(ValueError, match="block_size is"):
            dataclasses.replace(a, spec=dataclasses.replace(a.spec, block_size=size)).run()


def ones(like: np.ndarray) -> np.ndarray:
    """An array of bytes 0xff: a NaN of every type but int8."""
    return np.full(like.nbytes, 0xFF, np.uint8).view(like.dtype).reshape(like.shape)


@pytest.mark.parametrize(
    ("spec", "cache"),
    [*((s, np.float16) for s in SPECS.values() if not s.nope_size), *((SPECS["odd-widths"], c) for c in CODES)],
)
@pytest.mark.parametrize("sizes", [(1,), (7,), (255, 1, 1), (64, 200)], ids=str)
def test_prefill_in_chunks_has_the_bytes_of_prefill_at_once(
    spec: AttentionSpec, cache: Any, sizes: tuple[int, ...]
) -> None:
    a = inputs(spec, [[0, 262, 0]], tokens=262, past=0, length=262, cache=cache)
    output, *present = a.run()
    past = tuple(map(ones, present))
    at, pieces = 0, []
    while at < 262:
        count = min(sizes[len(pieces) % len(sizes)], 262 - at)
        part = dataclasses.replace(a, past=past).tokens(slice(at, at + count), [[0, count, at]])
        pieces.append(part.run(present=past, lanes=1 + len(pieces) % 3)[0])
        at += count
    assert_bytes((np.concatenate(pieces, 1), *past), (output, *present))


#: expands from 48 new tokens on
UP = attention_spec(6, 2, 32, v_head_size=24, key_split=16, rotary_size=8, nope_size=16, out_size=16)


def in_parts(a: Inputs, sizes: tuple[int, ...]) -> list[np.ndarray]:
    """Output and caches of a row's tokens in calls of so many, over again, into caches that were never cleared."""
    _, count, at = a.rows[0].tolist()
    past = tuple(ones(np.empty((1, *x.shape[1:2], at + count, x.shape[3]), x.dtype)) for x in a.past)
    for cache, before in zip(past, a.past, strict=True):
        cache[:, :, :at] = before[:, :, :at]
    first, pieces = 0, []
    while first < count:
        size = min(sizes[len(pieces) % len(sizes)], count - first)
        part = dataclasses.replace(a, past=past, length=1)
        part = part.tokens(slice(first, first + size), [[0, size, at + first]])
        pieces.append(part.run(present=past, lanes=1 + len(pieces) % 3)[0])
        first += size
    return [np.concatenate(pieces, 1), *past]


@pytest.mark.parametrize("count", [47, 48, 49, 129, 300])
@pytest.mark.parametrize("past", every([0, 255, 256, 700], 2))
def test_tokens_at_the_border_of_expansion(kernel: str, count: int, past: int) -> None:
    assert [UP.expands(n) for n in (1, 47, 48, 300)] == [False, False, True, True]
    a = inputs(UP, [[0, count, past]], tokens=count, past=past, length=past + count, cache=np.float16)
    got = a.run()
    if count + past < 400 or count < 50:
        check(a, got)
    assert_bytes(a.run(lanes=40), got)


def test_prefill_in_chunks_of_latents_that_are_expanded_or_absorbed() -> None:
    """All parts expand, or none does: the bytes of one call. Some of each: within the bounds of each."""
    for spec in (UP, dataclasses.replace(UP, sliding_window=60), dataclasses.replace(UP, chunk_size=100)):
        a = inputs(spec, [[0, 262, 3]], tokens=262, past=3, length=265, cache=np.float16)
        whole = a.run()
        for sizes in ((48, 107), (131,), (214, 48)):
            assert_bytes(in_parts(a, sizes), whole)
        each = in_parts(a, (1,))
        for sizes in ((7,), (47, 1)):
            assert_bytes(in_parts(a, sizes), each)
        check(a, whole)
        mixed = in_parts(a, (200, 1, 5, 40, 16))
        assert_bytes((mixed[0][:, :200],), (whole[0][:, :200],))
        assert_bytes((mixed[0][:, 200:],), (each[0][:, 200:],))
        assert_bytes(mixed[1:], whole[1:])


def test_a_prompt_of_several_tasks_of_a_head() -> None:
    """2,500 tokens: more than a task expands for. Their bytes are those of parts, and of more lanes than heads."""
    spec = attention_spec(2, 1, 18, v_head_size=16, key_split=9, nope_size=1, out_size=1)
    a = inputs(spec, [[0, 2500, 0]], tokens=2500, past=0, length=2500, cache=np.float16)
    want = in_parts(a, (700,))
    for lanes in (3, 40):
        assert_bytes(a.run(lanes=lanes), want)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("cache", CACHES[:2])
def test_types_of_up_projections(kernel: str, dtype: Any, cache: Any) -> None:
    a = inputs(UP, [[0, 60, 10], [13, 47, 0], [5, 0, 9], [0, 1, 70]], 60, 70, 71, dtype=dtype, cache=cache)
    got = a.run(lanes=2)
    assert [x.dtype for x in got] == [dtype, cache, cache]
    check(a, got)


@pytest.mark.parametrize("tokens", [2, 60])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_latent_that_is_not_a_number_stays_in_its_reach(kernel: str, bad: float, tokens: int) -> None:
    """In the first group's latent of a token: its heads of tokens that see it, no other row. In v_up: a feature."""
    spec = dataclasses.replace(UP, sliding_window=5)
    a = inputs(spec, [[0, tokens, 250], [0, tokens, 3]], tokens=tokens, past=300, length=310)
    want, *_ = a.run()
    qkv = a.qkv.copy()
    qkv[0, 1, 6 * 24 + 20] = bad
    got, *_ = dataclasses.replace(a, qkv=qkv).run(lanes=4)
    reached = np.zeros(got.shape, bool)
    reached[0, 1:6, : 3 * 16] = True
    assert_bytes((got[~reached],), (want[~reached],))
    assert np.isnan(bad) <= np.isnan(got[reached]).all()
    assert {x.tobytes() for x in got[np.isnan(got)]} <= {np.float32(np.nan).tobytes()}
    v_up = a.ups[1].copy()
    v_up[4, 3, 7] = bad
    got, *_ = dataclasses.replace(a, ups=(a.ups[0], v_up)).run()
    reached = np.zeros(got.shape, bool)
    reached[..., 4 * 16 + 7] = True
    assert not np.isfinite(got[reached]).any()
    assert_bytes((got[~reached],), (want[~reached],))


@pytest.mark.parametrize("window", [0, 1, 255, 256, 257, 300])
def test_borders_of_blocks(kernel: str, window: int) -> None:
    spec = attention_spec(4, 2, 16, sliding_window=window)
    for past in (254, 255, 256, 257, 511, 512):
        a = inputs(spec, [[0, 1, past]], tokens=1, past=past, length=past + 1)
        check(a, a.run(lanes=2))


@pytest.mark.parametrize("cache", CACHES[1:])
def test_a_long_cache(cache: Any) -> None:
    """32,768 slots, split over lanes."""
    a = inputs(attention_spec(8, 2, 64), [[0, 2, 32766]], tokens=2, past=32768, length=32768, cache=cache)
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


@pytest.mark.parametrize("lanes", [1, 64])
@pytest.mark.parametrize(("tokens", "past"), [(1, 32767), (47, 100), (3000, 0)])
def test_the_workspace_of_latents_is_what_the_header_states(tokens: int, past: int, lanes: int) -> None:
    sizes: list[int] = []

    def buffer(size: int) -> np.ndarray:
        sizes.append(size)
        return native.aligned(size)

    inputs(UP, [[0, tokens, past]], tokens, past, past + tokens, cache=np.float16).run(lanes=lanes, buffer=buffer)
    absorbed, expanded = min(tokens, 47), min(tokens, 2048)
    rows = 4 * absorbed * (6 + 2) * 32 + 4 * absorbed * 6 * 24
    attends = 4 * (128 * 32 + 32 * 32 + 256 * 32 + 128 * (2 * 32 + 304))
    lane = 4 * (expanded * (24 + 16 + 16) + (16 + 16 + 35) * 24 + 256 * 40 + 32 * 32 + 128 * (16 + 288) + 8704)
    fixed = rows + 1024 + (64 << 20 if lanes > 1 else 0)
    assert lanes * attends + rows <= sizes[-1] <= lanes * (attends + lane) + fixed


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


@pytest.mark.parametrize("type_", CACHES[1:])
def test_what_lies_beyond_the_tokens_is_not_read(kernel: str, type_: Any) -> None:
    """Slots after the last token, before the window and in other rows may hold anything, as 0xff, a NaN."""
    for spec in (SPECS["plain"], SPECS["window"], SPECS["chunks"]):
        a = ragged(spec, cache=type_)
        want, *_ = a.run()
        past = tuple(ones(np.empty((5, 2, 300, x.shape[3]), x.dtype)) for x in a.past)
        for cache, from_ in zip(past, a.past, strict=True):
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


def stored_keys(spec: AttentionSpec, keys: np.ndarray) -> np.ndarray:
    """What one head's cache has of keys [S, D]."""
    count, d = keys.shape
    a = inputs(spec, [[0, count, 0]], tokens=count, past=0, length=count, cache=spec.cache_format)
    a.qkv[0, :, d : 2 * d] = keys
    return a.run()[1][0, 0]


HALVES = np.arange(-1.5, 2, 0.5)


@pytest.mark.parametrize("scale", [0.5, 0.013, 2.0**-64, 2.0**64])
def test_int8_codes(kernel: str, scale: float) -> None:
    """Ties are to even, the rest saturates."""
    at = (np.array([-128, -127, 0, 126, 127])[:, None] + HALVES).ravel()
    spec = attention_spec(1, 1, at.size + 5, cache_format="int8", k_scale=np.float32(scale))
    odd = [np.inf, -np.inf, np.nan, 3e38, 1e-44]
    with np.errstate(over="ignore"):
        x = np.float32(at) * np.float32(scale)
        want = np.rint(x / np.float32(scale)).clip(-128, 127)
        ends = [127, -128, 0, *np.rint(np.float32(odd[3:]) / np.float32(scale)).clip(-128, 127)]
    codes = stored_keys(spec, np.float32([*x, *odd])[None])
    assert codes.tolist() == [[*want, *ends]]
    assert set(want[at == 126.5]) == {126} or scale == 0.013  # of powers of two quotients are exact


@pytest.mark.parametrize("scale", [0.5, 0.013, 2.0**-64, 2.0**64])
def test_e4m3_codes(kernel: str, scale: float) -> None:
    """Every number, between two of them, and what saturates; as torch rounds."""
    table = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    at = np.concatenate([table, (table[1:] + table[:-1]) / 2, [449, 1000, 3e38, 1e-44]])
    at = np.concatenate([at, -at, [np.inf, -np.inf, np.nan]])
    with np.errstate(over="ignore"):
        x = at.astype(np.float32) * np.float32(scale)
    spec = attention_spec(1, 1, x.size, cache_format="fp8_e4m3", k_scale=np.float32(scale))
    want = (torch.from_numpy(x) / np.float32(scale)).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    assert stored_keys(spec, x[None])[0].tolist() == want.tolist()


def test_int8_token_codes(kernel: str) -> None:
    spec = attention_spec(1, 1, 6, cache_format="int8_token")
    x = [[0, 0, -0.0, 0, 0, 0], [1, -2, 0.5, 254, -254, 3], [1, np.nan, 2, 3, 4, 5], [1, -np.inf, 2, 3, 4, 5]]
    x += [[1e-44, -1e-44, 0, 0, 0, 0], [3e38, -3.4e38, 1e38, 0, 0, 1]]
    found = stored_keys(spec, np.float32(x))
    codes, scales = found[:, :6].tolist(), np.ascontiguousarray(found[:, 6:]).view(np.float32)[:, 0]
    np.testing.assert_array_equal(scales, np.float32([0, 2, np.nan, np.nan, 0, np.float32(3.4e38) / np.float32(127)]))
    assert codes[0] == codes[2] == codes[3] == codes[4] == [0] * 6
    assert codes[1] == [0, -1, 0, 127, -127, 2]  # 0.5 and 1.5 to even
    assert codes[5] == [112, -127, 37, 0, 0, 0]


@pytest.mark.parametrize("cache", ["fp8_e4m3", "int8_token"])
def test_a_code_that_is_not_a_number_reaches_those_that_see_it(kernel: str, cache: str) -> None:
    spec = attention_spec(4, 2, 16, sliding_window=5)
    a = inputs(spec, [[0, 40, 250]], tokens=40, past=300, length=300, cache=cache)
    want, *_ = a.run()
    for at in (4 * 16 + 3, 6 * 16 + 7):  # in the first group's key, in its value
        qkv = a.qkv.copy()
        qkv[0, 10, at] = np.nan
        got, *_ = dataclasses.replace(a, qkv=qkv).run()
        reached = np.zeros(got.shape, bool)
        reached[0, 10:15, : 2 * 16] = True
        if at > 6 * 16 and cache == "fp8_e4m3":
            reached &= np.arange(64) % 16 == 7
        assert np.isnan(got[reached]).all()
        assert {x.tobytes() for x in got[reached]} == {np.float32(np.nan).tobytes()}
        assert_bytes((got[~reached],), (want[~reached],))


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
        ({"cache_format": "int4"}, 'cache_format is "int4", the operator defines: none, int8, fp8_e4m3, int8_token'),
        ({"cache_format": "int8", "k_scale": 0.0}, "k_scale is 0, expected a number from 2^-64 to 2^64"),
        ({"cache_format": "int8", "v_scale": -1.0}, "v_scale is -1, expected a number"),
        ({"cache_format": "fp8_e4m3", "v_scale": float("nan")}, "v_scale is nan, expected a number"),
        ({"cache_format": "fp8_e4m3", "k_scale": float("inf")}, "k_scale is inf, expected a number"),
        ({"k_scale": 0.5}, "k_scale is 0.5, expected 1 where cache_format is none"),
        ({"cache_format": "int8_token", "v_scale": 2.0}, "v_scale is 2, expected 1 where cache_format is int8_token"),
        ({"gated": 2}, "gated is 2, expected 0 to 1"),
        ({"gated": 1, "key_split": 8}, "gated is 1, expected 0 with a key_split"),
        ({"nope_size": 8, "out_size": 8}, "nope_size is 8, expected 0 without a key_split"),
        ({"key_split": 8, "nope_size": -1}, "nope_size is -1, expected 0 to"),
        ({"key_split": 8, "nope_size": 8}, "out_size is 0, expected 1 to"),
        ({"key_split": 8, "out_size": 8}, "out_size is 8, expected 0 to 0"),
        (
            {"key_split": 8, "nope_size": 8, "out_size": 8, "qk_norm": "head"},
            "qk_norm is head, expected none with a nope",
        ),
        ({"key_split": 8, "nope_size": 8, "out_size": 8, "rotary_size": 2}, "rotary_size is 2, expected 0 to 0"),
        ({"qk_norm": "layer"}, 'qk_norm is "layer", the operator defines: none, head, row'),
    ],
)
def test_bad_attributes_are_named(change: dict, message: str) -> None:
    assert message in native.refusal(dataclasses.replace(SPECS["plain"], **change), {})


def test_bfloat16_caches_are_refused() -> None:
    a = ragged(SPECS["plain"], cache=ml_dtypes.bfloat16)
    with pytest.raises(ValueError, match="the cache's type is bfloat16, the CPU kernels take float and float16"):
        a.run()


#: nodes that take lists: without windows, chunks and blocks, or with compressed keys
LISTS = {
    name: spec for name, spec in SPECS.items() if spec.compress_rate or not (spec.sliding_window or spec.chunk_size)
}


@pytest.mark.parametrize("cache", CACHES[1:], ids=str)
@pytest.mark.parametrize("spec", LISTS.values(), ids=LISTS)
def test_selected_slots(kernel: str, spec: AttentionSpec, cache: Any) -> None:
    """Lists of several blocks, for all groups and for each; rows of few tokens attend to all."""
    for lists, size in ((1, 258), (spec.kv_num_heads, 7)):
        a = selecting(ragged(spec, cache=cache), lists, size)
        got = a.run()
        check(a, got)
        assert_bytes(a.run(lanes=40), got)


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("spec", LISTS.values(), ids=LISTS)
def test_selected_slots_on_all_kernels(spec: AttentionSpec, cache: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row's bytes are those that it has alone and in place, and other slots are not read."""
    a = selecting(ragged(spec, cache=cache), 1, 200)
    want = a.run()
    for name in USABLE:
        monkeypatch.setenv("QUANTMOE_FORCE_KERNEL", name)
        assert_bytes(a.run(lanes=2), want)
    for b, (begin, count, past) in enumerate(a.rows.tolist()):
        alone = a.row(b)
        assert_bytes(alone.run()[:1], (want[0][b : b + 1, begin : begin + count],))
        if not selects(a, b):
            continue
        assert a.selected is not None
        read = a.selected[b][a.selected[b] >= 0]
        if spec.compress_rate:
            read = np.append(read, np.arange(past - (spec.sliding_window or past), past))
        caches = [ones(np.empty((1, x.shape[1], past + count, x.shape[3]), x.dtype)) for x in a.past]
        for cache_, before in zip(caches, alone.past, strict=True):
            for slot in set(read.tolist()) & {*range(past)}:
                cache_[:, :, slot] = before[:, :, slot]
        again = dataclasses.replace(alone, past=tuple(caches), length=1)
        assert_bytes(again.run(present=again.past)[:1], (want[0][b : b + 1, begin : begin + count],))


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("spec", LISTS.values(), ids=LISTS)
def test_a_list_of_all_slots_is_dense_attention_bit_for_bit(spec: AttentionSpec, cache: Any) -> None:
    """Where the row has no more tokens than the list, and, token for token, where it has one more."""
    count = 3
    a = inputs(spec, [[0, count, 300]], tokens=count, past=300, length=300 + count, cache=cache)
    dense = a.run()
    every = np.full((1, count, 1, 300 + count), -1, np.int32)
    for i in range(count):
        every[0, i, 0, : 301 + i] = np.arange(301 + i)
    assert_bytes(dataclasses.replace(a, selected=every).run(lanes=2), dense)
    every[0, -1, 0, -1] = -1
    output, *present = dataclasses.replace(a, selected=every[..., :-1]).run(lanes=2)
    if not spec.expands(count):
        assert_bytes((output[:, :-1], *present), (dense[0][:, :-1], *dense[1:]))
    assert (output[:, -1] != dense[0][:, -1]).any()


def test_a_prompt_of_lists_in_pieces() -> None:
    """Latents whose dense prompts are expanded: with lists they are absorbed, 128 tokens at a time."""
    for spec in (UP, SPECS["nine-heads"], SPECS["compressed"]):
        a = inputs(spec, [[0, 300, 3]], tokens=300, past=3, length=303, cache=np.float16)
        a = selecting(a, 1, 40)
        whole = a.run(lanes=2)
        for size in (1, 7, 131):
            each = [
                dataclasses.replace(a, past=tuple(x[:, :, : 3 + at] for x in whole[1:]), length=3 + min(at + size, 300))
                .tokens(slice(at, at + size), [[0, min(size, 300 - at), 3 + at]])
                .run()[0]
                for at in range(40, 300, size)  # with fewer tokens than a list the row attends to all
            ]
            assert_bytes((np.concatenate(each, 1),), (whole[0][:, 40:],))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, r"selected\[0, 0, 0\]: expected ascending slots from 0 to 9, then -1"),
        ({0: 10}, r"selected\[0, 0, 0\]: expected ascending"),
        ({0: 5, 1: 5}, r"selected\[0, 0, 0\]: expected ascending"),
        ({0: 5, 1: 4}, r"selected\[0, 0, 0\]: expected ascending"),
    ],
)
def test_lists_of_slots_that_are_not_there_are_refused(change: dict[int, int], message: str) -> None:
    a = inputs(SPECS["plain"], [[0, 1, 9]], tokens=1, past=9, length=10)
    lists = np.full((1, 1, 1, 4), -1, np.int32)
    good = np.array([2, 9, -1, -1], np.int32).reshape(lists.shape)
    dataclasses.replace(a, selected=good).run()
    for at, slot in change.items():
        lists[..., at] = slot
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(a, selected=lists).run()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_compressed_keys_that_are_not_read(kernel: str, bad: float) -> None:
    """Keys before the window, and values of slots that complete none or that no list has, do not reach the output."""
    spec = SPECS["compressed"]
    a = inputs(spec, [[0, 2, 299]], tokens=2, past=299, length=301)
    lists = np.full((1, 2, 1, 40), -1, np.int32)
    lists[..., :3] = 1, 5, 200
    for selected in (None, lists):
        b = dataclasses.replace(a, selected=selected)
        want = b.run()[0]
        keys, values = (x.copy() for x in a.past)
        keys[:, :, : 299 - spec.sliding_window + 1] = bad
        values[:, :, np.arange(299) % 3 != 2] = bad
        if selected is not None:
            values[:, :, [slot for slot in range(299) if slot not in (5, 200)]] = bad
        assert_bytes(dataclasses.replace(b, past=(keys, values)).run()[:1], (want,))
        values[:, :, 200] = np.nan
        assert np.isnan(dataclasses.replace(b, past=(keys, values)).run()[0]).all()


def test_lists_of_compressed_keys_alone() -> None:
    """They have more of them than as many slots in a row. Lanes do not write into each other's memory."""
    spec = dataclasses.replace(SPECS["compressed"], compress_rate=50, sliding_window=0)
    a = inputs(spec, [[0, 4, 996]] * 8, tokens=4, past=996, length=1000)
    dense, lists = a.run(), np.tile(np.arange(49, 1000, 50, np.int32), (8, 4, 1, 1))
    lists[:, :3, :, 19] = -1
    for lanes in (1, 40, 40, 40):
        assert_bytes(dataclasses.replace(a, selected=lists).run(lanes=lanes), dense)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"compress_rate": -1}, "compress_rate is -1, expected 0 to"),
        ({"chunk_size": 5}, "chunk_size is 5, expected 0 with a compress_rate"),
        ({"key_split": 5}, "key_split is 5, expected 0 with a compress_rate"),
        ({"block_size": 256}, "block_size is 256, expected 0 with a compress_rate"),
        ({"v_head_size": 16}, "v_head_size is 16, expected head_size 32 with a compress_rate"),
        ({"cache_format": "int8_token"}, "compress_rate is 3, expected 0 where cache_format is int8_token"),
    ],
)
def test_nodes_that_cannot_have_compressed_keys(change: dict[str, Any], message: str) -> None:
    assert message in native.refusal(dataclasses.replace(SPECS["compressed"], **change), {})


@pytest.mark.parametrize("name", ["window", "chunks"])
def test_nodes_that_take_no_lists(name: str) -> None:
    a = inputs(SPECS[name], [[0, 1, 9]], tokens=1, past=9, length=10)
    lists = np.zeros((1, 1, 1, 4), np.int32)
    with pytest.raises(ValueError, match=r"(sliding_window is 100|chunk_size is 7), expected 0 with `selected`"):
        dataclasses.replace(a, selected=lists).run()
    b = inputs(SPECS["plain"], [[0, 1, 9]], tokens=1, past=9, length=10)
    with pytest.raises(ValueError, match="selected has 3 lists a token, expected 1, or kv_num_heads 2"):
        dataclasses.replace(b, selected=np.zeros((1, 1, 3, 4), np.int32)).run()
