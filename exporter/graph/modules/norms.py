"""RMS norms that store their weights' distance from one -> plain ones, recognised by what they compute.

Gemma, Qwen3-Next and Qwen3.5 multiply by 1 + weight. The sum, made in f32, becomes the
graph's weight, in the graph's type. Every norm then has the form that engines fuse and that CachedAttention has inside.
"""

from __future__ import annotations

import copy
from typing import Any

import torch


class RMSNorm(torch.nn.Module):
    """x / sqrt(mean(x^2) + eps) over the last dimension, in f32, then in x's type times weight."""

    def __init__(self, weight: torch.Tensor, eps: float):
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(weight, requires_grad=False), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).type_as(x)


def plain_norms(model: torch.nn.Module) -> list[str]:
    """Replace every norm by 1 + weight; the names of their weights, which are now to be one more."""
    found = []
    for name, module in list(model.named_modules()):
        if (eps := _epsilon(module)) is not None:
            weight: Any = module.weight
            model.set_submodule(name, RMSNorm(weight.data, eps))
            found.append(f"{name}.weight")
    return found


def _epsilon(module: torch.nn.Module) -> float | None:
    """Return the epsilon of a norm by 1 + weight; None for other modules."""
    weight = module._parameters.get("weight")
    eps = next((v for k, v in vars(module).items() if k in ("eps", "variance_epsilon") and isinstance(v, float)), None)
    if not type(module).__name__.endswith("RMSNorm") or list(module._parameters) != ["weight"] or eps is None:
        return None
    if weight is None or weight.ndim != 1:
        return None
    probe, generator = copy.copy(module), torch.Generator().manual_seed(0)
    own = torch.randn(weight.shape, generator=generator)
    probe._parameters = {"weight": torch.nn.Parameter(own, requires_grad=False)}
    x = torch.randn(4, len(own), generator=generator)
    with torch.no_grad():
        try:
            given = probe(x)
        except (TypeError, ValueError, AttributeError, RuntimeError):  # of more than one input
            return None
        want = RMSNorm(own + 1, eps)(x)
    return eps if torch.is_tensor(given) and torch.allclose(given, want, rtol=1e-5, atol=1e-6) else None
