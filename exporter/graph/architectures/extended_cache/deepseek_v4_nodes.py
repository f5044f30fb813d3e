"""DeepSeek-V4's attention as CachedAttention with compressed keys, and a SparseIndexer that selects among them.

Each token makes a compressed key of the tokens that end with it. CachedAttention reads the keys of windows' last
tokens. The key is a sum over tokens, weighted by a softmax of gates. Both sums of the softmax are a CausalConv of
exponentials, which have no largest gate to subtract. So gates are limited to +-MOST.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from types import MethodType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as v4

from quantmoe.custom_ops.op import AttentionSpec, ConvSpec, IndexerSpec
from quantmoe.custom_ops.ops.sparse_indexer import sparse_indexer
from quantmoe.custom_ops.reference import attention as reference
from quantmoe.exporter.graph.modules.attention import (
    FAILURES,
    NEAR,
    TOLERANCE,
    Called,
    Draw,
    Given,
    Kind,
    RecognisedAttention,
    Unlike,
    bound,
    drawing,
    line,
    near_all,
    probe_of,
)
from quantmoe.exporter.graph.modules.pooled_keys import convolved

#: exponentials of gates up to here have sums in f32
MOST = 80.0
PROJECTIONS = ("q_a_proj", "q_b_proj", "kv_proj", "o_a_proj", "o_b_proj")
#: of a trial: batch, new tokens, tokens of a compressed key at most
BATCH, NEW, RATE = 2, 14, 3


def parts_of(module: Any) -> list[Any]:
    """Return the modules of an attention module that make compressed keys: its own, and its indexer's."""
    own = module.compressor
    return [part for part in (own, getattr(own, "indexer", None)) if part is not None]


