"""A rank has a smaller configuration, and parts of tensors with its sizes.

- Attention: some of the heads, and their cache. If there are more ranks than key-value heads, several ranks hold one
  head. A latent is in all ranks.
- Linear attention: some of the key heads and their value heads, with convolution, decays and states.
- Short convolutions (LFM2): some of the channels, with both gates.
- Experts: a slice of each expert. With ``--expert-parallel``: some experts whole; ids of other experts contribute zero.
- A shared expert is divided as routed experts are. With ``--expert-parallel`` it is whole in the last rank, or in all
  ranks if it cannot be one of the layer's experts.
- Dense layers: a slice of their features.
- LM head: a slice of the vocabulary. It is whole if it shares the embeddings' tensor, or if N does not divide the
  vocabulary.
- Embeddings, norms, routers: all of them.
"""

# A rank has rows of linears that make heads, features or logits, and columns of linears that take them. The products of
# all ranks' columns add up to the whole model's.
#
# Columns in act-order share scales with columns anywhere. If an expert or MLP makes their features, and nothing else
# sees these, a rank takes features in the order of the columns. A linear of heads is divided by its rows instead.
from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from quantmoe.custom_ops.expert import Expert
from quantmoe.custom_ops.matrix import QuantizedMatrix, in_order, joined, portion, reordered, rows_of
from quantmoe.exporter.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from quantmoe.exporter.reading.expert_map import Placement

#: linears whose rows, and whose columns, are divided; others would need their heads in another order, or more sums
ROWS = ("q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj", "gate_proj", "up_proj", "w1", "w3", "sinks",
        "lm_head")  # fmt: skip
COLUMNS = ("o_proj", "out_proj", "down_proj", "w2")
#: linears of an MLP that take its features -> those that make them
MADE_BY = {"down_proj": ("gate_proj", "up_proj"), "w2": ("w1", "w3")}
#: activation_format whose scales are of groups of features, as they were before act-order
GROUPED = ("fp8_group128", "nvfp4", "mxfp8", "mxfp4")
#: sizes of a configuration that are divided beside the heads of attention
DIVIDED = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "linear_num_key_heads",
           "linear_num_value_heads", "linear_num_heads")  # fmt: skip


