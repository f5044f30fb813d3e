"""SparseIndexer through the C ABI: exact selection, the same bytes on every kernel and in any pieces."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.operators.indexer import SPECS, Inputs, check, inputs

from quantmoe.custom_ops import native
from quantmoe.custom_ops.op import IndexerSpec
from quantmoe.custom_ops.ops.sparse_indexer import listed, ranked

USABLE = [name for name, usable in native.kernels().items() if usable]
#: of a batch: right padding, left padding, nothing new, a block's border, everything
RAGGED = [[0, 5, 250], [3, 6, 0], [4, 0, 17], [8, 1, 255], [0, 9, 256]]


@pytest.fixture(params=USABLE)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("QUANTMOE_FORCE_KERNEL", request.param)
    return request.param


def ragged(spec: IndexerSpec, **others: Any) -> Inputs:
    return inputs(spec, RAGGED, tokens=9, past=260, length=265, **others)


@pytest.mark.parametrize("cache", [np.float32, np.float16])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_of_equal_scores_the_lower_slots_are_selected(kernel: str, spec: IndexerSpec, dtype: Any, cache: Any) -> None:
    """Scores of small integers are exact, and many are equal: the lists are the reference's, of slots and blocks."""
    a = ragged(spec, dtype=dtype, cache=cache, whole=True)
    for lanes in (1, 3):
        for found, want in zip(a.run(lanes=lanes), a.reference(), strict=True):
            np.testing.assert_array_equal(found, want)


