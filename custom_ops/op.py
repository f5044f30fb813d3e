"""The operator definition of ``op.def`` and the attributes of a node as dataclasses.

Torch-free and engine-free: the exporter, the layouts, the reference and the tests all take names from here.
"""

from __future__ import annotations

from quantmoe.custom_ops import DOMAIN as DOMAIN
from quantmoe.custom_ops.op_def import nodes
from quantmoe.custom_ops.op_def.nodes import Projection as Projection
from quantmoe.custom_ops.op_def.schema import Spec as Spec
from quantmoe.custom_ops.op_def.schema import schema
from quantmoe.custom_ops.op_def.tensor_shapes import named_size


def enum(kind: str) -> dict[str, int]:
    """Return names and ABI codes of one enum of op.def, e.g. ``enum("format")["int4"] == 0``."""
    return schema().enums[kind]


def op_version(op: str) -> int:
    return schema().operators[op].version


def inputs(op: str) -> tuple[tuple[str, str], ...]:
    """(name, type) of each input of ``op`` that all its nodes have, in order."""
    return schema().operators[op].inputs


def optional_inputs(op: str) -> tuple[tuple[str, str], ...]:
    """Return the inputs after the required ones, which only some nodes have."""
    return schema().operators[op].optional_inputs


def outputs(op: str) -> tuple[tuple[str, str], ...]:
    """(name, type) of each output of ``op``, in order."""
    return schema().operators[op].outputs


def attribute_kinds(op: str = "QuantMoE") -> dict[str, str]:
    """Attribute name -> kind (``i``, ``f`` or an enum's name), in op.def's order, projections expanded."""
    return {name: a.kind for name, a in schema().operators[op].attributes.items()}


class MoESpec(nodes.QuantMoE):
    """All attributes of a QuantMoE node. Sizes: H hidden, I intermediate, in features."""

    def matrices(self, projection: str) -> tuple[Projection, int, int, int]:
        """Return the attributes of "w13" or "w2", and N, K and the number of an expert's matrices."""
        if projection == "w13":
            return self.w13, self.intermediate_size, self.hidden_size, 1 + self.gated
        return self.w2, self.hidden_size, self.intermediate_size, 1


class LinearSpec(nodes.QuantLinear):
    """All attributes of a QuantLinear node."""

    @property
    def moe(self) -> MoESpec:
        """The layer whose w2 these weights are, as the layouts and kernels see them."""
        return MoESpec(
            num_experts=1,
            expert_offset=0,
            hidden_size=self.out_features,
            intermediate_size=self.in_features,
            activation="silu",
            gated=0,
            swiglu_alpha=0.0,
            swiglu_limit=0.0,
            apply_router_weight_on_input=0,
            w13=self.w,
            w2=self.w,
        )


class RoutingSpec(nodes.MoERouting):
    """All attributes of a MoERouting node."""

    @property
    def logits(self) -> int:
        """The number of a token's logits: one for each expert, and the gate of the shared experts."""
        return self.num_experts + self.shared_gate

    @property
    def slots(self) -> int:
        """Ids and weights of a token."""
        return self.top_k + self.shared_experts


class RouterSpec(nodes.MoERouter):
    """All attributes of a MoERouter node."""

    @property
    def routing(self) -> RoutingSpec:
        """The MoERouting of its logits."""
        own = {name: value for name, value in self.attributes().items() if name not in ("op_version", "hidden_size")}
        return RoutingSpec.from_attributes(own | {"op_version": RoutingSpec.OPERATOR.version})


class AttentionSpec(nodes.CachedAttention):
    """All attributes of a CachedAttention node."""

    @property
    def cache_dtype(self) -> str | None:
        """NumPy's name of the type of the caches' codes; None where they are floats."""
        return {"none": None, "fp8_e4m3": "uint8"}.get(self.cache_format, "int8")

    @property
    def cache_widths(self) -> tuple[int, int]:
        """Elements of a token and head in the caches of keys and of values."""
        return self._size("key_width"), self._size("value_width")

    @property
    def query_size(self) -> int:
        """Features of a head's query in qkv."""
        return self._size("query_size")

    @property
    def output_size(self) -> int:
        """Features of a head's output."""
        return self._size("head_out")

    @property
    def gates_size(self) -> int:
        """Gates that a token's qkv begins with."""
        return self._size("gates_size")

    def _size(self, name: str) -> int:
        return named_size(self.OPERATOR, vars(self), name)

    def expands(self, count: int) -> bool:
        """Return whether a row of so many new tokens expands its latents: ops/cached_attention.def."""
        up = self.nope_size + self.out_size
        saved = self.head_size + self.v_head_size - self.query_size - self.output_size
        return self.nope_size > 0 and count * saved >= self.v_head_size * up


NormSpec = nodes.AddRMSNorm
ReduceSpec = nodes.AllReduce
ReduceNormSpec = nodes.AllReduceAddRMSNorm
GatherSpec = nodes.AllGather
ScatterSpec = nodes.ReduceScatter
RowsSpec = nodes.TokenRows
ConvSpec = nodes.CausalConv
DeltaSpec = nodes.GatedDelta
SpaceSpec = nodes.StateSpace
IndexerSpec = nodes.SparseIndexer
