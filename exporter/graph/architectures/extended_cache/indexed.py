"""Sparse attention with an indexer: small keys of all tokens say which tokens, or which blocks, are attended to.

The small keys are kept behind the values of the same cache. Scores, the selection and attention are standard nodes. Of
equal scores ONNX' TopK selects the lower position. What a module gives its attention function is not a list of
positions, but a mask of the selected tokens [batch, heads, sequence, tokens].
"""

from __future__ import annotations

import inspect
from types import MethodType
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import apply_rotary_pos_emb

from quantmoe.exporter.graph.architectures import mrope
from quantmoe.exporter.graph.modules.attention import bound


def prepare(model: PreTrainedModel) -> None:
    """Make attention keep the indexer's keys in its cache, and the indexer select a number that no length changes."""
    mrope.prepare(model)
    for module in model.modules():
        attention: Any = module
        if not type(module).__name__.endswith("Attention") or not hasattr(module, "indexer"):
            continue
        attention.indexed = True
        if attention.indexer is not None:  # or it has the selection of a layer before
            select = _select_blocks if hasattr(attention.indexer, "topk_blocks") else _select
            attention.indexer.forward = MethodType(select, attention.indexer)
        if attention.indexer is not None or getattr(attention, "qk_rope_head_dim", None) == 0:
            attention.forward = MethodType(_attention, attention)


