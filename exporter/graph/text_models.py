"""Text models that transformers has only inside models of several modalities, with the language model's head."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming
from transformers.modeling_outputs import CausalLMOutputWithPast

from quantmoe.exporter.graph.architectures import ARCHITECTURES
from quantmoe.exporter.graph.encoder import encoder_model, is_encoder

#: config.model_type of a text model -> folder of transformers.models and class
CLASSES = {
    "deepseek_ocr2_text": ("deepseek_ocr2", "DeepseekOcr2TextModel"),
    "ernie4_5_vl_moe_text": ("ernie4_5_vl_moe", "Ernie4_5_VLMoeTextModel"),
    "glm4v_moe_text": ("glm4v_moe", "Glm4vMoeTextModel"),
    "glm5_next_text": ("glm5_next", "Glm5NextTextModel"),
    "hy_v4_vl_text": ("hy_v4_vl", "HYV4VLTextModel"),
    "mistral4": ("mistral4", "Mistral4Model"),
    "mistral_large4_text": ("mistral_large4", "MistralLarge4TextModel"),
    "muse_spark_text": ("muse_spark", "MuseSparkTextModel"),
    "qwen3_omni_moe_text": ("qwen3_omni_moe", "Qwen3OmniMoeThinkerTextModel"),
    "qwen3_vl_moe_text": ("qwen3_vl_moe", "Qwen3VLMoeTextModel"),
    "step3p5": ("step3p7", "Step3p7TextModel"),
}
#: text models with a class of their own whose names are the outer model's in checkpoints
NAMED_OUTSIDE = ("inkling_text",)


def causal_model(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Return transformers' causal language model of a configuration, or the text model of CLASSES with a head.

    Raises:
        ValueError: transformers has neither.
    """
    if is_encoder(config):
        return encoder_model(config, dtype)
    if config.model_type not in CLASSES:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        getattr(ARCHITECTURES.get(config.model_type), "trim", lambda model: None)(model)
        return model
    folder, name = CLASSES[config.model_type]
    text = getattr(importlib.import_module(f"transformers.models.{folder}.modeling_{folder}"), name)
    # in the family's module and of its base class, which say what the experts and the attention may be
    members = {"__module__": text.__module__, "__init__": _init, "forward": _forward, "text_class": text}
    members["_tied_weights_keys"] = {"lm_head.weight": "model.embed_tokens.weight"}
    made: Any = type(name.removesuffix("Model") + "ForCausalLM", text.__bases__, members)
    return made._from_config(config, dtype=dtype)


def renamings(config: PreTrainedConfig, outer: str) -> list[WeightRenaming]:
    """Return how transformers renames a published tensor of the model around a text model of CLASSES or NAMED_OUTSIDE.

    Args:
        outer: that model's model_type.
    """
    inside = config.model_type in (*CLASSES, *NAMED_OUTSIDE)
    found = get_checkpoint_conversion_mapping(outer) if inside else None
    return [t for t in found or () if isinstance(t, WeightRenaming) and not isinstance(t, WeightConverter)]


def _init(self: Any, config: PreTrainedConfig) -> None:
    PreTrainedModel.__init__(self, config)
    self.model = self.text_class(config)
    self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
    self.post_init()


def _forward(
    self: Any,
    input_ids: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    cache: Any = None,
    inputs_embeds: torch.Tensor | None = None,
    use_cache: bool = True,
    **_: Any,
) -> CausalLMOutputWithPast:
    made = self.model(
        input_ids=input_ids,
        attention_mask=attention_mask,
        position_ids=position_ids,
        cache=cache,
        inputs_embeds=inputs_embeds,
        use_cache=use_cache,
    )
    logits = self.lm_head(made.last_hidden_state) * getattr(self.config, "output_multiplier", 1.0)
    if cap := getattr(self.config, "final_logit_softcapping", None):
        logits = torch.tanh(logits / cap) * cap
    return CausalLMOutputWithPast(logits=logits, cache=made.cache)