@pytest.mark.parametrize("cache", [np.float32, np.float16])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_kernels_lanes_and_memory_give_the_same_bytes(
    spec: IndexerSpec, cache: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = replace(ragged(spec, cache=cache), length=1)
    a.rows[:, 1] = np.minimum(a.rows[:, 1], 260 - a.rows[:, 2])
    want = a.run()
    check(a, *want)
    for name in USABLE:
        monkeypatch.setenv("QUANTMOE_FORCE_KERNEL", name)
        for lanes in (1, 2, 64):
            for found, own in zip(a.run(lanes=lanes), want, strict=True):
                assert found.tobytes() == own.tobytes()
    past = a.past.copy()
    selected, _ = replace(a, past=past).run(present=past, lanes=3)
    assert selected.tobytes() == want[0].tobytes()
    for b, (_, count, before) in enumerate(a.rows.tolist()):
        np.testing.assert_array_equal(past[b, :, : before + count], want[1][b, :, : before + count])


@pytest.mark.parametrize("sizes", [(1,), (7,), (255, 1, 1), (64, 200)], ids=str)
def test_a_prompt_in_pieces_has_the_lists_of_one_at_once(sizes: tuple[int, ...]) -> None:
    """Into a cache of 300 slots in which all others are NaN. A row has its bytes alone."""
    a = inputs(SPECS["some-heads"], [[0, 262, 0], [3, 11, 0]], tokens=262, past=0, length=262, cache=np.float16)
    selected, present = a.run(lanes=2)
    check(a, selected, present)
    alone = replace(a, query=a.query[:1], key=a.key[:1], weights=a.weights[:1], past=np.full((1, 1, 300, 24), np.nan))
    alone = replace(alone, past=alone.past.astype(np.float16), length=1)
    at, pieces = 0, []
    while at < 262:
        count = min(sizes[len(pieces) % len(sizes)], 262 - at)
        part = alone.tokens(slice(at, at + count), [[0, count, at]])
        pieces.append(part.run(present=alone.past, lanes=1 + len(pieces) % 3)[0])
        at += count
    np.testing.assert_array_equal(np.concatenate(pieces, 1), selected[:1])
    np.testing.assert_array_equal(alone.past[:, :, :262], present[:1])


def test_a_long_cache_and_more_tokens_than_are_scored_at_once() -> None:
    for rows, tokens in (([[0, 2, 32766]], 2), ([[1, 300, 0]], 301)):
        past = rows[0][2]
        a = inputs(IndexerSpec(num_heads=4, head_size=16, top_k=40), rows, tokens, past, past + tokens)
        want = a.run()
        check(a, *want)
        np.testing.assert_array_equal(a.run(lanes=3)[0], want[0])


def test_all_scores_are_equal() -> None:
    """And none is above 0: the first slots."""
    a = ragged(SPECS["some-heads"])
    for zero in ({"query": np.zeros_like(a.query)}, {"weights": np.zeros_like(a.weights)}):
        selected, _ = replace(a, **zero).run(lanes=2)
        np.testing.assert_array_equal(selected[4, 0, 0], np.arange(100))


def test_blocks_of_equal_scores(kernel: str) -> None:
    """The first blocks, and those that are always selected."""
    for name, want in (
        ("best-slots", [*range(30), *range(250, 257)]),
        ("last-slots", [*range(48), 256]),
        ("local-blocks-alone", [*range(238, 257)]),
    ):
        a = ragged(SPECS[name])
        selected, _ = replace(a, query=np.zeros_like(a.query)).run(lanes=3)
        for row in selected[4, 0]:
            assert row[: len(want)].tolist() == want
            assert (row[len(want) :] == -1).all()


@pytest.mark.parametrize("name", ["best-slots", "last-slots"])
def test_a_block_with_nan_is_selected(kernel: str, name: str) -> None:
    """Where its score has a NaN; elsewhere it changes nothing."""
    spec = SPECS[name]
    a = inputs(spec, [[0, 1, 200]], tokens=1, past=200, length=201)
    want = a.run()[0]
    for at in (4 * spec.block_size + 1, 4 * spec.block_size + spec.block_size - 1):
        past = a.past.copy()
        past[0, 0, at] = np.nan
        selected, _ = replace(a, past=past).run()
        if name == "last-slots" and (at + 1) % spec.block_size:
            np.testing.assert_array_equal(selected, want)
        else:
            assert all(at in row for row in selected[0, 0].tolist())


@pytest.mark.parametrize("seen", [1, 2, 15, 16, 17, 47, 48, 63, 64, 65])
def test_lists_near_their_size(seen: int) -> None:
    """All slots as long as a list has room for them; one block less from then on."""
    for name in ("best-slots", "last-slots"):
        spec = SPECS[name]
        a = inputs(spec, [[0, 1, seen - 1]], tokens=1, past=seen - 1, length=seen, whole=True)
        selected, want = a.run()[0], a.reference()[0]
        np.testing.assert_array_equal(selected, want)
        if seen <= selected.shape[-1]:
            assert (selected[0, 0, :, :seen] == np.arange(seen)).all()
        else:
            assert (selected[0, 0, :, -1] < seen - 1).all() or spec.best_slot


def test_the_reference_in_words() -> None:
    found = np.array([1.0, 5.0, 3.0, 3.0, 2.0, 9.0, 0.0])
    best = IndexerSpec(num_heads=1, head_size=1, top_k=4, block_size=2, local_blocks=1)
    assert listed(best, found).tolist() == [4, 5, 6]  # block 2 by slot 5; the token's own
    assert listed(best, found[:5]).tolist() == [0, 1, 4]  # block 0 by slot 1
    last = replace(best, best_slot=0, local_blocks=0)
    assert listed(last, found).tolist() == [0, 1, 4, 5, 6]  # slots 1 and 5
    assert listed(last, found[:6]).tolist() == [0, 1, 4, 5]


def test_what_is_not_a_number_is_selected(kernel: str) -> None:
    """NaN is above all numbers, infinity above the others; keys of other rows, or after the token, change nothing."""
    a = inputs(SPECS["one-slot"], [[0, 2, 9], [0, 2, 9]], tokens=2, past=9, length=12)
    want = a.run()[0]
    for bad in (np.nan, np.inf):
        past, key = a.past.copy(), a.key.copy()
        past[0, 0, 5], key[0, 1] = np.abs(bad), bad
        selected, _ = replace(a, past=past, query=np.abs(a.query), weights=np.abs(a.weights)).run()
        assert selected[0].ravel().tolist() == [5, 5]
        selected, _ = replace(a, key=key).run()
        np.testing.assert_array_equal(selected[0, 0], want[0, 0])
        np.testing.assert_array_equal(selected[1], want[1])
    assert ranked(np.array([1.0, np.nan, 2.0, np.inf, 2.0, -np.inf, np.nan])).tolist() == [1, 6, 3, 2, 4, 0, 5]


def test_nothing_to_do() -> None:
    for rows, tokens in (([[0, 0, 3]], 0), ([[1, 0, 3]], 2), ([], 2)):
        a = inputs(SPECS["one-head"], rows, tokens=tokens, past=4, length=6)
        check(a, *a.run(lanes=2))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[0, 3, 0]], r"rows\[0\] is \[0, 3, 0\].*the call's tokens are 2"),
        ([[0, 1, 5]], r"rows\[0\] is \[0, 1, 5\].*the cache before the call has slots 4"),
        ([[0, 2, 4]], r"rows\[0\] is \[0, 2, 4\].*the cache has slots 5"),
        ([[-1, 1, 0]], r"rows\[0\] is \[-1, 1, 0\].*expected numbers of at least 0"),
    ],
)
def test_rows_that_are_not_there_are_refused(rows: list[list[int]], message: str) -> None:
    a = inputs(SPECS["one-head"], rows, tokens=2, past=4, length=5)
    with pytest.raises(ValueError, match=message):
        a.run()
    with pytest.raises(ValueError, match=r"rows\[0\] is"):
        a.reference()


