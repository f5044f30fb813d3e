"""Tables that are only looked up stay in the checkpoint's 16 bits; the rows found there become the graph's type."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import onnx_ir as ir

from quantmoe.exporter.graph.lowering.weights import Weight


def keep_tables(weights: Iterable[Weight], stored: Callable[[str], ir.DataType | None]) -> None:
    """Replace Gather(wide table) by Cast(Gather(table as stored)).

    Args:
        weights: of a graph, from place_weights.
        stored: parameter -> the type that its tensor in the checkpoint has; None when it is written otherwise.
    """
    for weight in weights:
        table, dtype = weight.value, stored(weight.parameter)
        wide, uses = table.dtype, list(table.uses())
        assert wide is not None
        if dtype is None or dtype.itemsize >= wide.itemsize or not all(looks_up(node, i) for node, i in uses):
            continue
        table.type = ir.TensorType(dtype)
        for node, _ in uses:
            rows = ir.node("Gather", node.inputs, node.attributes, name=node.name)
            cast = ir.node("Cast", rows.outputs, {"to": wide}, name=f"{node.name}/wide")
            assert node.graph is not None
            ir.convenience.replace_nodes_and_values(node.graph, node, [node], [rows, cast], node.outputs, cast.outputs)


def looks_up(node: ir.Node, index: int) -> bool:
    """Return whether a node reads only rows of this input."""
    axis = node.attributes.get("axis")
    return node.op_type == "Gather" and index == 0 and (axis is None or axis.as_int() == 0)
