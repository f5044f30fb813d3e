"""The model as choosing sees it. exporter/graph has it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from quantmoe.custom_ops.op import MoESpec
from quantmoe.exporter.reading.formats import Format, MoELayer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shared:
    """A shared expert beside routed ones, names of modules as in the model.

    Attributes:
        mixture: what has the experts, their router and the shared expert.
        router: of the mixture's router.
        projections: of the shared expert's gate (where experts have one), up and down.
        gate: of the linear [1, H] whose sigmoid is its weight; "": it has the weight 1.
        count: its width in experts.
        flat: whether the mixture returns [tokens, H], whatever the shape of its input.
        logits: whether it also returns the router's logits.
    """

    mixture: str
    router: str
    projections: tuple[str, ...]
    gate: str
    count: int
    flat: bool
    logits: bool


class DescribedModel(Protocol):
    """A model without weights: graph.model.Skeleton, which says what its members are."""

    format: Format
    experts: dict[str, MoELayer]
    linears: dict[str, str]
    sources: dict[str, str]
    tensors: dict[str, Any]
    absorbed: list[str]
    vision: Any
    dtype: Any

    @property
    def type_name(self) -> str: ...

    def lookups(self) -> Sequence[str]: ...

    def shared(self, specs: Mapping[str, MoESpec]) -> dict[str, Shared]: ...
