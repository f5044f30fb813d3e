"""Manifold-constrained hyper-connections -> HyperConnection, recognised by what they compute.

DeepSeek-V4 and GLM-5.3-Flash have them. In standard nodes, dividing the mixing matrix by sums of its rows and columns
takes 114 nodes of each connection. Hunyuan 4 has no mixing matrix, and Qwen4-Exp has gates of features. Their
connections stay standard nodes.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch

from quantmoe.custom_ops import torch_op  # noqa: F401
from quantmoe.custom_ops.op_def.nodes import HyperConnection
from quantmoe.exporter.graph.modules.attention import (
    FAILURES,
    Unlike,
    drawing,
    judged,
    line,
    near_all,
    once_a_kind,
    randomise,
)

PARAMETERS = {"fn", "base", "scale"}
#: sums of a projection in f32 in another order, and 40 quotients of what they make
_TOLERANCE = 1e-4


def replace(model: torch.nn.Module, refusal: Callable[[HyperConnection], str]) -> dict[str, HyperConnection]:
    """Make every hyper-connection with a mixing matrix a HyperConnection after its projection.

    Args:
        refusal: why the target has no such node, "" if it has. Without it, a module stays standard nodes.

    Returns:
        What was found, by module name.
    """
    compare = once_a_kind(_compare)

    def judge(module: Any) -> HyperConnection:
        spec: HyperConnection = compare(module)
        if reason := refusal(spec):
            raise Unlike(reason)
        return spec

    found, _ = judged(((name, module) for name, module in model.named_modules() if _looks_like_one(module)), judge)
    for name, spec in found.items():
        module: Any = model.get_submodule(name)
        module.attributes = json.dumps(spec.attributes())
        module.forward = MethodType(_forward, module)
    return found


def _looks_like_one(module: torch.nn.Module) -> bool:
    return set(module._parameters) == PARAMETERS and hasattr(module, "hc_sinkhorn_iters")


def _compare(module: Any) -> HyperConnection:
    """Return the node of a module; raise Unlike where the module gives something else on random streams."""
    draw = drawing()
    try:
        spec = HyperConnection(
            num_streams=module.hc_mult,
            hidden_size=module.fn.shape[1] // module.hc_mult,
            iterations=module.hc_sinkhorn_iters,
            epsilon=module.hc_eps,
        )
        probe = copy.deepcopy(module, {id(module.fn): module.fn})
        randomise(probe, draw)
        probe.fn.data /= probe.fn.shape[1] ** 0.5
        probe.attributes = json.dumps(spec.attributes())
        for spread in (1.0, 10.0):
            probe.scale.data.copy_(spread * draw(3))
            streams = draw(2, 5, spec.num_streams, spec.hidden_size)
            with torch.no_grad():
                want, made = probe(streams), _forward(probe, streams)
            if not near_all(made, [t.numpy() for t in want], _TOLERANCE):
                raise Unlike("it computes something else than HyperConnection")
    except FAILURES as error:
        raise Unlike(f"its forward does not run alone: {line(error)}") from None
    return spec


def _forward(self: Any, hidden_streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    normed = self.input_norm(hidden_streams.flatten(2).float())
    mixes = torch.nn.functional.linear(normed, self.fn.float())
    collapsed, post, comb = torch.ops.quantmoe.hyper_connection(
        hidden_streams, mixes, self.base.float(), self.scale.float(), self.attributes
    )
    return post, comb, collapsed
