"""One expert: the matrices a converter yields and a layout packs."""

from __future__ import annotations

from dataclasses import dataclass

from quantmoe.custom_ops.matrix import QuantizedMatrix


@dataclass(frozen=True, eq=False)
class Expert:
    """The projections of one expert. H hidden size, I intermediate size.

    Attributes:
        gate: [I, H]; None when the layer is not gated.
        up: [I, H].
        down: [H, I].
    """

    gate: QuantizedMatrix | None
    up: QuantizedMatrix
    down: QuantizedMatrix

    @property
    def hidden_size(self) -> int:
        return self.up.shape[1]

    @property
    def intermediate_size(self) -> int:
        return self.up.shape[0]
