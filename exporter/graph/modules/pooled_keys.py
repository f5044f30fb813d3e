"""Keys of blocks of tokens, for a SparseIndexer that has a block's key in its last slot.

What a block's key is made of comes a token at a time. A CausalConv keeps it of the last tokens, so that a token makes
the key of the tokens that end with it. Of the keys, SparseIndexer reads each block's last one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionAndFullAttentionLayer

from quantmoe.custom_ops.op import ConvSpec, IndexerSpec
from quantmoe.custom_ops.ops.sparse_indexer import sparse_indexer as reference
from quantmoe.exporter.graph.modules.attention import FAILURES, Unlike, line
from quantmoe.exporter.graph.modules.states.linear_attention import convolve


def new_cache(config: Any, attention: Iterable[Any]) -> Any:
    """Return a cache whose layers of attention that select blocks have a state, too.

    Args:
        attention: modules with an indexer or without.
    """
    cache = DynamicCache(config=config)
    for module in attention:
        if getattr(module, "found", None) is not None and module.indexer is not None:
            cache.layers[module.layer_idx] = LinearAttentionAndFullAttentionLayer()
    return cache


def window_of(linear: Iterable[Any]) -> int:
    """Return of how many tokens linear attention of the model keeps states, for blocks' keys to keep as many."""
    return next((module.found.conv.state_window for module in linear if hasattr(module, "found")), 1)


def convolved(x: torch.Tensor, taps: torch.Tensor, layer: Any, rows: torch.Tensor, window: int) -> torch.Tensor:
    """Return the convolution of each channel with its taps.

    Args:
        x: [batch, S, channels]. taps: [channels, width]. layer: of the cache.
        window: of how many tokens states are kept.
    """
    if taps.shape[1] == 1:
        return x * taps[:, 0]
    spec = ConvSpec(channels=taps.shape[0], width=taps.shape[1], activation="none", state_window=window)
    made = convolve(spec, SimpleNamespace(weight=taps.float(), bias=None), x, layer, rows)
    layer.has_previous_state[0] = True
    return made


def compare(spec: IndexerSpec, run: Callable[[torch.Tensor], Any], inputs: Callable[[dict[str, Any]], Any]) -> None:
    """Check that a node selects what an indexer selects, of random tokens.

    Args:
        spec: of the node. run: [batch, 1, S, S], a mask -> which tokens are selected, [batch, S, S].
        inputs: see :func:`indexer.node_inputs`.

    Raises:
        Unlike: it does not.
    """
    batch, new = 2, 11
    unseen = torch.ones(new, new, dtype=torch.bool).triu(1)
    mask = torch.zeros(batch, 1, new, new).masked_fill(unseen, torch.finfo(torch.float32).min)
    rows = torch.tensor([[0, new, 0]] * batch, dtype=torch.int32)
    layer = SimpleNamespace(conv_states={0: None}, has_previous_state={})
    try:
        with torch.no_grad():
            found = run(mask).numpy()
            query, key, weights = (
                t.numpy() for t in inputs({"rows": rows, "cache": SimpleNamespace(layers={0: layer})})
            )
    except FAILURES as error:
        raise Unlike(f"its indexer does more than select: {line(error)}") from None
    past, length = np.zeros((batch, 1, 0, spec.head_size), np.float32), np.zeros((batch, new), np.int64)
    want, _ = reference(spec, query, key, weights, past, rows.numpy(), length)
    for b, i in np.ndindex(batch, new):
        if set(np.flatnonzero(found[b, i]).tolist()) != {slot for slot in want[b, i, 0].tolist() if slot >= 0}:
            raise Unlike("its indexer selects something else than SparseIndexer")
