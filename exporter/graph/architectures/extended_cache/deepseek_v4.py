"""DeepSeek-V4: attention to a window of tokens, and to compressed keys of all earlier ones.

deepseek_v4_nodes.py has its nodes. In standard nodes a cache keeps the key of each token, which is also its
value. Behind it lies what compressed keys are made of. A window of tokens has one compressed key. Standard nodes make
them anew in each step.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, LinearAttentionAndFullAttentionLayer
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as v4

from quantmoe.exporter.graph.architectures.extended_cache import deepseek_v4_nodes
from quantmoe.exporter.graph.architectures.extended_cache.deepseek_v4_nodes import KIND as KIND
from quantmoe.exporter.graph.architectures.extended_cache.indexed import chosen, placed
from quantmoe.exporter.graph.modules import token_windows
from quantmoe.exporter.graph.standard_attention import grouped_attention

#: parts of published names -> parts that transformers' renamings do not take for a norm of attention
NAMES = {"model.norm.": "norm."}


def prepare(model: PreTrainedModel) -> None:
    """Give attention a cache like other models' and a number of selected keys that no length changes."""
    for module in model.modules():
        if isinstance(module, v4.DeepseekV4Model):
            module.forward = MethodType(_model, module)  # type: ignore[method-assign]
        elif isinstance(module, v4.DeepseekV4Attention):
            deepseek_v4_nodes.prepare(module)
            module.forward = MethodType(_attention, module)  # type: ignore[method-assign]


def states(model: PreTrainedModel, window: int) -> dict[str, Any]:
    """Let compressed keys have states after each of ``window`` tokens. No module has a state alone."""
    for module in model.modules():
        if hasattr(module, "state_window"):
            module.state_window = window
    return {}


def _model(self: Any, *args: Any, cache: Any = None, use_cache: bool = True, **kwargs: Any) -> Any:
    """DeepseekV4Model.forward with a cache of all tokens. All layers share the tokens of each window.

    Windows begin at a row's first token, so padding is in none.
    """
    attention = [layer.self_attn for layer in self.layers]
    if cache is None:
        cache = DynamicCache()
        for module in attention:  # a node's compressed keys have a state
            state = hasattr(module, "found") and module.compressor is not None
            cache.layers.append(LinearAttentionAndFullAttentionLayer() if state else DynamicLayer())
    positions = kwargs.get("position_ids")
    places, slots = placed(kwargs["attention_mask"].bool())
    if positions is None:
        new = (args[0] if args else kwargs["input_ids"]).shape[1]
        kwargs["position_ids"] = positions = places[:, -new:]
    rates = {own.compressor.compress_rate for own in attention if own.compressor and not hasattr(own, "found")}
    kwargs["windows"] = {rate: _windows(slots, positions, rate) for rate in sorted(rates)}
    return type(self).forward(self, *args, cache=cache, use_cache=False, **kwargs)


