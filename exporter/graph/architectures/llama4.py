"""Llama-4's language model: experts that are fed every token, rotary embeddings in complex numbers, and masks whose
chunks are counted with a cumulative sum."""

from __future__ import annotations

from types import MethodType
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.models.llama4 import modeling_llama4

from quantmoe.custom_ops.op import AttentionSpec
from quantmoe.exporter.graph.experts import put_on_interface
from quantmoe.exporter.graph.modules.attention import Called, Kind, RecognisedAttention, bound, projected
from quantmoe.exporter.graph.standard_attention import grouped_attention


def prepare(model: PreTrainedModel) -> None:
    """Give experts transformers' interface, make the rotary embedding real, mask chunks without a cumulative sum.

    TensorRT runs a cumulative sum as a loop, which no CUDA graph takes.
    """
    for module in model.modules():
        if isinstance(module, modeling_llama4.Llama4TextMoe):
            put_on_interface(module.experts, transposed=True)
            module.forward = MethodType(_moe, module)  # type: ignore[method-assign]
            module.router.forward = MethodType(_router, module.router)
        elif isinstance(module, modeling_llama4.Llama4TextRotaryEmbedding):
            module.forward = MethodType(_frequencies, module)  # type: ignore[method-assign]
        elif isinstance(module, modeling_llama4.Llama4TextAttention):
            module.forward = MethodType(_attention, module)  # type: ignore[method-assign]
        elif isinstance(module, modeling_llama4.Llama4TextModel):
            module.forward = MethodType(_model, module)  # type: ignore[method-assign]


