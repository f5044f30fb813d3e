"""Inkling 2: each layer reads a mixture of earlier layers' sums. Inkling 2 Mini visits its middle layers three times.

Keys, values, attention's outputs and the experts' outputs each pass a CausalConv, as in Inkling. A visit to a layer has
its own cache.

- Scores have a bias by distance, and a score without a value that follows from the token. Standard nodes make both, so
  attention takes more time and memory.
- In full attention a token makes the taps of its own convolutions. Their CausalConv gives the earlier tokens.
- Layers that are visited several times are traced one by one, so the export takes longer.
- Checkpoints of floats export. Experts in MXFP8 or NVFP4, as transformers reads them in published checkpoints, are
  refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import MethodType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.models.inkling2 import modeling_inkling2 as inkling2
from transformers.models.inkling2_loop import modeling_inkling2_loop as looped

from quantmoe.custom_ops.op import ConvSpec
from quantmoe.exporter.graph.architectures.extended_cache.indexed import placed, visible
from quantmoe.exporter.graph.architectures.extended_cache.inkling import taps_of_sum
from quantmoe.exporter.graph.modules.attention_inputs import Rows
from quantmoe.exporter.graph.modules.states.linear_attention import convolve
from quantmoe.exporter.graph.modules.states.state_parts import divide, join

#: as the reader calls it (FAMILIES) -> as transformers expects it in checkpoints
NAMES = {"_sconv.weight_proj.weight": "_sconv.weight_proj"}
_MODELS = inkling2.Inkling2TextModel, looped.Inkling2LoopTextModel
_MIXTURES = inkling2.Inkling2BlockAttentionResidual, looped.Inkling2LoopBlockAttentionResidual
_CONVOLUTIONS = inkling2.Inkling2ShortConvolution, looped.Inkling2LoopShortConvolution
_DYNAMIC = inkling2.Inkling2DynamicShortConvolution, looped.Inkling2LoopDynamicShortConvolution


def trim(model: PreTrainedModel) -> None:
    """Give the LM head the rows of padding that checkpoints have, and drop their logits."""
    own: Any = model
    rows = own.config.vocab_size
    own.lm_head = torch.nn.Linear(own.lm_head.in_features, rows, bias=False, dtype=own.lm_head.weight.dtype)
    own.logit_softcap.tokens = own.config.unpadded_vocab_size
    own.logit_softcap.forward = MethodType(_softcap, own.logit_softcap)


def _softcap(self: Any, logits: torch.Tensor) -> torch.Tensor:
    capped: torch.Tensor = type(self).forward(self, logits[..., : self.tokens])
    return capped


def prepare(model: PreTrainedModel) -> None:
    """Make layers follow the places of tokens, and mixtures of earlier sums few products."""
    for module in model.modules():
        own: Any = module
        if isinstance(module, _MODELS):
            own.forward = MethodType(_model, module)
        elif isinstance(module, _MIXTURES):
            own.forward = MethodType(_inputs, module)
        elif isinstance(module, looped.Inkling2LoopMessageAttentionResidual):
            own.forward = MethodType(_messages, module)


def stored(model: PreTrainedModel) -> dict[str, tuple[tuple[int, ...], Callable[[np.ndarray], np.ndarray]]]:
    """Return what the queries of messages are made from: name -> (shape of each of two tensors, the function)."""
    found: dict[str, tuple[tuple[int, ...], Callable[[np.ndarray], np.ndarray]]] = {}
    for name, module in model.named_modules():
        if isinstance(module, looped.Inkling2LoopMessageAttentionResidual):
            layers, _, size = module.query.shape
            found[f"{name}.query"] = (2 * layers, size), _by_layer
    return found


def _by_layer(rows: np.ndarray) -> np.ndarray:
    """Return queries [layers, 4, size] of rows: the query's and the MLP's of each layer, then the key's and value's."""
    outer, inner = rows.reshape(2, -1, 2, rows.shape[-1])
    return np.concatenate((outer[:, :1], inner, outer[:, 1:]), 1)


def states(model: PreTrainedModel, window: int) -> dict[str, ConvSpec]:
    """Return the modules that keep a state, and the node that has it, with states after each of ``window`` tokens."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, (*_CONVOLUTIONS, *_DYNAMIC)):
            width: int = module.conv_kernel_size
            fixed = isinstance(module, _CONVOLUTIONS)
            channels = module.conv1d.in_channels if fixed else (width - 1) * module.static_weight.shape[1]
            found[name] = ConvSpec(channels=channels, width=width, activation="none", state_window=window)
    return found


def attach(model: PreTrainedModel, found: dict[str, ConvSpec], rows: Rows) -> None:
    """Make the forward of these modules a node."""
    for name, spec in found.items():
        module: Any = model.get_submodule(name)
        module.spec, module.rows = spec, rows
        module.forward = MethodType(_convolution if isinstance(module, _CONVOLUTIONS) else _dynamic, module)


