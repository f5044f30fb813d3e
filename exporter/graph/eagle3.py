"""EAGLE-3 heads: a decoder layer of its own that drafts from the hidden states of three layers of the model.

The model gives features f_i = fc([a_i, b_i, c_i]), of the outputs of three layers. With the embedding e of the next
token t_(i + 1) the head computes x = [norm(e), norm(f_i)] and f'_i = f_i + attention(x), then a feed-forward network.
A norm and the head's own matrix give the logits of t_(i + 2), for some of the tokens. f'_i without that norm is the
f_(i + 1) of the next draft. Sources: arXiv 2503.01840, SGLang's and vLLM's llama_eagle3.py.

The model's graph makes the features. So the head has the interface of a layer of multi-token prediction (mtp.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from quantmoe.exporter.folder.files import CONFIG
from quantmoe.exporter.graph.placeholders import placeholder
from quantmoe.exporter.reading.checkpoint import Checkpoint, CheckpointError
from quantmoe.exporter.reading.config_fields import reading
from quantmoe.exporter.reading.eagle3 import feature_layers


def configuration(head: Checkpoint, target: Any) -> LlamaConfig:
    """Return the configuration of a head for a model with the configuration ``target``.

    A head that was trained on short texts drafts in all texts of the model.
    """
    path = head.folder / CONFIG
    fields = {name: value for name, value in head.config.items() if name not in ("architectures", "torch_dtype")}
    with reading(str(path)):
        found = LlamaConfig(**fields)
    if found.vocab_size != target.vocab_size:
        raise CheckpointError(
            f"{path}: vocab_size is {found.vocab_size}, the model has {target.vocab_size}; expected a head for it"
        )
    found.max_position_embeddings = target.max_position_embeddings
    found.tie_word_embeddings = False
    return found


class _Head(torch.nn.Module):
    """The parts of a head beside its decoder layer: the last norm, and the place of each token's logit."""

    def __init__(self, norm: torch.nn.Module, tokens: int | None):
        super().__init__()
        self.norm = norm
        if tokens is not None:
            self.register_buffer("places", placeholder((tokens,), torch.int32))


def prepare(model: PreTrainedModel) -> None:
    """Make a Llama of one layer a head.

    Its attention reads two hidden states. Its own logits are of ``draft_vocab_size`` tokens.
    """
    config: Any = model.config
    decoder: Any = model.get_decoder()
    (layer,) = decoder.layers
    for name in ("q_proj", "k_proj", "v_proj"):
        old = getattr(layer.self_attn, name)
        wide = torch.nn.Linear(2 * config.hidden_size, old.out_features, old.bias is not None, dtype=model.dtype)
        setattr(layer.self_attn, name, wide)
    layer.hidden_norm = type(layer.input_layernorm)(config.hidden_size, config.rms_norm_eps).to(model.dtype)
    layer.forward = MethodType(_layer, layer)
    layer.norm_before_residual = bool(getattr(config, "norm_before_residual", False))
    count = getattr(config, "draft_vocab_size", None) or config.vocab_size
    model.eagle3 = _Head(decoder.norm, config.vocab_size if count != config.vocab_size else None)
    decoder.norm = torch.nn.Identity()
    model.lm_head = torch.nn.Linear(config.hidden_size, count, bias=False, dtype=model.dtype)
    model.forward = MethodType(_forward, model)  # type: ignore[method-assign]


def stored(model: Any, head: Checkpoint) -> dict[str, tuple[tuple[int, ...], Callable[[np.ndarray], np.ndarray]]]:
    """Return the parameters whose tensors have another form, as Skeleton.stored_as: ``d2t``, which is added to the
    number of a logit to give its token."""
    if "places" not in model.eagle3._buffers:
        return {}
    count, tokens = model.lm_head.out_features, model.config.vocab_size

    def places(d2t: np.ndarray) -> np.ndarray:
        of = np.arange(count) + d2t
        if len({*of.tolist()}) < count or of.min() < 0 or of.max() >= tokens:
            raise CheckpointError(f"{head.where('d2t')}: expected {count} different tokens from 0 to {tokens - 1}")
        found = np.full(tokens, count, np.int32)  # behind all logits stands the lowest number
        found[of] = np.arange(count)
        return found

    return {"eagle3.places": ((count,), places)}


def _layer(
    self: Any, hidden_states: torch.Tensor, *args: Any, features: torch.Tensor | None = None, **kwargs: Any
) -> torch.Tensor:
    """LlamaDecoderLayer.forward of embeddings and features; of embeddings alone where only shapes are asked for."""
    features = hidden_states if features is None else features
    normed = self.hidden_norm(features)
    x = torch.cat((self.input_layernorm(hidden_states), normed), -1)
    attended, _ = self.self_attn(x, *args, **kwargs)
    x = (normed if self.norm_before_residual else features) + attended
    made: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
    return made


def _forward(
    self: Any,
    input_ids: torch.Tensor,
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor,
    position_ids: torch.Tensor,
    cache: Any,
    **_: Any,
) -> CausalLMOutputWithPast:
    given = {"attention_mask": attention_mask, "position_ids": position_ids, "cache": cache}
    embeddings = self.get_input_embeddings()(input_ids)
    made = self.get_decoder()(inputs_embeds=embeddings, features=hidden_states, use_cache=True, **given)
    logits = self.lm_head(self.eagle3.norm(made.last_hidden_state))
    if (places := getattr(self.eagle3, "places", None)) is not None:
        lowest = torch.full_like(logits[..., :1], torch.finfo(logits.dtype).min)
        logits = torch.cat((logits, lowest), -1).index_select(-1, places)
    return CausalLMOutputWithPast(logits=logits, cache=made.cache, hidden_states=made.last_hidden_state)


class _Features(torch.nn.Module):
    """The product that makes a head's features."""

    def __init__(self, inputs: int, outputs: int, dtype: torch.dtype):
        super().__init__()
        self.fc = torch.nn.Linear(inputs, outputs, bias=False, dtype=dtype)


def give_features(model: PreTrainedModel, decoder: Any, head: Checkpoint) -> None:
    """Make a model return the features that a head reads."""
    config: Any = model.config
    numbers = feature_layers(head.config, len(decoder.layers), head.folder / CONFIG)
    outputs: dict[int, torch.Tensor] = {}
    for i in {*numbers}:
        layer = decoder.layers[i]
        layer.forward = partial(_kept, layer.forward, outputs, i)
        layer.gives_features = True  # so that no other layer is like it (trace.py)
    width = config.hidden_size * len(numbers)
    model.features = _Features(width, head.config.get("hidden_size", config.hidden_size), model.dtype)
    model.forward = partial(_with_features, model, model.forward, outputs, numbers)  # type: ignore[method-assign]


def _kept(forward: Any, outputs: dict[int, torch.Tensor], i: int, *args: Any, **kwargs: Any) -> Any:
    made = forward(*args, **kwargs)
    outputs[i] = made[0] if isinstance(made, tuple) else made
    return made


def _with_features(
    self: Any, forward: Any, outputs: dict[int, torch.Tensor], numbers: list[int], *args: Any, **kwargs: Any
) -> Any:
    made = forward(*args, **kwargs)
    made["hidden_states"] = self.features.fc(torch.cat([outputs[i] for i in numbers], -1))
    return made
