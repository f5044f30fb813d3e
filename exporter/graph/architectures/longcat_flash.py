"""LongCat-Flash: experts behind the last real one return their input."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.models.longcat_flash import modeling_longcat_flash as longcat

from quantmoe.exporter.graph.experts import experts_forward, put_on_interface


def trim(model: PreTrainedModel) -> None:
    """Leave out what transformers keeps of experts that have no weights."""
    for module in model.modules():
        if isinstance(module, longcat.LongcatFlashExperts):
            own = module.gate_up_proj.data[: module.num_routed_experts]
            module.gate_up_proj = torch.nn.Parameter(own, requires_grad=False)
            module.num_experts = module.num_routed_experts  # type: ignore[assignment]


def prepare(model: PreTrainedModel) -> None:
    """Give experts transformers' interface. What returns its input is a product of the input and a sum of weights."""
    for module in model.modules():
        if isinstance(module, longcat.LongcatFlashExperts):
            put_on_interface(module)
            module.forward = MethodType(_forward, module)  # type: ignore[method-assign]
        elif isinstance(module, longcat.LongcatFlashTopkRouter):
            module.classifier.__class__ = _Weight


class _Weight(torch.nn.Linear):
    """A linear that its router reads the weight of, so that no QuantLinear takes its place."""


def _forward(self: Any, hidden_states: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    real = ids < self.num_experts
    # an expert of weight 0, for which the node has no way to say that there is none
    found = experts_forward(self, hidden_states, torch.where(real, ids, 0), torch.where(real, weights, 0.0))
    kept = torch.where(real, 0.0, weights).sum(-1, keepdim=True)
    return found + (hidden_states * kept).to(found.dtype)
