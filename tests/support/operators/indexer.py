"""SparseIndexer in float64, with a bound on how far a kernel's scores may be from it; ops/sparse_indexer.def."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from support.operators import native_kernels as native
from support.operators.arithmetic import SECOND, TINY, U

from quantmoe.custom_ops.op import IndexerSpec
from quantmoe.custom_ops.ops import sparse_indexer

SPECS = {
    "one-head": IndexerSpec(num_heads=1, head_size=16, top_k=7),
    "some-heads": IndexerSpec(num_heads=5, head_size=24, top_k=100),
    "odd-widths": IndexerSpec(num_heads=3, head_size=19, top_k=256),
    "many-heads": IndexerSpec(num_heads=130, head_size=8, top_k=33),
    "one-slot": IndexerSpec(num_heads=4, head_size=16, top_k=1),
    "more-than-all": IndexerSpec(num_heads=4, head_size=16, top_k=4096),
    "best-slots": IndexerSpec(
        num_heads=3, head_size=16, top_k=40, num_groups=3, relu=0, block_size=5, best_slot=1, local_blocks=2
    ),
    "local-blocks-alone": IndexerSpec(num_heads=6, head_size=19, top_k=21, num_groups=2, block_size=7, local_blocks=3),
    "last-slots": IndexerSpec(num_heads=9, head_size=24, top_k=48, block_size=16, best_slot=0),
    "last-slots-in-groups": IndexerSpec(num_heads=4, head_size=8, top_k=6, num_groups=2, block_size=2, best_slot=0),
}


@dataclass(frozen=True)
class Inputs:
    """Inputs of a call. length: L, attention_mask's."""

    spec: IndexerSpec
    query: np.ndarray
    key: np.ndarray
    weights: np.ndarray
    past: np.ndarray
    rows: np.ndarray
    length: int

    @property
    def tensors(self) -> tuple[np.ndarray, ...]:
        mask = np.zeros((len(self.query), self.length), np.int64)
        return self.query, self.key, self.weights, self.past, self.rows, mask

    def run(self, **options: Any) -> tuple[np.ndarray, np.ndarray]:
        selected, present = native.run(self.spec, *self.tensors, **options)
        return selected, present

    def reference(self) -> tuple[np.ndarray, np.ndarray]:
        return sparse_indexer.sparse_indexer(self.spec, *self.tensors)

    def tokens(self, at: slice, rows: list[list[int]]) -> Inputs:
        """Only some of the new tokens."""
        cut = {name: getattr(self, name)[:, at] for name in ("query", "key", "weights")}
        return replace(self, rows=np.array(rows, np.int32), **cut)


def inputs(
    spec: IndexerSpec,
    rows: list[list[int]],
    tokens: int,
    past: int,
    length: int,
    dtype: Any = np.float32,
    cache: Any = np.float32,
    whole: bool = False,
) -> Inputs:
    """Random ones. whole: small integers, whose scores are exact in f32 and often equal."""
    rng, batch = np.random.default_rng(0), len(rows)

    def draw(*shape: int) -> np.ndarray:
        return rng.integers(-2, 3, shape) if whole else rng.standard_normal(shape)

    heads, size = spec.num_heads, spec.head_size
    return Inputs(
        spec,
        draw(batch, tokens, heads * size).astype(dtype),
        draw(batch, tokens, size).astype(dtype),
        draw(batch, tokens, heads).astype(np.float32),
        draw(batch, 1, past, size).astype(cache),
        np.array(rows, np.int32).reshape(batch, 3),
        length,
    )


def check(
    a: Inputs,
    selected: np.ndarray,
    present: np.ndarray,
    bounds: Callable[..., tuple[np.ndarray, np.ndarray]] | None = None,
) -> None:
    """Check a kernel's lists and keys: keys as the cache's type rounds them, and no slot left out whose score is
    certainly above a selected one's.

    Args:
        bounds: as :func:`bounded`; None: of the CPU's arithmetic.
    """
    want = a.reference()[1]
    np.testing.assert_array_equal(present, want)
    check_lists(a, selected, want, bounds or bounded)


def check_lists(
    a: Inputs, selected: np.ndarray, keys: np.ndarray, bounds: Callable[..., tuple[np.ndarray, np.ndarray]]
) -> None:
    """Check the lists of all tokens, of keys [B, 1, slots, head_size]."""
    for b, (begin, count, past) in enumerate(a.rows.tolist()):
        outside = np.delete(selected[b], np.s_[begin : begin + count], 0)
        assert (outside == -1).all()
        for i in range(count):
            score, error = bounds(a, b, begin + i, keys[b, 0, : past + i + 1].astype(np.float64))
            for row, low, high in zip(selected[b, begin + i], score - error, score + error, strict=True):
                check_list(a.spec, row, low, high)


def check_list(spec: IndexerSpec, row: np.ndarray, low: np.ndarray, high: np.ndarray) -> None:
    """Check a list by bounds of the scores of all slots that its token sees: as many slots as the reference's, of whole
    blocks, in order."""
    seen, size = len(low), spec.block_size
    most = len(sparse_indexer.listed(spec, low))
    assert (row[most:] == -1).all()
    assert (np.diff(row[:most]) > 0).all()
    assert row[0] >= 0
    assert row[most - 1] < seen
    blocks = max(0, -(-seen // size) - spec.local_blocks) if spec.best_slot else seen // size
    chosen = np.isin(np.arange(seen), row[:most])
    assert chosen[blocks * size :].all()
    chosen = chosen[: blocks * size].reshape(blocks, size)
    assert (chosen.any(1) == chosen.all(1)).all()
    if chosen.all():
        return
    found = (bound[: blocks * size].reshape(blocks, size) for bound in (low, high))
    low, high = (bound.max(1) if spec.best_slot else bound[:, -1] for bound in found)
    if (own := chosen.all(1)).any():
        assert low[~own].max() <= high[own].min()


def bounded(a: Inputs, b: int, at: int, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return a token's scores [num_groups, slots] and by how much a kernel's may differ: each fma rounds its partial
    sum."""
    query = a.query[b, at].astype(np.float64).reshape(a.spec.num_heads, -1)
    weights = a.weights[b, at].astype(np.float64)[:, None]
    terms = query[:, None] * keys
    products = np.maximum(terms.sum(2), 0) if a.spec.relu else terms.sum(2)
    wrong = U * np.abs(terms.cumsum(2)).sum(2) + TINY * terms.shape[2]
    shape = (a.spec.num_groups, -1, len(keys))
    scores, wrong = (weights * products).reshape(shape), (np.abs(weights) * wrong).reshape(shape)
    partial = np.abs(scores.cumsum(1)).sum(1)
    return scores.sum(1), (wrong.sum(1) + U * partial) * SECOND + TINY * scores.shape[1]
