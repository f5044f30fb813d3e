"""ZAYA: a short convolution before attention, whose layers keep its state beside keys and values.

Queries and keys pass a convolution of each channel and then one of each head. Half of a value comes from the token
before. All of them need tokens before alone, so that one CausalConv gives the channels of this and earlier tokens.
"""

from __future__ import annotations

from types import MethodType, SimpleNamespace
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.models.zaya.modeling_zaya import ZayaCCAProjection

from quantmoe.custom_ops.op import ConvSpec
from quantmoe.exporter.graph.modules.attention_inputs import Rows
from quantmoe.exporter.graph.modules.states.linear_attention import convolve
from quantmoe.exporter.reading.checkpoint import CheckpointError


def prepare(model: PreTrainedModel) -> None:
    """Refuse convolutions and biases that no published model has."""
    config: Any = model.config
    for field, want in (("cca_time0", 2), ("cca_time1", 2), ("attention_bias", False)):
        if (found := getattr(config, field)) != want:
            raise CheckpointError(f"config.json: {field} is {found}, expected {want}, as in ZAYA1-8B")


def states(model: PreTrainedModel, window: int) -> dict[str, ConvSpec]:
    """Return the modules that keep a state, and the node that has it, with states after each of ``window`` tokens."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, ZayaCCAProjection):
            twice, delayed = 2 * module.conv_qk_depthwise.in_channels, module.v_proj_delayed.out_features
            found[name] = ConvSpec(channels=twice + delayed, width=3, activation="none", state_window=window)
    return found


def attach(model: PreTrainedModel, found: dict[str, ConvSpec], rows: Rows) -> None:
    """Make the forward of these modules their projections and a node."""
    for name, spec in found.items():
        module: Any = model.get_submodule(name)
        module.conv, module.rows, module.delayed = spec, rows, module.v_proj_delayed.out_features
        module.forward = MethodType(_forward, module)


def _taps(self: Any) -> SimpleNamespace:
    """Return the node's weight [channels, 3] and bias.

    Its channels are the convolution of a token, then the convolution of the token before, then delayed values.
    """
    own = self.conv_qk_depthwise.weight[:, 0].float()
    pad, delayed = torch.nn.functional.pad, self.delayed
    bias = self.conv_qk_depthwise.bias.float()
    shift = torch.tensor([[0.0, 1.0, 0.0]]).expand(delayed, 3)
    weight = torch.cat((pad(own, (1, 0)), pad(own, (0, 1)), shift))
    return SimpleNamespace(weight=weight, bias=torch.cat((bias, bias, torch.zeros(delayed))))


def _forward(self: Any, hidden_states: torch.Tensor, cache: Any, conv_mask: Any = None) -> tuple[torch.Tensor, ...]:
    shape = (*hidden_states.shape[:-1], -1, self.head_dim)
    queries, keys = self.q_proj(hidden_states), self.k_proj(hidden_states)
    groups = self.num_key_value_groups
    mixed = (queries.reshape(shape) + keys.reshape(shape).repeat_interleave(groups, -2)) * 0.5
    both, value = torch.cat((queries, keys), -1), self.v_proj_delayed(hidden_states)
    given = torch.cat((both, both, value), -1)
    layer = cache.layers[self.layer_idx]
    now, before, delayed = convolve(self.conv, _taps(self), given, layer, self.rows.rows).split(
        [both.shape[-1], both.shape[-1], value.shape[-1]], -1
    )
    layer.has_previous_state[0] = True
    # a product of each head with both tokens
    heads, last = self.num_attention_heads + self.num_key_value_heads, self.conv_qk_grouped
    pair = torch.stack((before, now), -1).unflatten(-2, (heads, self.head_dim)).flatten(-2)
    weight = last.weight.unflatten(0, (heads, self.head_dim)).flatten(-2)
    made = torch.matmul(pair.unsqueeze(-2), weight.transpose(1, 2)).squeeze(-2)
    made = made + last.bias.unflatten(0, (heads, self.head_dim))
    query = made[..., : self.num_attention_heads, :] + mixed
    key = made[..., self.num_attention_heads :, :] + mixed.unflatten(-2, (-1, groups)).mean(-2)
    return query, key, torch.cat((self.v_proj_current(hidden_states), delayed), -1).reshape(shape)