def test_attributes_and_types_that_are_refused() -> None:
    a = inputs(SPECS["one-head"], [[0, 1, 0]], tokens=1, past=4, length=4)
    for name in ("num_heads", "head_size", "top_k"):
        with pytest.raises(ValueError, match=f"{name} is 0"):
            replace(a, spec=replace(a.spec, **{name: 0})).run()
    for wrong, message in (
        ({"num_groups": 2}, "num_groups is 2, expected 1 to 1|num_groups is 2"),
        ({"block_size": 2}, "top_k is 7, expected a multiple of block_size, 2"),
        ({"block_size": 7}, "local_blocks is 0"),
        ({"block_size": 7, "local_blocks": 2}, "local_blocks is 2"),
        ({"block_size": 7, "best_slot": 0, "local_blocks": 1}, "local_blocks is 1"),
        ({"relu": 2}, "relu is 2"),
        ({"best_slot": -1}, "best_slot is -1"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(a, spec=replace(a.spec, **wrong)).run()
    odd = replace(a.spec, num_heads=3, num_groups=2)
    with pytest.raises(ValueError, match="num_groups is 2, expected a divisor of num_heads, 3"):
        inputs(odd, [[0, 1, 0]], tokens=1, past=4, length=4).run()
    with pytest.raises(ValueError, match="past_keys is neither float nor float16"):
        replace(a, past=a.past.astype(ml_dtypes.bfloat16)).run()
    larger = np.zeros((1, 1, 5, 16), np.float32)
    with pytest.raises(ValueError, match="present_keys is past_keys' memory, which has 4 slots, and is to have 5"):
        replace(a, past=larger[:, :, :4], length=5).run(present=larger)


@pytest.mark.parametrize("lanes", [1, 64])
@pytest.mark.parametrize(("tokens", "past"), [(1, 32767), (300, 5000)])
def test_the_workspace_is_what_the_header_states(tokens: int, past: int, lanes: int) -> None:
    sizes: list[int] = []

    def buffer(size: int) -> np.ndarray:
        sizes.append(size)
        return native.aligned(size)

    a = inputs(SPECS["some-heads"], [[0, tokens, past]], tokens, past, past + tokens)
    a.run(lanes=lanes, buffer=buffer)
    scores = min(16 << 20, 4 * min(tokens + 1, 128) * (past + tokens + 256))
    assert sizes[-1] <= scores + lanes * 4 * (128 * (24 + 272) + 32 * 24 + 2048 + 64)
