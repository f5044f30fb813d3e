"""Qwen4-Exp: streams of residuals, embeddings of n-grams, and attention to the best blocks of tokens.

An indexer is a SparseIndexer of blocks, where the target takes lists. In standard nodes its keys are kept as in
indexed.py. A layer with embeddings of n-grams has three short convolutions: linear attention's, one that is dilated,
and one that only delays the tokens' numbers. Their states are one tensor.
"""

from __future__ import annotations

import math
from types import MethodType, SimpleNamespace
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.models.qwen4_exp import modeling_qwen4_exp as qwen4

from quantmoe.custom_ops.op import ConvSpec, IndexerSpec
from quantmoe.exporter.graph.architectures import mrope
from quantmoe.exporter.graph.architectures.extended_cache.indexed import (
    PackedCache,
    by_slot,
    chosen,
    placed,
)
from quantmoe.exporter.graph.modules import pooled_keys, token_windows
from quantmoe.exporter.graph.modules.attention import Called, Given, drawing, probe_of
from quantmoe.exporter.graph.modules.states.linear_attention import convolve
from quantmoe.exporter.graph.modules.states.state_parts import StatePart, divide, join
from quantmoe.exporter.graph.standard_attention import grouped_attention

#: digits of a token's number plus 1, in base 256: every type of a graph has them exactly
_DIGITS = 3


def prepare(model: PreTrainedModel) -> None:
    """Give the model positions of one axis, a selection that no length changes, and states that are one tensor."""
    mrope.prepare(model)
    rotary = next(m for m in model.modules() if isinstance(m, qwen4.Qwen4ExpTextRotaryEmbedding))
    linear = [module for module in model.modules() if isinstance(module, qwen4.Qwen4ExpTextGatedDeltaNet)]
    for module in model.modules():
        own: Any = module
        if isinstance(module, qwen4.Qwen4ExpTextModel):
            own.forward = MethodType(_model, module)
        elif isinstance(module, qwen4.Qwen4ExpTextAttention):
            own.rotary = (rotary,)  # no module of this one, too
            own.forward = MethodType(_attention, module)
            own.indexer.rotary, own.indexer.linear = (rotary,), linear[:1]
            own.indexer.compare = MethodType(_compare, own.indexer)
            own.indexer.node_inputs = MethodType(_node_inputs, own.indexer)
        elif isinstance(module, qwen4.Qwen4ExpTextDecoderLayer) and module.ple is not None:
            own.forward = MethodType(_layer, module)
            own.ple.forward = MethodType(_injected, own.ple)
        elif isinstance(module, qwen4.Qwen4ExpTextNGramEmbedding):
            # functions of config.json
            module._non_persistent_buffers_set |= module._buffers.keys()


def _model(
    self: Any,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    position_ids: torch.Tensor | None = None,
    cache: Any = None,
    **_: Any,
) -> MoeModelOutputWithPast:
    """Qwen4ExpTextModel.forward without a history of positions: the positions of the tokens tell it."""
    embeddings = self.embed_tokens(input_ids)
    if cache is None:
        attention = (layer.self_attn for layer in self.layers if layer.layer_type != "linear_attention")
        cache = pooled_keys.new_cache(self.config, attention)
    tokens = placed(attention_mask.bool())
    if position_ids is None:
        position_ids = tokens[0][:, -input_ids.shape[1] :]
    mask = create_causal_mask(
        config=self.config,
        inputs_embeds=embeddings,
        attention_mask=attention_mask,
        cache=cache,
        allow_is_causal_skip=False,
    )
    x, tables = embeddings.repeat(1, 1, self.config.hc_count), self.rotary_emb(embeddings, position_ids)
    for layer in self.layers:
        x = layer(
            x,
            position_embeddings=tables,
            attention_mask=mask,
            cache=cache,
            ple_input_ids=input_ids,
            position_ids=position_ids,
            tokens=tokens,
        )
    return MoeModelOutputWithPast(last_hidden_state=self.hyper_connection_mixer(x), cache=cache)


