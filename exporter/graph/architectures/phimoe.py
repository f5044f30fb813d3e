"""Phi-3.5-MoE: cosines and sines have a factor for short and one for long sequences.

transformers 5.24 takes the long sequences' factor and the short sequences' frequencies. Here both follow the
sequence's length, as in Microsoft's own code.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.models.phimoe import modeling_phimoe

from quantmoe.exporter.errors import CheckpointError


def prepare(model: PreTrainedModel) -> None:
    """Make the rotary module read its frequencies, which long_rope.py computes.

    Raises:
        CheckpointError: another kind of rotary embedding, whose tables the module scales in its own way.
    """
    rope = model.config.rope_parameters
    if rope["rope_type"] not in ("default", "longrope"):
        raise CheckpointError(
            f"config.json: rope_type {rope['rope_type']} of phimoe is not supported, expected default or longrope"
        )
    for module in model.modules():
        if isinstance(module, modeling_phimoe.PhimoeRotaryEmbedding):
            module.forward = MethodType(_tables, module)  # type: ignore[method-assign]
            if rope["rope_type"] == "longrope":
                module.length_scalings = rope["short_mscale"], rope["long_mscale"]


def _tables(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """PhimoeRotaryEmbedding.forward without a branch on the length."""
    angles = position_ids[..., None].float() * self.inv_freq.float()
    angles = torch.cat((angles, angles), -1)
    return tuple((table * self.attention_scaling).to(x.dtype) for table in (angles.cos(), angles.sin()))  # type: ignore[return-value]
