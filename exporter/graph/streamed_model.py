"""Transformers' model on its dequantized weights, one decoder layer at a time, so that any size fits into memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from accelerate import init_empty_weights

from quantmoe.exporter.graph.experts import fit
from quantmoe.exporter.graph.model import Skeleton, _LargeOnMeta, decoder_of, quiet, state_of
from quantmoe.exporter.graph.text_models import causal_model
from quantmoe.exporter.reading.formats import Format


class Streamed:
    """A model in float32. Each run reads all weights of its decoder layers once more.

    Args:
        format: the opened checkpoint. layers: only the first so many decoder layers.
        progress: is called with decoder layers done, and of how many, of a run.

    Attributes:
        layers: the decoder layers, whose modules have weights only while they run.
    """

    def __init__(
        self,
        format: Format,
        layers: int | None = None,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ):
        format.input_scales = False  # activations are floats
        self.skeleton = skeleton = Skeleton(format, layers=layers)
        with init_empty_weights(), _LargeOnMeta(), quiet():
            self.model = causal_model(skeleton.model.config, torch.float32).eval()
            fit(self.model, skeleton.experts, str(format.ckpt.folder))
        self.model.requires_grad_(requires_grad=False).set_experts_implementation("eager")
        self.layers = decoder_of(self.model).layers
        self._progress = progress
        names = {id(module): name for name, module in self.model.named_modules()}
        prefixes = tuple(f"{names[id(layer)]}." for layer in self.layers)
        rest = state_of(skeleton, lambda name: not name.startswith(prefixes))
        self.model.load_state_dict(rest, strict=False, assign=True)
        self.model.tie_weights()
        for at, (layer, prefix) in enumerate(zip(self.layers, prefixes, strict=True)):
            self._stream(layer, prefix, at)

    def _stream(self, layer: torch.nn.Module, prefix: str, at: int) -> None:
        def load(*_: object) -> None:
            state = state_of(self.skeleton, lambda name: name.startswith(prefix))
            layer.load_state_dict({name.removeprefix(prefix): tensor for name, tensor in state.items()}, assign=True)
            layer.requires_grad_(requires_grad=False)

        def free(*_: object) -> None:
            layer.to("meta")
            self._progress(at + 1, len(self.layers))

        layer.register_forward_pre_hook(load)
        layer.register_forward_hook(free)

    def outputs(self, windows: Sequence[Sequence[int]], hidden: bool = False) -> Iterator[tuple[np.ndarray, list[Any]]]:
        """Run texts of one length together.

        Yields:
            The logits of a text after each token, f32 [tokens, vocabulary]. If asked for, also the hidden states after
            each decoder layer, f32 [tokens, width]. After the last layer they are behind the final norm.
        """
        states: list[np.ndarray] = []

        def keep(module: object, arguments: Any, named: Any) -> None:
            states.append((arguments[0] if arguments else named["hidden_states"]).numpy())

        readers = [*self.layers[1:], self.model.get_output_embeddings()] if hidden else []
        hooks = [reader.register_forward_pre_hook(keep, with_kwargs=True) for reader in readers]
        with torch.no_grad(), quiet():
            logits = self.model(torch.tensor(windows), use_cache=False).logits.numpy()
        for hook in hooks:
            hook.remove()
        for row in range(len(windows)):
            yield logits[row], [state[row] for state in states]
