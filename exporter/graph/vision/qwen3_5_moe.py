"""Qwen3.5 and 3.6 with experts: a tower of full attention in each frame, positions of three axes in the decoder."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as qwen

from quantmoe.exporter.graph.architectures.mrope import turn_by
from quantmoe.exporter.graph.vision.vision_attention import attend_in_frames

NAME = "qwen3_5_moe"


def parts(config: Any) -> int:
    return 1


def prepare(model: PreTrainedModel) -> None:
    turn_by(model, _positions_of)


def _positions_of(rotary: Any, position_ids: torch.Tensor) -> torch.Tensor:
    """Let each frequency look up its own axis before there are angles."""
    axes = torch.zeros(len(rotary.inv_freq), dtype=torch.int64)
    for axis in (1, 2):
        axes[axis : 3 * rotary.mrope_section[axis] : 3] = axis
    return position_ids.expand(3, *position_ids.shape[-2:])[axes].permute(1, 2, 0)


def tower(config: Any, kind: Any = qwen.Qwen3_5MoeVisionModel) -> torch.nn.Module:
    """Return the tower of the configuration; the convolution of patches, which do not overlap, is a product.

    Args:
        kind: transformers' class of it.

    Raises:
        ValueError: heads of a width that cannot be turned by rows and columns.
    """
    size, heads = config.vision_config.hidden_size, config.vision_config.num_heads
    if heads < 1 or size % (4 * heads):
        raise ValueError(f"vision_config.num_heads is {heads}, expected a divisor of hidden_size / 4, {size} / 4")
    made: Any = kind._from_config(config.vision_config)
    convolution = made.patch_embed.proj
    made.patch_embed.proj = torch.nn.Linear(convolution.weight[0].numel(), convolution.out_channels)
    made.forward = MethodType(_forward, made)
    return made


def derived(model: Any) -> dict[str, tuple[tuple[int, ...], Callable[[np.ndarray], np.ndarray]]]:
    patches, weight = model.patch_embed, model.patch_embed.proj.weight
    shape = (len(weight), patches.in_channels, patches.temporal_patch_size, patches.patch_size, patches.patch_size)
    return {"patch_embed.proj.weight": (shape, lambda array: array.reshape(len(array), -1))}


def _forward(self: Any, pixel_values: torch.Tensor, image_grid_thw: torch.Tensor) -> torch.Tensor:
    """Make the tower of this configuration; all frames in a call have equally many patches."""
    weight = self.patch_embed.proj.weight
    row, column, height, width = places(pixel_values, image_grid_thw, self.spatial_merge_size)
    x = self.patch_embed.proj(pixel_values.to(weight.dtype))
    x = x + _positions(self.pos_embed, self.num_grid_per_side, (row, height), (column, width)).to(x.dtype)

    tables, frames = turns(row, column, self.rotary_pos_emb.inv_freq), equal_frames(image_grid_thw)
    inner, features = list(getattr(self, "deepstack_visual_indexes", ())), []
    for layer, block in enumerate(self.blocks):
        x = x + attention(block.attn, block.norm1(x), tables, frames)
        x = x + _mlp(block.mlp, block.norm2(x))
        if layer in inner:
            features.append(_merged(self.deepstack_merger_list[inner.index(layer)], x))
    return torch.cat((_merged(self.merger, x), *features), -1)


def _merged(merger: Any, x: torch.Tensor) -> torch.Tensor:
    """Return features of image tokens [patches / merged, hidden size] from [patches, width]."""
    if merger.use_postshuffle_norm:
        return _mlp(merger, merger.norm(x.reshape(-1, merger.hidden_size)))
    return _mlp(merger, merger.norm(x).reshape(-1, merger.hidden_size))


def turns(row: torch.Tensor, column: torch.Tensor, frequencies: torch.Tensor) -> list[torch.Tensor]:
    """Return cosines and sines f32 [patches, 1, head features], of a patch's row and then of its column."""
    angles = (torch.stack((row, column), 1)[..., None].float() * frequencies.float()).flatten(1)
    return [torch.cat((table, table), -1)[:, None] for table in (angles.cos(), angles.sin())]


def equal_frames(grid: torch.Tensor) -> torch.Tensor:
    """Return the number of frames and the patches of each, int64 [2].

    Of frames that differ, the product is not the number of patches.
    """
    return torch.stack((grid[:, 0].sum(), (grid[:, 1] * grid[:, 2]).amax(0)))


def places(pixels: torch.Tensor, grid: torch.Tensor, merged: int) -> tuple[torch.Tensor, ...]:
    """Row and column of each patch in its frame, and that frame's numbers of rows and columns: int64 [patches] each.

    Patches that the tower's end merges, ``merged`` by ``merged``, are neighbours.
    """
    sizes = grid.prod(1)
    ends = sizes.cumsum(0)
    patch = torch.arange(pixels.shape[0])  # len would be traced as a constant
    image = (patch[:, None] >= ends).sum(1)
    height, width = grid[:, 1][image], grid[:, 2][image]
    within = (patch - (ends - sizes)[image]) % (height * width)
    block, inner = within // merged**2, within % merged**2
    across = width // merged
    return block // across * merged + inner // merged, block % across * merged + inner % merged, height, width


def _positions(table: torch.nn.Embedding, side: int, *axes: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Return a square table of embeddings stretched over each frame, bilinear with its corners on the frame's.

    Args:
        axes: of rows and of columns: place of each patch [patches], places that its frame has.
    """
    found = []
    for place, size in axes:
        source = place.float() * (side - 1) / (size - 1).clamp(min=1)
        low = source.floor()
        found.append((low.long(), (low.long() + 1).clamp(max=side - 1), source - low))
    (top, bottom, down), (left, right, along) = found
    return sum(  # type: ignore[return-value]
        (a * b)[:, None] * table(row * side + column).float()
        for row, a in ((top, 1 - down), (bottom, down))
        for column, b in ((left, 1 - along), (right, along))
    )


def attention(module: Any, x: torch.Tensor, tables: list[torch.Tensor], frames: torch.Tensor) -> torch.Tensor:
    query, key, value = module.qkv(x).unflatten(-1, (3, module.num_heads, -1)).unbind(1)
    cos, sin = tables
    query, key = ((t * cos + qwen.rotate_half(t) * sin) for t in (query.float(), key.float()))
    made = attend_in_frames(query, key, value.float(), frames, module.scaling)
    return module.proj(made.to(x.dtype))


def _mlp(module: Any, x: torch.Tensor) -> torch.Tensor:
    """Return its activation in f32: not every engine has one of bfloat16."""
    inner = module.linear_fc1(x)
    return module.linear_fc2(module.act_fn(inner.float()).to(x.dtype))
