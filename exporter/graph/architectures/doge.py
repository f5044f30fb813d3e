"""An expert of Doge has one feature. So it is a row of two tables, which standard nodes look up.

The tables stay floats: ``--quantize`` rounds the other weights.

- In a prompt, the router of transformers 5.24 mixes the scores of tokens. Exports give each token its own scores, as
  transformers does token by token.
- Attention selects ``keep_window_size`` tokens by their values. Of equal values the lower position is selected.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.models.doge import modeling_doge as doge

from quantmoe.exporter.graph.architectures.extended_cache.indexed import chosen
from quantmoe.exporter.graph.standard_attention import grouped_attention


def prepare(model: PreTrainedModel) -> None:
    """Make attention select a number that no length changes, and experts causal."""
    for module in model.modules():
        if isinstance(module, doge.DogeAttention):
            module.forward = MethodType(_attention, module)  # type: ignore[method-assign]
        elif isinstance(module, doge.DogeCDMoE):
            module.forward = MethodType(_mixture, module)  # type: ignore[method-assign]


def _attention(
    self: Any,
    hidden_states: torch.Tensor,
    position_embeddings: Any,
    attention_mask: torch.Tensor,
    cache: Any = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    x, shape = hidden_states, (*hidden_states.shape[:2], -1, self.head_dim)
    query = self.q_norm(self.q_proj(x).view(shape)).transpose(1, 2)
    key = self.k_norm(self.k_proj(x).view(shape)).transpose(1, 2)
    value = self.v_proj(x).view(shape).transpose(1, 2)
    query, key = doge.apply_rotary_pos_emb(query, key, *position_embeddings)
    if cache is not None:
        key, value = cache.update(key, value, self.layer_idx)
    rates = torch.nn.functional.softplus(self.dt_proj(value.transpose(1, 2).flatten(2)))
    bias = torch.exp(self.A * rates).transpose(1, 2)[:, :, None]  # of each head of keys
    lowest, most, length = torch.finfo(bias.dtype).min, self.keep_window_size, key.shape[2]
    ranked = torch.where(attention_mask == 0, bias, lowest)
    ranked = torch.nn.functional.pad(ranked, (0, most), value=-torch.inf)
    selected = chosen(ranked.topk(most, -1).indices, length + most)[..., :length]
    mask = torch.where(selected, attention_mask, lowest)
    found, _none = grouped_attention(self, query, key, value, mask, self.scaling, position_bias=bias)
    return self.o_proj(found.flatten(2)), None


def _mixture(self: Any, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
    x = hidden_states
    rows, columns = self.router_gate(x).chunk(2, -1)
    scores, experts = (rows[..., None] + columns[..., None, :]).flatten(-2).topk(self.top_k, -1)
    weights = scores.softmax(-1)
    if self.norm_topk_prob:
        weights = weights / weights.sum(-1, keepdim=True)
    features = torch.matmul(self.down_embed(experts), x[..., None])[..., 0]
    own = torch.matmul((self.act_fn(features) * weights)[..., None, :], self.up_embed(experts))[..., 0, :]
    return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)) + own, None
