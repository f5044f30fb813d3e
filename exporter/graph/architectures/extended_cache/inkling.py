"""Inkling's keys, values, attention's outputs and the experts' outputs each pass a CausalConv.

Its four states are one tensor, ``past_key_values.N.conv_state``.

- Scores have a bias that follows from a token and its distance to the other one. Standard nodes make it, so attention
  takes more time and memory.
- The two shared experts stay floats. ``--quantize`` rounds the routed experts and the other linears.
- Checkpoints of floats are tested. Quantized checkpoints of Inkling are not.
"""

from __future__ import annotations

from types import MethodType, SimpleNamespace
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.models.inkling import modeling_inkling as inkling

from quantmoe.custom_ops.op import ConvSpec
from quantmoe.exporter.graph.architectures.extended_cache.indexed import placed, visible
from quantmoe.exporter.graph.modules.attention_inputs import Rows
from quantmoe.exporter.graph.modules.states.linear_attention import convolve
from quantmoe.exporter.graph.modules.states.state_parts import StatePart, divide, join
from quantmoe.exporter.graph.standard_attention import grouped_attention


def prepare(model: PreTrainedModel) -> None:
    """Make layers follow the places of tokens, and their convolutions keep one state."""
    for module in model.modules():
        if isinstance(module, inkling.InklingTextModel):
            module.forward = MethodType(_model, module)  # type: ignore[method-assign]
        elif isinstance(module, inkling.InklingDecoderLayer):
            module.forward = MethodType(_layer, module)  # type: ignore[method-assign]
        elif isinstance(module, inkling.InklingAttention):
            module.forward = MethodType(_attention, module)  # type: ignore[method-assign]


def states(model: PreTrainedModel, window: int) -> dict[str, ConvSpec]:
    """Return the modules that keep a state, and the node that has it, with states after each of ``window`` tokens."""
    return {
        name: ConvSpec(
            channels=module.conv1d.in_channels,
            width=module.conv_kernel_size,
            activation="none",
            state_window=window,
        )
        for name, module in model.named_modules()
        if isinstance(module, inkling.InklingShortConvolution)
    }


def attach(model: PreTrainedModel, found: dict[str, ConvSpec], rows: Rows) -> None:
    """Make the forward of these modules a node."""
    for name, spec in found.items():
        module: Any = model.get_submodule(name)
        module.spec, module.rows = spec, rows
        module.forward = MethodType(_convolution, module)


def _convolution(self: Any, x: torch.Tensor, part: StatePart) -> torch.Tensor:
    return convolve(self.spec, SimpleNamespace(weight=taps_of_sum(self), bias=None), x, part, self.rows.rows)


def taps_of_sum(convolution: Any) -> torch.Tensor:
    """Return the taps of the sum of a convolution and its input, [channels, width]: the last tap is 1 more."""
    taps = convolution.conv1d.weight[:, 0].float()
    own: torch.Tensor = taps + torch.nn.functional.pad(torch.ones(1), (taps.shape[1] - 1, 0))
    return own


def _model(
    self: Any,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    position_ids: torch.Tensor | None = None,
    cache: Any = None,
    **_: Any,
) -> MoeModelOutputWithPast:
    x, (places, _slots) = self.embed_tokens(input_ids), placed(attention_mask.bool())
    cache = DynamicCache(config=self.config) if cache is None else cache
    positions = places[:, -input_ids.shape[1] :] if position_ids is None else position_ids
    windows = {layer.self_attn.sliding_window or 0 for layer in self.layers}
    masks = {window: visible(attention_mask, places, positions, x.dtype, window) for window in sorted(windows)}
    for layer in self.layers:
        mask = masks[layer.self_attn.sliding_window or 0]
        x = layer(x, mask, positions, positions[..., None] - places[:, None], cache)
    return MoeModelOutputWithPast(last_hidden_state=self.norm(x), cache=cache)


def _layer(
    self: Any, x: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, behind: torch.Tensor, cache: Any
) -> torch.Tensor:
    """InklingDecoderLayer.forward.

    Args:
        behind: how far each token is behind each slot's, [batch, sequence, slots].
    """
    attention = self.self_attn
    convolutions = (attention.k_sconv, attention.v_sconv, self.attn_sconv, self.mlp_sconv)
    layer = cache.layers[attention.layer_idx]
    parts = divide(layer, [(own.conv1d.in_channels, own.conv_kernel_size) for own in convolutions])
    found = attention(
        self.input_layernorm(x), attention_mask=mask, cache=cache, positions=positions, behind=behind, parts=parts
    )
    x = x + self.attn_sconv(found, parts[2])
    x = x + self.mlp_sconv(self.mlp(self.post_attention_layernorm(x)), parts[3])
    join(layer, parts)
    return x


def _attention(
    self: Any,
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor,
    cache: Any,
    positions: torch.Tensor,
    behind: torch.Tensor,
    parts: list[StatePart],
) -> torch.Tensor:
    x, shape = hidden_states, (*hidden_states.shape[:2], -1, self.head_dim)
    query = self.q_norm(self.q_proj(x).view(shape)).transpose(1, 2)
    key = self.k_norm(self.k_sconv(self.k_proj(x), parts[0]).view(shape)).transpose(1, 2)
    value = self.v_sconv(self.v_proj(x), parts[1]).view(shape).transpose(1, 2)
    key, value = cache.update(key, value, self.layer_idx)
    relative = self.r_proj(x).unflatten(-1, (self.num_heads, -1))
    bias = by_distance(torch.matmul(relative, self.rel_logits_proj.proj), behind)
    floor = self.config.log_scaling_n_floor
    if not self.is_sliding and floor is not None:
        longer = ((positions + 1).float() / floor).clamp(min=1.0)
        factor = (1 + self.config.log_scaling_alpha * longer.log()).to(x.dtype)[:, None, :, None]
        query, bias = query * factor, bias * factor
    found, _none = grouped_attention(self, query, key, value, attention_mask, self.scaling, position_bias=bias)
    made: torch.Tensor = self.o_proj(found.flatten(2))
    return made


def by_distance(biases: torch.Tensor, behind: torch.Tensor) -> torch.Tensor:
    """Return the bias of each score, [batch, heads, sequence, slots]; 0 beyond the distances that have one.

    Args:
        biases: of each distance, [batch, sequence, heads, distances]. behind: [batch, sequence, slots].
    """
    biases, behind = biases.transpose(1, 2), behind[:, None]
    extent = biases.shape[-1]
    index = behind.clamp(0, extent - 1).expand(-1, biases.shape[1], -1, -1)
    return torch.where((behind >= 0) & (behind < extent), biases.gather(-1, index), 0.0)
