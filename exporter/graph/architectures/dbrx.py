"""DBRX: experts that are not on transformers' interface, and layers that are called blocks."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.models.dbrx import modeling_dbrx as dbrx

from quantmoe.exporter.graph.experts import TopKRouter, experts_like, put_on_interface

#: parts of published names -> of the model
NAMES = {".blocks.": ".layers.", ".ffn.router.layer.": ".ffn.router."}


class _Model(dbrx.DbrxModel):
    @property
    def blocks(self) -> torch.nn.ModuleList:
        found: torch.nn.ModuleList = self.layers
        return found


def trim(model: PreTrainedModel) -> None:
    """Make layers and mixtures what other models have."""
    for module in list(model.modules()):
        if isinstance(module, dbrx.DbrxModel):
            decoder: Any = module
            decoder.layers = decoder.blocks
            del decoder.blocks
            decoder.__class__ = _Model
        elif isinstance(module, dbrx.DbrxFFN):
            mixture: Any = module
            old, config = mixture.experts, mixture.experts.mlp
            name = model.config.ffn_config.ffn_act_fn.get("name", "silu")
            mixture.experts = experts_like(old.num_experts, old.hidden_size, old.ffn_hidden_size, name, config.w1.dtype)
            mixture.router = TopKRouter(mixture.router.layer, mixture.top_k, mixture.moe_normalize_expert_weights)
            mixture.forward = MethodType(_mixture, mixture)


def prepare(model: PreTrainedModel) -> None:
    """Give experts transformers' interface."""
    for module in model.modules():
        if isinstance(module, dbrx.DbrxFFN):
            put_on_interface(module.experts)


def _mixture(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    flat = hidden_states.reshape(-1, hidden_states.shape[-1])
    _, weights, ids = self.router(flat)
    found: torch.Tensor = self.experts(flat, ids, weights).reshape(hidden_states.shape)
    return found
