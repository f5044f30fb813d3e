"""Mamba-2's state space becomes a CausalConv and a StateSpace.

The state is f32 in any graph: ``past_key_values.N.recurrent_state`` [batch, heads, states, size].

- GPUs need a state of 64, 128 or 256, and heads of a multiple of 32 features.
- Time steps follow ``time_step_limit`` of config.json, which published models leave unlimited. Another limit is
  refused. transformers 5.24 raises time steps to 0.001 in prompts (its pull request 48989), and exports do not.
"""

# As linear_attention.py, modules are recognised by what they compute. Both nodes read their parts of in_proj's output,
# so that nothing is split.

from __future__ import annotations

import copy
import dataclasses
import json
import math
from collections.abc import Callable
from types import MethodType
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionLayer

from quantmoe.custom_ops.op import ConvSpec, SpaceSpec
from quantmoe.custom_ops.ops.causal_conv import causal_conv as reference_conv
from quantmoe.custom_ops.ops.state_space import state_space as reference_space
from quantmoe.exporter.graph.modules.attention import (
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
from quantmoe.exporter.graph.modules.attention_inputs import Rows
from quantmoe.exporter.graph.modules.states.linear_attention import convolve, recurrent_state, widen

LINEARS = ("in_proj", "out_proj")
#: in the node's order
PARAMETERS = ("A_log", "dt_bias", "D", "norm.weight")
#: sums in f32 in another order, of chunks of 70 tokens
_TOLERANCE = 1e-4


@dataclasses.dataclass(frozen=True)
class StateSpace:
    """Nodes that compute a module. They read a row of in_proj's output, z, then x, B and C, then dt."""

    conv: ConvSpec
    space: SpaceSpec

    @property
    def features(self) -> int:
        """Outputs of in_proj."""
        return self.space.z_size


def recognise(
    model: torch.nn.Module, refusal: Callable[[ConvSpec | SpaceSpec], str], window: int
) -> tuple[dict[str, StateSpace], dict[str, str]]:
    """Return the modules of a state space, and why others that look like it are none. By name.

    Args:
        refusal: why the target's kernels do not run a node; "" when they do.
        window: how many states it keeps, after each of the last so many tokens of a run.
    """
    compare = once_a_kind(_compare)

    def judge(module: Any) -> StateSpace:
        own = _spec(module, window)
        compare(module, own)
        for spec in (own.conv, own.space):
            if reason := refusal(spec):
                raise Unlike(reason)
        return own

    return judged(((name, module) for name, module in model.named_modules() if _looks_like_one(module)), judge)


def _looks_like_one(module: Any) -> bool:
    linears = (getattr(module, name, None) for name in LINEARS)
    return (
        all(type(linear) is torch.nn.Linear for linear in linears)
        and type(getattr(module, "conv1d", None)) is torch.nn.Conv1d
        and {*PARAMETERS} <= {name for name, _ in module.named_parameters()}
        and hasattr(module, "ssm_state_size")
        and hasattr(module.norm, "variance_epsilon")
    )


def _spec(module: Any, window: int) -> StateSpace:
    sizes = module.n_groups, module.num_heads, module.ssm_state_size, module.head_dim
    groups, heads, states, size = sizes
    inner, convolution, norm = heads * size, module.conv1d, module.norm
    channels = inner + 2 * groups * states
    if not all(type(value) is int and value > 0 for value in sizes) or heads % groups:
        raise Unlike(f"{heads} heads in {groups} groups, expected a positive multiple")
    if not convolution.in_channels == convolution.groups == channels:
        raise Unlike("its convolution is not of x, B and C, each channel alone")
    if (limits := module.time_step_limit) != (0.0, math.inf):
        raise Unlike(f"its time_step_limit is {limits}, expected none: of several tokens alone it would be kept")
    features = inner + channels + heads
    if module.in_proj.out_features != features:
        raise Unlike(f"its in_proj has {module.in_proj.out_features} outputs, expected {features}: z, x, B, C and dt")
    conv = ConvSpec(
        channels=channels,
        width=convolution.kernel_size[0],
        activation="silu",
        state_window=window,
        x_size=features,
        x_offset=inner,
    )
    space = SpaceSpec(
        num_groups=groups,
        num_heads=heads,
        state_size=states,
        head_size=size,
        norm_size=getattr(norm, "group_size", inner),
        norm_epsilon=norm.variance_epsilon,
        state_window=window,
        dt_size=features,
        dt_offset=inner + channels,
        z_size=features,
        z_offset=0,
    )
    return StateSpace(conv, space)


def _compare(module: Any, found: StateSpace) -> None:
    """Raise Unlike where a module gives something else on random tokens and states."""
    draw = drawing()
    conv, space = dataclasses.replace(found.conv, state_window=1), dataclasses.replace(found.space, state_window=1)
    try:
        probe = copy.deepcopy(module, {id(getattr(module, name)): torch.nn.Identity() for name in LINEARS})
        randomise(probe, draw)
        probe.layer_idx, weight = 0, probe.conv1d.weight[:, 0].numpy()
        bias = np.zeros(0) if probe.conv1d.bias is None else probe.conv1d.bias.numpy()
        a_log, dt_bias, d, norm = (probe.get_parameter(name).numpy() for name in PARAMETERS)
        for batch, new, past in ((2, 5, False), (2, 1, True), (2, 5, True), (1, 70, True)):
            projected = draw(batch, new, found.features)
            conv_state = draw(batch, conv.channels, conv.width)
            state = draw(batch, space.num_heads, space.state_size, space.head_size)
            layer, cache = LinearAttentionLayer(), DynamicCache()
            if past:
                layer.update_conv_state(conv_state.clone())
                layer.update_recurrent_state(state.transpose(2, 3).clone())
            cache.layers, probe.in_proj = [layer], Given(projected)
            rows = np.array([[0, new, int(past)]] * batch, np.int32)
            x = projected.numpy()
            mixed, present_conv = reference_conv(conv, x, weight, bias, conv_state[..., 1:].numpy(), rows)
            output, present = reference_space(space, mixed, x, x, a_log, dt_bias, d, norm, state.numpy(), rows)
            with torch.no_grad():
                want = probe(torch.zeros(batch, new, 8), cache=cache, attention_mask=None)
            made = layer.conv_states[0][..., 1:], layer.recurrent_states[0].transpose(2, 3)
            if not near_all((output, present_conv, present), [t.numpy() for t in (want, *made)], _TOLERANCE):
                raise Unlike("it computes something else than Mamba-2's state space")
    except FAILURES as error:
        raise Unlike(f"its forward does not run alone: {line(error)}") from None


def attach(model: torch.nn.Module, found: dict[str, StateSpace], rows: Rows) -> list[str]:
    """Make the forward of recognised modules their projections and two nodes between them.

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
    space, layer, rows = self.found.space, cache.layers[self.layer_idx], self.rows.rows
    projected = self.in_proj(hidden_states)
    xbc = convolve(self.found.conv, self.conv1d, projected, layer, rows)
    state = recurrent_state(layer, xbc, space.state_window, (space.num_heads, space.state_size, space.head_size))
    parameters = map(self.get_parameter, PARAMETERS)
    y, layer.recurrent_states[0] = torch.ops.quantmoe.state_space(
        xbc, projected, projected, *parameters, state, rows, json.dumps(space.attributes())
    )
    layer.has_previous_state[0] = True
    return self.out_proj(y)
