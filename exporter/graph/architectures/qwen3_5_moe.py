"""Qwen3.5 and 3.6 with experts: of their multimodal rotary positions text has one for all three axes."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe


def prepare(model: PreTrainedModel) -> None:
    """Make the rotary module take its angles from one axis: all have the same positions, which interleaving leaves
    alone."""
    turn_by(model, lambda _, ids: (ids[0] if ids.ndim == 3 else ids)[..., None])


def turn_by(model: PreTrainedModel, positions_of: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
    """Replace Qwen3_5MoeTextRotaryEmbedding.forward.

    Args:
        positions_of: of the module and position_ids, [3, batch, sequence] or of equal axes [batch, sequence]; the
            positions of each frequency, [batch, sequence, frequencies], or 1 for all.
    """

    def tables(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return cosines and sines, [batch, sequence, rotary features], each for features i and i + half; x: for its
        type."""
        angles = positions_of(self, position_ids).float() * self.inv_freq.float()
        angles = torch.cat((angles, angles), -1)
        return tuple((table * self.attention_scaling).to(x.dtype) for table in (angles.cos(), angles.sin()))

    for module in model.modules():
        if isinstance(module, modeling_qwen3_5_moe.Qwen3_5MoeTextRotaryEmbedding):
            module.forward = MethodType(tables, module)  # type: ignore[method-assign]
