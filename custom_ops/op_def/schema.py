"""Reads ``op.def``, and makes of it the dataclasses of nodes.py and the ctypes structs of structs.py.

``python -m quantmoe.custom_ops.op_def.schema``, of ``make format``, writes nodes.pyi: nodes.py as type checkers see it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, make_dataclass, replace
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, ClassVar, Self

Number = int | float | str
NODES = "quantmoe.custom_ops.op_def.nodes"


@dataclass(frozen=True)
class Attribute:
    """A line of op.def; kind: ``i``, ``f`` or an enum's name.

    A file of an op_version before ``since`` lacks the attribute, which means ``absent``.
    """

    name: str
    kind: str
    since: int = 1
    absent: Number | None = None
    comment: str = ""

    @property
    def type(self) -> type:
        return {"i": int, "f": float}.get(self.kind, str)


@dataclass(frozen=True, kw_only=True)
class Operator:
    """An operator.

    name_c: of its struct, qm_<name_c>. own: its attributes, except the projections'. shapes: op.def's text by tensor;
    sizes: the values that these name. optional: names of strings that a node may lack, which structs and dataclasses
    leave out. optional_inputs: after ``inputs``, of nodes that have a use for them. host_sizes: inputs in host memory
    that hold a size of the shapes. engines: "CPU" and "CUDA" where it runs by its name there.
    """

    name: str
    name_c: str
    version: int
    inputs: tuple[tuple[str, str], ...]
    outputs: tuple[tuple[str, str], ...]
    own: tuple[Attribute, ...]
    projections: dict[str, tuple[Attribute, ...]] = field(hash=False)
    shapes: dict[str, str] = field(hash=False)
    sizes: dict[str, str] = field(hash=False)
    optional: frozenset[str] = frozenset()
    optional_inputs: tuple[tuple[str, str], ...] = ()
    host_sizes: dict[str, str] = field(default_factory=dict, hash=False)
    engines: frozenset[str] = frozenset()

    @property
    def snake(self) -> str:
        """The name in PyTorch and of the files in ops: ``moe_routing`` of MoERouting."""
        words = re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", self.name.replace("MoE", "Moe"))
        return words.lower()

    @property
    def attributes(self) -> dict[str, Attribute]:
        """By name, in op.def's order, projections' as <prefix>_<name>."""
        found = {a.name: a for a in self.own}
        for prefix, attributes in self.projections.items():
            found |= {f"{prefix}_{a.name}": a for a in attributes}
        return found


@dataclass(frozen=True)
class Schema:
    operators: dict[str, Operator]
    projection: tuple[Attribute, ...]
    enums: dict[str, dict[str, int]]


def split(line: str) -> tuple[str, list[str], str] | None:
    """Return a line's macro without QM_, its arguments without quotes, and its comment; None: it is no macro's."""
    found = re.fullmatch(r'QM_(\w+)\(((?:[^")]|"[^"]*")*)\)[ \t]*(?://[ \t]*(.*))?', line)
    if found is None:
        return None
    arguments = re.findall(r'"[^"]*"|[^,"]*[^,"\s][^,"]*', found[2])
    return found[1], [argument.strip(' "') for argument in arguments], found[3] or ""


def parse(text: str) -> Schema:
    """op.def's text.

    Raises:
        ValueError: naming the line of an attribute whose kind, op_version or meaning when absent cannot be.
    """
    lines = [line for text_line in text.splitlines() if (line := split(text_line))]

    def of(macro: str, op: str | None = None) -> list[list[str]]:
        """Return the arguments of a macro's lines; of an operator's, without its name."""
        return [a if op is None else a[1:] for m, a, _ in lines if m == macro and op in (None, a[0])]

    enums: dict[str, dict[str, int]] = {kind: {} for (kind,) in of("ENUM")}
    for kind, name, code in of("VALUE"):
        enums[kind][name] = int(code)

    def attribute(comment: str, kind: str, name: str) -> Attribute:
        if kind not in ("i", "f", *enums):
            raise ValueError(f"attribute {name} is of kind {kind}, expected i, f or an enum: {', '.join(enums)}")
        return Attribute(name, kind, comment=comment)

    def later(comment: str, since: str, kind: str, name: str, absent: str) -> Attribute:
        a = attribute(comment, kind, name)
        if kind in enums and absent not in enums[kind]:
            raise ValueError(f"attribute {name}: absent means {absent}, expected one of: {', '.join(enums[kind])}")
        return replace(a, since=int(since), absent=a.type(absent))

    make: dict[str, Callable[..., Attribute]] = {"ATTR": attribute, "ATTR_SINCE": later}
    projection = tuple(attribute(comment, *a) for m, a, comment in lines if m == "PROJECTION_ATTR")
    operators = {}
    for op, name_c, version in of("OP"):
        own = tuple(make[m](comment, *a[1:]) for m, a, comment in lines if m in make and a[0] == op)
        for a in own:
            if not 1 <= a.since <= int(version):
                raise ValueError(f"attribute {a.name} is of op_version {a.since}, {op} is of {version}")
        inputs, more, outputs = (
            tuple((name, type_) for name, type_, _ in of(m, op)) for m in ("INPUT", "INPUT_OPTIONAL", "OUTPUT")
        )
        shapes = {name: shape for m in ("INPUT", "INPUT_OPTIONAL", "OUTPUT") for name, _, shape in of(m, op)}
        sizes = {name: value for name, value in of("SIZE", op)}
        projections = {prefix: projection for (prefix,) in of("PROJECTION", op)}
        optional = {f"{prefix}_{name}" for prefix in projections for _, name in of("PROJECTION_OPTIONAL")}
        optional |= {name for (name,) in of("STRING", op)}
        engines = frozenset(engine for engine in ("CPU", "CUDA") if of(engine, op))
        operators[op] = Operator(
            name=op,
            name_c=name_c,
            version=int(version),
            inputs=inputs,
            outputs=outputs,
            own=own,
            projections=projections,
            shapes=shapes,
            sizes=sizes,
            optional=frozenset(optional),
            optional_inputs=more,
            host_sizes=dict(of("HOST_SIZE", op)),
            engines=engines,
        )
    return Schema(operators, projection, enums)


def read(folder: Traversable) -> str:
    """Return op.def of a folder with the files of the operators in the place of their list."""
    files = sorted((file for file in (folder / "ops").iterdir() if file.name.endswith(".def")), key=lambda f: f.name)
    operators = "\n".join(file.read_text(encoding="utf-8") for file in files)
    return (folder / "op.def").read_text(encoding="utf-8").replace('#include "ops.def"\n', operators)


@cache
def schema() -> Schema:
    """op.def of this release."""
    return parse(read(files("quantmoe.custom_ops")))


class Spec:
    """All attributes of a node; a subclass for each operator, its projections fields of type Projection.

    op_version may be left out: it is the one that this release writes. So may attributes of a later op_version than 1:
    op.def says what their absence means.
    """

    OPERATOR: ClassVar[Operator]
    ENUMS: ClassVar[dict[str, dict[str, int]]]
    PROJECTION: ClassVar[type]
    OP: ClassVar[str]
    op_version: int

    def attributes(self) -> dict[str, Number]:
        """Node attributes in op.def's order, every one that its op_version has.

        Raises:
            ValueError: naming an attribute that the op_version lacks and whose value is not what that means.
        """
        values = asdict(self)  # type: ignore[call-overload]
        for prefix in self.OPERATOR.projections:
            values |= {f"{prefix}_{k}": v for k, v in values.pop(prefix).items()}
        for name, a in self.OPERATOR.attributes.items():
            if a.since > self.op_version and values.pop(name) != a.absent:
                raise ValueError(f"{name} needs op_version {a.since}, found {self.op_version}")
        return {name: values[name] for name in self.OPERATOR.attributes if name in values}

    @classmethod
    def from_attributes(cls, attributes: Mapping[str, Any]) -> Self:
        """Inverse of :meth:`attributes`, of any op_version that this release knows; optional ones are ignored.

        Raises:
            ValueError: naming a missing or unknown attribute, an op_version that this release does not know, or an enum
                value that op.def does not list.
        """
        own = {name: value for name, value in attributes.items() if name not in cls.OPERATOR.optional}
        newest = cls.OPERATOR.version
        version = own.get("op_version", newest)
        if not isinstance(version, int) or not 1 <= version <= newest:
            raise ValueError(f"op_version is {version}, this release knows {'1 to ' * (newest > 1)}{newest}")
        known = {name: a for name, a in cls.OPERATOR.attributes.items() if a.since <= version}
        if missing := known.keys() - own.keys():
            raise ValueError(f"{cls.OP} node lacks the attributes {sorted(missing)}")
        if unknown := own.keys() - known.keys():
            raise ValueError(f"{cls.OP} node has unknown attributes {sorted(unknown)}")
        for name, a in known.items():
            if a.kind in cls.ENUMS and own[name] not in cls.ENUMS[a.kind]:
                raise ValueError(f"{name} is {own[name]!r}; supported: {', '.join(cls.ENUMS[a.kind])}")
        own |= {name: a.absent for name, a in cls.OPERATOR.attributes.items() if a.since > version}
        for prefix, projection in cls.OPERATOR.projections.items():
            own[prefix] = cls.PROJECTION(**{a.name: own.pop(f"{prefix}_{a.name}") for a in projection})
        return cls(**own)


def make_projection(schema: Schema) -> type:
    """Return the dataclass of a projection's attributes."""
    fields = [(a.name, a.type) for a in schema.projection]
    return make_dataclass("Projection", fields, namespace={"__module__": NODES}, frozen=True, kw_only=True)