class _Visit:
    """The cache of one visit to a layer, in the place of the cache of all.

    Attributes:
        parts: of the layer's states, by conv_idx of its convolutions.
    """

    def __init__(self, cache: Any, layer: torch.nn.Module, index: int):
        self.cache, self.index = cache, index
        found: list[Any] = [module for module in layer.modules() if hasattr(module, "conv_idx")]
        specs = [module.spec for module in sorted(found, key=lambda module: module.conv_idx)]
        self.parts = divide(cache.layers[index], [(spec.channels, spec.width) for spec in specs])

    def update(self, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> Any:
        """Return keys and values of all tokens."""
        return self.cache.update(key, value, self.index)

    def end(self) -> None:
        """Keep the new states."""
        join(self.cache.layers[self.index], self.parts)


def _convolution(self: Any, x: torch.Tensor, *_: Any, cache: _Visit, **__: Any) -> torch.Tensor:
    """Return the sum of a convolution and its input, divided."""
    taps = taps_of_sum(self) / math.sqrt(self.conv_kernel_size + 1)
    return convolve(self.spec, SimpleNamespace(weight=taps, bias=None), x, cache.parts[self.conv_idx], self.rows.rows)


def _dynamic(self: Any, x: torch.Tensor, dynamic_input: torch.Tensor, *_: Any, cache: _Visit, **__: Any) -> Any:
    """Return the sum of a convolution, of taps of the channel and of the token, and its input, divided."""
    width, heads, channels = self.conv_kernel_size, self.num_heads, x.shape[-1]
    delays = torch.eye(width).flip(0)[1:].repeat_interleave(channels, 0)
    weights, part = SimpleNamespace(weight=delays, bias=None), cache.parts[self.conv_idx]
    before = convolve(self.spec, weights, x.repeat(1, 1, width - 1), part, self.rows.rows)
    tokens = torch.cat((x, before), -1).unflatten(-1, (width, heads, -1)).float()
    own = self.weight_proj(dynamic_input).float().unflatten(-1, (heads, width)).transpose(-1, -2)[..., None]
    taps = self.static_weight.float().unflatten(-1, (heads, -1)) + own
    found = (tokens * taps).sum(2).flatten(-2) + x.float()
    return (found / math.sqrt(2 * width + 1)).to(x.dtype)


def _inputs(self: Any, block_states: torch.Tensor, partial_block_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
    queries = self.query.float().view(-1, self.query.shape[-1])
    return mixed(self.norm, queries, block_states, partial_block_states).unbind(-2)


def _messages(self: Any, block_states: torch.Tensor, partial_block_states: torch.Tensor, layer: int) -> torch.Tensor:
    return mixed(self.norm, self.query[layer].float(), block_states, partial_block_states)


def mixed(norm: torch.nn.Module, queries: torch.Tensor, blocks: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """Return attention of queries to normed sums of layers, which are their keys and values, [batch, S, queries, size].

    The norms of ``blocks`` are one node for all layers that read them.

    Args:
        queries: [queries, size]. blocks: [batch, S, blocks, size]. last: [batch, S, size].
    """
    last = norm(last.float()).unsqueeze(-2)
    if not blocks.shape[-2]:
        return last.expand(-1, -1, len(queries), -1)
    blocks, size = norm(blocks.float()), queries.shape[-1]
    scores = torch.cat([torch.matmul(keys, queries.t()) for keys in (blocks, last)], -2) * size**-0.5
    weights = scores.softmax(-2).transpose(-1, -2)
    return torch.matmul(weights[..., :-1], blocks) + weights[..., -1:] * last


def _model(
    self: Any,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    position_ids: torch.Tensor | None = None,
    cache: Any = None,
    **_: Any,
) -> MoeModelOutputWithPast:
    x, (places, _slots) = self.embed_tokens(input_ids), placed(attention_mask.bool())
    count, passes = len(self.layers), getattr(self.config, "loop_num_passes", 1)
    first = getattr(self.config, "loop_layer_index_start", count)
    core = self.layers[first : getattr(self.config, "loop_layer_index_end", count)]
    if cache is None:
        cache, *again = (DynamicCache(config=self.config) for _ in range(passes))
        cache.layers += [layer for own in again for layer in own.layers[first : first + len(core)]]
    positions = places[:, -input_ids.shape[1] :] if position_ids is None else position_ids
    behind = (positions[..., None] - places[:, None])[:, None]
    windows = {layer.self_attn.sliding_window or 0 for layer in self.layers}
    masks = {window: visible(attention_mask, places, positions, x.dtype, window) for window in sorted(windows)}

    def visit(layer: Any, x: torch.Tensor, blocks: torch.Tensor, index: int, *given: torch.Tensor) -> Any:
        mask, own = masks[layer.self_attn.sliding_window or 0], _Visit(cache, layer, index)
        kept = {"attention_mask": mask, "relative_distance": behind, "cache": own, "position_ids": positions}
        made = layer(x, blocks, *given, **kept)
        own.end()
        return made, torch.cat((blocks, x.unsqueeze(-2)), -2) if layer.is_block_boundary else blocks

    blocks = x.new_zeros(*x.shape[:-1], 0, x.shape[-1])
    for i, layer in enumerate(self.layers[:first]):
        x, blocks = visit(layer, x, blocks, i)
    start = x, blocks
    for i, layer in enumerate(core):
        x, blocks = visit(layer, x, blocks, first + i)
    for turn in range(1, passes):
        last, earlier = x, blocks[..., start[1].shape[-2] + 1 :, :]  # without what the core began with
        x, blocks = start
        for i, layer in enumerate(core):
            messages = self.message_input(earlier, last, i)
            x, blocks = visit(layer, x, blocks, count + (turn - 1) * len(core) + i, messages)
    for i in range(first + len(core), count):
        x, blocks = visit(self.layers[i], x, blocks, i)
    return MoeModelOutputWithPast(last_hidden_state=self.norm(self.final_input(blocks, x)[0]).to(x.dtype), cache=cache)
