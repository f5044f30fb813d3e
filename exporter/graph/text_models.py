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
from quantmoe.exporter.reading.families import family_named


def causal_model(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Return transformers' causal language model of a configuration, or its text model with a head.

    Raises:
        ValueError: transformers has neither.
    """
    if is_encoder(config):
        return encoder_model(config, dtype)
    found = family_named(config.model_type).text_class
    if not found:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        getattr(ARCHITECTURES.get(config.model_type), "trim", lambda model: None)(model)
        return model
    folder, name = found
    text = getattr(importlib.import_module(f"transformers.models.{folder}.modeling_{folder}"), name)
    # in the family's module and of its base class, which say what the experts and the attention may be
    members = {"__module__": text.__module__, "__init__": _init, "forward": _forward, "text_class": text}
    members["_tied_weights_keys"] = {"lm_head.weight": "model.embed_tokens.weight"}
    made: Any = type(name.removesuffix("Model") + "ForCausalLM", text.__bases__, members)
    return made._from_config(config, dtype=dtype)


def renamings(config: PreTrainedConfig, outer: str) -> list[WeightRenaming]:
    """Return how transformers renames a published tensor of the model around a text model.

    Args:
        outer: that model's model_type.
    """
    own = family_named(config.model_type)
    found = get_checkpoint_conversion_mapping(outer) if own.text_class or own.named_outside else None
    if found is None and own.text_class:  # a text model that is published alone
        found = get_checkpoint_conversion_mapping(own.text_class[0])
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