class PackedCache:
    """A cache of one attention module, whose second tensor has the indexer's keys behind its own.

    Attributes:
        keys: the indexer's, [batch, sequence, features]: of new tokens, after an update of all; None: there is none.
        mask: of the module, [batch, 1, sequence, tokens].
    """

    def __init__(self, cache: Any, keys: Any, mask: torch.Tensor):
        self.cache, self.keys, self.mask, self.updated = cache, keys, mask, False

    def all_keys(self, layer: int) -> torch.Tensor:
        """Return the indexer's keys of all tokens; where the module attends to another's keys, they are all it has."""
        if not self.updated:
            self.keys = self._halves(self.keys[:, None], layer)[:, 0]
        keys: torch.Tensor = self.keys
        return keys

    def _halves(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return what is all of a cache, of all tokens: each of its two tensors has a half, so that none is empty."""
        half = x.shape[-1] // 2
        return torch.cat(self.cache.update(x[..., :half], x[..., half:], *args, **kwargs), -1)

    def update(self, first: torch.Tensor, second: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return what a module caches, of all tokens; a part of the indexer's keys lies behind each head's."""
        if self.keys is None:
            first = self._halves(torch.cat((first, second), -1), *args, **kwargs)
            return first.split([first.shape[-1] - second.shape[-1], second.shape[-1]], -1)
        heads, width, size = second.shape[1], second.shape[-1], self.keys.shape[-1]
        each = -(-size // heads)
        keys = torch.nn.functional.pad(self.keys, (0, heads * each - size))
        parts = keys.unflatten(-1, (heads, each)).transpose(1, 2)
        first, joined = self.cache.update(first, torch.cat((second, parts), -1), *args, **kwargs)
        second, parts = joined.split([width, each], -1)
        self.keys, self.updated = parts.transpose(1, 2).flatten(-2)[..., :size], True
        return first, second


class _Given(Exception):  # noqa: N818
    """An indexer gave keys to a cache."""


class _Asking:
    """A stand-in for a cache, which ends the run of an indexer with the keys that it gives."""

    def __getitem__(self, _: int) -> _Asking:
        return self

    @property
    def layers(self) -> _Asking:
        """Return all layers."""
        return self

    def update_indexer(self, keys: torch.Tensor, *_: Any) -> None:
        """Take keys, as a cache does."""
        raise _Given(keys)

    update_index = update_indexer


def _keys(indexer: Any, given: dict[str, Any]) -> torch.Tensor:
    """Return the indexer's keys of new tokens, [batch, sequence, features].

    Args:
        given: arguments of the attention module. Keys follow from them without the queries.
    """
    x, names = given["hidden_states"], inspect.signature(type(indexer).forward).parameters
    own = {name: given.get(name) for name in names if name != "self"} | {"cache": _Asking()}
    if "q_resid" in names:
        own["q_resid"] = x.new_zeros(*x.shape[:2], indexer.q_lora_rank)
    try:
        type(indexer).forward(indexer, **own)
    except _Given as found:
        keys: torch.Tensor = found.args[0]
        return keys.reshape(*x.shape[:2], -1)
    raise AssertionError(f"{type(indexer).__name__} gives its cache no keys")


def _attention(self: Any, *args: Any, **kwargs: Any) -> Any:
    given = bound(self, args, kwargs)
    keys = None if self.indexer is None else _keys(self.indexer, given)
    given["cache"] = PackedCache(given["cache"], keys, given["attention_mask"])
    return type(self).forward(self, **given)


class _Longer:
    """A stand-in for a cache, with the keys of all tokens, and of as many more as are selected."""

    def __init__(self, keys: torch.Tensor, more: int):
        self.keys = torch.nn.functional.pad(keys, (0, 0, 0, more))

    def update_indexer(self, *_: Any) -> torch.Tensor:
        """Return the keys of all tokens."""
        return self.keys


def _select(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Return which tokens are selected, [batch, 1, sequence, tokens]. Some that a token does not see may be, too."""
    given = bound(self, args, kwargs)
    keys, mask, more = given["cache"].all_keys(self.layer_idx), given["attention_mask"], self.index_topk
    given["attention_mask"] = torch.nn.functional.pad(mask, (0, more), value=-torch.inf)
    given["cache"] = _Longer(keys, more)
    indices = type(self).forward(self, **given)
    return chosen(indices, keys.shape[1] + more)[:, None, :, : keys.shape[1]]


def chosen(indices: torch.Tensor, length: int) -> torch.Tensor:
    """Return which of so many numbers a last dimension names."""
    named = torch.zeros(*indices.shape[:-1], length, dtype=torch.float32)
    return named.scatter(-1, indices.long(), 1.0) > 0


def placed(seen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the place of each slot of a cache among its row's tokens, and the slot of each place, [batch, slots].

    Args:
        seen: [batch, slots], whether a slot has a token; the others are padding, whose place is another token's.
    """
    places = seen.long().cumsum(1) - 1
    batch, count = seen.shape  # len() would make the batch a constant of the graph
    slots = torch.zeros(batch, count + 1, dtype=torch.int64)
    every = torch.arange(count).expand(batch, count)
    slots = slots.scatter(1, torch.where(seen, places, count), every)[:, :count]
    return places.clamp(min=0), slots


def in_order(x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Return tokens [batch, slots, features] by their places."""
    return x.gather(1, slots[..., None].expand(*slots.shape, x.shape[-1]))


def visible(
    attention_mask: torch.Tensor, places: torch.Tensor, positions: torch.Tensor, dtype: torch.dtype, window: int = 0
) -> torch.Tensor:
    """Return what a mask adds to scores, [batch, 1, sequence, slots].

    Args:
        attention_mask: [batch, slots]. places: of ``placed``. positions: of the new tokens.
        window: a token sees so many tokens, with itself; 0: all before.
    """
    behind = positions[..., None] - places[:, None]
    seen = attention_mask.bool()[:, None] & (behind >= 0)
    if window:
        seen = seen & (behind < window)
    return torch.where(seen, 0.0, torch.finfo(dtype).min).to(dtype)[:, None]


def by_slot(named: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """Return which slots are in named groups.

    Args:
        named: [batch, heads, sequence, groups]. groups: of each slot, [batch, slots].
    """
    index = groups[:, None, None].expand(*named.shape[:3], groups.shape[1])
    return named.gather(-1, index)


def _select_blocks(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Return which tokens are in selected blocks, [batch, indexer's heads, sequence, tokens] (MiniMax-M3).

    A block has the score of its best token. The blocks next to a token are always selected.
    """
    given = bound(self, args, kwargs)
    cache, positions, size = given["cache"], given["position_ids"][:, None, :, None], self.block_size
    x, tables = given["hidden_states"], given["position_embeddings"]
    queries = self.q_norm(self.q_proj(x).unflatten(-1, (self.num_heads, self.head_dim))).transpose(1, 2)
    queries = apply_rotary_pos_emb(queries, queries, *tables)[0].float()
    places, slots = placed(cache.mask[:, 0, -1] == 0)  # the last token sees all of its row
    scores = torch.matmul(queries, in_order(cache.keys, slots).float().transpose(1, 2)[:, None])
    length = slots.shape[1]
    scores = scores.masked_fill(torch.arange(length) > positions, -torch.inf)
    # as many blocks more as are selected, so that no length changes that number
    scores = torch.nn.functional.pad(scores, (0, size * self.topk_blocks), value=-torch.inf)
    count = length // size + self.topk_blocks
    blocks = scores[..., : count * size].unflatten(-1, (count, size)).amax(-1)
    behind = positions // size - torch.arange(count)
    blocks = blocks.masked_fill((behind >= 0) & (behind < self.local_blocks), torch.inf)
    return by_slot(chosen(blocks.topk(self.topk_blocks, -1).indices, count), places // size)
