"""Sparse attention with an indexer (DeepSeek-V3.2): small keys of all tokens say which tokens are attended to.

The small keys are kept behind the keys that turn, in the same cache. Scores, the selection and attention are standard
nodes. Of equal scores ONNX' TopK selects the lower position.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Attention, apply_rotary_pos_emb


def prepare(model: PreTrainedModel) -> None:
    """Make attention keep the indexer's keys in its cache, and the indexer select a number that no length changes."""
    for module in model.modules():
        if isinstance(module, DeepseekV32Attention):
            attention: Any = module
            attention.indexed = True
            attention.indexer.forward = MethodType(_select, attention.indexer)
            attention.forward = MethodType(_attention, attention)


class _Packed:
    """A cache of one attention module, whose second tensor has the indexer's keys behind its own."""

    def __init__(self, cache: Any, keys: torch.Tensor):
        self.cache, self.keys = cache, keys

    def update(self, latent: torch.Tensor, turning: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the latent and the keys that turn, of all tokens."""
        sizes = [turning.shape[-1], self.keys.shape[-1]]
        joined = torch.cat((turning, self.keys[:, None]), -1)
        latent, joined = self.cache.update(latent, joined, *args, **kwargs)
        turning, keys = joined.split(sizes, -1)
        self.keys = keys[:, 0]
        return latent, turning


def _attention(self: Any, hidden_states: torch.Tensor, position_embeddings: Any, *args: Any, **kwargs: Any) -> Any:
    keys = _keys(self.indexer, hidden_states, position_embeddings)
    kwargs["cache"] = _Packed(kwargs["cache"], keys)
    return type(self).forward(self, hidden_states, position_embeddings, *args, **kwargs)


def _turned(indexer: Any, x: torch.Tensor, tables: Any) -> torch.Tensor:
    """Return queries or keys [batch, sequence, heads, features] with their first features turned."""
    first, rest = x.split([indexer.qk_rope_head_dim, indexer.head_dim - indexer.qk_rope_head_dim], -1)
    return torch.cat((apply_rotary_pos_emb(first, first, *tables, unsqueeze_dim=2)[0], rest), -1)


def _keys(indexer: Any, hidden_states: torch.Tensor, tables: Any) -> torch.Tensor:
    """Return the indexer's keys of new tokens, [batch, sequence, features]."""
    return _turned(indexer, indexer.k_norm(indexer.wk(hidden_states))[:, :, None], tables)[:, :, 0]


def _select(
    self: Any,
    hidden_states: torch.Tensor,
    q_resid: torch.Tensor,
    position_embeddings: Any,
    attention_mask: torch.Tensor,
    *_: Any,
    cache: _Packed,
    **__: Any,
) -> torch.Tensor:
    """Return the indices of the selected tokens, [batch, sequence, index_topk]; beyond the last token: none."""
    queries = self.wq_b(q_resid).unflatten(-1, (self.n_heads, self.head_dim))
    queries = _turned(self, queries, position_embeddings).float()
    scores = torch.matmul(queries, cache.keys.float().transpose(1, 2)[:, None]) * self.softmax_scale
    weights = self.weights_proj(hidden_states).float() * self.n_heads**-0.5
    scores = torch.matmul(weights[:, :, None], torch.relu(scores))[:, :, 0] + attention_mask
    scores = torch.nn.functional.pad(scores, (0, self.index_topk), value=-torch.inf)
    return scores.topk(self.index_topk, -1).indices