def _moe(self: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Llama4TextMoe.forward without the experts that were not chosen: their inputs are times zero there."""
    hidden_states = hidden_states.reshape(-1, self.hidden_dim)
    logits, weights, ids = self.router(hidden_states)
    return self.shared_expert(hidden_states) + self.experts(hidden_states, ids, weights), logits


def _router(self: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Llama4Router.forward as other routers have it: logits [T, E], weights [T, k], ids [T, k]."""
    logits = type(self).forward(self, hidden_states)[-1]
    chosen, ids = torch.topk(logits, self.top_k)
    return logits, chosen.float().sigmoid(), ids


def _frequencies(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines in place of complex numbers, [batch, sequence, head_dim], each for two neighbours."""
    angles = position_ids[..., None].float() * self.inv_freq.float().repeat_interleave(2, -1)
    return angles.cos() * self.attention_scaling, angles.sin() * self.attention_scaling


def _model(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Llama4TextModel.forward with other masks of chunks."""
    original = modeling_llama4.create_chunked_causal_mask
    modeling_llama4.create_chunked_causal_mask = _chunked_mask
    try:
        return type(self).forward(self, *args, **kwargs)
    finally:
        modeling_llama4.create_chunked_causal_mask = original


def _chunked_mask(config: Any, attention_mask: torch.Tensor, **kwargs: Any) -> torch.Tensor | None:
    """create_chunked_causal_mask: chunks are counted from a row's first token that is not padding.

    Args:
        attention_mask: [batch, L], of the cache and the new tokens.

    Returns:
        [batch, 1, S, L], 0 or the type's lowest number.
    """
    mask = create_causal_mask(config=config, attention_mask=attention_mask, **kwargs)
    if mask is None:  # where all attention is CachedAttention
        return None
    new, length = mask.shape[-2:]
    keys = torch.arange(length, device=mask.device)
    first = torch.where(attention_mask.bool(), keys, length).amin(-1)[:, None, None, None]
    queries = (torch.arange(new, device=mask.device) + (length - new))[:, None]
    start = queries - (queries - first) % config.attention_chunk_size
    made: Any = torch.where(keys < start, torch.finfo(mask.dtype).min, mask)
    made.chunk_size = config.attention_chunk_size  # for modules/attention.py
    return made


def _attention(
    self: Any,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    attention_mask: torch.Tensor,
    cache: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Llama4TextAttention.forward, in the order [batch, heads, sequence, head_dim] from the projections on.

    TensorRT 10.6 fuses a change of that order with the products beside it. In engines for sequences of 1 to 512, all
    heads except the first then get another head's factors of the norm, without a message. docs/lab/tensorrt.md has the
    other faults of this kind.
    """
    batch, new = hidden_states.shape[:-1]

    def heads(x: torch.Tensor) -> torch.Tensor:
        return x.view(batch, new, -1, self.head_dim).transpose(1, 2)

    q, k, v = (heads(project(hidden_states)) for project in (self.q_proj, self.k_proj, self.v_proj))
    if self.use_rope:
        q, k = _rotate(q, k, position_embeddings)
    if hasattr(self, "qk_norm"):
        q, k = self.qk_norm(q), self.qk_norm(k)
    if self.attn_temperature_tuning and not self.use_rope:
        positions = torch.arange(new) + cache.get_seq_length(self.layer_idx)
        q = (q * _temperatures(self, positions)[:, None]).to(q.dtype)
    k, v = cache.update(k, v, self.layer_idx)
    found, _ = grouped_attention(self, q, k, v, attention_mask, scaling=self.scaling)
    return self.o_proj(found.reshape(batch, new, -1)), None


def _temperatures(self: Any, positions: torch.Tensor) -> torch.Tensor:
    """Return the factors of queries where nothing turns, f32."""
    return torch.log1p(torch.floor((positions.float() + 1.0) / self.floor_scale)) * self.attn_scale + 1.0


def _node(self: Any, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
    """Llama4TextAttention.forward as its projections and one node.

    Positions of temperatures are the slots of tokens, as without padding.
    """
    given, spec = bound(self, args, kwargs), self.found.spec
    qkv, norms = projected(self, given["hidden_states"]), []
    if spec.qk_norm != "none":
        norms = [torch.ones(spec.head_size)] * 2
    if self.attn_temperature_tuning and not self.use_rope:
        begin, _, past = self.rows.rows.unbind(1)
        slots = torch.arange(qkv.shape[1]) + (past - begin)[:, None]
        factors = _temperatures(self, slots.clamp(min=0))[..., None]  # below 0: padding, whatever it is
        size = spec.num_heads * spec.head_size
        queries, rest = qkv.split([size, qkv.shape[-1] - size], -1)
        qkv = torch.cat(((queries * factors).to(qkv.dtype), rest), -1)
    output = self.rows.attend(self, qkv, given["cache"], tables=given["position_embeddings"], norms=norms)
    return self.o_proj(output), None


def _recognise(module: Any, called: Called) -> RecognisedAttention:
    """:func:`_attention` as a node. It norms after it turns, which changes no norm: the node does it before."""
    spec = AttentionSpec(
        num_heads=module.num_attention_heads,
        kv_num_heads=module.num_key_value_heads,
        head_size=module.head_dim,
        v_head_size=module.head_dim,
        scale=float(np.float32(module.scaling)),
        sliding_window=called.window,
        chunk_size=getattr(called.arguments["attention_mask"], "chunk_size", 0),
        softcap=0.0,
        rotary_size=module.head_dim if module.use_rope else 0,
        rotary_interleaved=int(module.use_rope),
        qk_norm="head" if hasattr(module, "qk_norm") else "none",
        norm_epsilon=float(np.float32(module.qk_norm.eps)) if hasattr(module, "qk_norm") else 0.0,
    )
    return RecognisedAttention(spec=spec, table=called.table, sinks="", outputs=2, kind=KIND)


def _attach(module: Any) -> None:
    module.forward = MethodType(_node, module)


KIND = Kind(lambda module: type(module) is modeling_llama4.Llama4TextAttention, _recognise, _attach)


def _rotate(
    q: torch.Tensor, k: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the pairs of neighbouring features as complex numbers, times e^(i angle)."""
    cos, sin = (table[:, None] for table in tables)
    sin = sin * torch.tensor([-1.0, 1.0]).repeat(q.shape[-1] // 2)
    neighbours = torch.arange(q.shape[-1]) ^ 1

    def turn(x: torch.Tensor) -> torch.Tensor:
        x32 = x.float()
        return (x32 * cos + x32.index_select(-1, neighbours) * sin).type_as(x)

    return turn(q), turn(k)
