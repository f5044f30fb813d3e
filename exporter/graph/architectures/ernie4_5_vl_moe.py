"""ERNIE 4.5 VL: text has experts of its own, the first half of a layer's; so have images, which are left out."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.models.ernie4_5_vl_moe import modeling_ernie4_5_vl_moe as ernie

#: parts of published names -> of transformers' text model
NAMES = {
    ".mlp.gate.": ".mlp.text_moe.gate.",
    ".mlp.moe_statics.": ".mlp.text_moe.gate.moe_statics.",
    ".mlp.experts.": ".mlp.text_moe.experts.",
}


def prepare(model: PreTrainedModel) -> None:
    """Leave the experts of images out, and make rotary tables of one position for all three axes."""
    for module in model.modules():
        if isinstance(module, ernie.Ernie4_5_VLMoeMoeBlock):
            del module.vision_moe
        elif isinstance(module, ernie.Ernie4_5_VLMoeTextRotaryEmbedding):
            module.forward = MethodType(_tables, module)  # type: ignore[method-assign]


def stored(model: PreTrainedModel) -> dict[str, tuple[tuple[int, ...], Callable[[np.ndarray], np.ndarray]]]:
    """Return what routers are made from: name -> (shape of the checkpoint's tensor, the function)."""
    found: dict[str, tuple[tuple[int, ...], Callable[[np.ndarray], np.ndarray]]] = {}
    for name, module in model.named_modules():
        if isinstance(module, ernie.Ernie4_5_VLMoeMoeTopKRouter):
            experts, size = module.weight.shape
            found[f"{name}.weight"] = (size, experts), np.transpose
            found[f"{name}.moe_statics.e_score_correction_bias"] = (2, experts), _first
    return found


def _first(rows: np.ndarray) -> np.ndarray:
    return rows[:1]


def _tables(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines, [batch, sequence, head_dim], each for two neighbours.

    The module keeps the frequencies of rows and of columns one after the other. They turn side by side.
    """
    rows, columns, _ = self.mrope_section
    halves = self.inv_freq[: rows + columns].unflatten(0, (2, rows)).t().flatten()
    frequencies = torch.cat((halves, self.inv_freq[rows + columns :])).float().repeat_interleave(2)
    positions = position_ids[0] if position_ids.ndim == 3 else position_ids
    angles = positions[..., None].float() * frequencies
    return angles.cos() * self.attention_scaling, angles.sin() * self.attention_scaling
