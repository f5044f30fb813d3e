"""A residual sum and the RMS norm of it -> AddRMSNorm, of the norms that divided_norms.py has written.

The norm's other user is the next sum, so the node gives the sum, too. Embeddings are no sum: the node adds them to
themselves. Twice the numbers, if f16 has them, with four times epsilon have the same norm to the last bit. A norm of
something else stays as it is.
"""

from __future__ import annotations

import onnx_ir as ir

from quantmoe.custom_ops.op import DOMAIN, NormSpec
from quantmoe.exporter.graph.passes.divided_norms import only_user, producer

_SIXTEEN_BITS = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def add_norms(model: ir.Model) -> None:
    """Replace Add and the norm after it, where both addends have the sum's shape and 16 bits, and the norm of a
    Gather."""
    for node in list(model.graph):
        if node.op_type == "Div" and (found := _match(node)) is not None:
            add, product, weight, epsilon = found
            (total,), (normed,) = add.outputs, product.outputs
            alone = add.op_type == "Gather"
            addends = [total, total] if alone else list(add.inputs)
            attributes = NormSpec(norm_epsilon=4 * epsilon if alone else epsilon).attributes()
            made = ir.node(
                "AddRMSNorm", [*addends, weight], attributes, domain=DOMAIN, num_outputs=2, name=product.name
            )
            for value, old in zip(made.outputs, (normed, total), strict=True):
                value.type, value.shape = old.type, old.shape
            if alone:
                model.graph.insert_after(add, [made])
                ir.convenience.replace_all_uses_with(normed, made.outputs[0])
                _remove(product)
                continue
            # the weight is there from the start, so both results can be where the sum was
            ir.convenience.replace_nodes_and_values(
                model.graph, add, [add], [made], [total, normed], [made.outputs[1], made.outputs[0]]
            )
            _remove(product)


def _match(quotient: ir.Node) -> tuple[ir.Node, ir.Node, ir.Value, float] | None:
    """Return the sum or Gather, the product with the weight, the weight and epsilon of x / sqrt(mean(x^2) +
    epsilon)."""
    wide, root = quotient.inputs
    cast, shifted = producer(wide, "Cast"), producer(_input(root, "Sqrt"), "Add")
    if cast is None or shifted is None:
        return None
    add = producer(cast.inputs[0], "Add") or producer(cast.inputs[0], "Gather")
    mean = producer(shifted.inputs[0], "ReduceMean")
    square = producer(mean.inputs[0], "Pow") if mean is not None else None
    narrow = only_user(quotient.outputs[0], "Cast")
    product = only_user(narrow.outputs[0], "Mul") if narrow is not None else None
    if add is None or mean is None or square is None or narrow is None or product is None:
        return None
    weight = next((value for value in product.inputs if value is not narrow.outputs[0]), None)
    total = add.outputs[0]
    power, epsilon, axis = (_number(value) for value in (square.inputs[1], shifted.inputs[1], mean.inputs[1]))
    same = add.op_type == "Gather" or all(v is not None and v.shape == total.shape for v in add.inputs)
    if (
        square.inputs[0] is not wide
        or (power, axis) != (2, -1)
        or epsilon is None
        or weight is None
        or weight.producer() is not None
        or weight.shape is None
        or total.shape is None
        or not same
        or weight.shape != total.shape[-1:]
        or {total.dtype, weight.dtype, product.outputs[0].dtype} - {total.dtype}
        or total.dtype not in _SIXTEEN_BITS
    ):
        return None
    return add, product, weight, epsilon


def _remove(product: ir.Node) -> None:
    """Take out a node without users, and what only it used."""
    unused = [product]
    while unused:
        node = unused.pop()
        inputs = [value.producer() for value in node.inputs if value is not None]
        assert node.graph is not None
        node.graph.remove(node, safe=True)
        unused += {n for n in inputs if n is not None and not any(value.uses() for value in n.outputs)}


def _number(value: ir.Value | None) -> float | None:
    """Return a constant of one element."""
    tensor = ir.convenience.get_const_tensor(value) if value is not None else None
    return float(tensor.numpy().reshape(())) if tensor is not None and tensor.size == 1 else None


def _input(value: ir.Value | None, op_type: str) -> ir.Value | None:
    node = producer(value, op_type)
    return node.inputs[0] if node is not None else None
