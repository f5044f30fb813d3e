"""Shared experts become routed experts: the ids after the routed ones, which every token has.

A shared expert must be computed like the routed ones, and have their width or a multiple.

A mixture is recognised by what it computes. Its router, its experts and the shared expert's linears give random
numbers; what it makes of them must be routed + shared, or routed + sigmoid(gate) * shared.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from types import MethodType
from typing import Any

import numpy as np
import torch

from quantmoe.custom_ops.op import MoESpec
from quantmoe.custom_ops.reference import activate
from quantmoe.exporter.choosing.described_model import Shared
from quantmoe.exporter.graph.modules.attention import FAILURES, Given, drawing
from quantmoe.exporter.graph.modules.routers import is_product
from quantmoe.exporter.graph.modules.routers import recognise as recognise_router

_TOLERANCE = 1e-5


def recognise(model: torch.nn.Module, experts: Mapping[str, MoESpec]) -> dict[str, Shared]:
    """Shared experts that may become some of the routed ones, by the name of those.

    Args:
        experts: module name -> their node's attributes.
    """
    found = {}
    for name, spec in experts.items():
        mixture, _, leaf = name.rpartition(".")
        try:
            shared = _recognise(model.get_submodule(mixture), mixture, leaf, spec)
        except FAILURES:
            continue
        if shared is not None:
            found[name] = shared
    return found


def _recognise(module: Any, mixture: str, experts: str, spec: MoESpec) -> Shared | None:
    children = {name: child for name, child in module.named_children() if name != experts}
    routers = [name for name, child in children.items() if type(child).__name__.endswith("Router")]
    found = [(name, of) for name, child in children.items() if (of := _projections(child, spec)) is not None]
    gates = [
        name
        for name, child in children.items()
        if type(child) is torch.nn.Linear and (child.out_features, child.bias) == (1, None)
    ]
    if len(routers) != 1 or len(found) != 1 or len(gates) > 1:
        return None
    (router,), ((expert, projections),), gate = routers, found, next(iter(gates), "")
    width = children[expert].get_submodule(projections[-1]).in_features
    if width % spec.intermediate_size or recognise_router(children[router]) is None:
        return None
    if gate and (
        spec.apply_router_weight_on_input
        or children[router]._parameters.get("bias") is not None
        or not is_product(children[router])
    ):
        return None
    returns = _adds(module, experts, router, expert=expert, gate=gate, hidden=spec.hidden_size)
    if returns is None:
        return None
    flat, logits = returns

    def path(leaf: str) -> str:
        return f"{mixture}.{leaf}" if leaf else ""

    linears = tuple(path(f"{expert}.{leaf}") for leaf in projections)
    return Shared(
        mixture=mixture,
        router=path(router),
        projections=linears,
        gate=path(gate),
        count=width // spec.intermediate_size,
        flat=flat,
        logits=logits,
    )


def _projections(module: Any, spec: MoESpec) -> tuple[str, ...] | None:
    """Return the names of a module's linears as gate, up and down of an expert with the activation of ``spec``."""
    linears = {name: child for name, child in module.named_children() if type(child) is torch.nn.Linear}
    parameters = sum(len(list(child.parameters())) for child in linears.values())
    down = [name for name, child in linears.items() if child.out_features == spec.hidden_size]
    if len(linears) != 2 + spec.gated or not down or parameters != len(list(module.parameters())):
        return None
    *others, last = sorted(linears, key=lambda name: name == down[-1])
    width = linears[last].in_features
    if any((linears[name].in_features, linears[name].out_features) != (spec.hidden_size, width) for name in others):
        return None
    for names in (tuple(others), tuple(reversed(others))):
        if _activates(module, names, last, width, spec):
            return *names, last
    return None