def _attention(
    self: Any,
    hidden_states: torch.Tensor,
    position_embeddings: Any,
    attention_mask: torch.Tensor,
    cache: Any,
    position_ids: torch.Tensor,
    tokens: tuple[torch.Tensor, torch.Tensor],
    **_: Any,
) -> tuple[torch.Tensor, None]:
    x, indexer = hidden_states, self.indexer
    q, gate = self.q_proj(x).unflatten(-1, (-1, 2 * self.head_dim)).chunk(2, -1)
    k, v = (project(x).unflatten(-1, (-1, self.head_dim)) for project in (self.k_proj, self.v_proj))
    q, k = self.q_norm(q).transpose(1, 2), self.k_norm(k).transpose(1, 2)
    q, k = qwen4.apply_rotary_pos_emb(q, k, *position_embeddings)
    sizes = [heads * indexer.index_head_dim for heads in (indexer.index_n_heads, indexer.index_kv_heads)]
    queries, keys = indexer.index_qk_proj(x).split(sizes, -1)
    packed = PackedCache(cache, keys, attention_mask)
    k, v = packed.update(k, v.transpose(1, 2), self.layer_idx)
    queries = indexer.q_layernorm(queries.unflatten(-1, (-1, indexer.index_head_dim))).transpose(1, 2)
    queries = qwen4.apply_rotary_pos_emb(queries, cos=position_embeddings[0], sin=position_embeddings[1])
    selected = _selected(indexer, self.rotary[0], queries, packed.keys, position_ids, tokens)
    mask = torch.where(selected[:, None], attention_mask, torch.finfo(attention_mask.dtype).min)
    found, _none = grouped_attention(self, q, k, v, mask, self.scaling)
    return self.o_proj((found * gate.sigmoid()).flatten(-2)), None


