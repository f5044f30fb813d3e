"""DeepSeek-V2: DeepSeek-V3's attention with rotary embeddings in complex numbers, which ONNX lacks."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.models.deepseek_v2 import modeling_deepseek_v2
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention


def prepare(model: PreTrainedModel) -> None:
    """Give attention DeepSeek-V3's forward for interleaved pairs, and that its tables."""
    for module in model.modules():
        if isinstance(module, modeling_deepseek_v2.DeepseekV2RotaryEmbedding):
            module.forward = MethodType(_tables, module)  # type: ignore[method-assign]
        elif isinstance(module, modeling_deepseek_v2.DeepseekV2Attention):
            module.config.rope_interleave = True
            module.forward = MethodType(DeepseekV3Attention.forward, module)  # type: ignore[method-assign]


def _tables(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines, [batch, sequence, qk_rope_head_dim], each twice."""
    angles = position_ids[..., None].float() * self.inv_freq.float().repeat(2)
    cos, sin = (part * self.attention_scaling for part in (angles.cos(), angles.sin()))
    return cos.type_as(x), sin.type_as(x)
