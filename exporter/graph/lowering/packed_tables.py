"""Tables that are only looked up stay as the checkpoint quantized them; the rows found there become floats.

Standard operators read the rows out of layout ``cpu_panel`` (custom_ops/layouts/panel_rows.py). So a table and the LM
head tied to it share their bytes. Every product and difference is rounded in f32 as
:meth:`QuantizedMatrix.dequantize` rounds it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from quantmoe.custom_ops.layouts import cpu_panel
from quantmoe.custom_ops.layouts.panel_rows import PanelRows, Pieces, panel_rows
from quantmoe.custom_ops.op import LinearSpec
from quantmoe.exporter.graph.lowering.embeddings import looks_up
from quantmoe.exporter.graph.lowering.weights import Weight


@dataclass(eq=False)
class PackedTable:
    """A packed table, and the initializers that read its bytes as different types.

    Attributes:
        parameter: name in the model. spec: of the matrix. head: the linear whose packed weight it is, "" for none.
        views: (type, width) -> [bytes / size of that, width]; their bytes are yet to be written.
    """

    parameter: str
    spec: LinearSpec
    head: str
    views: dict[tuple[np.dtype, int], ir.Value] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        return cpu_panel.row_bytes(self.spec.moe, "w2")

    def view(self, pieces: Pieces) -> ir.Value:
        """Return the initializer whose rows are such pieces."""
        key = pieces.dtype, pieces.width
        if key not in self.views:
            count = self.bytes // (pieces.dtype.itemsize * pieces.width)
            self.views[key] = ir.Value(
                name=f"{self.parameter}.{pieces.dtype.name}x{pieces.width}",
                shape=ir.Shape([count, pieces.width]),
                type=ir.TensorType(ir.DataType.from_numpy(pieces.dtype)),
            )
        return self.views[key]


def pack_tables(weights: list[Weight], tables: Mapping[str, tuple[LinearSpec, str]]) -> list[PackedTable]:
    """Replace Gather(table) by what reads the rows of a packed one.

    Args:
        weights: of a graph, from place_weights; loses the tables.
        tables: parameter -> see Choice.
    """
    found = []
    for weight in list(weights):
        table = weight.value
        if weight.parameter not in tables or not all(looks_up(node, i) for node, i in table.uses()):
            continue
        spec, head = tables[weight.parameter]
        rows = panel_rows(spec)
        assert rows is not None
        assert table.dtype is not None
        packed = PackedTable(weight.parameter, spec, head)
        for node, _ in list(table.uses()):
            graph, ids = node.graph, node.inputs[1]
            assert graph is not None
            assert ids is not None
            made = _Lookup(packed, rows, ids)
            made.op("Cast", made.floats(), to=table.dtype)
            made.nodes[-1].name = node.name
            ir.convenience.replace_nodes_and_values(
                graph, node, [node], made.nodes, node.outputs, made.nodes[-1].outputs
            )
        weights.remove(weight)
        found.append(packed)
    return found


class _Lookup:
    """The nodes of one lookup, T ids at a time."""

    def __init__(self, table: PackedTable, rows: PanelRows, ids: ir.Value) -> None:
        self.table, self.rows, self.ids, self.nodes = table, rows, ids, list[ir.Node]()
        flat = self.op("Reshape", self.op("Cast", ids, to=ir.DataType.INT64), self.integers([-1, 1]))
        count = self.integers(rows.rows)
        self.panel, self.row = self.op("Div", flat, count), self.op("Mod", flat, count)

    def op(self, kind: str, *inputs: ir.Value, **attributes: object) -> ir.Value:
        self.nodes.append(ir.node(kind, inputs, attributes))  # type: ignore[arg-type]
        return self.nodes[-1].outputs[0]

    def constant(self, array: np.ndarray) -> ir.Value:
        return self.op("Constant", value=ir.tensor(array))

    def integers(self, values: object) -> ir.Value:
        return self.constant(np.array(values, np.int64))

    def octets(self, values: object) -> ir.Value:
        return self.constant(np.array(values, np.uint8))

    def reshape(self, value: ir.Value, *shape: int) -> ir.Value:
        return self.op("Reshape", value, self.integers([0, *shape]))

    def pieces(self, pieces: Pieces) -> ir.Value:
        """Return the stored pieces of the rows, [T, pieces, width]."""
        size = pieces.dtype.itemsize * pieces.width
        panel = self.op("Mul", self.panel, self.integers(self.rows.stride // size))
        row = self.op("Mul", self.row, self.integers(pieces.step // size))
        index = self.op("Add", self.op("Add", panel, row), self.integers(pieces.at // size))
        return self.op("Gather", self.table.view(pieces), index, axis=0)

    def halves(self, octets: ir.Value) -> list[ir.Value]:
        """Return the low and the high 4 bits of bytes."""
        low = self.op("BitwiseAnd", octets, self.octets(15))
        return [low, self.op("BitShift", octets, self.octets(4), direction="RIGHT")]

    def wide(self, pieces: Pieces) -> ir.Value:
        """Return the pieces in f32, [T, pieces, width]."""
        return self.op("Cast", self.pieces(pieces), to=ir.DataType.FLOAT)

    def codes(self) -> ir.Value:
        """Return the codes of the rows, f32 [T, groups, columns of a group]; 0 where the weight is 0."""
        rows, columns = self.rows, self.table.spec.in_features
        codes = None
        if rows.codes is not None:
            codes = self.pieces(rows.codes)
            if rows.flip:
                codes = self.op("BitwiseXor", codes, self.octets(rows.flip))
            if rows.codes.dtype == np.uint8:
                codes = self.op("Concat", *self.halves(self.reshape(codes, columns // 32, 16)), axis=-1)
        if rows.high is not None:
            planes = self.reshape(self.pieces(rows.high), columns // 32, rows.high_bits, 1, 4)
            shifts = range(0, 8, rows.high_bits)  # one node each: a shift that broadcasts 4 bytes is slow
            parts = [self.op("BitShift", planes, self.octets(shift), direction="RIGHT") for shift in shifts]
            bits = self.op("BitwiseAnd", self.op("Concat", *parts, axis=-2), self.octets((1 << rows.high_bits) - 1))
            bits = self.reshape(bits, columns // 32, 32)
            if codes is None:
                codes = bits
            else:
                codes = self.op("BitwiseOr", codes, self.op("BitShift", bits, self.octets(4), direction="LEFT"))
        assert codes is not None
        found = self.op("Cast", codes, to=ir.DataType.FLOAT)
        if rows.zero:
            found = self.op("Sub", found, self.constant(np.array(rows.zero, np.float32)))
        return self.reshape(found, columns // rows.group, rows.group)

    def floats(self) -> ir.Value:
        """Return the rows, f32 in the shape of the ids and one more dimension."""
        columns, group = self.table.spec.in_features, self.rows.group
        scales = [self.wide(factor) for factor in self.rows.factors]
        levels = [self.pieces(level) for level in self.rows.levels]
        if 0 < len(levels) < len(scales):
            levels = self.halves(levels[0])
        for i, level in enumerate(levels):
            blocks = len(self.rows.factors[i].at)
            wide = self.op("Cast", level, to=ir.DataType.FLOAT)
            product = self.op("Mul", self.reshape(wide, blocks, columns // group // blocks), scales[i])
            scales[i] = self.reshape(product, columns // group, 1)
        found = self.op("Mul", self.codes(), scales[0])
        for minimum in scales[1:]:
            found = self.op("Sub", found, minimum)
        shape = self.op("Concat", self.op("Shape", self.ids), self.integers([columns]), axis=0)
        return self.op("Reshape", found, shape)
