"""Mamba-2 of transformers -> CausalConv and a state space in standard nodes (state_space_nodes.py).

As linear_attention.py, modules are recognised by what they compute, here with the nodes themselves on onnx's own
evaluator. Their norm stays as it is.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable
from types import MethodType
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from onnx.reference import ReferenceEvaluator
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionLayer

from quantmoe.custom_ops.op import ConvSpec
from quantmoe.custom_ops.reference import conv as reference_conv
from quantmoe.exporter.graph.passes.attention import (
    FAILURES,
    Given,
    Unlike,
    drawing,
    judged,
    line,
    near_all,
    once_a_kind,
    randomise,
)
from quantmoe.exporter.graph.passes.linear_attention import convolve, recurrent_state, widen
from quantmoe.exporter.graph.passes.rows import Rows
from quantmoe.exporter.graph.passes.state_space_nodes import alone, state_space

LINEARS = ("in_proj", "out_proj")
PARAMETERS = ("A_log", "D", "dt_bias")
#: sums in f32 in another order, of chunks of 70 tokens
_TOLERANCE = 1e-4


@dataclasses.dataclass(frozen=True)
class StateSpace:
    """What a module computes.

    Attributes:
        conv: of the node that x, B and C pass, in this order.
        groups, heads: heads of one group are beside each other. size: of a head's x. states: of B and C.
    """

    conv: ConvSpec
    groups: int
    heads: int
    size: int
    states: int

    @property
    def sizes(self) -> dict[str, int]:
        """Of its nodes."""
        shape = {"groups": self.groups, "heads": self.heads, "size": self.size, "states": self.states}
        return shape | {"window": self.window}

    @property
    def window(self) -> int:
        """How many states it keeps, after each of the last so many tokens of a run."""
        return self.conv.state_window


def recognise(
    model: torch.nn.Module, refusal: Callable[[ConvSpec], str], window: int
) -> tuple[dict[str, StateSpace], dict[str, str]]:
    """Modules of a state space, and why others that look like it are none. By name.

    Args:
        refusal: why the target's kernels do not run a node; "" when they do.
        window: see :class:`StateSpace`.
    """
    compare = once_a_kind(_compare)

    def judge(module: Any) -> StateSpace:
        own = _spec(module, window)
        compare(module, own)
        if reason := refusal(own.conv):
            raise Unlike(reason)
        return own

    return judged(((name, module) for name, module in model.named_modules() if _looks_like_one(module)), judge)


def _looks_like_one(module: Any) -> bool:
    linears = (getattr(module, name, None) for name in LINEARS)
    return (
        all(type(linear) is torch.nn.Linear for linear in linears)
        and type(getattr(module, "conv1d", None)) is torch.nn.Conv1d
        and all(isinstance(getattr(module, name, None), torch.nn.Parameter) for name in PARAMETERS)
        and hasattr(module, "ssm_state_size")
    )


def _spec(module: Any, window: int) -> StateSpace:
    sizes = module.n_groups, module.num_heads, module.head_dim, module.ssm_state_size
    groups, heads, size, states = sizes
    channels, convolution = heads * size + 2 * groups * states, module.conv1d
    if not all(type(value) is int and value > 0 for value in sizes) or heads % groups:
        raise Unlike(f"{heads} heads in {groups} groups, expected a positive multiple")
    if not convolution.in_channels == convolution.groups == channels:
        raise Unlike("its convolution is not of x, B and C, each channel alone")
    if (limits := module.time_step_limit) != (0.0, math.inf):
        raise Unlike(f"its time_step_limit is {limits}, expected none: of several tokens alone it would be kept")
    conv = ConvSpec(channels=channels, width=convolution.kernel_size[0], activation="silu", state_window=window)
    return StateSpace(conv, *sizes)


def _compare(module: Any, found: StateSpace) -> None:
    """Raises Unlike where a module gives something else on random tokens and states."""
    draw, own = drawing(), dataclasses.replace(found, conv=dataclasses.replace(found.conv, state_window=1))
    nodes = ReferenceEvaluator(ir.to_proto(alone(own.sizes)))
    try:
        probe = copy.deepcopy(module, {id(getattr(module, name)): torch.nn.Identity() for name in LINEARS})
        randomise(probe, draw)
        probe.layer_idx, probe.found = 0, own
        inner, features = own.heads * own.size, module.in_proj.out_features
        if features != inner + own.conv.channels + own.heads:
            raise Unlike(f"its in_proj has {features} outputs, expected z, x, B, C and dt, of {own}")
        weight, bias = probe.conv1d.weight[:, 0].numpy(), probe.conv1d.bias
        for batch, new, past in ((2, 5, False), (2, 1, True), (2, 5, True), (1, 70, True)):
            projected = draw(batch, new, features)
            conv, state = draw(batch, own.conv.channels, own.conv.width), draw(batch, own.heads, own.states, own.size)
            layer, cache = LinearAttentionLayer(), DynamicCache()
            if past:
                layer.update_conv_state(conv.clone())
                layer.update_recurrent_state(state.transpose(2, 3).clone())
            cache.layers, probe.in_proj = [layer], Given(projected)
            z, mixed, dt = projected.split([inner, own.conv.channels, own.heads], -1)
            rows = torch.tensor([[0, new, int(past)]] * batch, dtype=torch.int32)
            given = (np.zeros(0) if bias is None else bias.numpy(), conv[..., 1:].numpy(), rows.numpy())
            convolved, present_conv = reference_conv(own.conv, mixed.numpy(), weight, *given)
            parts = (torch.from_numpy(convolved).float(), dt, probe.A_log, probe.dt_bias, probe.D, state, rows)
            named = zip(nodes.input_names, (part.detach().numpy() for part in parts), strict=True)
            with np.errstate(divide="ignore", invalid="ignore"):  # of numbers that Where leaves out
                y, present = nodes.run(None, dict(named))
            with torch.no_grad():
                want = probe(torch.zeros(batch, new, 8), cache=cache, attention_mask=None)
                output = probe.norm(torch.from_numpy(y), z)
            made = layer.conv_states[0][..., 1:], layer.recurrent_states[0].transpose(2, 3)
            if not near_all((output, present_conv, present), [t.numpy() for t in (want, *made)], _TOLERANCE):
                raise Unlike("it computes something else than Mamba-2's state space")
    except FAILURES as error:
        raise Unlike(f"its forward does not run alone: {line(error)}") from None


def attach(model: torch.nn.Module, found: dict[str, StateSpace], rows: Rows) -> list[str]:
    """Makes the forward of recognised modules their projections, a node and standard nodes between them.

    Returns:
        Names of the parameters that are f32 now, in the shapes that the nodes take, see linear_attention.py's as_taken.
    """
    changed = []
    for path, own in found.items():
        module: Any = model.get_submodule(path)
        leaves = ("conv1d.weight", "conv1d.bias", *PARAMETERS)
        changed += [f"{path}.{leaf}" for leaf in leaves if widen(module, leaf)]
        module.found, module.rows, module.forward = own, rows, MethodType(_forward, module)
    return changed


def _forward(self: Any, hidden_states: torch.Tensor, cache: Any, *_: Any, **__: Any) -> torch.Tensor:
    found, layer, rows = self.found, cache.layers[self.layer_idx], self.rows.rows
    inner = found.heads * found.size
    z, mixed, dt = self.in_proj(hidden_states).split([inner, found.conv.channels, found.heads], -1)
    mixed = convolve(found.conv, self.conv1d, mixed, layer, rows)
    state = recurrent_state(layer, mixed, found.window, (found.heads, found.states, found.size))
    y, layer.recurrent_states[0] = state_space(mixed, dt, self.A_log, self.dt_bias, self.D, state, rows, found.sizes)
    layer.has_previous_state[0] = True
    return self.out_proj(self.norm(y, z).to(hidden_states.dtype))
