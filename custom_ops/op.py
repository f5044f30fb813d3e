"""The operator definition of ``op.def``, read once, and the attributes of a node as dataclasses.

Torch-free and engine-free: the exporter, the layouts, the reference and the tests all take names from here.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, ClassVar, Self

DOMAIN = "quantmoe"


@cache
def _lines() -> dict[str, list[tuple[str, ...]]]:
    text = (files("quantmoe.custom_ops") / "op.def").read_text()
    found: dict[str, list[tuple[str, ...]]] = {}
    for macro, arguments in re.findall(r"^QM_(\w+)\((.*?)\)", text, re.MULTILINE):
        found.setdefault(macro, []).append(tuple(a.strip() for a in arguments.split(",")))
    return found


@cache
def enum(kind: str) -> dict[str, int]:
    """Names and ABI codes of one enum of op.def, e.g. ``enum("format")["int4"] == 0``."""
    return {name: int(code) for k, name, code in _lines()["VALUE"] if k == kind}


@cache
def op_version(op: str) -> int:
    return next(int(version) for name, _, version in _lines()["OP"] if name == op)


def inputs(op: str) -> list[tuple[str, str]]:
    """(name, type) of each input of ``op``, in order."""
    return [(name, type_) for o, name, type_ in _lines()["INPUT"] if o == op]


def outputs(op: str) -> list[tuple[str, str]]:
    """(name, type) of each output of ``op``, in order."""
    return [(name, type_) for o, name, type_ in _lines()["OUTPUT"] if o == op]


@cache
def attribute_kinds(op: str = "QuantMoE") -> dict[str, str]:
    """Attribute name -> kind (``i``, ``f`` or an enum's name), in op.def's order, projections expanded."""
    kinds = {name: kind for o, kind, name in _lines()["ATTR"] if o == op}
    for prefix in _prefixes(op):
        kinds |= {f"{prefix}_{name}": kind for kind, name in _lines()["PROJECTION_ATTR"]}
    return kinds


def optional_attributes(op: str) -> set[str]:
    """Names of the attributes that nodes may lack."""
    return {f"{prefix}_{name}" for prefix in _prefixes(op) for _, name in _lines()["PROJECTION_OPTIONAL"]}


def _prefixes(op: str) -> list[str]:
    return [prefix for o, prefix in _lines()["PROJECTION"] if o == op]


@dataclass(frozen=True)
class Projection:
    """How one projection's weights are stored and multiplied: the ``w13_*`` or ``w2_*`` attributes."""

    format: str
    group_size: int
    scale_type: str
    activation_format: str
    layout: str = "cpu_panel"
    layout_version: int = 1
    block_n: int = 1
    zero_points: int = 0
    bias: int = 0
    perm: int = 0
    pre_scale: int = 0


class Spec:
    """All attributes of a node; a subclass for each operator, its projections fields of type Projection."""

    OP: ClassVar[str]

    def attributes(self) -> dict[str, int | float | str]:
        """Node attributes in op.def's order, every one present."""
        values = dataclasses.asdict(self)  # type: ignore[call-overload]
        for prefix in _prefixes(self.OP):
            values |= {f"{prefix}_{k}": v for k, v in values.pop(prefix).items()}
        return {name: values[name] for name in attribute_kinds(self.OP)}

    @classmethod
    def from_attributes(cls, attributes: Mapping[str, Any]) -> Self:
        """Inverse of :meth:`attributes`, for which it takes no optional ones.

        Raises:
            ValueError: naming a missing or unknown attribute, or an enum value that op.def does not list.
        """
        kinds, optional = attribute_kinds(cls.OP), optional_attributes(cls.OP)
        own = {name: value for name, value in attributes.items() if name not in optional}
        if missing := kinds.keys() - own.keys():
            raise ValueError(f"{cls.OP} node lacks the attributes {sorted(missing)}")
        if unknown := own.keys() - kinds.keys():
            raise ValueError(f"{cls.OP} node has unknown attributes {sorted(unknown)}")
        for name, kind in kinds.items():
            if kind not in ("i", "f") and own[name] not in enum(kind):
                raise ValueError(f"{name} is {own[name]!r}; supported: {', '.join(enum(kind))}")
        for prefix in _prefixes(cls.OP):
            names = [field.name for field in dataclasses.fields(Projection)]
            own[prefix] = Projection(**{name: own.pop(f"{prefix}_{name}") for name in names})
        return cls(**own)


@dataclass(frozen=True)
class MoESpec(Spec):
    """All attributes of a QuantMoE node. Sizes: H hidden, I intermediate, in features."""

    OP: ClassVar[str] = "QuantMoE"

    num_experts: int
    hidden_size: int
    intermediate_size: int
    w13: Projection
    w2: Projection
    activation: str = "silu"
    gated: int = 1
    expert_offset: int = 0
    swiglu_alpha: float = 0.0
    swiglu_limit: float = 0.0
    apply_router_weight_on_input: int = 0
    op_version: int = dataclasses.field(default_factory=lambda: op_version("QuantMoE"))


@dataclass(frozen=True)
class LinearSpec(Spec):
    """All attributes of a QuantLinear node."""

    OP: ClassVar[str] = "QuantLinear"

    in_features: int
    out_features: int
    w: Projection
    op_version: int = dataclasses.field(default_factory=lambda: op_version("QuantLinear"))

    @property
    def moe(self) -> MoESpec:
        """The layer whose w2 these weights are, as the layouts and kernels see them."""
        return MoESpec(1, self.out_features, self.in_features, self.w, self.w, gated=0)


@dataclass(frozen=True)
class RoutingSpec(Spec):
    """All attributes of a MoERouting node."""

    OP: ClassVar[str] = "MoERouting"

    num_experts: int
    top_k: int
    method: str
    renormalize: int = 0
    n_group: int = 1
    topk_group: int = 1
    routed_scaling_factor: float = 1.0
    op_version: int = dataclasses.field(default_factory=lambda: op_version("MoERouting"))
