"""Rotary positions of three axes, of models that see images: text has the same position on every axis."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from transformers import PreTrainedModel


def prepare(model: PreTrainedModel) -> None:
    """Make the rotary module take its angles from one axis."""
    turn_by(model, lambda _, ids: (ids[0] if ids.ndim == 3 else ids)[..., None])


def turn_by(model: PreTrainedModel, positions_of: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
    """Replace the forward of rotary modules with axes.

    Args:
        positions_of: the module and position_ids -> the positions of each frequency, [batch, sequence, frequencies],
            or 1 for all. position_ids are [3, batch, sequence], or [batch, sequence] if the axes are equal.
    """

    def tables(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return cosines and sines, [batch, sequence, rotary features], each for features i and i + half; x: for its
        type."""
        angles = positions_of(self, position_ids).float() * self.inv_freq.float()
        angles = torch.cat((angles, angles), -1)
        return tuple((table * self.attention_scaling).to(x.dtype) for table in (angles.cos(), angles.sin()))

    for module in model.modules():
        if hasattr(module, "mrope_section"):
            module.forward = MethodType(tables, module)  # type: ignore[method-assign]
