"""The operators' C structs through ctypes, made from op.def: qm_moe and its like."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from typing import Any, Self

from quantmoe.custom_ops.c_calls import checked
from quantmoe.custom_ops.op_def.nodes import Projection
from quantmoe.custom_ops.op_def.schema import Operator, Spec, schema


def make_struct(operator: Operator) -> type[ctypes.Structure]:
    """Return the operator's attributes in op.def's order, 4 bytes each, projections' as <prefix>_<name>."""
    fields = [(a, ctypes.c_float if of.kind == "f" else ctypes.c_int32) for a, of in operator.attributes.items()]
    return type(f"qm_{operator.name_c}", (ctypes.Structure,), {"_fields_": fields})


#: by operator
STRUCTS = {op: make_struct(operator) for op, operator in schema().operators.items()}


class _Projection(ctypes.Structure):
    """qm_projection, which the operators' structs have as well."""

    _fields_ = [(a.name, ctypes.c_float if a.kind == "f" else ctypes.c_int32) for a in schema().projection]


class _Attribute(ctypes.Structure):
    """qm_attribute."""

    _fields_ = [
        ("name", ctypes.c_char * 32),
        ("kind", ctypes.c_char),
        ("since", ctypes.c_int32),
        ("offset", ctypes.c_int32),
    ]


class _Operator(ctypes.Structure):
    """qm_operator."""

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("bytes", ctypes.c_size_t),
        ("count", ctypes.c_size_t),
        ("attributes", ctypes.POINTER(_Attribute)),
    ]


class Value(ctypes.Structure):
    """qm_value."""

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("kind", ctypes.c_char),
        ("integer", ctypes.c_int64),
        ("number", ctypes.c_float),
        ("text", ctypes.c_char_p),
    ]


class Shape(ctypes.Structure):
    """qm_shape."""

    _fields_ = [("rank", ctypes.c_int32), ("sizes", ctypes.c_int64 * 8)]

    @classmethod
    def of(cls, shape: Sequence[int] | None) -> Self:
        """Return a shape; None: of an input that is left out."""
        return cls(-1) if shape is None else cls(len(shape), (ctypes.c_int64 * 8)(*shape))


class Tensor(ctypes.Structure):
    """qm_tensor."""

    _fields_ = [("data", ctypes.c_void_p), ("type", ctypes.c_int32), ("shape", Shape)]


def check_structs(lib: ctypes.CDLL, operators: Iterable[Operator] = schema().operators.values()) -> None:
    """Compare the attributes, sizes and offsets of a library's structs with these.

    Raises:
        OSError: they differ, as where one was built from another op.def, or by another release.
    """
    if not hasattr(lib, "qm_find_operator"):
        raise OSError(f"{lib._name}: built by another release than this package: make build, make cuda")
    lib.qm_find_operator.restype = ctypes.POINTER(_Operator)
    for operator in operators:
        struct, known = make_struct(operator), lib.qm_find_operator(operator.name.encode())
        own = known.contents if known else _Operator()
        found = {a.name.decode(): (a.kind.decode(), a.since, a.offset) for a in own.attributes[: own.count]}
        want = {
            name: (a.kind if a.kind in ("i", "f") else "s", a.since, getattr(struct, name).offset)
            for name, a in operator.attributes.items()
        }
        if list(found.items()) != list(want.items()) or own.bytes != ctypes.sizeof(struct):
            differ = sorted(name for name in found.keys() | want.keys() if found.get(name) != want.get(name))
            raise OSError(
                f"{lib._name}: built from another op.def than this package's (make build, make cuda): "
                f"qm_{operator.name_c} has {own.bytes} bytes, expected {ctypes.sizeof(struct)}; "
                f"attributes that differ: {', '.join(differ)}"
            )


def node(lib: ctypes.CDLL, spec: Spec) -> ctypes.Structure:
    """Return the C struct of a node, filled as the engines' adapters do.

    Raises:
        ValueError: with the C ABI's message.
    """
    found, kinds = STRUCTS[spec.OP](), {name: a.kind for name, a in spec.OPERATOR.attributes.items()}
    values = [_value(name, kinds[name], value) for name, value in spec.attributes().items()]
    given = (Value * len(values))(*values), ctypes.c_size_t(len(values))
    checked(lib.qm_set_attributes, spec.OP.encode(), ctypes.byref(found), *given)
    return found


def _value(name: str, kind: str, value: Any) -> Value:
    if kind == "i":
        return Value(name.encode(), b"i", integer=int(value))
    if kind == "f":
        return Value(name.encode(), b"f", number=float(value))
    return Value(name.encode(), b"s", text=str(value).encode())


def projection(p: Projection) -> ctypes.Structure:
    """Return the C struct of a projection.

    Raises:
        ValueError: naming an enum's value that op.def does not have, or a number outside int32.
    """
    found = _Projection()
    for a in schema().projection:
        value = getattr(p, a.name)
        if codes := schema().enums.get(a.kind):
            if value not in codes:
                raise ValueError(f'{a.name} is "{value}", the operator defines: {", ".join(codes)}')
            value = codes[value]
        elif a.kind == "i" and not -(2**31) <= value < 2**31:
            raise ValueError(f"{a.name} is {value}, outside int32")
        setattr(found, a.name, value)
    return found
