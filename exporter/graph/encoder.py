"""Encoders: all tokens of a text at once, without a cache.

The graph gives the tokens' hidden states, a vector of the text, and what a head makes of each token.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from transformers import AutoModelForTokenClassification, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import ModelOutput

from quantmoe.exporter.errors import CheckpointError
from quantmoe.exporter.folder.files import CONFIG
from quantmoe.exporter.folder.json_files import read_object
from quantmoe.exporter.reading.checkpoint import Checkpoint
from quantmoe.exporter.reading.families import family_named

#: why no attention of an encoder is CachedAttention
PLAIN = "an encoder attends to tokens on both sides"


@dataclass
class EncoderOutput(ModelOutput):
    """Outputs of the graph, in order.

    Attributes:
        last_hidden_state: [batch, sequence, hidden]. sentence_embedding: [batch, hidden].
        logits: of the head that classifies tokens, [batch, sequence, labels]; None without one.
    """

    last_hidden_state: torch.Tensor | None = None
    sentence_embedding: torch.Tensor | None = None
    logits: torch.Tensor | None = None


def is_encoder(config: PreTrainedConfig) -> bool:
    return family_named(config.model_type).encoder


def encoder_model(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Return transformers' model of an encoder, with a head that classifies tokens."""
    made: PreTrainedModel = AutoModelForTokenClassification.from_config(config, dtype=dtype)
    return made


def prepare(model: Any, ckpt: Checkpoint) -> None:
    """Make a model return what the graph returns.

    Raises:
        CheckpointError: the checkpoint asks for another pooling.
    """
    model.first_alone, model.unit = _pooling(ckpt)
    if "score.weight" not in ckpt:
        del model.score
    model.forward = MethodType(_forward, model)


def inputs() -> tuple[dict[str, torch.Tensor], dict[str, dict[int, Any]]]:
    """Return example inputs, and which of their sizes are dynamic."""
    sizes = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    made = {"input_ids": torch.zeros(2, 3, dtype=torch.int64), "attention_mask": torch.ones(2, 3, dtype=torch.int64)}
    return made, dict.fromkeys(made, sizes)


def _pooling(ckpt: Checkpoint) -> tuple[bool, bool]:
    """Return whether the first token alone is the vector of a text, and whether that has length 1.

    sentence-transformers' files say it. Without them a vector is the mean over the tokens.
    """
    path = ckpt.companions / "1_Pooling" / CONFIG
    modes = [key for key, value in read_object(path).items() if key.startswith("pooling_mode_") and value is True]
    known = {"pooling_mode_mean_tokens": False, "pooling_mode_cls_token": True}
    if len(modes) > 1 or not set(modes) <= known.keys():
        raise CheckpointError(f"{path}: {', '.join(modes)}; expected one of {', '.join(known)}")
    listed = ckpt.companions / "modules.json"
    unit = listed.is_file() and "models.Normalize" in listed.read_text(encoding="utf-8")
    return bool(modes) and known[modes[0]], unit


def _forward(self: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor, **_: Any) -> EncoderOutput:
    states = self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
    wide = states.float()
    if self.first_alone:
        pooled = wide[:, 0]
    else:
        counted = attention_mask.float()[..., None]
        pooled = (wide * counted).sum(1) / counted.sum(1).clamp(min=1e-9)
    if self.unit:
        pooled = torch.nn.functional.normalize(pooled, dim=-1)
    logits = self.score(states) if hasattr(self, "score") else None
    return EncoderOutput(last_hidden_state=states, sentence_embedding=pooled.to(states.dtype), logits=logits)
