"""JetMoE also has experts that make queries and outputs of attention.

They are one product of all experts. A token takes the outputs of its own experts. These weights stay floats.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.models.jetmoe import modeling_jetmoe as jetmoe

from quantmoe.exporter.graph.experts import TopKRouter, experts_like, put_on_interface

#: parts of names that the exporter reads (its row of reading/families.py) -> of the model
NAMES = {".mlp.router.layer.": ".mlp.router.", ".self_attention.mixture.": ".self_attention.experts."}


class _Experts(torch.nn.Linear):
    """A linear of all experts, which no QuantLinear takes the place of: its tensor has three dimensions."""


def trim(model: PreTrainedModel) -> None:
    """Make mixtures a router and experts as other models have them."""
    for module in list(model.modules()):
        if isinstance(module, jetmoe.JetMoeMoE):
            mixture: Any = module
            kind, config = mixture.output_linear.weight.dtype, model.config
            sizes = mixture.output_linear.num_experts, mixture.input_size, mixture.hidden_size
            mixture.experts = experts_like(*sizes, config.activation_function, kind)
            mixture.router = TopKRouter(mixture.router.layer, config.num_experts_per_tok)
            del mixture.input_linear, mixture.output_linear
            mixture.forward = MethodType(_mixture, mixture)
        elif isinstance(module, jetmoe.JetMoeAttention):
            attention: Any = module
            for name in ("input_linear", "output_linear"):
                own = getattr(attention.experts, name)
                shape = own.input_size, own.output_size * own.num_experts
                if name == "output_linear":
                    shape = own.input_size * own.num_experts, own.output_size
                setattr(attention.experts, name, _Experts(*shape, bias=False, dtype=own.weight.dtype))
            attention.forward = MethodType(_attention, attention)


def prepare(model: PreTrainedModel) -> None:
    """Give experts transformers' interface."""
    for module in model.modules():
        if isinstance(module, jetmoe.JetMoeMoE):
            put_on_interface(module.experts)


def stored(model: PreTrainedModel) -> dict[str, tuple[tuple[int, ...], Callable[[np.ndarray], np.ndarray]]]:
    """Return what linears of all experts are made from: name -> (shape of the checkpoint's tensor, the function)."""
    found: dict[str, tuple[tuple[int, ...], Callable[[np.ndarray], np.ndarray]]] = {}
    for name, module in model.named_modules():
        if isinstance(module, jetmoe.JetMoeMoA):
            count, size, low = module.num_experts, module.input_size, module.hidden_size
            found[f"{name}.input_linear.weight"] = (count, low, size), _rows
            found[f"{name}.output_linear.weight"] = (count, size, low), _columns
    return found


def _rows(experts: np.ndarray) -> np.ndarray:
    return experts.reshape(-1, experts.shape[2])


def _columns(experts: np.ndarray) -> np.ndarray:
    return experts.swapaxes(0, 1).reshape(experts.shape[1], -1)


def _mixture(self: Any, x: torch.Tensor) -> torch.Tensor:
    flat = x.reshape(-1, self.input_size)
    _, weights, ids = self.router(flat)
    found: torch.Tensor = self.experts(flat, ids, weights).reshape(x.shape) + self.bias
    return found


def _attention(
    self: Any,
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    position_embeddings: Any = None,
    cache: Any = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None, None]:
    mixture, shape = self.experts, hidden_states.shape[:-1]
    logits, ids = mixture.router.layer(hidden_states).float().topk(self.top_k, -1)
    gates, at = logits.softmax(-1).to(hidden_states.dtype)[..., None], ids[..., None]
    every = mixture.input_linear(hidden_states).unflatten(-1, (mixture.num_experts, mixture.hidden_size))
    at = at.expand(*at.shape[:-1], mixture.hidden_size)
    query = every.gather(2, at).reshape(*shape, -1, self.head_dim).transpose(1, 2)
    key, value = self.kv_proj(hidden_states).chunk(2, -1)
    key, value = (part.reshape(*shape, -1, self.head_dim).transpose(1, 2) for part in (key, value))
    query, key = jetmoe.apply_rotary_pos_emb(query, key, *position_embeddings)
    if cache is not None:
        key, value = cache.update(key, value, self.layer_idx)
    attend = jetmoe.ALL_ATTENTION_FUNCTIONS.get_interface(
        self.config._attn_implementation, jetmoe.eager_attention_forward
    )
    # heads of one expert after those of another: each expert has all keys
    key, value = key.repeat(1, self.top_k, 1, 1), value.repeat(1, self.top_k, 1, 1)
    output, _ = attend(self, query, key, value, attention_mask, scaling=self.scaling, **kwargs)
    output = output.reshape(*shape, self.top_k, -1) * gates
    spread = torch.zeros_like(every).scatter(2, at, output).flatten(-2)
    return mixture.output_linear(spread) + mixture.bias, None, None
