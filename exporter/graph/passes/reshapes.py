"""Leaves reshapes out that change nothing: to a shape that the tensor has just been given."""

from __future__ import annotations

import onnx_ir as ir


def drop_repeated_reshapes(model: ir.Model) -> None:
    """Remove each Reshape of a Reshape to the same shape: experts and their router flatten one after the other."""
    for node in list(model.graph):
        x = node.inputs[0] if node.op_type == "Reshape" else None
        before = x.producer() if x is not None else None
        if x is None or before is None or before.op_type != "Reshape" or before.inputs[1] is not node.inputs[1]:
            continue
        zeros, zeros_before = (one.attributes.get_int("allowzero", 0) for one in (node, before))
        if zeros != zeros_before or node.outputs[0].is_graph_output():
            continue
        node.outputs[0].replace_all_uses_with(x)
        model.graph.remove(node, safe=True)
