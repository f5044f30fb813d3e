"""Tensors that a model keeps in a file beside it, and the operators that take them, found in milliseconds."""

from __future__ import annotations

import mmap
from dataclasses import dataclass, field
from pathlib import Path

from quantmoe.exporter.folder.protobuf import fields, packed

#: numbers of onnx.proto: ModelProto.graph; GraphProto's lists; NodeProto's fields
GRAPH, NODE, INITIALIZER = 7, 1, 5
INPUT, OP_TYPE, NODE_DOMAIN = 1, 4, 7
#: standard operators with graphs of their own
WITH_GRAPHS = ("If", "Loop", "Scan", "SequenceMap")
#: TensorProto's fields; external_data is a list of (key, value)
DIMS, DATA_TYPE, NAME, EXTERNAL_DATA = 1, 2, 8, 13


@dataclass
class ExternalTensor:
    """An initializer.

    Attributes:
        file: beside the model. offset, length: its bytes there. data_type: TensorProto.DataType.
        takers: (domain, op_type) of the nodes that take it.
    """

    name: str
    data_type: int
    shape: tuple[int, ...]
    file: str
    offset: int
    length: int
    takers: set[tuple[str, str]] = field(default_factory=set)


def external_tensors(path: Path) -> list[ExternalTensor]:
    """Return the tensors of a model's graph that have an offset and a length.

    There is none in a graph with graphs inside, since what these take is not looked at, or in a file that is no model.
    """
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            for number, begin, end in fields(data, 0, len(data)):
                if number == GRAPH:
                    return _of_graph(data[begin:end])
    except (OSError, ValueError):
        pass  # ONNX Runtime says what is wrong with the file
    return []


def _of_graph(data: bytes) -> list[ExternalTensor]:
    found, taken = dict[str, ExternalTensor](), list[tuple[str, tuple[str, str]]]()
    for number, at, to in fields(data, 0, len(data)):
        if number == INITIALIZER and (tensor := _tensor(data, at, to)) is not None:
            found[tensor.name] = tensor
        elif number == NODE:
            parts = list(fields(data, at, to))
            texts = {n: data[a:b].decode() for n, a, b in parts if n in (OP_TYPE, NODE_DOMAIN)}
            taker = texts.get(NODE_DOMAIN, ""), texts.get(OP_TYPE, "")
            if taker[1] in WITH_GRAPHS:
                return []
            taken += [(data[a:b].decode(), taker) for n, a, b in parts if n == INPUT]
    for name, taker in taken:
        if name in found:
            found[name].takers.add(taker)
    return list(found.values())


def _tensor(data: bytes, begin: int, end: int) -> ExternalTensor | None:
    name, data_type, shape, places = "", 0, list[int](), dict[str, str]()
    for number, at, to in fields(data, begin, end):
        if number == DIMS:
            shape += [at] if at == to else packed(data, at, to)
        elif number == DATA_TYPE:
            data_type = at
        elif number == NAME:
            name = data[at:to].decode()
        elif number == EXTERNAL_DATA:
            entry = {part: data[a:b].decode() for part, a, b in fields(data, at, to)}
            places[entry.get(1, "")] = entry.get(2, "")
    if not all(places.get(key, "").isdecimal() for key in ("offset", "length")):
        return None
    return ExternalTensor(
        name, data_type, tuple(shape), places["location"], int(places["offset"]), int(places["length"])
    )