def make_spec(schema: Schema, op: str, projection: type) -> type:
    """Return the dataclass of an operator's attributes."""
    operator = schema.operators[op]
    unsaid = {a.name: a.absent for a in operator.own if a.since > 1} | {"op_version": operator.version}
    fields: list[Any] = [(a.name, a.type) for a in operator.own]
    fields += [(prefix, projection) for prefix in operator.projections]
    fields = [(name, type_, field(default=unsaid[name])) if name in unsaid else (name, type_) for name, type_ in fields]
    constants = {"__module__": NODES, "OP": op, "OPERATOR": operator, "ENUMS": schema.enums, "PROJECTION": projection}
    return make_dataclass(op, fields, bases=(Spec,), namespace=constants, frozen=True, kw_only=True)


def stub(schema: Schema) -> str:
    """Return the text of nodes.pyi."""

    def line(name: str, type_: str, comment: str = "") -> str:
        text = f"    {name}: {type_}"
        return f"{text}  # {comment}" if comment and len(text) + len(comment) < 116 else text

    def attributes(found: tuple[Attribute, ...]) -> list[str]:
        optional = {a.name for a in found if a.since > 1 or a.name == "op_version"}
        return [line(a.name, a.type.__name__ + " = ..." * (a.name in optional), a.comment) for a in found]

    decorator = "@dataclass(frozen=True, kw_only=True)"
    blocks = [["from dataclasses import dataclass", "", "from quantmoe.custom_ops.op_def.schema import Spec"]]
    blocks.append([decorator, "class Projection:", *attributes(schema.projection)])
    for operator in schema.operators.values():
        prefixes = [line(prefix, "Projection") for prefix in operator.projections]
        blocks.append([decorator, f"class {operator.name}(Spec):", *attributes(operator.own), *prefixes])
    return "\n\n".join("\n".join(block) for block in blocks) + "\n"


if __name__ == "__main__":
    Path(__file__).with_name("nodes.pyi").write_text(stub(schema()), encoding="utf-8")
