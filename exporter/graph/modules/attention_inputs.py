"""Recognised attention in a trace: what all nodes of a model share, and the modules' new forward."""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from quantmoe.custom_ops.op import RowsSpec
from quantmoe.exporter.graph.modules import indexer
from quantmoe.exporter.graph.modules.attention import REACH, TABLES, RecognisedAttention, bound
from quantmoe.exporter.targets import Target


class Rows:
    """Values that all nodes share, made once in a trace: the mask, where each row's tokens are, and the tables."""

    def __init__(self, decoder: torch.nn.Module, target: Target):
        self.mask = self.rows = torch.empty(0)
        self.target = target
        self._tables: list[tuple[torch.Tensor, str, torch.Tensor]] = []
        decoder.register_forward_pre_hook(self._begin, with_kwargs=True)

    def _begin(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        given = bound(module, args, kwargs)
        ids = given.get("input_ids")
        if ids is None:  # embeddings in their place: the positions, of an axis or several, are of as many tokens
            ids = given.get("position_ids")
            ids = given["inputs_embeds"] if ids is None else ids[0] if ids.ndim == 3 else ids
        new = ids.shape[1]
        cache = given.get("cache")
        layers = cache.layers if cache is not None else []
        past = next((keys for layer in layers if (keys := getattr(layer, "keys", None)) is not None), None)
        self.mask, self._tables = given["attention_mask"], []
        if self.target.token_rows and past is not None:
            self.rows, _ = torch.ops.quantmoe.token_rows(past, ids, self.mask, json.dumps(RowsSpec().attributes()))
        else:
            self.rows = rows_of(self.mask, new, 0 if past is None else past.shape[2])

    def table(self, table: torch.Tensor, kind: str) -> torch.Tensor:
        """Return the node's part of a model's table, f32."""
        found = next((part for whole, k, part in self._tables if whole is table and k == kind), None)
        if found is None:
            found = TABLES[kind](table).float()
            self._tables.append((table, kind, found))
        return found

    def attend(
        self,
        module: Any,
        qkv: torch.Tensor,
        cache: Any,
        *,
        tables: Sequence[torch.Tensor],
        norms: Sequence[torch.Tensor] = (),
        sinks: torch.Tensor | None = None,
        ups: Sequence[torch.Tensor] = (),
        selection: Sequence[torch.Tensor] = (),
    ) -> torch.Tensor:
        """Return a module's node.

        Args:
            qkv: [B, S, ..] as the node has it. tables: the model's. norms: of queries and keys. sinks: [num_heads].
            ups: k_up and v_up, of a node with a nope_size. selection: of :meth:`select`, or slots that each token sees.

        Returns:
            [B, S, num_heads * output_size].
        """
        found, spec = module.found, module.found.spec
        none = torch.zeros(0)
        sinks = torch.full((spec.num_heads,), -torch.inf) if sinks is None else sinks
        parts = [self.table(t, found.table)[..., : spec.rotary_size // 2] for t in tables]
        layer: Any = cache.layers[module.layer_idx] if module.layer_idx < len(cache.layers) else None
        begun = layer is not None and layer.is_initialized
        if begun:
            past = [layer.keys, layer.values]
        else:
            past = [qkv.new_zeros((len(qkv), spec.kv_num_heads, 0, width)) for width in spec.cache_widths]
        others = [*ups, *[None] * (2 - len(ups)), None, selection[0]] if selection else ups
        output, *present = torch.ops.quantmoe.cached_attention(
            qkv, *past, self.rows, self.mask, *parts, *(norms or (none, none)), sinks, module.attention, *others
        )
        if begun:
            layer.keys, layer.values = present
        else:
            cache.update(*present, module.layer_idx)
        if len(selection) > 1:
            cache.layers[module.layer_idx].indexer_keys = selection[1]
        return output

    def select(self, module: Any, given: Mapping[str, Any]) -> Any:
        """Return the slots that each token attends to, [B, S, groups, slots], and an indexer's keys of all tokens.

        Args:
            given: see :func:`indexer.node_inputs`.
        """
        spec, layers, i = module.found.indexer, given["cache"].layers, module.layer_idx
        query, key, weights = indexer.node_inputs(module.indexer, {**given, "rows": self.rows})
        query, key = (x.to(given["hidden_states"].dtype) for x in (query, key))
        past = getattr(layers[i], "indexer_keys", None) if i < len(layers) else None
        past = key.new_zeros((len(key), 1, 0, spec.head_size)) if past is None else past
        attributes = json.dumps(spec.attributes())
        return torch.ops.quantmoe.sparse_indexer(query, key, weights, past, self.rows, self.mask, attributes)


def rows_of(mask: torch.Tensor, new: int, past: int) -> torch.Tensor:
    """Return the node's ``rows``, which TokenRows makes in the CUDA graph.

    Each row of a batch has the first new token that counts, how many do, and how many were before.

    The new tokens' columns of the mask are its last ones where it is longer than the cache, which then grows. Otherwise
    the cache has room for them, and they end with the last column that any row has set.

    Args:
        mask: int64 [B, L], 1 for tokens that count. new: S. past: slots of the cache, P.

    Returns:
        int32 [B, 3].
    """
    seen, length = mask.bool(), mask.shape[1]
    grows = torch.sym_min(torch.sym_max(length - past, 0), 1)
    # Sizes become tensors by arange alone: its bounds ONNX Runtime's CUDA provider takes from the host, where it keeps
    # sizes. Elsewhere a size would be copied to the device, and with a copy no CUDA graph can be captured.
    least = new + torch.sym_max(length - new, 0) * grows
    end = torch.where(seen, torch.arange(1, length + 1), torch.tensor(0)).amax((0, 1))
    end = end.maximum(torch.arange(least, least + 1))
    # more tokens than the mask has columns: the node refuses them by name
    own = seen.index_select(1, (end + torch.arange(-new, 0)).minimum(torch.arange(length - 1, length)))
    before = (seen & (torch.arange(new, length + new) < end)).sum(1)
    begin = torch.where(own, torch.arange(new), torch.tensor(REACH)).amin(1)
    return torch.stack((begin.minimum(own.logical_not().sum(1)), own.sum(1), before), 1).int()


def widen_tables(decoder: torch.nn.Module) -> None:
    """Rotary modules give their tables in their input's type: here f32, as the nodes take them, whatever the graph."""

    def wide(forward: Callable[..., Any], x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return forward(x.float(), *args, **kwargs)

    for module in decoder.modules():
        if type(module).__name__.endswith("RotaryEmbedding"):
            module.forward = partial(wide, module.forward)  # type: ignore[method-assign]


def attach(
    model: torch.nn.Module, found: dict[str, RecognisedAttention], rows: Rows, gates_first: Container[str]
) -> None:
    """Make the forward of recognised modules their projections and one node between them.

    Args:
        gates_first: gated modules whose q_proj has all gates before all queries, as the node has them.
    """
    for path, recognised in found.items():
        module: Any = model.get_submodule(path)
        module.found, module.rows, module.attention = recognised, rows, json.dumps(recognised.spec.attributes())
        module.gates_first = path in gates_first
        recognised.kind.attach(module)
