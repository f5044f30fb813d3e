"""RMS norms in the words that ONNX Runtime's CUDA provider fuses to one kernel when a session is created.

Its SimplifiedLayerNormFusion knows x / sqrt(mean(x^2) + epsilon), cast back and then times the weight. transformers
multiplies by a reciprocal, and some of its architectures multiply by the weight before the cast. TensorRT fuses either.
"""

from __future__ import annotations

import onnx_ir as ir


def divide_by_roots(model: ir.Model) -> None:
    """Replace x * Reciprocal(Sqrt(v)) by x / Sqrt(v), and Cast(Cast(w) * y) of such a y by w * Cast(y).

    The second rounds y to w's type, as most architectures do, where the product alone was rounded.
    """
    for node in list(model.graph):
        root = producer(node.inputs[0], "Sqrt") if node.op_type == "Reciprocal" else None
        uses = list(node.outputs[0].uses())
        if root is None or len(uses) != 1 or uses[0].node.op_type != "Mul":
            continue
        product, index = uses[0]
        x = product.inputs[1 - index]
        quotient = ir.node("Div", [x, root.outputs[0]], name=product.name)
        _replace(product, [quotient], quotient.outputs[0])
        model.graph.remove(node, safe=True)
        _cast_before_weight(quotient)


def _cast_before_weight(quotient: ir.Node) -> None:
    """Move the cast of a quotient before its weight (:func:`divide_by_roots`)."""
    (y,) = quotient.outputs
    product = only_user(y, "Mul")
    cast = only_user(product.outputs[0], "Cast") if product is not None else None
    if product is None or cast is None:
        return
    wide = producer(next(value for value in product.inputs if value is not y), "Cast")
    dtype = cast.attributes["to"].as_int()
    if wide is None or wide.inputs[0] is None or wide.inputs[0].dtype != dtype:
        return
    narrow = ir.node("Cast", [y], {"to": dtype}, name=cast.name)
    weighted = ir.node("Mul", [wide.inputs[0], narrow.outputs[0]], name=product.name)
    narrow.outputs[0].type = ir.TensorType(ir.DataType(dtype))
    _replace(cast, [narrow, weighted], weighted.outputs[0])
    assert product.graph is not None
    product.graph.remove(product, safe=True)


def _replace(node: ir.Node, made: list[ir.Node], value: ir.Value) -> None:
    """Put nodes in the place of one, and a value in the place of its output."""
    assert node.graph is not None
    (old,) = node.outputs
    value.type, value.shape = old.type, old.shape
    ir.convenience.replace_nodes_and_values(node.graph, node, [node], made, [old], [value])


def producer(value: ir.Value | None, op_type: str) -> ir.Node | None:
    """Return the node that makes a value, if it is of a type."""
    node = value.producer() if value is not None else None
    return node if node is not None and node.op_type == op_type else None


def only_user(value: ir.Value, op_type: str) -> ir.Node | None:
    """Return the only node that reads a value, if it is of a type."""
    uses = list(value.uses())
    return uses[0].node if len(uses) == 1 and uses[0].node.op_type == op_type else None
