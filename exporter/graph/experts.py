"""transformers' experts interface: a layer's nodes, and which experts they do not compute."""

from __future__ import annotations

from collections.abc import Mapping
from types import MethodType
from typing import Any

import numpy as np
import torch
from transformers import MixtralConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _default_apply_gate
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from quantmoe.custom_ops import torch_op  # noqa: F401
from quantmoe.custom_ops.reference import activate
from quantmoe.exporter.reading.checkpoint import CheckpointError
from quantmoe.exporter.reading.formats import MoELayer


def experts_forward(
    self: torch.nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Return the sum of a layer's nodes in the order of its groups: mostly one, the module's own."""
    weights = top_k_weights.float()
    if self.has_post_expert_norm:
        count, (tokens, width) = weights.shape[1], hidden_states.shape
        hidden_states = hidden_states[:, None].expand(tokens, count, width).reshape(-1, width)
        top_k_index, weights = top_k_index.reshape(-1, 1), torch.ones_like(weights).reshape(-1, 1)
    first, *others = (
        torch.ops.quantmoe.quant_moe(
            node.rotate(hidden_states), top_k_index, weights, node.w13, node.w2, node.attributes
        )
        for node in getattr(self, "groups", [self])
    )
    found: torch.Tensor = first
    for other in others:
        found = found + other
    if self.has_post_expert_norm:
        normed = self.post_expert_norm(found).unflatten(0, top_k_weights.shape)
        found = (normed * top_k_weights[..., None]).sum(1).to(found.dtype)
    return found


def put_on_interface(experts: Any, transposed: bool = False) -> None:
    """Give experts with a gate, gate_up_proj and down_proj the attributes and the forward of the interface."""
    experts.has_gate = experts.is_concatenated = True
    experts.has_bias = experts.has_post_expert_norm = experts._is_expert_parallel = False
    experts.is_transposed = transposed
    experts.forward = MethodType(experts_forward, experts)


def experts_like(count: int, size: int, inner: int, activation: str, dtype: torch.dtype) -> MixtralExperts:
    """Return experts on transformers' interface, for a family whose own are not.

    Args:
        count: how many. size, inner: features of their inputs, and between their two products.
    """
    sizes = {"num_local_experts": count, "hidden_size": size, "intermediate_size": inner, "hidden_act": activation}
    config = MixtralConfig(**sizes)
    config._experts_implementation = "eager"
    return MixtralExperts(config).to(dtype)


class TopKRouter(torch.nn.Module):
    """A router as transformers' others are, in the place of a linear and what followed it.

    Args:
        linear: of the logits. top_k: experts of a token.
        norm: weights are a softmax over all experts, divided by their norm of this order; None: of the chosen ones.
    """

    def __init__(self, linear: torch.nn.Linear, top_k: int, norm: float | None = None):
        super().__init__()
        self.weight, self.top_k, self.norm = linear.weight, top_k, norm

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return logits [tokens, experts], weights and ids [tokens, top_k]."""
        logits = torch.nn.functional.linear(hidden_states, self.weight)
        if self.norm is None:
            top, ids = logits.float().topk(self.top_k, -1)
            return logits, top.softmax(-1).to(hidden_states.dtype), ids
        weights, ids = logits.softmax(-1).topk(self.top_k, -1)
        return logits, weights / torch.norm(weights, p=self.norm, dim=-1, keepdim=True), ids


def fit(model: torch.nn.Module, layers: Mapping[str, MoELayer], where: str) -> None:
    """Give layers of transformers' model, which has one number for all, their own numbers of experts.

    Args:
        layers: experts module name -> its layer in the checkpoint.
        where: names the checkpoint, for errors.

    Raises:
        CheckpointError: the groups of a router do not divide the experts of its layer.
    """
    for name, layer in layers.items():
        mixture: Any = model.get_submodule(name.rpartition(".")[0])
        experts: Any = model.get_submodule(name)
        count, top_k = layer.num_experts, layer.top_k
        old = experts.num_experts
        routers = [m for path, m in mixture.named_modules() if path.rpartition(".")[2] in ("gate", "router")]
        for module in (mixture, experts, *routers):
            if getattr(module, "top_k", top_k) != top_k and not experts.has_post_expert_norm:
                module.top_k = top_k
            if old != count:
                _resize(module, old, count)
        for router in routers if old != count else ():
            if count % (groups := getattr(router, "num_group", None) or getattr(router, "n_group", None) or 1):
                raise CheckpointError(
                    f"{where}: {layer.name} has {count} experts, expected a multiple of n_group, {groups}"
                )


def _resize(module: torch.nn.Module, old: int, count: int) -> None:
    """Give a module's own tensors and numbers of ``old`` experts another number."""
    for tensors in (module._parameters, module._buffers):
        for name, tensor in tensors.items():
            if tensor is not None and tensor.shape[:1] == (old,):
                made = torch.empty((count, *tensor.shape[1:]), dtype=tensor.dtype, device=tensor.device)
                own = torch.nn.Parameter(made, requires_grad=False)
                tensors[name] = own if tensors is module._parameters else made
    for name in ("num_experts", "num_local_experts", "n_routed_experts", "out_features"):
        if getattr(module, name, None) == old:
            setattr(module, name, count)


def check_experts(module: Any, layer: MoELayer, where: str) -> None:
    """Refuse experts whose arithmetic the node does not have."""
    if module.has_gate != layer.gated:
        has = "a gate" if module.has_gate else "no gate"
        found = ", ".join(layer.projections) or "gate and up in one"
        raise CheckpointError(f"{where} has {has}, the checkpoint's {layer.name} has {found} for each expert")
    if getattr(type(module), "_apply_gate", _default_apply_gate) is not _default_apply_gate:
        _check_gate(module, layer, where)
    first = layer.outline().expert(0)
    if module.has_bias != (first.up.bias is not None and first.down.bias is not None):
        has = "biases" if module.has_bias else "no biases"
        raise CheckpointError(f"{where} has {has}, the checkpoint's {layer.name}.0 does not agree")


def _check_gate(module: Any, layer: MoELayer, where: str) -> None:
    """Refuse a gate of an architecture's own that is not the layer's activation, on numbers beyond every limit."""
    pair = torch.randn(2, 64, 32, generator=torch.Generator().manual_seed(0)) * 8
    halves = pair.transpose(0, 1)
    given = halves.flatten(1) if module.is_concatenated else halves.transpose(1, 2).flatten(1)
    found = module._apply_gate(given).double().numpy()
    want = activate(layer, *pair.double().numpy())  # type: ignore[arg-type]  # it has the fields that are read
    if found.shape != want.shape or np.abs(found - want).max() > 1e-5 * np.abs(want).max():
        raise CheckpointError(f"{where}: its own gating is not {layer.activation} and not supported yet")


ALL_EXPERTS_FUNCTIONS.register("quantmoe", experts_forward)
