"""Shapes of a node's tensors, as op.def states them, for sizes that may be symbols of ``torch.export``."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import CodeType, MappingProxyType
from typing import Any

from quantmoe.custom_ops.op_def.schema import Operator, schema


def output_shapes(
    operator: Operator,
    attributes: Mapping[str, Any],
    inputs: Sequence[Sequence[Any] | None],
    *,
    largest: Callable[[Any, Any], Any] = max,
    smallest: Callable[[Any, Any], Any] = min,
    host_sizes: Mapping[str, Any] = MappingProxyType({}),
) -> list[list[Any]]:
    """Return the shapes of a node's outputs. The inputs' shapes are not checked.

    Args:
        attributes: of the node; what it lacks means what op.def says.
        inputs: shapes in op.def's order, numbers or symbols; None for one that is left out. largest, smallest: of two
            of them. host_sizes: by the names of the inputs that hold them; 1 if the input is left out.
    """
    names = [name for name, _ in (*operator.inputs, *operator.optional_inputs)]

    def smaller(a: Any, b: Any) -> Any:
        return 1 if 1 in {size for size in (a, b) if isinstance(size, int)} else smallest(a, b)

    values = _values(operator, attributes) | {"max": largest, "min": smaller}
    free: dict[str, Any] = {size: host_sizes.get(name, 1) for name, size in operator.host_sizes.items()}
    given = {name: shape for name, shape in zip(names, inputs, strict=False) if shape is not None}
    for name, shape in given.items():
        _bind(_items(operator.shapes[name], values), list(shape), free, values)
    return [
        list(given[text]) if (text := operator.shapes[name]) in given else _sizes(text, free, values)
        for name, _ in operator.outputs
    ]


def input_shapes(operator: Operator, attributes: Mapping[str, Any], free: Mapping[str, Any]) -> list[list[int] | None]:
    """Return the shapes of a node's inputs for sizes that the run decides, as ``{"B": 1, "S": 7, "..": [3, 5]}``.

    Optional inputs come last, None where ``free`` lacks one of their sizes. A packed input has no sizes.
    """
    values, shapes = _values(operator, attributes), operator.shapes
    required = [_sizes(shapes[name], dict(free), values) for name, _ in operator.inputs]
    sizes = {name: {*re.findall(r"\b[A-Z]\b", shapes[name])} for name, _ in operator.optional_inputs}
    for name, size in operator.host_sizes.items():
        sizes[name].add(size)
    return required + [
        _sizes(shapes[name], dict(free), values) if free.keys() >= used else None for name, used in sizes.items()
    ]


def named_size(operator: Operator, attributes: Mapping[str, Any], name: str) -> int:
    """Return a QM_SIZE of op.def for a node's attributes."""
    return int(_values(operator, attributes)[name])


def _values(operator: Operator, attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return op.def's values by name: integers, enums by their codes, QM_SIZEs, functions."""
    values: dict[str, Any] = {"where": lambda c, a, b: a if c else b, "pick": lambda i, *choices: choices[i]}
    enums = schema().enums
    for a in operator.own:
        if a.kind != "f":
            value = attributes.get(a.name, a.absent)
            values[a.name] = enums[a.kind][value] if a.kind in enums else value
    for name, text in operator.sizes.items():
        values[name] = _value(text, values)
    return values


@cache
def _compiled(text: str) -> CodeType:
    return compile(text.replace("/", "//"), "op.def", "eval")


def _value(text: str, values: dict[str, Any]) -> Any:
    return eval(_compiled(text), {"__builtins__": {}}, values)  # op.def's own text


def _items(shape: str, values: dict[str, Any]) -> list[str] | None:
    """Return the sizes of a shape's text; None: opaque."""
    if shape == "packed":
        return None
    if "?" in shape:
        value, first, second = re.split(r"[?:]", shape)
        shape = first if _value(value.strip(), values) else second
    inside = shape.strip().removesuffix("or [0]").strip()[1:-1]
    return [item.strip() for item in re.split(r",(?![^(]*\))", inside)]


def _bind(items: list[str] | None, shape: list[Any], free: dict[str, Any], values: dict[str, Any]) -> None:
    """Take the free sizes of an input's shape."""
    if items is None:
        return
    if ".." in items:
        at = items.index("..")
        rest = len(shape) + 1 - len(items)
        free.setdefault("..", shape[at : at + rest])
        items, shape = items[:at] + items[at + 1 :], shape[:at] + shape[at + rest :]
    for item, size in zip(items, shape, strict=False):
        *factor, name = item.rsplit(" * ", 1)
        if re.fullmatch("[A-Z]", name):
            free.setdefault(name, size // _value(factor[0], values) if factor else size)


def _sizes(shape: str, free: dict[str, Any], values: dict[str, Any]) -> list[Any]:
    sizes: list[Any] = []
    for item in _items(shape, values) or []:
        sizes += free[".."] if item == ".." else [_value(item, values | free)]
    return sizes
