"""Gives the placeholders of the traced graph their final form: which parameter, transposed or not."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass


@dataclass(frozen=True, eq=False)
class Weight:
    """An initializer whose bytes are yet to be written.

    Attributes:
        value: in the graph, its shape and type known, no const_value.
        parameter: name in the model, e.g. ``model.norm.weight`` or ``model.layers.0.mlp.experts.w13``.
        transposed: the value is the parameter's transpose.
    """

    value: ir.Value
    parameter: str
    transposed: bool = False


def place_weights(model: ir.Model) -> list[Weight]:
    """Replace Transpose(placeholder), as linears are exported, by an initializer of the transpose.

    Requires:
        model.meta["placeholders"], from model.trace.
    Ensures:
        every returned value is read by a node; every value without a producer is an input, an initializer or returned.
    """
    graph = model.graph
    weights: list[Weight] = []
    for value in model.meta.pop("placeholders"):
        flipped: ir.Value | None = None
        for node, _ in list(value.uses()):
            if node.op_type != "Transpose" or list(node.attributes["perm"].as_ints()) != [1, 0]:
                continue
            if flipped is None:
                flipped = ir.Value(name=f"{value.name}.T", shape=ir.Shape(list(value.shape)[::-1]), type=value.type)
                weights.append(Weight(flipped, value.name, transposed=True))
            node.outputs[0].replace_all_uses_with(flipped)
            node.graph.remove(node, safe=True)
        if value.uses():
            weights.append(Weight(value, value.name))
    RemoveUnusedNodesPass()(model)
    known = {weight.value for weight in weights} | {*graph.inputs} | {*graph.initializers.values()}
    for node in graph:
        for value in node.inputs:
            if value is not None and value.producer() is None and value not in known:
                raise AssertionError(f"{node.name} reads {value.name}, which nothing provides")
    return weights
