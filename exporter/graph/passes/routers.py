"""Routers of transformers -> MoERouting, in CUDA files MoERouter: recognised by what they compute, replaced before the
trace.

Not on the ONNX graph: the scatter in DeepSeek's and GLM's routers loses its batch dimension when it is exported.
"""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Mapping
from dataclasses import replace
from types import MethodType
from typing import Any

import numpy as np
import torch

from quantmoe.custom_ops.op import RouterSpec, RoutingSpec, enum
from quantmoe.custom_ops.reference import route
from quantmoe.exporter.graph.passes.attention import drawing
from quantmoe.exporter.reading.formats.base import CORRECTION_BIAS

_TOKENS, _TOLERANCE = 64, 1e-6


def replace_routers(
    model: torch.nn.Module, target: str = "cpu", shared: Mapping[str, tuple[int, int]] | None = None
) -> dict[str, RoutingSpec]:
    """Makes every router that equals a MoERouting one, for target "cuda" a MoERouter where its logits are a product;
    others stay as they are.

    Args:
        shared: router -> its shared experts, and 1 where their gate's row follows those of its weight.

    A router is a module of a class named ``*Router`` with ``weight`` [E, H] whose forward returns (logits [T, E],
    weights [T, k], ids [T, k]), as transformers' are.

    Returns:
        What was found, by module name.
    """
    found = {}
    for name, module in model.named_modules():
        if type(module).__name__.endswith("Router") and (spec := recognise(module)) is not None:
            product = is_product(module)
            if shared and name in shared:
                count, gate = shared[name]
                spec = replace(spec, shared_experts=count, shared_gate=gate)
            attach(module, spec, target == "cuda" and product)
            found[name] = spec
    return found


def recognise(router: Any) -> RoutingSpec | None:
    """The MoERouting with a router's ids and, to 1e-6, weights on random tokens; None when there is none."""
    if (tried := _try(router)) is None:
        return None
    probe, _, logits, weights, ids = tried
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


def is_product(router: Any) -> bool:
    """Whether a router's logits are, to 1e-6, the product of its input and its weight, plus its bias if it has one."""
    if (tried := _try(router)) is None:
        return False
    probe, x, logits, *_ = tried
    want = torch.nn.functional.linear(x, probe.weight, getattr(probe, "bias", None)).numpy()
    return np.allclose(logits, want, rtol=_TOLERANCE, atol=_TOLERANCE)


def _try(router: Any) -> tuple[Any, torch.Tensor, np.ndarray, np.ndarray, np.ndarray] | None:
    """A copy with random tensors, random tokens [T, H], and the logits, weights and ids that it makes of them."""
    if not isinstance(getattr(router, "weight", None), torch.Tensor):
        return None
    probe, draw = copy.deepcopy(router).float(), drawing()
    for part in probe.modules():  # all of them: a tensor left at zero could be one that MoERouting lacks
        for tensors in (part._parameters, part._buffers):
            for name, old in tensors.items():
                if old is not None:
                    new = draw(old.shape) * (0.2 if name == CORRECTION_BIAS else 1.0)
                    tensors[name] = torch.nn.Parameter(new, requires_grad=False) if tensors is part._parameters else new
    x = draw(_TOKENS, probe.weight.shape[1]) * 2 / probe.weight.shape[1] ** 0.5
    with torch.no_grad():
        try:
            logits, weights, ids = (part.numpy() for part in probe(x))
        except (TypeError, ValueError, AttributeError):  # not three tensors
            return None
    return probe, x, logits, weights, ids


def _correction_bias(router: torch.nn.Module) -> torch.Tensor | None:
    """[E]; ERNIE's is [1, E], which costs a node."""
    tensors = itertools.chain(router.named_parameters(), router.named_buffers())
    found = next((tensor for name, tensor in tensors if name.rpartition(".")[2] == CORRECTION_BIAS), None)
    return found if found is None or found.ndim == 1 else found.reshape(-1)


def attach(router: Any, spec: RoutingSpec, product: bool = False) -> None:
    """Makes the router's forward one node after its logits, or with their product; what it computed is dead code to the
    exporter."""
    attributes = spec.attributes()
    if product:
        own = attributes | {"hidden_size": router.weight.shape[1], "op_version": RouterSpec.OPERATOR.version}
        attributes = RouterSpec.from_attributes(own).attributes()
        if (bias := router._parameters.get("bias")) is not None:
            wide = bias.data.flatten()[:1].float().expand(bias.shape)  # a placeholder as it was; the node takes f32
            router._parameters["bias"] = torch.nn.Parameter(wide, requires_grad=False)
    router.gated = bool(spec.shared_gate)
    router.routing = json.dumps(attributes)
    router.forward = MethodType(_product_forward if product else _forward, router)


def _product_forward(self: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = hidden_states if hidden_states.ndim == 2 else hidden_states.reshape(-1, self.weight.shape[1])
    biases = [getattr(self, "bias", None), _correction_bias(self)]
    given = [torch.zeros(0) if bias is None else bias.float() for bias in biases]
    ids, weights = torch.ops.quantmoe.moe_router(x, self.weight, *given, self.routing)
    return torch.nn.functional.linear(x.float(), self.weight.float(), biases[0]), weights, ids


def _forward(self: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if self.gated:
        logits = torch.nn.functional.linear(hidden_states, self.weight)
    else:
        computed = type(self).forward(self, hidden_states)
        logits = computed[-1] if len(computed) == 2 else computed[0]  # Llama-4's: scores, logits
    bias = _correction_bias(self)
    bias = torch.zeros(logits.shape[-1] - self.gated) if bias is None else bias.float()
    ids, weights = torch.ops.quantmoe.moe_routing(logits, bias, self.routing)
    return logits, weights, ids
