"""One expert: the matrices a converter yields and a layout packs."""

from __future__ import annotations

from dataclasses import dataclass

from quantmoe.custom_ops.matrix import QuantizedMatrix, in_order, reordered


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

    def in_order(self) -> Expert:
        """Return the expert with intermediate features in the order of down's columns; only gate and up make them.

        Raises:
            ValueError: rows of gate or up that share a scale would not stay together.
        """
        order = self.down.perm
        if order is None:
            return self
        return Expert(self.gate and reordered(self.gate, order), reordered(self.up, order), in_order(self.down))

    @property
    def hidden_size(self) -> int:
        return self.up.shape[1]

    @property
    def intermediate_size(self) -> int:
        return self.up.shape[0]
