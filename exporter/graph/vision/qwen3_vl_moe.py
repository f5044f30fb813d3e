"""Qwen3-VL with experts: the first decoder layers add features of the tower's inner layers.

These features lie behind the usual ones. So an embedding is several times as wide as the hidden size, and text has
zeros there. onnxruntime-genai's three files need no further input.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.models.qwen3_vl_moe import modeling_qwen3_vl_moe as qwen

from quantmoe.exporter.graph.vision import qwen3_5_moe

NAME = "qwen3_vl"
derived = qwen3_5_moe.derived


def parts(config: Any) -> int:
    """Return how many times the hidden size an image token's features are wide."""
    return 1 + len(config.vision_config.deepstack_visual_indexes)


def tower(config: Any) -> torch.nn.Module:
    """Return Qwen3VLMoeVisionModel of the configuration, see :func:`qwen3_5_moe.tower`."""
    return qwen3_5_moe.tower(config, qwen.Qwen3VLMoeVisionModel)


def prepare(model: PreTrainedModel) -> None:
    """Make the text model take such embeddings, and positions of three axes."""
    qwen3_5_moe.prepare(model)
    for module in model.modules():
        if isinstance(module, qwen.Qwen3VLMoeTextModel):
            module.forward = MethodType(_text, module)  # type: ignore[method-assign]
            module._deepstack_process = lambda hidden, _, features: hidden + features
    # numbers of the layers, so that layers that add are not taken for layers that do not
    model.config.deepstack_layers = list(range(model.config.num_hidden_layers))


def _text(self: Any, *args: Any, inputs_embeds: torch.Tensor | None = None, **kwargs: Any) -> Any:
    """Run Qwen3VLMoeTextModel.forward on embeddings with features behind them."""
    if inputs_embeds is None:
        return type(self).forward(self, *args, **kwargs)
    inputs_embeds, *features = inputs_embeds.split(self.config.hidden_size, -1)
    return type(self).forward(self, *args, inputs_embeds=inputs_embeds, deepstack_visual_embeds=features, **kwargs)