def _node_inputs(self: Any, given: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the query, key and head_weights of a SparseIndexer whose blocks have the mean of their keys."""
    x, layer, size = given["hidden_states"], given["cache"].layers[self.layer_idx], self.compress_ratio
    cos, sin = given["position_embeddings"]
    sizes = [heads * self.index_head_dim for heads in (self.index_n_heads, self.index_kv_heads)]
    queries, keys = self.index_qk_proj(x).split(sizes, -1)
    queries = self.q_layernorm(queries.unflatten(-1, (-1, self.index_head_dim)))
    queries = qwen4.apply_rotary_pos_emb(queries, cos=cos, sin=sin, unsqueeze_dim=2)
    taps = torch.full((self.index_head_dim, size), 1 / size)
    means = pooled_keys.convolved(keys, taps, layer, given["rows"], pooled_keys.window_of(self.linear))
    cos, sin = self.rotary[0](means, (given["position_ids"] - (size - 1)).clamp(min=0))
    keys = qwen4.apply_rotary_pos_emb(self.k_layernorm(means)[:, None], cos=cos, sin=sin)[:, 0]
    return queries.flatten(-2), keys, torch.ones(queries.shape[:3])


def _spec(self: Any) -> IndexerSpec:
    return IndexerSpec(
        num_heads=self.index_n_heads,
        head_size=self.index_head_dim,
        top_k=self.block_topk * self.compress_ratio,
        block_size=self.compress_ratio,
        best_slot=0,
    )


def _compare(self: Any, _: Called) -> IndexerSpec:
    draw = drawing()
    probe = probe_of(self, ("index_qk_proj",), draw)
    probe.layer_idx, probe.compress_ratio, probe.block_topk, probe.token_budget = 0, 2, 2, 4
    probe.linear = ()

    def run(mask: torch.Tensor) -> torch.Tensor:
        made = draw(*mask.shape[::2], (self.index_n_heads + self.index_kv_heads) * self.index_head_dim)
        probe._modules["index_qk_proj"] = Given(made)
        found: torch.Tensor = type(self).forward(probe, made, tables(*mask.shape[::2]), mask, None)
        return found[:, 0]

    def positions(batch: int, new: int) -> torch.Tensor:
        return torch.arange(new).repeat(batch, 1)

    def tables(batch: int, new: int) -> Any:
        return self.rotary[0](torch.zeros(1), positions(batch, new))

    def inputs(given: dict[str, Any]) -> Any:
        made = probe.index_qk_proj.values
        known = {"position_embeddings": tables(*made.shape[:2]), "position_ids": positions(*made.shape[:2])}
        return _node_inputs(probe, given | known | {"hidden_states": made})

    pooled_keys.compare(_spec(probe), run, inputs)
    return _spec(self)


def _selected(
    indexer: Any,
    rotary: Any,
    queries: torch.Tensor,
    keys: torch.Tensor,
    positions: torch.Tensor,
    tokens: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """Return which tokens are selected, [batch, sequence, slots]: the best whole blocks, and the last block.

    Args:
        queries: [batch, heads, sequence, features]. keys: [batch, slots, features]. tokens: of ``placed``.
    """
    (places, slots), size, most = tokens, indexer.compress_ratio, indexer.block_topk
    blocks = token_windows.of(slots, size)
    count = blocks.shape[1]
    pooled = token_windows.take(keys, blocks).float().mean(2).to(keys.dtype)
    tables = rotary(pooled, torch.arange(count)[None] * size)
    pooled = qwen4.apply_rotary_pos_emb(indexer.k_layernorm(pooled)[:, None], cos=tables[0], sin=tables[1])
    scores = torch.relu(torch.matmul(queries.float(), pooled.float().transpose(2, 3))).sum(1)
    scores = scores / math.sqrt(indexer.index_head_dim)
    last = torch.arange(count) >= ((positions + 1) // size)[..., None]
    scores = torch.nn.functional.pad(scores.masked_fill(last, -torch.inf), (0, most), value=-torch.inf)
    named = chosen(scores.topk(most, -1).indices, count + most)[..., :count] | last
    return by_slot(named[:, None], places // size)[:, 0]


def _layer(self: Any, hidden_states: torch.Tensor, *args: Any, cache: Any, **kwargs: Any) -> torch.Tensor:
    """Qwen4ExpTextDecoderLayer.forward, whose short convolutions have one state."""
    linear, ple = self.linear_attn, self.ple
    layer, words = cache.layers[linear.layer_idx], _DIGITS * (ple.ple_embedding.ngram_size - 1)
    sizes = (
        (linear.conv_dim, linear.conv_kernel_size),
        (ple.conv1d.in_channels, ple.short_conv_state_len + 1),
        (words, ple.ple_embedding.ngram_size),
    )
    own, *others = parts = divide(layer, sizes)
    ple.parts = (*others, linear)
    made: torch.Tensor = type(self).forward(self, hidden_states, *args, cache=own, **kwargs)
    join(layer, parts)
    return made


def _injected(self: Any, hidden_states: torch.Tensor, input_ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """Qwen4ExpTextPLELayer.forward between two CausalConv."""
    part, words, linear = self.parts
    rows = _ngrams(self.ple_embedding, input_ids, words, linear, hidden_states)
    embeddings = self.ple_embedding.ngram_embedding(rows).flatten(-2)
    keys = self.norm_key(self.key_proj(embeddings)).unflatten(-1, (self.hc_count, self.hidden_size))
    queries = self.norm_query(hidden_states).unflatten(-1, (self.hc_count, self.hidden_size))
    gate = (keys * queries).sum(-1, keepdim=True) / math.sqrt(self.hidden_size)
    gate = gate.abs().clamp_min(1e-6).sqrt() * gate.sign()
    value = (torch.sigmoid(gate) * self.value_proj(embeddings).unsqueeze(-2)).flatten(-2)
    width, dilation = self.short_conv_state_len + 1, self.conv1d.dilation[0]
    taps = torch.nn.functional.pad(self.conv1d.weight[:, 0, :, None], (0, dilation - 1)).flatten(1)[:, :width]
    return value + _delayed(self.norm_conv(value), taps, "silu", part, linear)


def _delayed(x: torch.Tensor, taps: torch.Tensor, activation: str, part: StatePart, linear: Any) -> torch.Tensor:
    """Return the convolution of each channel with its taps, as the linear attention of the layer has its own."""
    spec = ConvSpec(
        channels=taps.shape[0],
        width=taps.shape[1],
        activation=activation,
        state_window=linear.found.conv.state_window,
    )
    convolution = SimpleNamespace(weight=taps.float(), bias=None)
    return convolve(spec, convolution, x, part, linear.rows.rows)


def _ngrams(self: Any, ids: torch.Tensor, part: StatePart, linear: Any, like: torch.Tensor) -> torch.Tensor:
    """Return the rows of the embeddings of n-grams that end with each token, [batch, sequence, heads].

    An n-gram has no token before an end of text, nor before the first token. The end of a text stands there.
    """
    before = self.ngram_size - 1
    digits = torch.stack([(ids + 1) // 256**i % 256 for i in range(_DIGITS)], -1)
    taps = torch.eye(before + 1).flip(1)[1:].repeat_interleave(_DIGITS, 0)  # by 1, 2, .. tokens
    delayed = _delayed(digits.repeat(1, 1, before).to(like.dtype), taps, "none", part, linear)
    weights = torch.tensor([256**i for i in range(_DIGITS)])
    found = (delayed.round().long().unflatten(-1, (before, _DIGITS)) * weights).sum(-1) - 1
    words, ended = [ids], torch.zeros_like(ids, dtype=torch.bool)
    for i in range(before):
        ended = ended | (found[..., i] < 0) | (found[..., i] == self.eos_token_id)
        words.append(torch.where(ended, self.eos_token_id, found[..., i]))
    rows, mixed = [], words[0] * self.layer_multipliers[0]
    for i in range(before):
        mixed = torch.bitwise_xor(mixed, words[i + 1] * self.layer_multipliers[i + 1])
        heads = slice(i * self.heads_per_ngram, (i + 1) * self.heads_per_ngram)
        rows.append(mixed[..., None] % self.ngram_heads_vocab_sizes[heads] + self.ngram_heads_offsets[heads])
    return torch.cat(rows, -1)
