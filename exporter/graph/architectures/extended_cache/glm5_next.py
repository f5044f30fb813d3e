"""GLM-5-Next: latent attention to the best pools of tokens, delta attention, and streams of residuals.

An indexer is a SparseIndexer of blocks. In standard nodes its keys are kept as in indexed.py. Behind each
key lies what says its part in the key of its pool.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.models.glm5_next import modeling_glm5_next as glm5

from quantmoe.custom_ops.op import IndexerSpec
from quantmoe.exporter.graph.architectures.extended_cache.indexed import PackedCache, by_slot, chosen, placed
from quantmoe.exporter.graph.modules import pooled_keys, token_windows
from quantmoe.exporter.graph.modules.attention import Called, Given, Unlike, drawing, probe_of
from quantmoe.exporter.graph.standard_attention import grouped_attention


def prepare(model: PreTrainedModel) -> None:
    """Give attention a mask like other models', and a number of selected pools that no length changes."""
    linear = [module for module in model.modules() if isinstance(module, glm5.Glm5NextTextLinearAttention)]
    for module in model.modules():
        if isinstance(module, glm5.Glm5NextTextModel):
            module.forward = MethodType(_model, module)  # type: ignore[method-assign]
        elif isinstance(module, glm5.Glm5NextTextAttention):
            module.forward = MethodType(_attention, module)  # type: ignore[method-assign]
            indexer: Any = module.indexer
            if indexer is not None:
                indexer.linear = linear[:1]
                indexer.compare = MethodType(_compare, indexer)
                indexer.node_inputs = MethodType(_node_inputs, indexer)


def _model(
    self: Any,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    position_ids: torch.Tensor | None = None,
    cache: Any = None,
    **_: Any,
) -> MoeModelOutputWithPast:
    if cache is None:
        attention = (layer.self_attn for layer in self.layers if layer.block_type != "linear_attention")
        cache = pooled_keys.new_cache(self.config, attention)
    embeddings, (places, slots) = self.embed_tokens(input_ids), placed(attention_mask.bool())
    positions = places[:, -input_ids.shape[1] :] if position_ids is None else position_ids
    mask = create_causal_mask(
        config=self.config,
        inputs_embeds=embeddings,
        attention_mask=attention_mask,
        cache=cache,
        allow_is_causal_skip=False,
    )
    pools = token_windows.of(slots, self.config.index_kpool)
    x, selected = embeddings.unsqueeze(2).expand(-1, -1, self.config.hc_mult, -1).contiguous(), None
    for layer in self.layers:
        x, selected = layer(
            x,
            attention_mask=None if layer.block_type == "linear_attention" else mask,
            position_ids=positions,
            cache=cache,
            prev_topk_indices=selected,
            places=places,
            pools=pools,
        )
    return MoeModelOutputWithPast(last_hidden_state=self.norm(self.hc_head(x)), cache=cache)


