"""Qwen3.5 and 3.6 with experts: of their multimodal rotary positions text has one for all three axes."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe


def prepare(model: PreTrainedModel) -> None:
    """Makes the rotary module take its angles from one axis."""
    for module in model.modules():
        if isinstance(module, modeling_qwen3_5_moe.Qwen3_5MoeTextRotaryEmbedding):
            module.forward = MethodType(_tables, module)  # type: ignore[method-assign]


def _tables(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Qwen3_5MoeTextRotaryEmbedding.forward where all axes have the same positions, which interleaving leaves alone.

    Args:
        x: for its type. position_ids: [3, batch, sequence], or [batch, sequence].

    Returns:
        Cosines and sines, [batch, sequence, rotary features], each for features i and i + half.
    """
    positions = position_ids[0] if position_ids.ndim == 3 else position_ids
    angles = positions[..., None].float() * self.inv_freq.float()
    angles = torch.cat((angles, angles), -1)
    return tuple((table * self.attention_scaling).to(x.dtype) for table in (angles.cos(), angles.sin()))  # type: ignore[return-value]
