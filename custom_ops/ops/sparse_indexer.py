"""The reference of SparseIndexer."""

from __future__ import annotations

import numpy as np

from quantmoe.custom_ops.op_def.nodes import SparseIndexer
from quantmoe.custom_ops.reference import check_slots


def sparse_indexer(
    spec: SparseIndexer,
    query: np.ndarray,
    key: np.ndarray,
    head_weights: np.ndarray,
    past_keys: np.ndarray,
    rows: np.ndarray,
    attention_mask: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Select the slots that each token attends to.

    Args:
        spec: the node's attributes. The others: inputs of op.def's shapes, any float type.

    Returns:
        selected int32 [B, S, num_groups, the slots of a list]; present_keys of past's type, zeros in slots after the
        last token.

    Raises:
        ValueError: ``rows`` asks for tokens or slots that are not there.
    """
    batch, tokens, _ = query.shape
    capacity = max(past_keys.shape[2], attention_mask.shape[1])
    check_slots(rows, tokens, past_keys.shape[2], capacity)
    present = np.zeros((batch, 1, capacity, spec.head_size), past_keys.dtype)
    most = spec.top_k + (0 if spec.best_slot else spec.block_size - 1)
    selected = np.full((batch, tokens, spec.num_groups, most), -1, np.int32)
    for b, (begin, count, past) in enumerate(rows.tolist()):
        present[b, 0, :past] = past_keys[b, 0, :past]
        present[b, 0, past : past + count] = key[b, begin : begin + count]
        for i in range(count):
            found = scores(spec, query[b, begin + i], head_weights[b, begin + i], present[b, 0, : past + i + 1])
            for group, own in enumerate(found):
                chosen = listed(spec, own)
                selected[b, begin + i, group, : len(chosen)] = chosen
    return selected, present


def scores(spec: SparseIndexer, query: np.ndarray, weights: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Return a token's scores, float64 [num_groups, slots]: its query [num_heads * n], weights [num_heads], keys
    [slots, n]."""
    with np.errstate(invalid="ignore", over="ignore"):
        products = query.astype(np.float64).reshape(spec.num_heads, -1) @ keys.astype(np.float64).T
        if spec.relu:
            products = np.where(products < 0, 0, products)
        weighted = weights.astype(np.float64)[:, None] * products
        return np.asarray(weighted.reshape(spec.num_groups, -1, len(keys)).sum(1))


def listed(spec: SparseIndexer, found: np.ndarray) -> np.ndarray:
    """Return the slots that a list has, of the scores of all slots that the token sees."""
    size, slots = spec.block_size, len(found)
    blocks = slots // size
    if spec.best_slot:
        blocks = max(0, -(-slots // size) - spec.local_blocks)
        of_blocks = found[: blocks * size].reshape(blocks, size).max(1)  # NaN is the largest
    else:
        of_blocks = found[size - 1 :: size]
    chosen = np.sort(ranked(of_blocks)[: spec.top_k // size - spec.local_blocks])
    whole = (chosen[:, None] * size + np.arange(size)).ravel()
    return np.concatenate((whole, np.arange(blocks * size, slots)))


def ranked(found: np.ndarray) -> np.ndarray:
    """Return the slots by their scores, the largest first, NaN above all, of equal ones the lower first."""
    return np.lexsort((np.arange(len(found)), np.where(np.isnan(found), 0, -found), ~np.isnan(found)))