def _activates(module: Any, names: tuple[str, ...], last: str, width: int, spec: MoESpec) -> bool:
    """Return whether a module gives its last linear the activation of the others' outputs, and returns what that
    gives."""
    draw = drawing()
    made = {name: draw(5, width) * 8 for name in names}
    output = draw(5, spec.hidden_size)
    probe = _with(module, {name: Given(values) for name, values in made.items()})
    heard: list[torch.Tensor] = []
    probe._modules[last] = _Heard(output, heard)
    with torch.no_grad():
        found = probe(torch.zeros(5, spec.hidden_size))
    gate = made[names[0]].numpy().astype(np.float64) if spec.gated else None
    want = activate(spec, gate, made[names[-1]].numpy().astype(np.float64))
    (x,) = heard
    return torch.equal(found, output) and np.allclose(x.numpy(), want, rtol=_TOLERANCE, atol=_TOLERANCE)


def _adds(module: Any, experts: str, router: str, *, expert: str, gate: str, hidden: int) -> tuple[bool, bool] | None:
    """Return how a mixture returns its output (``flat``, ``logits``), None if it computes something else.

    The output must be the routed experts' output plus the shared expert's, times the gate's sigmoid.
    """
    draw = drawing()
    x, routed, shared, full = draw(2, 3, hidden), draw(6, hidden), draw(6, hidden), draw(6, 1)
    logits, weights = draw(6, 8), draw(6, 2)
    ids = torch.arange(12).reshape(6, 2) % 8
    heard: list[torch.Tensor] = []
    probe = _with(module, {experts: _Heard(routed, heard), expert: _As(shared)})
    probe._modules[router] = _Router(logits, weights, ids)
    if gate:
        probe._modules[gate] = _As(full)
    with torch.no_grad():
        made = probe(x)
    output = made[0] if (several := isinstance(made, tuple)) else made
    given, chosen, of = heard
    want = routed + shared * (full.sigmoid() if gate else 1)
    same = torch.equal(given.reshape(-1, hidden), x.reshape(-1, hidden)) and torch.equal(chosen, ids)
    same = same and torch.equal(of, weights) and output.shape in (x.shape, routed.shape)
    if not (same and torch.allclose(output.reshape(-1, hidden), want, rtol=_TOLERANCE, atol=_TOLERANCE)):
        return None
    if several and not (len(made) == 2 and torch.equal(made[1].reshape(logits.shape), logits)):
        return None
    return output.ndim < x.ndim, several


def _with(module: Any, replaced: Mapping[str, torch.nn.Module]) -> Any:
    """Return a copy of a module with other children."""
    probe = copy.copy(module)
    probe._modules = module._modules | replaced
    if "forward" in vars(module):
        probe.forward = MethodType(module.forward.__func__, probe)
    return probe


class _Heard(torch.nn.Module):
    """A module in the place of experts or of a linear, which keeps its input."""

    def __init__(self, output: torch.Tensor, heard: list[torch.Tensor]):
        super().__init__()
        self.output, self.heard = output, heard

    def forward(self, *given: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        self.heard += (*given, *named.values())
        return self.output.clone()


class _As(torch.nn.Module):
    """A module with a given output [T, N], in the shape of its input."""

    def __init__(self, output: torch.Tensor):
        super().__init__()
        self.output = output

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.output.reshape(*x.shape[:-1], -1).clone()


class _Router(torch.nn.Module):
    def __init__(self, *outputs: torch.Tensor):
        super().__init__()
        self.outputs = outputs

    def forward(self, *_: Any) -> tuple[torch.Tensor, ...]:
        return tuple(output.clone() for output in self.outputs)


def attach(model: torch.nn.Module, found: Iterable[Shared]) -> None:
    """Make the forward of mixtures their router and their experts, which have the shared one."""
    for shared in found:
        module: Any = model.get_submodule(shared.mixture)
        for name in (shared.gate, *shared.projections):
            if name:
                model.set_submodule(name, torch.nn.Identity())
        module.shared = shared
        module.forward = MethodType(_forward, module)


def _forward(self: Any, hidden_states: torch.Tensor, *_: Any, **__: Any) -> Any:
    x = hidden_states.reshape(-1, hidden_states.shape[-1])
    logits, weights, ids = getattr(self, self.shared.router.rpartition(".")[2])(x)
    output = self.experts(x, ids, weights)
    output = output if self.shared.flat else output.reshape(hidden_states.shape)
    return (output, logits) if self.shared.logits else output
