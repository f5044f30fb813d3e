"""Indexers of sparse attention -> SparseIndexer: recognised by what they compute of the keys in their cache.

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


class _Found(Exception):  # noqa: N818
    """The factors of an indexer: queries [batch, S, heads, size], weights [batch, S, heads]."""


class _Keys:
    """Stands for the keys of all tokens, or for their products with queries.

    Attributes:
        queries: what the keys were multiplied by, None before that. factor: of the products.
        positive: only what is above 0 is left of them.
    """

    def __init__(self, queries: torch.Tensor | None = None, factor: float = 1.0, positive: bool = False):
        self.queries, self.factor, self.positive = queries, factor, positive

    def _same(self, *_: Any) -> _Keys:
        return self

    transpose = unsqueeze = float = _same

    def __mul__(self, factor: Any) -> _Keys:
        if not factor > 0:
            raise Unlike("its indexer's scores have a factor that is not above 0")
        return _Keys(self.queries, self.factor * factor, self.positive)

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

    def update_indexer(self, keys: torch.Tensor, *_: Any) -> Any:
        """Return the keys of all tokens."""
        self.new = keys
        return _Keys() if self.past is None else torch.cat((self.past, keys), 1)


def node_inputs(indexer: Any, given: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the node's query [batch, S, heads * size], key [batch, S, size] and head_weights [batch, S, heads], f32.

    Args:
        given: arguments of the attention module, and what it makes of them for its indexer.
    """
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
    draw = drawing()
    linears = ("wq_b", "wk", "weights_proj")
    if any(type(getattr(indexer, name, None)) is not torch.nn.Linear for name in linears):
        raise Unlike(f"its indexer has other projections than {', '.join(linears)}")
    features = [getattr(indexer, name).out_features for name in linears]
    probe = probe_of(indexer, (*linears, "q_input_norm"), draw)
    probe._modules["q_input_norm"] = torch.nn.Identity()  # before wq_b in Mistral-Large-4
    spec = IndexerSpec(num_heads=features[2], head_size=features[1], top_k=indexer.index_topk)
    for batch, new, past, most in SIZES:
        for name, size in zip(linears, features, strict=True):
            probe._modules[name] = _Linear(draw(batch, new, size))
        probe.index_topk = most
        kwargs, _, mask = called.again((batch, new, past), draw)
        kwargs |= {"q_resid": draw(batch, new, 8), "attention_mask": mask[:, 0]}
        keys = draw(batch, past, spec.head_size)
        try:
            with torch.no_grad():
                found = type(probe).forward(probe, **_arguments(probe, kwargs, _Cache(keys)))
                query, key, weights = (t.numpy() for t in node_inputs(probe, kwargs))
        except FAILURES as error:
            raise Unlike(f"its indexer does more than select: {line(error)}") from None
        rows, length = np.tile(np.array([0, new, past], np.int32), (batch, 1)), np.zeros((batch, past + new), np.int64)
        own = IndexerSpec(num_heads=spec.num_heads, head_size=spec.head_size, top_k=most)
        want, _ = reference(own, query, key, weights, keys.numpy()[:, None], rows, length)
        for b, i in np.ndindex(batch, new):  # where fewer tokens are seen, the indexer selects others, too
            seen = {slot for slot in found[b, i].tolist() if slot <= past + i}
            if seen != {slot for slot in want[b, i, 0].tolist() if slot >= 0}:
                raise Unlike("its indexer selects something else than SparseIndexer")
    return spec
