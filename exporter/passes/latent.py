"""Latent attention (DeepSeek's): keys are concatenated.

transformers assigns their two parts to slices, which become ScatterND: each copies all keys, with an index for every
feature. ONNX Runtime's TensorRT provider gives ScatterND its default ``reduction``, which TensorRT 10.6 does not parse.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from transformers import PreTrainedModel


def concatenate_keys(model: PreTrainedModel) -> None:
    """Replaces ``expand_kv`` of attention modules, which all of transformers' architectures have alike."""
    for module in model.modules():
        if hasattr(module, "expand_kv"):
            module.expand_kv = MethodType(_expand_kv, module)  # type: ignore[assignment]


def _expand_kv(self: Any, kv_nope: torch.Tensor, k_rot: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """DeepseekV3Attention.expand_kv.

    Args:
        kv_nope: [batch, 1, L, kv_lora_rank]. k_rot: [batch, 1, L, qk_rope_head_dim].

    Returns:
        keys and values, [batch, heads, L, D] and [batch, heads, L, v_head_dim].
    """
    batch, _, length, _ = kv_nope.shape
    expanded = self.kv_b_proj(kv_nope).view(batch, length, -1, self.qk_nope_head_dim + self.v_head_dim).transpose(1, 2)
    k_nope, values = expanded.split((self.qk_nope_head_dim, self.v_head_dim), -1)
    return torch.cat((k_nope, k_rot.expand(-1, k_nope.shape[1], -1, -1)), -1), values
