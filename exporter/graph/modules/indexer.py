"""Indexers of sparse attention -> SparseIndexer: recognised by what they compute of the keys in their cache.

An architecture whose indexer makes one key of a block of tokens (pooled_keys.py) gives it `compare` and `node_inputs`.

An indexer's own forward makes queries, keys and the heads' weights. It gets a stand-in for the cache's keys, which
notes what is computed of them. Everything behind the sum over heads is the node's, and is compared with its reference.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from quantmoe.custom_ops.op import IndexerSpec
from quantmoe.custom_ops.ops.sparse_indexer import sparse_indexer as reference
from quantmoe.exporter.graph.modules.attention import FAILURES, Called, Given, Unlike, drawing, line, probe_of

#: of a trial: batch, new tokens, tokens in the cache, tokens that are selected
SIZES = ((2, 5, 7, 3), (1, 1, 9, 4), (2, 6, 0, 2))


#: projections of an indexer of slots, and of one of blocks
LINEARS = ("wq_b", "wk", "weights_proj")
BLOCK_LINEARS = ("q_proj", "k_proj")


class _Found(Exception):  # noqa: N818
    """The factors of an indexer: queries [batch, S, heads, size], weights [batch, S, heads]."""


class _Keys:
    """Stands for the keys of all tokens, or for their products with queries.

    Products with queries [batch, heads, S, size] that are masked are scores themselves, each head's own.

    Attributes:
        queries: what the keys were multiplied by, None before that. factor: of the products.
        positive: only what is above 0 is left of them.
    """

    shape = (1, 1, 1, 1)

    def __init__(self, queries: torch.Tensor | None = None, factor: float = 1.0, positive: bool = False):
        self.queries, self.factor, self.positive = queries, factor, positive

    def _same(self, *_: Any) -> _Keys:
        return self

    transpose = unsqueeze = float = _same

    def __mul__(self, factor: Any) -> _Keys:
        if not factor > 0:
            raise Unlike("its indexer's scores have a factor that is not above 0")
        return _Keys(self.queries, self.factor * factor, self.positive)

    def masked_fill(self, *_: Any) -> None:
        """End the forward of an indexer whose heads select for themselves."""
        if self.queries is None or self.positive:
            raise Unlike("its indexer masks its keys")
        queries = self.queries.transpose(1, 2) * self.factor
        raise _Found(queries, queries.new_ones(queries.shape[:3], dtype=torch.float32))

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> _Keys:
        """Note a function of torch."""
        if function is torch.matmul and isinstance(args[1], _Keys):
            queries, keys = args
            if keys.positive:
                raise _Found(keys.queries, queries.squeeze(-2) * keys.factor)
            if keys.queries is None:
                return _Keys(queries, keys.factor)
        if function in (torch.relu, torch.nn.functional.relu):
            return _Keys(args[0].queries, args[0].factor, positive=True)
        raise Unlike(f"its indexer computes something else of its keys: {getattr(function, '__name__', function)}")


class _Cache:
    """A stand-in for a cache, which notes an indexer's new keys [batch, S, size].

    Attributes:
        past: the keys before; None: unknown.
    """

    def __init__(self, past: torch.Tensor | None = None):
        self.past, self.new = past, torch.empty(0)

    def __getitem__(self, _: int) -> _Cache:
        return self

    @property
    def layers(self) -> _Cache:
        """Return all layers."""
        return self

    def update_indexer(self, keys: torch.Tensor, *_: Any) -> Any:
        """Return the keys of all tokens."""
        self.new = keys
        return _Keys() if self.past is None else torch.cat((self.past, keys), 1)

    def update_index(self, keys: torch.Tensor) -> Any:
        """Return the keys of all tokens, [batch, 1, tokens, size]."""
        found = self.update_indexer(keys[:, 0])
        return found if self.past is None else found[:, None]


def node_inputs(indexer: Any, given: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the node's query [batch, S, heads * size], key [batch, S, size] and head_weights [batch, S, heads], f32.

    Args:
        given: arguments of the attention module, and what it makes of them for its indexer; "rows", as nodes have them.
    """
    if (own := getattr(indexer, "node_inputs", None)) is not None:
        made: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = own(given)
        return made
    cache = _Cache()
    try:
        type(indexer).forward(indexer, **_arguments(indexer, given, cache))
    except _Found as found:
        query, weights = found.args
        return query.flatten(-2), cache.new.float(), weights
    raise Unlike("its indexer does not sum over heads")