def _windows(slots: torch.Tensor, positions: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the slots of each window of tokens, [batch, windows, size], and whether a token sees its compressed key,
    [batch, sequence, windows]. A token sees it from the last token of the window on."""
    found = token_windows.of(slots, size)
    return found, torch.arange(found.shape[1]) < ((positions + 1) // size)[..., None]


def _attention(
    self: Any,
    hidden_states: torch.Tensor,
    position_embeddings: Any,
    attention_mask: torch.Tensor,
    cache: Any,
    windows: dict[int, tuple[torch.Tensor, torch.Tensor]],
    **_: Any,
) -> tuple[torch.Tensor, None]:
    x, tables, compressor = hidden_states, position_embeddings[self.rope_layer_type], self.compressor
    shape = (*x.shape[:2], -1, self.head_dim)
    residual = self.q_a_norm(self.q_a_proj(x))
    q = self.q_b_norm(self.q_b_proj(residual).view(shape).transpose(1, 2))
    q = v4.apply_rotary_pos_emb(q, *tables)
    kv = v4.apply_rotary_pos_emb(self.kv_norm(self.kv_proj(x)).view(shape).transpose(1, 2), *tables)
    pooled = [part for part in (compressor, getattr(compressor, "indexer", None)) if part is not None]
    made = [project(x) for part in pooled for project in (part.kv_proj, part.gate_proj)]
    # a cache has two tensors
    cut = self.head_dim if made else self.head_dim // 2
    kept = torch.cat((kv[:, 0], *made), -1)[:, None]
    kept = torch.cat(cache.update(kept[..., :cut], kept[..., cut:], self.layer_idx), -1)
    kv, *made = kept.split([self.head_dim, *(part.shape[-1] for part in made)], -1)
    if pooled:
        slots, seen = windows[compressor.compress_rate]
        of = [token_windows.take(part[:, 0], slots) for part in made]
        compressed = [_compressed(part, *of[2 * i : 2 * i + 2]) for i, part in enumerate(pooled)]
        if len(pooled) > 1:
            seen = seen & _selected(compressor.indexer, x, residual, tables, compressed[1], seen)
        lowest = torch.finfo(attention_mask.dtype).min
        more = torch.where(seen, 0.0, lowest).to(attention_mask.dtype)[:, None]
        kv = torch.cat((kv, compressed[0][:, None]), 2)
        attention_mask = torch.cat((attention_mask, more), -1)
    found, _none = grouped_attention(self, q, kv, kv, attention_mask, self.scaling, s_aux=self.sinks)
    found = v4.apply_rotary_pos_emb(found.transpose(1, 2), tables[0], -tables[1]).transpose(1, 2)
    grouped = self.o_a_proj(found.reshape(*x.shape[:2], self.config.o_groups, -1))
    return self.o_b_proj(grouped.flatten(2)), None


def _compressed(part: Any, kv: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Return a key for each window of tokens, [batch, windows, head_dim].

    Where a token has two keys, the first is of the window after its own.

    Args:
        kv, gate: [batch, windows, compress_rate, features].
    """
    size, width = part.compress_rate, part.head_dim
    gate = gate + part.position_bias
    if kv.shape[-1] == 2 * width:
        kv, gate = (_with_the_window_before(t, width, none) for t, none in ((kv, 0.0), (gate, -torch.inf)))
    found = part.kv_norm((kv * gate.softmax(2, dtype=torch.float32).to(kv.dtype)).sum(2))
    positions = torch.arange(found.shape[1])[None] * size
    tables = part.rotary_emb(found, position_ids=positions, layer_type=part.rope_layer_type)
    turned: torch.Tensor = v4.apply_rotary_pos_emb(found[:, None], *tables)
    return turned[:, 0]


def _with_the_window_before(x: torch.Tensor, width: int, none: float) -> torch.Tensor:
    """Return the first features of the window before each one, and behind them the others of its own."""
    before = torch.nn.functional.pad(x[:, :-1, :, :width], (0, 0, 0, 0, 1, 0), value=none)
    return torch.cat((before, x[..., width:]), 2)


def _selected(
    indexer: Any, x: torch.Tensor, residual: torch.Tensor, tables: Any, keys: torch.Tensor, seen: torch.Tensor
) -> torch.Tensor:
    """Return which compressed keys are selected, [batch, sequence, windows]."""
    queries = indexer.q_b_proj(residual).unflatten(-1, (-1, indexer.head_dim))
    queries = v4.apply_rotary_pos_emb(queries, *tables, unsqueeze_dim=2)
    scores = indexer.scorer(queries, keys, x).masked_fill(~seen, -torch.inf)
    scores = torch.nn.functional.pad(scores, (0, indexer.index_topk), value=-torch.inf)
    indices = scores.topk(indexer.index_topk, -1).indices
    return chosen(indices, scores.shape[-1])[..., : keys.shape[1]]