def _forward(self: Any, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
    given = bound(self, args, kwargs)
    cache, tables = given["cache"], given["position_embeddings"][self.rope_layer_type]
    if self.compressor is not None:
        given |= {"layer": cache.layers[self.layer_idx], "rows": self.rows.rows, "window": self.state_window}
    qkv, given["selecting"] = _inputs(self, given, tables)
    selection = self.rows.select(self, given) if self.found.indexer is not None else ()
    norms = [torch.ones(self.head_dim), _to_front(self.kv_norm.weight.float(), tables)]
    output = self.rows.attend(
        self, qkv, cache, tables=tables, norms=norms, sinks=self.sinks.float(), selection=selection
    )
    grouped = self.o_a_proj(_output(self, output, tables).unflatten(-1, (self.config.o_groups, -1)))
    return self.o_b_proj(grouped.flatten(2)), None


def _to_front(x: torch.Tensor, tables: Any) -> torch.Tensor:
    """Return features with those that turn, the last ones, in front of the others, as the node has them."""
    size = 2 * tables[0].shape[-1]
    return torch.cat((x[..., -size:], x[..., :-size]), -1)


def _inputs(self: Any, given: Mapping[str, Any], tables: Any) -> tuple[torch.Tensor, Any]:
    """Return qkv of a node, and what its indexer's node takes: query, key and head_weights."""
    x, compressor, selecting = given["hidden_states"], self.compressor, None
    residual = self.q_a_norm(self.q_a_proj(x))
    queries = self.q_b_proj(residual).unflatten(-1, (-1, self.head_dim))
    made = [_to_front(queries, tables).flatten(-2), _to_front(self.kv_proj(x), tables)]
    if compressor is not None:
        keys = _compressed(parts_of(self), given)
        made.append(_to_front(keys[0], tables))
        if len(keys) > 1:
            own = compressor.indexer
            queries = own.q_b_proj(residual).unflatten(-1, (-1, own.head_dim))
            queries = v4.apply_rotary_pos_emb(queries, *tables, unsqueeze_dim=2).flatten(-2)
            weights = own.scorer.weights_proj(x).float() * (own.scorer.weights_scaling * own.scorer.softmax_scale)
            selecting = queries, keys[1], weights
    return torch.cat(made, -1), selecting


def _compressed(parts: list[Any], given: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return a key of the tokens that end with each one, [batch, S, head_dim], for each part.

    Where a token has two keys, the first is of the window after its own.
    """
    x, positions, rate, made, taps = given["hidden_states"], given["position_ids"], parts[0].compress_rate, [], []
    for part in parts:
        biases = torch.nn.functional.embedding(positions % rate, part.position_bias.float())
        weights = (part.gate_proj(x).float() + biases).clamp(-MOST, MOST).exp()
        made += [part.kv_proj(x).float() * weights, weights]
        overlap = weights.shape[-1] == 2 * part.head_dim
        own = torch.eye(2).repeat_interleave(rate, 1) if overlap else torch.ones(1, rate)
        taps.append(own.repeat_interleave(part.head_dim, 0).repeat(2, 1))
    sums = convolved(torch.cat(made, -1), torch.cat(taps), given["layer"], given["rows"], given["window"])
    windows = (positions - (rate - 1)).clamp(min=0)
    tables, keys = parts[0].rotary_emb(x, position_ids=windows, layer_type=parts[0].rope_layer_type), []
    for part, own in zip(parts, sums.split([2 * weights.shape[-1] for weights in made[1::2]], -1), strict=True):
        over, under = own.unflatten(-1, (2, -1, part.head_dim)).sum(-2).unbind(-2)
        key = part.kv_norm((over / under).to(x.dtype))
        keys.append(v4.apply_rotary_pos_emb(key[:, None], *tables)[:, 0])
    return keys


def _output(self: Any, output: torch.Tensor, tables: Any) -> torch.Tensor:
    """Return a node's output [batch, S, heads * head_dim] turned back: keys that turned are its values."""
    heads, size = output.unflatten(-1, (-1, self.head_dim)), 2 * tables[0].shape[-1]
    heads = torch.cat((heads[..., size:], heads[..., :size]), -1)
    return v4.apply_rotary_pos_emb(heads, tables[0], -tables[1], unsqueeze_dim=2).flatten(-2)


def _node_inputs(self: Any, given: Mapping[str, Any]) -> Any:
    return given["selecting"]


def _indexer_spec(self: Any, _called: Called | None = None) -> IndexerSpec:
    """Return the node of an indexer of compressed keys."""
    return IndexerSpec(
        num_heads=self.num_heads,
        head_size=self.head_dim,
        top_k=self.index_topk * self.compress_rate,
        block_size=self.compress_rate,
        best_slot=0,
    )


def _spec(module: Any, window: int, turning: int) -> AttentionSpec:
    """Return the node of an attention module: with compressed keys, or of keys alone, which are latents."""
    rate = module.compressor.compress_rate if module.compressor is not None else 0
    return AttentionSpec(
        num_heads=module.num_heads,
        kv_num_heads=1,
        head_size=module.head_dim,
        v_head_size=module.head_dim,
        scale=float(np.float32(module.scaling)),
        sliding_window=window,
        chunk_size=0,
        softcap=0.0,
        rotary_size=turning,
        rotary_interleaved=1,
        qk_norm="head",
        norm_epsilon=float(np.float32(module.kv_norm.variance_epsilon)),
        key_split=0 if rate else module.head_dim // 2,
        compress_rate=rate,
    )


def _pooling(module: Any) -> ConvSpec | None:
    """Return the node that sums what compressed keys are made of."""
    if module.compressor is None or module.compressor.compress_rate == 1:
        return None
    widths = [part.kv_proj.out_features for part in parts_of(module)]
    width = module.compressor.compress_rate * widths[0] // module.head_dim
    return ConvSpec(channels=2 * sum(widths), width=width, activation="none")


def _compare(module: Any, called: Called) -> RecognisedAttention:
    """Return the node that gives what a module gives, on a prompt of random tokens."""
    draw = drawing()
    probe, pairs = _probe(module, draw), called.arguments["position_embeddings"][0].shape[-1]
    x, positions = draw(BATCH, NEW, 8), torch.arange(NEW).repeat(BATCH, 1)
    unseen = torch.ones(NEW, NEW, dtype=torch.bool)
    unseen = unseen.triu(1) | unseen.tril(-NEAR if called.window else -NEW)
    mask = torch.zeros(BATCH, 1, NEW, NEW).masked_fill(unseen, torch.finfo(torch.float32).min)
    rows = torch.tensor([[0, NEW, 0]] * BATCH, dtype=torch.int32)
    given = {"hidden_states": x, "position_ids": positions, "rows": rows, "window": 1}
    given["layer"] = SimpleNamespace(conv_states={0: None}, has_previous_state={})
    try:
        with torch.no_grad():
            tables = tuple(draw(BATCH, NEW, pairs) for _ in range(2))
            if (own := probe.compressor) is not None:
                tables = own.rotary_emb(x, position_ids=positions, layer_type=own.rope_layer_type)
            found = type(module).forward(
                probe, x, dict.fromkeys(("main", "compress"), tables), positions, attention_mask=mask, cache=None
            )[0]
            qkv, selecting = _inputs(probe, given, tables)
            lists = None
            if selecting is not None:
                keys = np.zeros((BATCH, 1, 0, own.indexer.head_dim), np.float32)
                query, key, weights = (t.numpy() for t in selecting)
                length = np.zeros((BATCH, NEW), np.int64)
                lists, _ = sparse_indexer(_indexer_spec(own.indexer), query, key, weights, keys, rows.numpy(), length)
            norms = torch.ones(module.head_dim), _to_front(probe.kv_norm.weight, tables)
            spec = _spec(probe, NEAR if called.window else 0, 2 * pairs)
            past, other = (np.zeros((BATCH, 1, 0, width), np.float32) for width in spec.cache_widths)
            cos, sin, q_norm, k_norm, sinks = (t.numpy() for t in (*tables, *norms, probe.sinks))
            given_too = (rows.numpy(), NEW, cos, sin, q_norm, k_norm, sinks)
            made, *_ = reference(spec, qkv.numpy(), past, other, *given_too, selected=lists)
            want = _output(probe, torch.from_numpy(made).float(), tables)
    except FAILURES as error:
        raise Unlike(f"its forward does more than attend: {line(error)}") from None
    if not near_all([found], [want.numpy()], TOLERANCE[1.0]):
        raise Unlike("it computes something else than CachedAttention with compressed keys")
    spec = _spec(module, called.window, 2 * pairs)
    return RecognisedAttention(
        spec=spec, table=called.table, sinks="sinks", outputs=2, kind=KIND, pooling=_pooling(module)
    )


def _probe(module: Any, draw: Draw) -> Any:
    """Return a module with random parameters, random outputs in the place of its projections, and short windows."""
    probe = probe_of(module, (*PROJECTIONS, "compressor"), draw)
    widths = {name: getattr(module, name).out_features for name in PROJECTIONS[:3]}
    probe._modules |= {name: Given(draw(BATCH, NEW, width)) for name, width in widths.items()}
    probe._modules |= {name: torch.nn.Identity() for name in PROJECTIONS[3:]}
    probe._modules["compressor"] = None
    if module.compressor is None:
        return probe
    parts = []
    for part in parts_of(module):
        own = probe_of(part, ("kv_proj", "gate_proj", "indexer", "q_b_proj", "scorer"), draw)
        width, own.compress_rate = part.kv_proj.out_features, min(part.compress_rate, RATE)
        own._modules |= {name: Given(draw(BATCH, NEW, width)) for name in ("kv_proj", "gate_proj")}
        own.position_bias = torch.nn.Parameter(draw(own.compress_rate, width), requires_grad=False)
        parts.append(own)
    probe._modules["compressor"] = parts[0]
    if len(parts) > 1:
        own, old = parts[1], module.compressor.indexer
        own.index_topk, own._modules["scorer"] = 2, copy.copy(old.scorer)
        own.scorer._modules = {"weights_proj": Given(draw(BATCH, NEW, old.num_heads))}
        own._modules["q_b_proj"] = Given(draw(BATCH, NEW, old.num_heads * old.head_dim))
        parts[0]._modules["indexer"] = own
    return probe


def prepare(attention: Any) -> None:
    """Let a recogniser see an attention module's indexer, which is part of its compressor."""
    if attention.compressor is not None:
        attention.state_window = 1
    indexer = getattr(attention.compressor, "indexer", None)
    attention.__dict__["indexer"] = indexer  # no child, which would have a second name
    if indexer is not None:
        indexer.compare = MethodType(_indexer_spec, indexer)
        indexer.node_inputs = MethodType(_node_inputs, indexer)


def _attach(module: Any) -> None:
    module.forward = MethodType(_forward, module)


KIND = Kind(lambda module: isinstance(module, v4.DeepseekV4Attention), _compare, _attach)
