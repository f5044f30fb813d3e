"""Several short convolutions of one layer: their states are parts of one tensor, channels one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class StatePart:
    """A stand-in for a cache and for its layer: the part of one short convolution in a layer's states.

    Attributes:
        conv_states: [.., channels, width - 1], or None where the layer has nothing.
    """

    def __init__(self, layer: Any, first: int, channels: int, width: int):
        state = layer.conv_states[0]
        own = None if state is None else state[..., first : first + channels, state.shape[-1] - width + 1 :]
        self.conv_states: dict[int, torch.Tensor | None] = {0: own}
        self.recurrent_states, self.has_previous_state = layer.recurrent_states, layer.has_previous_state

    def __getitem__(self, _: int) -> StatePart:
        return self

    @property
    def layers(self) -> StatePart:
        """Return all layers."""
        return self


def divide(layer: Any, sizes: Sequence[tuple[int, int]]) -> list[StatePart]:
    """Return the parts of a layer's states; sizes: channels and width of each convolution."""
    parts, first = [], 0
    for channels, width in sizes:
        parts.append(StatePart(layer, first, channels, width))
        first += channels
    return parts


def join(layer: Any, parts: Sequence[StatePart]) -> None:
    """Make the parts' new states the layer's. The longest has no padding."""
    states = [state for part in parts if (state := part.conv_states[0]) is not None]
    longest = max(state.shape[-1] for state in states)
    padded = (torch.nn.functional.pad(state, (longest - state.shape[-1], 0)) for state in states)
    layer.conv_states[0] = torch.cat([*padded], -2)
    layer.has_previous_state[0] = True
