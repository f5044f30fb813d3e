"""Multi-token prediction: a layer that drafts, which transformers leaves out when it loads a model. Qwen's checkpoints
have it as ``mtp.*``, DeepSeek-V3's and GLM-4.5's as the layer after the last one, MiMo-V2-Flash's as
``model.mtp.layers.0.*``.

h_i is the hidden state after the main model's last norm, and e the embedding of the next token t_(i + 1). The layer
computes h'_i = layer(fc([norm(e), norm(h_i)])). A norm of its own and the main model's head then give the logits of
t_(i + 2). The normed h'_i is the h_(i + 1) of the next draft. Sources: transformers' MtpLayer, onnxruntime-genai's Qwen
builder, vLLM's qwen3_next_mtp.

MiMo's layer has a sliding window and no experts (sglang's mimo_v2_flash_nextn.py, vLLM's mimo_v2_mtp.py). MiMo has
three such layers, each trained for one token further ahead. vLLM uses the first one, and so does this module.
"""

from __future__ import annotations

import copy
from types import MethodType
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from quantmoe.exporter.reading.families import EAGLE3, MIMO

#: names of Qwen's -> those of a model of one layer
_QWEN = {
    f"{wrapper}mtp.{part}": own
    for wrapper in ("", "model.")
    for part, own in (("layers.", "model.layers."), ("norm.", "model.norm."), ("", "mtp."))
}
_INPUT = {"enorm.": "mtp.pre_fc_norm_embedding.", "hnorm.": "mtp.pre_fc_norm_hidden.", "eh_proj.": "mtp.fc."}
#: the same of what a layer after the last one has; "": a copy of what the main model has
_NEXT = _INPUT | {
    "shared_head.norm.": "model.norm.",
    "shared_head.head.": "",
    "embed_tokens.": "",
    "": "model.layers.0.",
}
#: the same of MiMo's
_MIMO = _INPUT | {
    "final_layernorm.": "model.norm.",
    "pre_mlp_layernorm.": "model.layers.0.post_attention_layernorm.",
    "self_attn.attention_sink_bias": "model.layers.0.self_attn.sinks",
    "": "model.layers.0.",
}
#: the same of an EAGLE-3 head's (eagle3.py)
_EAGLE3 = {
    "midlayer.": "model.layers.0.",
    "norm.": "eagle3.norm.",
    "lm_head.": "lm_head.",
    "embed_tokens.": "model.embed_tokens.",
    "d2t": "eagle3.places",
}


def names(layer: str) -> dict[str, str]:
    """Return prefixes of the layer's tensors -> prefixes in a model of one layer.

    Args:
        layer: Format.next_layer; "": Qwen's.
    """
    own = _MIMO if layer.startswith(MIMO) else _EAGLE3 if layer == EAGLE3 else _NEXT
    return {f"{layer}{name}": prefix for name, prefix in own.items()} if layer else _QWEN


class Input(torch.nn.Module):
    """The input of the layer: a token's embedding and the hidden state before it, each normed, in one projection."""

    def __init__(self, size: int, norm: torch.nn.Module, dtype: torch.dtype):
        super().__init__()
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = copy.deepcopy(norm), copy.deepcopy(norm)
        self.fc = torch.nn.Linear(2 * size, size, bias=False, dtype=dtype)

    def forward(self, embeddings: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return hidden states from embeddings and hidden states, all [B, S, H]."""
        normed = self.pre_fc_norm_embedding(embeddings), self.pre_fc_norm_hidden(hidden_states)
        return self.fc(torch.cat(normed, -1))


def one_layer(config: PreTrainedConfig, layer: str) -> PreTrainedConfig:
    """Return the main model's configuration with the one layer, of full attention and experts; MiMo's of neither.

    Args:
        layer: see :func:`names`.
    """
    config = copy.deepcopy(config)
    config.num_hidden_layers = 1
    mimo = layer.startswith(MIMO)
    for name, value in {
        "layer_types": ["sliding_attention" if mimo else "full_attention"],
        "mlp_layer_types": ["dense" if mimo else "sparse"],
        "mlp_only_layers": [],
        "decoder_sparse_step": 1,
        "first_k_dense_replace": 0,
    }.items():
        if getattr(config, name, None) is not None:
            setattr(config, name, value)
    return config


def prepare(model: PreTrainedModel) -> None:
    """Make a model of one layer take hidden states, too."""
    decoder: Any = model.get_decoder()
    model.mtp = Input(model.config.hidden_size, decoder.norm, model.dtype)
    model.forward = MethodType(_forward, model)  # type: ignore[method-assign]


def _forward(
    self: Any,
    input_ids: torch.Tensor,
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor,
    position_ids: torch.Tensor,
    cache: Any,
    **_: Any,
) -> CausalLMOutputWithPast:
    embeddings = self.mtp(self.get_input_embeddings()(input_ids), hidden_states)
    given = {"attention_mask": attention_mask, "position_ids": position_ids, "cache": cache}
    made = self.get_decoder()(inputs_embeds=embeddings, use_cache=True, **given)
    return CausalLMOutputWithPast(logits=self.lm_head(made.last_hidden_state), cache=made.cache)