@dataclass(frozen=True)
class Cut:
    """A rank's part of a tensor: the ``index``-th of ``count`` equal ones.

    Attributes:
        axis: 0: rows. 1: columns of a linear; the ranks' products are added up. None: what is added to this sum; the
            first rank has it, and the others have zeros.
        sections: relative sizes of what the axis has one after the other, such as queries, keys and values. A part has
            a piece of each.
        order: parts lie in this act-order, of the columns or of the columns that take what the rows make. None: they
            lie in the order of features.
    """

    axis: int | None
    index: int
    count: int
    sections: tuple[int, ...] = (1,)
    order: np.ndarray | None = None

    def array(self, array: np.ndarray) -> np.ndarray:
        """Return the part of a tensor of floats."""
        if self.axis is None:
            return array if self.index == 0 else np.zeros_like(array)
        if self.order is not None:
            array = array.take(self.order, self.axis)
        before, found = (slice(None),) * self.axis, []
        for begin, end in self._sections(array.shape[self.axis]):
            size = (end - begin) // self.count
            found.append(array[*before, begin + self.index * size : begin + (self.index + 1) * size])
        return found[0] if len(found) == 1 else np.concatenate(found, self.axis)

    def matrix(self, m: QuantizedMatrix) -> QuantizedMatrix:
        """Return the part of a linear, its bias included.

        Raises:
            ValueError: it would divide what shares a scale, or columns in act-order.
        """
        if self.axis == 0:
            m = m if self.order is None else reordered(m, self.order)
            found = [portion(rows_of(m, *at), self.index, self.count, 0) for at in self._sections(m.shape[0])]
            return found[0] if len(found) == 1 else joined(found)
        m = m if self.order is None else in_order(m)
        bias = m.bias if m.bias is None or self.index == 0 else np.zeros_like(m.bias)
        return replace(portion(replace(m, bias=None), self.index, self.count, 1), bias=bias)

    def _sections(self, size: int) -> Iterator[tuple[int, int]]:
        """Yield where the sections begin and end on an axis of this size."""
        ends = [size * end // sum(self.sections) for end in itertools.accumulate(self.sections)]
        return itertools.pairwise([0, *ends])


@dataclass(frozen=True, kw_only=True)
class Slice:
    """A rank's share of a model.

    Attributes:
        rank: 0 to world - 1.
        whole_experts: it has some experts, not a part of each.
        placements: of layers by their numbers, where a map says which experts are where.
        own_tokens: it has tokens of its own, and all of the model except the experts.
        export_id: of the export, the same in all ranks (exporter/writing/identity.py); 0: not known.
    """

    rank: int
    world: int
    whole_experts: bool = False
    placements: Mapping[int, Placement] | None = None
    own_tokens: bool = False
    export_id: int = 0

    @property
    def place(self) -> dict[str, int]:
        """Return the attributes about ranks, for nodes that need the other ranks."""
        return {"rank": self.rank, "world": self.world, "export_id": self.export_id}

    def expert(self, expert: Expert, rounded: str) -> Expert:
        """Return the rank's part of an expert: where down is in act-order, features in the order of its columns.

        Args:
            rounded: down's activation_format, as the checkpoint says.

        Raises:
            ValueError: see :meth:`Cut.matrix`.
        """
        if self.whole_experts:
            return expert
        rows, columns = (Cut(axis, self.rank, self.world) for axis in (0, 1))
        try:
            if expert.down.perm is not None and rounded in GROUPED:
                raise ValueError(f"{rounded} rounds groups of features as they were before act-order")
            expert = expert.in_order()
            return Expert(expert.gate and rows.matrix(expert.gate), rows.matrix(expert.up), columns.matrix(expert.down))
        except ValueError as error:
            raise ValueError(f"{error}; --expert-parallel gives each rank whole experts") from None

    def ids(self, experts: int, routed: int, layer: int) -> Sequence[int]:
        """Return which of a layer's experts the rank has, in the order of its file.

        Args:
            experts: routed and shared ones. layer: its number.

        Raises:
            ValueError: fewer experts than ranks.
        """
        if not self.whole_experts:
            return range(experts)
        if self.placements is not None:
            shared = range(routed, experts) if self.rank == self.world - 1 else ()
            return (*self.placements[layer].ranks[self.rank], *shared)
        if experts < self.world:
            raise ValueError(f"{experts} experts among {self.world} ranks, expected at least one in each")
        return range(self.rank * experts // self.world, (self.rank + 1) * experts // self.world)

    def width(self, intermediate_size: int, where: str) -> int:
        """Return the intermediate size of the rank's experts."""
        return intermediate_size if self.whole_experts else self.part(intermediate_size, where)

    def narrow(self, config: Any, where: str) -> None:
        """Give transformers' configuration the rank's sizes.

        Raises:
            CheckpointError: naming what the ranks do not divide.
        """
        if self.own_tokens:
            return
        heads = config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        if kv_heads % self.world and self.world % kv_heads:
            raise CheckpointError(
                f"{where}: num_key_value_heads is {kv_heads}, expected a multiple or a divisor of --tensor-parallel "
                f"{self.world}"
            )
        if not getattr(config, "head_dim", None):
            config.head_dim = config.hidden_size // heads
        config.num_attention_heads = self.part(heads, f"{where}: num_attention_heads")
        config.num_key_value_heads = max(1, kv_heads // self.world)
        of_experts = "moe_intermediate_size" if hasattr(config, "moe_intermediate_size") else "intermediate_size"
        for key in DIVIDED:
            own = key in (of_experts, "shared_expert_intermediate_size")  # of experts, routed or shared
            if getattr(config, key, None) and not (own and self.whole_experts):
                setattr(config, key, self.part(getattr(config, key), f"{where}: {key}"))

    def cuts(
        self,
        names: Sequence[str],
        found: tuple[int, ...],
        want: tuple[int, ...],
        where: str,
        sections: tuple[int, ...] = (),
    ) -> Mapping[str, Cut]:
        """Return which tensors of a linear the rank has parts of, where the model's parameter is smaller than the
        stored one.

        Args:
            names: of the tensor, or of those whose rows are the parameter's sections.
            found: its shape. want: the parameter's. where: named in the error.
            sections: of what linear attention has of each head or channel, see :class:`Cut`; (): it is not that.

        Raises:
            CheckpointError: it is none of those that are divided.
        """
        module, _, leaf = names[0].rpartition(".")
        linear = leaf if leaf == "sinks" else module.rpartition(".")[2]
        divided = [i for i, n in enumerate(want) if len(found) == len(want) and n != found[i]]
        axis = 0 if linear in ROWS or sections else 1 if linear in COLUMNS else None
        if sections and len(want) == 4:
            axis = 2  # Kimi's A_log [1, 1, heads, 1]
        count = rest = 0  # fewer parts than ranks where several have the same heads of keys and values
        if axis is not None and divided == [axis]:
            count, rest = divmod(found[axis], want[axis])
        if not count or rest or self.world % count or (sections and count < self.world):
            raise CheckpointError(
                f"{where} has shape {list(found)}, {list(want)} in each of {self.world} ranks. Only rows of "
                f"{', '.join(ROWS)}, columns of {', '.join(COLUMNS)} and heads of linear attention are divided"
            )
        own = sections if sections and len(names) == 1 else (1,)
        made = {name: Cut(axis, self.rank * count // self.world, count, own) for name in names}
        return made | {f"{module}.bias": Cut(None, self.rank, self.world)} if linear in COLUMNS else made

    def part(self, size: int, what: str) -> int:
        """Return a rank's share of heads, features or channels; ``what`` they are, for the error.

        Raises:
            CheckpointError: the ranks do not divide them.
        """
        if size % self.world:
            raise CheckpointError(f"{what} is {size}, expected a multiple of --tensor-parallel {self.world}")
        return size // self.world
