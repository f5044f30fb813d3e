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
from quantmoe.exporter.graph.modules.attention import drawing
from quantmoe.exporter.reading.weights.base import CORRECTION_BIAS
from quantmoe.exporter.targets import CPU, Target

_TOKENS, _TOLERANCE = 64, 1e-6
#: below the logarithm of every weight, and a float16
UNSELECTED = -1e4


def replace_routers(
    model: torch.nn.Module, target: Target = CPU, shared: Mapping[str, tuple[int, int]] | None = None
) -> dict[str, RoutingSpec]:
    """Make every router that equals a MoERouting one, or what the target has for it; others stay as they are.

    A MoERouter is for logits that are a product. Nodes of ai.onnx are for routers that equal topk_softmax.

    Args:
        shared: router -> its shared experts, and 1 if their gate's row follows the rows of its weight.

    A router is a module of a class named ``*Router`` with ``weight`` [E, H]. Its forward returns logits [T, E], weights
    [T, k] and ids [T, k], as transformers' routers do.

    Returns:
        What was found, by module name.
    """
    found, dtype = {}, next(model.parameters()).dtype
    for name, module in model.named_modules():
        if type(module).__name__.endswith("Router") and (spec := recognise(module)) is not None:
            product = is_product(module)
            if shared and name in shared:
                count, gate = shared[name]
                spec = replace(spec, shared_experts=count, shared_gate=gate)
            if target.router == "ai.onnx":
                if spec.method == "topk":
                    continue
                attach_standard(module, spec)
            else:
                attach(module, spec, dtype if target.router == "MoERouter" and product else None)
            found[name] = spec
    return found


def recognise(router: Any) -> RoutingSpec | None:
    """Return the MoERouting with a router's ids and, to 1e-6, weights on random tokens; None when there is none."""
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
    """Return whether a router's logits are, to 1e-6, the product of its input and its weight, plus its bias if it has
    one."""
    if (tried := _try(router)) is None:
        return False
    probe, x, logits, *_ = tried
    want = torch.nn.functional.linear(x, probe.weight, getattr(probe, "bias", None)).numpy()
    return np.allclose(logits, want, rtol=_TOLERANCE, atol=_TOLERANCE)


def _try(router: Any) -> tuple[Any, torch.Tensor, np.ndarray, np.ndarray, np.ndarray] | None:
    """Return a copy with random tensors, random tokens [T, H], and the logits, weights and ids that it makes of
    them."""
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


def attach(router: Any, spec: RoutingSpec, product: torch.dtype | None = None) -> None:
    """Make the router's forward one node after its logits; with ``product``, one node that includes their product.

    What the forward computed is dead code to the exporter.
    """
    attributes = spec.attributes()
    if product:
        own = attributes | {"hidden_size": router.weight.shape[1], "op_version": RouterSpec.OPERATOR.version}
        attributes = RouterSpec.from_attributes(own).attributes()
        # The node takes a weight of the graph's type, where transformers keeps DeepSeek's in f32, and biases in f32.
        for leaf, dtype in (("weight", product), ("bias", torch.float32)):
            if (old := router._parameters.get(leaf)) is not None:
                typed = old.data.flatten()[:1].to(dtype).expand(old.shape)  # a placeholder as it was
                router._parameters[leaf] = torch.nn.Parameter(typed, requires_grad=False)
    router.gated = bool(spec.shared_gate)
    router.routing = json.dumps(attributes)
    router.forward = MethodType(_product_forward if product else _forward, router)


def attach_standard(router: Any, spec: RoutingSpec) -> None:
    """Make the router's forward what com.microsoft::QMoE and operators of ONNX compute (lowering/qmoe.py).

    Requires:
        another method than topk, whose weights may be negative: QMoE leaves such experts out.
    """
    router.gated, router.routing = False, json.dumps(spec.attributes())
    router.forward = MethodType(_selected_forward, router)


def _product_forward(self: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = hidden_states if hidden_states.ndim == 2 else hidden_states.reshape(-1, self.weight.shape[1])
    biases = [getattr(self, "bias", None), _correction_bias(self)]
    given = [torch.zeros(0) if bias is None else bias.float() for bias in biases]
    ids, weights = torch.ops.quantmoe.moe_router(x, self.weight, *given, self.routing)
    return torch.nn.functional.linear(x.float(), self.weight.float(), biases[0]), weights, ids


def _logits(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    if self.gated:
        return torch.nn.functional.linear(hidden_states, self.weight)
    computed = type(self).forward(self, hidden_states)
    logits: torch.Tensor = computed[-1] if len(computed) == 2 else computed[0]  # Llama-4's: scores, logits
    return logits


def _selected_forward(self: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the router as a softmax of selected logits, times a factor for each token.

    com.microsoft::QMoE has this router on every provider. The logits are logarithms of the weights, the factor is the
    sum of the weights.
    """
    spec, logits = RoutingSpec.from_attributes(json.loads(self.routing)), _logits(self, hidden_states)
    x, bias = logits.float(), _correction_bias(self)
    softmax = spec.method in ("softmax_topk", "topk_softmax")
    scores = x.softmax(-1) if softmax else x.sigmoid()
    logs = x if softmax else torch.nn.functional.logsigmoid(x)
    if bias is None and spec.n_group == spec.topk_group:
        total = scores.topk(spec.top_k, -1).values.sum(-1, keepdim=True)
    else:
        compared = x if spec.method.startswith("topk_") else scores
        chosen = (_choice(spec, compared, bias).unsqueeze(-1) == torch.arange(spec.num_experts)).any(1)
        total = (scores * chosen).sum(-1, keepdim=True)
        logs = logs.masked_fill(~chosen, UNSELECTED)
    own = replace(spec, method="topk_softmax", renormalize=0, n_group=1, topk_group=1, routed_scaling_factor=1.0)
    attributes = json.dumps(own.attributes())
    ids, weights = torch.ops.quantmoe.moe_routing(logs.to(logits.dtype), torch.zeros(spec.num_experts), attributes)
    if spec.method != "topk_softmax" and not spec.renormalize:
        weights = weights * total
    if spec.routed_scaling_factor != 1:
        weights = weights * spec.routed_scaling_factor
    return logits, weights, ids


def _choice(spec: RoutingSpec, scores: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Selected ids [T, top_k]."""
    choice = scores if bias is None else scores + bias.float()
    if spec.topk_group < spec.n_group:
        groups = choice.unflatten(-1, (spec.n_group, -1))
        best = groups.topk(min(2, groups.shape[-1]), -1).values.sum(-1)
        kept = (best.topk(spec.topk_group, -1).indices.unsqueeze(-1) == torch.arange(spec.n_group)).any(1)
        choice = groups.masked_fill(~kept.unsqueeze(-1), -torch.inf).flatten(1)
    return choice.topk(spec.top_k, -1).indices


def _forward(self: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    logits, bias = _logits(self, hidden_states), _correction_bias(self)
    bias = torch.zeros(logits.shape[-1] - self.gated) if bias is None else bias.float()
    ids, weights = torch.ops.quantmoe.moe_routing(logits, bias, self.routing)
    return logits, weights, ids
