"""OpenAI's privacy filter: routers divide weights by their number, and the layer multiplies by it again."""

from __future__ import annotations

from transformers import PreTrainedModel
from transformers.models.openai_privacy_filter.modeling_openai_privacy_filter import OpenAIPrivacyFilterTopKRouter


def prepare(model: PreTrainedModel) -> None:
    """Name the factor as other families do, so that modules/routers.py finds it."""
    for module in model.modules():
        if isinstance(module, OpenAIPrivacyFilterTopKRouter):
            module.routed_scaling_factor = 1 / module.top_k  # type: ignore[assignment]
