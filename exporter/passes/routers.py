"""Routers of transformers -> MoERouting: recognised by what they compute, replaced before the trace.

Not on the ONNX graph: the scatter in DeepSeek's and GLM's routers loses its batch dimension when it is exported.
"""

from __future__ import annotations

import copy
import itertools
import json
from types import MethodType
from typing import Any

import numpy as np
import torch

from quantmoe.custom_ops.op import RoutingSpec, enum
from quantmoe.custom_ops.reference import route
from quantmoe.exporter.formats.base import CORRECTION_BIAS

_TOKENS, _TOLERANCE = 64, 1e-6


def replace_routers(model: torch.nn.Module) -> dict[str, RoutingSpec]:
    """Makes every router that equals a MoERouting one; others stay as they are.

    A router is a module of a class named ``*Router`` with ``weight`` [E, H] whose forward returns (logits [T, E],
    weights [T, k], ids [T, k]), as transformers' are.

    Returns:
        What was found, by module name.
    """
    found = {}
    for name, module in model.named_modules():
        if type(module).__name__.endswith("Router") and (spec := recognise(module)) is not None:
            attach(module, spec)
            found[name] = spec
    return found


def recognise(router: Any) -> RoutingSpec | None:
    """The MoERouting with a router's ids and, to 1e-6, weights on random tokens; None when there is none."""
    if not isinstance(getattr(router, "weight", None), torch.Tensor):
        return None
    probe, generator = copy.deepcopy(router).float(), torch.Generator().manual_seed(0)
    for part in probe.modules():  # all of them: a tensor left at zero could be one that MoERouting lacks
        for tensors in (part._parameters, part._buffers):
            for name, old in tensors.items():
                if old is not None:
                    new = torch.randn(old.shape, generator=generator) * (0.2 if name == CORRECTION_BIAS else 1.0)
                    tensors[name] = torch.nn.Parameter(new, requires_grad=False) if tensors is part._parameters else new
    x = torch.randn(_TOKENS, probe.weight.shape[1], generator=generator) * 2 / probe.weight.shape[1] ** 0.5
    with torch.no_grad():
        try:
            logits, weights, ids = (part.numpy() for part in probe(x))
        except (TypeError, ValueError, AttributeError):  # not three tensors
            return None
    bias = _correction_bias(probe)
    groups = {(1, 1), (getattr(router, "num_group", 1) or 1, getattr(router, "topk_group", 1) or 1)}  # None: no groups
    scaling = getattr(router, "routed_scaling_factor", 1.0)
    if ids.ndim != 2 or ids.dtype.kind != "i" or logits.shape != (_TOKENS, len(probe.weight)):
        return None
    # softmax_topk, renormalized, is topk_softmax: of equals the one that needs fewer exponentials
    methods = sorted(enum("routing_method"), key=lambda method: not method.startswith("topk_"))
    for method, renormalize, (n_group, topk_group) in itertools.product(methods, (0, 1), sorted(groups, reverse=True)):
        spec = RoutingSpec(
            num_experts=logits.shape[1],
            top_k=ids.shape[1],
            method=method,
            renormalize=renormalize,
            n_group=n_group,
            topk_group=topk_group,
            routed_scaling_factor=float(np.float32(scaling)),
        )
        want_ids, want = route(spec, logits, None if bias is None else bias.numpy())
        a, b = np.argsort(ids, axis=1), np.argsort(want_ids, axis=1)
        same = np.array_equal(np.take_along_axis(ids, a, 1), np.take_along_axis(want_ids, b, 1))
        if same and np.allclose(
            np.take_along_axis(weights, a, 1), np.take_along_axis(want, b, 1), rtol=_TOLERANCE, atol=_TOLERANCE
        ):
            return spec
    return None


def _correction_bias(router: torch.nn.Module) -> torch.Tensor | None:
    """[E]; ERNIE's is [1, E]."""
    tensors = itertools.chain(router.named_parameters(), router.named_buffers())
    return next((t.reshape(-1) for name, t in tensors if name.rpartition(".")[2] == CORRECTION_BIAS), None)


def attach(router: Any, spec: RoutingSpec) -> None:
    """Makes the router's forward one node after its logits; what it computed from them is dead code to the exporter."""
    router.routing = json.dumps(spec.attributes())
    router.forward = MethodType(_forward, router)


def _forward(self: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    computed = type(self).forward(self, hidden_states)
    logits = computed[-1] if len(computed) == 2 else computed[0]  # Llama-4's: scores, logits
    bias = _correction_bias(self)
    bias = torch.zeros(logits.shape[-1]) if bias is None else bias.float()
    ids, weights = torch.ops.quantmoe.moe_routing(logits, bias, self.routing)
    return logits, weights, ids