def _attention(
    self: Any,
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor,
    cache: Any,
    position_ids: torch.Tensor,
    places: torch.Tensor,
    pools: torch.Tensor,
    prev_topk_indices: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None, torch.Tensor | None]:
    x, indexer, selected = hidden_states, self.indexer, prev_topk_indices
    residual = self.q_a_layernorm(self.q_a_proj(x))
    q = self.q_b_proj(residual).unflatten(-1, (-1, self.qk_head_dim)).transpose(1, 2)
    latent, key = self.kv_a_proj_with_mqa(x).split([self.kv_lora_rank, self.qk_rope_head_dim], -1)
    latent, keys = self.kv_a_layernorm(latent), None
    if indexer is not None:
        parts = torch.nn.functional.linear(x, indexer.index_kpool_compress_gate)
        keys = torch.cat((indexer.k_norm(indexer.wk(x)), parts), -1)
    packed = PackedCache(cache, keys, attention_mask)
    latent, key = packed.update(latent[:, None], key[:, None], self.layer_idx)
    if indexer is not None:
        named = _selected(indexer, x, residual, packed.keys, position_ids, pools)
        selected = by_slot(named[:, None], places // indexer.index_kpool)
    mask = torch.where(selected, attention_mask, torch.finfo(attention_mask.dtype).min)
    k, v = self.expand_kv(latent, key)
    found, _none = grouped_attention(self, q, k, v, mask, self.scaling)
    return self.o_proj(found.flatten(2)), None, selected if self.next_skip_topk or indexer is None else None


def _node_inputs(self: Any, given: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the query, key and head_weights of a SparseIndexer whose blocks have a sum of their keys."""
    x, layer, size = given["hidden_states"], given["cache"].layers[self.layer_idx], self.index_kpool
    parts = torch.nn.functional.linear(x, self.index_kpool_compress_gate)
    joined = torch.cat((self.k_norm(self.wk(x)), parts), -1)
    taps = torch.eye(size).repeat_interleave(joined.shape[-1], 0)  # the tokens of a pool, the oldest first
    window = pooled_keys.window_of(self.linear)
    tokens = pooled_keys.convolved(joined.repeat(1, 1, size), taps, layer, given["rows"], window)
    keys, parts = tokens.unflatten(-1, (size, -1)).chunk(2, -1)
    parts = (parts.float() + self.index_kpool_compress_ape.float()).softmax(2).to(keys.dtype)
    weights = self.weights_proj(x).float() * (self.n_heads**-0.5 * self.softmax_scale)
    return self.wq_b(given["q_resid"]), (keys * parts).sum(2), weights


def _spec(self: Any) -> IndexerSpec:
    return IndexerSpec(
        num_heads=self.n_heads,
        head_size=self.head_dim,
        top_k=self.index_topk,
        block_size=self.index_kpool,
        best_slot=0,
    )


def _compare(self: Any, _: Called) -> IndexerSpec:
    if not self.index_kpool_always_select_tail:
        raise Unlike("its indexer does not always select the last pool")
    draw, names = drawing(), ("wq_b", "wk", "weights_proj")
    probe = probe_of(self, names, draw)
    probe.layer_idx, probe.index_kpool, probe.index_topk, probe.linear = 0, 2, 4, ()
    ape, gate = (draw(2, self.head_dim), draw(self.head_dim, 8))
    probe.index_kpool_compress_ape, probe.index_kpool_compress_gate = (
        torch.nn.Parameter(tensor, requires_grad=False) for tensor in (ape, gate)
    )
    given: dict[str, torch.Tensor] = {}

    def run(mask: torch.Tensor) -> torch.Tensor:
        batch, new = mask.shape[::2]
        for name, size in zip(names, (self.n_heads * self.head_dim, self.head_dim, self.n_heads), strict=True):
            probe._modules[name] = Given(draw(batch, new, size))
            probe._modules[name].weight = torch.empty(0)
        given.update(hidden_states=draw(batch, new, 8), q_resid=draw(batch, new, 8))
        every = torch.ones(batch, new, dtype=torch.bool)
        indices = type(self).forward(probe, **given, attention_mask=every, cache=None)
        return chosen(torch.where(indices < 0, new, indices), new + 1)[..., :new]

    pooled_keys.compare(_spec(probe), run, lambda known: _node_inputs(probe, {**known, **given}))
    return _spec(self)


def _selected(
    indexer: Any,
    x: torch.Tensor,
    residual: torch.Tensor,
    cached: torch.Tensor,
    positions: torch.Tensor,
    pools: torch.Tensor,
) -> torch.Tensor:
    """Return which pools are selected, [batch, sequence, pools].

    Args:
        cached: keys, and what says their parts in pools, [batch, slots, features].
        pools: the slots of each, [batch, pools, index_kpool].
    """
    size = indexer.index_kpool
    most = indexer.index_topk // size
    keys, parts = token_windows.take(cached, pools).chunk(2, -1)
    parts = (parts.float() + indexer.index_kpool_compress_ape.float()).softmax(2).to(keys.dtype)
    pooled = (keys * parts).sum(2).float()
    count = pooled.shape[1]
    queries = indexer.wq_b(residual).unflatten(-1, (-1, indexer.head_dim)).float()
    scores = torch.relu(torch.matmul(queries, pooled.transpose(1, 2)[:, None]) * indexer.softmax_scale)
    weights = indexer.weights_proj(x).float() * indexer.n_heads**-0.5
    scores = torch.matmul(weights[:, :, None], scores)[:, :, 0]
    last = torch.arange(count) >= ((positions + 1) // size)[..., None]  # not whole, or later
    scores = torch.nn.functional.pad(scores.masked_fill(last, -torch.inf), (0, most), value=-torch.inf)
    named = chosen(scores.topk(most, -1).indices, count + most)[..., :count]
    return named | last if indexer.index_kpool_always_select_tail else named & ~last
