"""The operators' C structs through ctypes, made from op.def: qm_moe and its like."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from typing import Self

from quantmoe.custom_ops.c_calls import ERROR_SIZE, check_status
from quantmoe.custom_ops.nodes import Projection
from quantmoe.custom_ops.schema import Operator, Spec, schema


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
        OSError: they differ, as where one was built from another op.def.
    """
    lib.qm_attribute_at.restype, lib.qm_node_size.restype = ctypes.POINTER(_Attribute), ctypes.c_size_t
    for operator in operators:
        op, struct = operator.name.encode(), make_struct(operator)
        found, index = {}, 0
        while attribute := lib.qm_attribute_at(op, ctypes.c_size_t(index)):
            a = attribute.contents
            found[a.name.decode()] = (a.kind.decode(), a.since, a.offset)
            index += 1
        want = {
            name: (a.kind if a.kind in ("i", "f") else "s", a.since, getattr(struct, name).offset)
            for name, a in operator.attributes.items()
        }
        if list(found.items()) != list(want.items()) or lib.qm_node_size(op) != ctypes.sizeof(struct):
            differ = sorted(name for name in found.keys() | want.keys() if found.get(name) != want.get(name))
            raise OSError(
                f"{lib._name}: built from another op.def than this package's (make build, make cuda): "
                f"qm_{operator.name_c} has {lib.qm_node_size(op)} bytes, expected {ctypes.sizeof(struct)}; "
                f"attributes that differ: {', '.join(differ)}"
            )


def node(lib: ctypes.CDLL, spec: Spec) -> ctypes.Structure:
    """Return the C struct of a node, filled as the engines' adapters do.

    Raises:
        ValueError: with the C ABI's message.
    """
    found, op, err = STRUCTS[spec.OP](), spec.OP.encode(), ctypes.create_string_buffer(ERROR_SIZE)
    for name, value in spec.attributes().items():
        to, kind = (op, ctypes.byref(found), name.encode()), spec.OPERATOR.attributes[name].kind
        if name == "op_version":
            status = lib.qm_set_version(*to[:2], ctypes.c_int64(int(value)), err)
        elif kind == "i":
            status = lib.qm_set_int(*to, ctypes.c_int64(int(value)), err)
        elif kind == "f":
            status = lib.qm_set_float(*to, ctypes.c_float(float(value)), err)
        else:
            status = lib.qm_set_string(*to, str(value).encode(), err)
        check_status(status, err)
    return found


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