def _arguments(indexer: Any, given: Mapping[str, Any], cache: _Cache) -> dict[str, Any]:
    names = (name for name in inspect.signature(type(indexer).forward).parameters if name != "self")
    return {name: given.get(name) for name in names} | {"cache": cache}


class _Linear(Given):
    """A linear module with a given output."""

    weight = torch.empty(0)


def compare(indexer: Any, called: Called) -> IndexerSpec:
    """Return the SparseIndexer that selects what an indexer selects, of random tokens.

    Raises:
        Unlike: there is none.
    """
    if (judge := getattr(indexer, "compare", None)) is not None:
        pooled: IndexerSpec = judge(called)
        return pooled
    draw = drawing()
    blocks = hasattr(indexer, "topk_blocks")
    linears = BLOCK_LINEARS if blocks else LINEARS
    if any(type(getattr(indexer, name, None)) is not torch.nn.Linear for name in linears):
        raise Unlike(f"its indexer has other projections than {', '.join(linears)}")
    features = [getattr(indexer, name).out_features for name in linears]
    probe = probe_of(indexer, (*linears, "q_input_norm"), draw)
    probe._modules["q_input_norm"] = torch.nn.Identity()  # before wq_b in Mistral-Large-4
    spec = _spec(indexer)
    for batch, new, past, most in SIZES:
        for name, size in zip(linears, features, strict=True):
            probe._modules[name] = _Linear(draw(batch, new, size))
        probe.index_topk = most
        if blocks:
            probe.topk_blocks, probe.block_size = max(most - 1, spec.local_blocks), 2
        kwargs, _, mask = called.again((batch, new, past), draw)
        positions = {"position_ids": torch.arange(past, past + new).repeat(batch, 1)} if blocks else {}
        kwargs |= {"q_resid": draw(batch, new, 8), "attention_mask": mask[:, 0]} | positions
        keys = draw(batch, past, spec.head_size)
        try:
            with torch.no_grad():
                found = type(probe).forward(probe, **_arguments(probe, kwargs, _Cache(keys)))
                query, key, weights = (t.numpy() for t in node_inputs(probe, kwargs))
        except FAILURES as error:
            raise Unlike(f"its indexer does more than select: {line(error)}") from None
        rows, length = np.tile(np.array([0, new, past], np.int32), (batch, 1)), np.zeros((batch, past + new), np.int64)
        own = _spec(probe)  # of the trial's sizes
        want, _ = reference(own, query, key, weights, keys.numpy()[:, None], rows, length)
        lists = found if blocks else found[:, None]  # [batch, groups, new, slots or blocks]
        for b, group, i in np.ndindex(*lists.shape[:3]):
            selected = {slot // own.block_size for slot in want[b, i, group].tolist() if slot >= 0}
            # where fewer tokens are seen, the indexer selects others, too
            if selected != {at for at in lists[b, group, i].tolist() if 0 <= at <= (past + i) // own.block_size}:
                raise Unlike("its indexer selects something else than SparseIndexer")
    return spec


def _spec(indexer: Any) -> IndexerSpec:
    """Return the node of an indexer: of slots, or of blocks for each head (MiniMax-M3)."""
    if not hasattr(indexer, "topk_blocks"):
        return IndexerSpec(num_heads=indexer.n_heads, head_size=indexer.head_dim, top_k=indexer.index_topk)
    if indexer.local_blocks < 1:
        raise Unlike("its indexer does not always select a token's own block")
    return IndexerSpec(
        num_heads=indexer.num_heads,
        head_size=indexer.head_dim,
        top_k=indexer.topk_blocks * indexer.block_size,
        num_groups=indexer.num_heads,
        relu=0,
        block_size=indexer.block_size,
        local_blocks=indexer.local_blocks,
    )
