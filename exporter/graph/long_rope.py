"""``longrope`` (Phi-3.5-MoE) has factors for short and for long texts. ``dynamic`` (NTK) lowers them with length.

With ``dynamic``, nothing is scaled up to ``context_length``. ``longrope`` has a limit,
``original_max_position_embeddings``, in the model's metadata ``short_context``. Keys in the cache keep the factors of
the step that wrote them. So a text that grows past the limit must be run again from its first token:

- ``quantmoe generate`` and ``Generator`` run all tokens again, once.
- ``Generator.generate_batch`` and ``generate --prompts`` refuse prompts whose answers may pass the limit.
- ``generate --speculate mtp`` refuses every ``longrope`` model. Use ``--speculate ngram``.
- onnxruntime-genai stops at the limit: ``genai_config.json`` sets ``search.max_length`` to it at most.
- ``export --paged`` uses the long factors for every request if the context is longer than the limit, as vLLM does.
- Your own program must run all tokens again, in one step that has more tokens than the limit.

In long texts of Phi-3.5-MoE, transformers 5.24 changes only ``long_mscale``. Microsoft's own code uses the long
factors, and so do exports.
"""

# transformers overwrites a buffer with the frequencies of a run, which a graph cannot. Here they are a function of the
# run's positions. Each sequence of a batch has the frequencies of its own length, which transformers gives it when it
# runs alone.
from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

FOLLOWING = ("dynamic", "longrope")


def follow_lengths(model: torch.nn.Module) -> None:
    """Give every rotary module that updates its frequencies a forward that computes them."""
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if any(kind in FOLLOWING for kind in (kinds.values() if isinstance(kinds, dict) else [kinds])):
            own = inspect.unwrap(module.forward.__func__)  # type: ignore[attr-defined]
            module.forward = partial(_forward, module, own)  # type: ignore[method-assign]


def switch_of(config: Any) -> int | None:
    """Return the number of tokens up to which ``longrope`` uses its short factors; None where nothing switches."""
    rope = getattr(config, "rope_parameters", None) or {}
    parts = [part for part in (rope, *rope.values()) if isinstance(part, dict) and part.get("rope_type") == "longrope"]
    return min((part["original_max_position_embeddings"] for part in parts), default=None)


class _Following:
    """A rotary module with other frequencies, and perhaps another factor of its tables."""

    def __init__(self, module: Any, frequencies: torch.Tensor, scaling: torch.Tensor | None):
        self.module, self.frequencies, self.scaling = module, frequencies, scaling

    def __getattr__(self, name: str) -> Any:
        if name.endswith("inv_freq"):
            return self.frequencies
        if name.endswith("attention_scaling") and self.scaling is not None:
            return self.scaling
        return getattr(self.module, name)


def _forward(
    self: Any, own: Callable[..., Any], x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None
) -> Any:
    """Return cosines and sines as the module does.

    Args:
        own: the module's forward without transformers' updates: it multiplies positions [.., batch, tokens, 1] by
            frequencies, here [batch, 1, rotary_size / 2].
        position_ids: [batch, tokens], or with the axes of pictures in front.
    """
    kind = self.rope_type if layer_type is None else self.rope_type[layer_type]
    given = {} if layer_type is None else {"layer_type": layer_type}
    if kind not in FOLLOWING:
        return own(self, x, position_ids, **given)
    # in f32, which every engine reduces
    lengths = position_ids.float().amax((*range(position_ids.ndim - 2), -1))[:, None, None] + 1
    make = partial(ROPE_INIT_FUNCTIONS[kind], self.config, layer_type=layer_type)
    if kind == "dynamic":
        return own(_Following(self, make(seq_len=lengths)[0], None), x, position_ids, **given)
    rope = self.config.rope_parameters if layer_type is None else self.config.rope_parameters[layer_type]
    limit = rope["original_max_position_embeddings"]
    short, long = (make(seq_len=length)[0] for length in (limit, limit + 1))
    scalings = getattr(self, "length_scalings", None)  # architectures/phimoe.py
    scaling = None if scalings is None else torch.where(lengths > limit, scalings[1], scalings[0])
    return own(_Following(self, torch.where(lengths > limit, long, short), scaling), x, position_ids, **given)
