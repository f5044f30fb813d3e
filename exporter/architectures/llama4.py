"""Llama-4's language model: experts that are fed every token, and rotary embeddings in complex numbers."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.llama4 import modeling_llama4


def prepare(model: PreTrainedModel) -> None:
    """Gives the experts the interface that other architectures have, and makes the rotary embedding real."""
    for module in model.modules():
        if isinstance(module, modeling_llama4.Llama4TextMoe):
            experts: Any = module.experts
            experts.has_gate = experts.is_transposed = experts.is_concatenated = True
            experts.has_bias = experts.has_post_expert_norm = experts._is_expert_parallel = False
            experts.forward = MethodType(ALL_EXPERTS_FUNCTIONS["quantmoe"], experts)
            module.forward = MethodType(_moe, module)  # type: ignore[method-assign]
            module.router.forward = MethodType(_router, module.router)
        elif isinstance(module, modeling_llama4.Llama4TextRotaryEmbedding):
            module.forward = MethodType(_frequencies, module)  # type: ignore[method-assign]
        elif isinstance(module, modeling_llama4.Llama4TextAttention):
            module.forward = MethodType(_attention, module)  # type: ignore[method-assign]


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


def _frequencies(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
    """Cosines and sines [2, batch, sequence, head_dim / 2] in place of complex numbers."""
    angles = position_ids[..., None].float() * self.inv_freq.float()
    return torch.stack((angles.cos(), angles.sin())) * self.attention_scaling


def _attention(self: Any, hidden_states: torch.Tensor, position_embeddings: torch.Tensor, *args: Any, **kwargs: Any):  # type: ignore[no-untyped-def]
    complex_ = modeling_llama4.apply_rotary_emb
    modeling_llama4.apply_rotary_emb = _rotate
    try:
        return type(self).forward(self, hidden_states, position_embeddings, *args, **kwargs)
    finally:
        modeling_llama4.apply_rotary_emb = complex_


def _rotate(q: torch.Tensor, k: torch.Tensor, frequencies: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Pairs of neighbouring features as complex numbers, times e^(i angle)."""
    cos, sin = frequencies[:, :, :, None, :]

    def turn(x: torch.Tensor) -> torch.Tensor:
        a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(3).type_as(x)

    return turn(q), turn(k)
