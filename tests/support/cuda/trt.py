"""ctypes over tests/cuda/drivers/trt_driver.cc: TensorRT's side of the plug-in interface."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass, field
from typing import Any

import quantmoe
from quantmoe.custom_ops.op import Spec, inputs, outputs
from quantmoe.custom_ops.op_def.schema import schema

TYPES = {"f32": 0, "f16": 1, "i8": 2, "i32": 3, "bf16": 7, "i64": 8}  # nvinfer1::DataType
FIELD_TYPES = {"f": 1, "i": 5, "s": 6, "i64": 10}  # nvinfer1::PluginFieldType
BUILD, RUNTIME = 0, 1
_PTR = ctypes.c_void_p


class Field(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("data", _PTR), ("type", ctypes.c_int32), ("length", ctypes.c_int32)]


class Tensor(ctypes.Structure):
    _fields_ = [(n, ctypes.c_int32) for n in ("type", "format", "rank")] + [
        (n, ctypes.c_int64 * 4) for n in ("dims", "most")
    ]


def tensor(type_: str, dims: tuple[int, ...], most: tuple[int, ...] | None = None, format_: int = 0) -> Tensor:
    return Tensor(TYPES[type_], format_, len(dims), (ctypes.c_int64 * 4)(*dims), (ctypes.c_int64 * 4)(*(most or dims)))


@dataclass
class Attribute:
    """A PluginField and the memory behind it."""

    name: str | None
    type: int
    value: Any
    length: int = 1
    data: Any = field(init=False)

    def __post_init__(self) -> None:
        kinds = {1: ctypes.c_float, 5: ctypes.c_int32, 10: ctypes.c_int64}
        if self.type == FIELD_TYPES["s"]:
            self.data = ctypes.create_string_buffer(self.value.encode())
            self.length = len(self.data)
        else:
            self.data = kinds[self.type](self.value)


def attributes_of(spec: Spec) -> dict[str, Attribute]:
    """The node's attributes as TensorRT's parser passes them."""
    kinds = {int: "i", float: "f", str: "s"}
    return {n: Attribute(n, FIELD_TYPES[kinds[type(v)]], v) for n, v in spec.attributes().items()}


def driver_library() -> ctypes.CDLL:
    """tests/cuda/drivers/trt_driver.cc."""
    lib = ctypes.CDLL(os.environ["QUANTMOE_TRT_DRIVER"])
    for name in ("open", "select", "create", "attach", "load"):
        getattr(lib, f"driver_{name}").restype = _PTR
    for name in ("log", "name"):
        getattr(lib, f"driver_{name}").restype = ctypes.c_char_p
    lib.driver_workspace.restype = ctypes.c_size_t
    return lib


class Driver:
    """The library, opened as the TensorRT of a version would (100600: 10.6; 10701: TensorRT-RTX 1.7.1).

    fake: the copy in the driver, whose GPU and memory are the test's (fake_gpu.cc).
    """

    def __init__(self, as_version: int = 10701, plain: bool = False, fake: bool = False) -> None:
        self.lib = driver_library()
        self.creator = _PTR(
            self.lib.driver_open(b"" if fake else quantmoe.trt_library_path().encode(), as_version, plain)
        )
        assert self.creator, self.log()
        self.select("QuantMoE")
        self.lib.driver_clear()

    def select(self, op: str, optional: int = 0) -> None:
        """Further calls are about this operator's nodes that have so many optional inputs."""
        index = list(schema().operators).index(op)
        self.op, self.inputs = op, len(inputs(op)) + optional
        self.creator = _PTR(self.lib.driver_select(index, self.inputs, len(outputs(op))))

    def log(self) -> str:
        """What was logged since the last call, one "severity text" a line."""
        text = self.lib.driver_log().decode()
        self.lib.driver_clear()
        return text

    def fields(self, function: str, handle: _PTR) -> list[Field]:
        found = (Field * 64)()
        return list(found[: getattr(self.lib, f"driver_{function}")(handle, found, 64)])

    def create(self, attributes: dict[str, Attribute], phase: int = BUILD, layer: str = "experts") -> Plugin | None:
        given = [
            Field(a.name and a.name.encode(), ctypes.addressof(a.data), a.type, a.length) for a in attributes.values()
        ]
        made = self.lib.driver_create(self.creator, layer.encode(), (Field * len(given))(*given), len(given), phase)
        return Plugin(self, _PTR(made)) if made else None


class Plugin:
    """An IPluginV3; tensors are the inputs, then the outputs."""

    def __init__(self, driver: Driver, handle: _PTR) -> None:
        self.driver, self.handle = driver, handle

    def __del__(self) -> None:
        self.driver.lib.driver_destroy(self.handle)

    def call(self, function: str, tensors: list[Tensor], *arguments: Any) -> int:
        return getattr(self.driver.lib, f"driver_{function}")(
            self.handle, (Tensor * len(tensors))(*tensors), *arguments
        )

    def outputs(self, tensors: list[Tensor]) -> list[tuple[str, tuple[int, ...]]] | None:
        """Type and dimensions of each output as the plug-in says from the inputs', None where it refuses them."""
        found = (Tensor * len(tensors))(*tensors)
        if self.driver.lib.driver_outputs(self.handle, found):
            return None
        names = {code: name for name, code in TYPES.items()}
        return [(names[t.type], tuple(t.dims[: t.rank])) for t in found[self.driver.inputs :]]

    def attach(self) -> Plugin:
        return Plugin(self.driver, _PTR(self.driver.lib.driver_attach(self.handle)))

    def serialize(self) -> dict[str, Attribute]:
        found = {}
        for f in self.driver.fields("serialize", self.handle):
            if f.type == FIELD_TYPES["s"]:
                text = ctypes.string_at(f.data, f.length)
                assert text[-1] == 0, "the length counts the NUL"
                value: Any = text[:-1].decode()
            else:
                value = {1: ctypes.c_float, 5: ctypes.c_int32, 10: ctypes.c_int64}[f.type].from_address(f.data).value
            found[f.name.decode()] = Attribute(f.name.decode(), f.type, value, f.length)
        return found
