"""GLM-4.5V: RMS norms, a table of positions stretched by cubic interpolation, and patches that a convolution merges.

onnxruntime-genai 0.18 has no pipeline of this model. Programs run the three files themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.models.glm4v_moe import modeling_glm4v_moe as glm

from quantmoe.exporter.graph.architectures.mrope import turn_by
from quantmoe.exporter.graph.vision import qwen3_5_moe

NAME = ""
parts = qwen3_5_moe.parts


def prepare(model: PreTrainedModel) -> None:
    turn_by(model, _positions_of)


def _positions_of(rotary: Any, position_ids: torch.Tensor) -> torch.Tensor:
    """Let each frequency look up its own axis before there are angles: sections of frequencies, one after the other."""
    axes = torch.tensor([i % 3 for i, size in enumerate(rotary.mrope_section) for _ in range(size)])
    return position_ids.expand(3, *position_ids.shape[-2:])[axes].permute(1, 2, 0)


def tower(config: Any) -> torch.nn.Module:
    """Return the tower of the configuration; its two convolutions, whose windows do not overlap, are products.

    Raises:
        ValueError: heads of a width that cannot be turned by rows and columns, or a table that is no square.
    """
    made: Any = qwen3_5_moe.tower(config, glm.Glm4vMoeVisionModel)
    merging = made.downsample
    made.downsample = torch.nn.Linear(merging.weight[0].numel(), merging.out_channels)
    made.forward = MethodType(_forward, made)
    return made


def derived(model: Any) -> dict[str, tuple[tuple[int, ...], Callable[[np.ndarray], np.ndarray]]]:
    side, weight = model.spatial_merge_size, model.downsample.weight
    shape = (len(weight), weight.shape[1] // side**2, side, side)
    return qwen3_5_moe.derived(model) | {"downsample.weight": (shape, lambda array: array.reshape(len(array), -1))}


def _forward(self: Any, pixel_values: torch.Tensor, image_grid_thw: torch.Tensor) -> torch.Tensor:
    """Glm4vMoeVisionModel.forward; all frames in a call have equally many patches."""
    weight = self.patch_embed.proj.weight
    row, column, height, width = qwen3_5_moe.places(pixel_values, image_grid_thw, self.spatial_merge_size)
    x = self.post_conv_layernorm(self.patch_embed.proj(pixel_values.to(weight.dtype)))
    x = x + _positions(self.embeddings.position_embedding, (row, height), (column, width)).to(x.dtype)
    tables = qwen3_5_moe.turns(row, column, self.rotary_pos_emb.inv_freq)
    frames = qwen3_5_moe.equal_frames(image_grid_thw)
    for block in self.blocks:
        x = x + qwen3_5_moe.attention(block.attn, block.norm1(x), tables, frames)
        x = x + _gated(block.mlp, block.norm2(x), block.mlp.act_fn)
    windows = self.post_layernorm(x).unflatten(0, (-1, self.spatial_merge_size**2)).transpose(1, 2)
    merger = self.merger
    x = merger.post_projection_norm(merger.proj(self.downsample(windows.flatten(1))))
    return _gated(merger, merger.act1(x.float()).to(x.dtype), merger.act_fn)


def _gated(module: Any, x: torch.Tensor, activation: Any) -> torch.Tensor:
    """Return a gated MLP with its activation in f32: not every engine has one of bfloat16."""
    return module.down_proj(activation(module.gate_proj(x).float()).to(x.dtype) * module.up_proj(x))


def _positions(table: torch.nn.Embedding, *axes: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Return a square table of embeddings stretched over each frame by cubic interpolation of its 16 nearest rows.

    Outside the table its border goes on.

    Args:
        axes: of rows and of columns: place of each patch [patches], places that its frame has.
    """
    side, found = int(table.num_embeddings**0.5), []
    for place, size in axes:
        source = (place.float() + 0.5) * side / size - 0.5
        low = source.floor()
        taps = [(low.long() + i).clamp(0, side - 1) for i in range(-1, 3)]
        found.append([*zip(taps, _cubic(source - low), strict=True)])
    return sum(  # type: ignore[return-value]
        (a * b)[:, None] * table(row * side + column).float() for row, a in found[0] for column, b in found[1]
    )


def _cubic(t: torch.Tensor) -> list[torch.Tensor]:
    """Return the factors of the points at -1, 0, 1 and 2, where 0 <= t < 1: cubic convolution with a slope of -0.75."""
    slope = -0.75

    def near(x: torch.Tensor) -> torch.Tensor:
        return ((slope + 2) * x - (slope + 3)) * x * x + 1

    def far(x: torch.Tensor) -> torch.Tensor:
        return ((slope * x - 5 * slope) * x + 8 * slope) * x - 4 * slope

    return [far(t + 1), near(t), near(1 - t), far(2 - t)]
