"""MiniMax-Text-01: a class of caches of its own, and tables of decays for blocks of 256 tokens in each layer."""

from __future__ import annotations

from types import MethodType
from typing import Any

from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.models.minimax import modeling_minimax


def configure(config: PreTrainedConfig) -> None:
    """Set blocks of one token, with equal results. Tables of longer ones are a gigabyte for 80 layers of 64 heads."""
    config.block_size = 1


def prepare(model: PreTrainedModel) -> None:
    """Take a cache of keys, values and states as other models do. What decays is what config.json says
    (modules/states/lightning.py), whether the checkpoint has tables of it or not."""
    for module in model.modules():
        if isinstance(module, modeling_minimax.MiniMaxModel):
            module.forward = MethodType(_model, module)  # type: ignore[method-assign]
        elif isinstance(module, modeling_minimax.MiniMaxLightningAttention):
            module._non_persistent_buffers_set |= module._buffers.keys()


def _model(self: Any, *args: Any, cache: Any = None, use_cache: bool = True, **kwargs: Any) -> Any:
    """MiniMaxModel.forward, which refuses other caches only if it is told to use them, and uses them anyway."""
    cache = DynamicCache(config=self.config) if cache is None else cache
    return type(self).forward(self, *args, cache=cache, use_cache=False, **kwargs)
