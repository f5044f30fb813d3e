"""Rotary tables without what no node reads.

transformers joins the angles to themselves, and CachedAttention takes the first half of their cosines and sines. Models
whose positions have several axes, as pictures do, repeat a text's positions for each axis, and take one.
"""

from __future__ import annotations

import onnx_ir as ir

from quantmoe.exporter.graph.passes.divided_norms import producer


def narrow_tables(model: ir.Model) -> None:
    """Remove the Concat of a value with itself whose second half is cut off, and axes if one alone is selected."""
    for node in list(model.graph):
        if node.op_type == "Concat":
            _halve(model.graph, node)
        elif node.op_type == "Gather":
            _select(model.graph, node)


def _halve(graph: ir.Graph, concat: ir.Node) -> None:
    x, *others = concat.inputs
    if (
        x is None
        or x.shape is None
        or others != [x]
        or concat.attributes["axis"].as_int() not in (-1, len(x.shape) - 1)
    ):
        return
    size, last = x.shape[-1], len(x.shape) - 1
    found, cuts, seen = [concat.outputs[0]], list[ir.Node](), list[ir.Value]()
    while found:
        value = found.pop()
        seen.append(value)
        if value.is_graph_output():
            return
        for user in (use.node for use in value.uses()):
            if user.graph is not graph:
                return
            if user.op_type in ("Cos", "Sin", "Cast") or (user.op_type == "Mul" and _scales(user, value)):
                found.append(user.outputs[0])
            elif (
                user.op_type == "Slice"
                and not user.outputs[0].is_graph_output()
                and [_numbers(v) for v in user.inputs[1:]] in [[[0], [size], [axis], [1]] for axis in (last, -1)]
            ):
                cuts.append(user)
            else:
                return
    concat.outputs[0].replace_all_uses_with(x)
    for value in seen:
        value.shape = ir.Shape(x.shape)
    for cut in cuts:
        assert cut.inputs[0] is not None
        cut.outputs[0].replace_all_uses_with(cut.inputs[0])
    graph.remove([concat, *cuts], safe=True)


def _select(graph: ir.Graph, gather: ir.Node) -> None:
    """Gather of one of the equal parts that Expand has made of x."""
    part = producer(gather.inputs[0], "Slice")
    expand = producer(part.inputs[0] if part is not None else gather.inputs[0], "Expand")
    unsqueeze = producer(expand.inputs[0], "Unsqueeze") if expand is not None else None
    x = unsqueeze.inputs[0] if unsqueeze is not None else None
    if expand is None or unsqueeze is None or x is None or x.shape is None or expand.outputs[0].shape is None:
        return
    sizes = [size.value if isinstance(size, ir.SymbolicDim) else size for size in x.shape]
    index = ir.convenience.get_const_tensor(gather.inputs[1]) if gather.inputs[1] is not None else None
    if (
        gather.attributes.get_int("axis", 0) != 0
        or index is None
        or len(index.shape) != 0
        or _numbers(unsqueeze.inputs[1]) != [0]
        or None in sizes
        or expand.outputs[0].shape[1:] != x.shape[:]
        or (part is not None and (len(part.inputs) < 4 or _numbers(part.inputs[3]) != [0]))
        or gather.outputs[0].is_graph_output()
    ):
        return
    gather.outputs[0].replace_all_uses_with(x)
    made: list[ir.Node | None] = [gather, part, expand, unsqueeze]
    for node in made:
        if node is not None and not node.outputs[0].uses() and not node.outputs[0].is_graph_output():
            graph.remove(node, safe=True)


def _scales(product: ir.Node, value: ir.Value) -> bool:
    """Return whether it multiplies by one number."""
    factor = product.inputs[product.inputs[0] is value]
    tensor = ir.convenience.get_const_tensor(factor) if factor is not None else None
    return tensor is not None and tensor.size == 1 and len(tensor.shape) <= 1


def _numbers(value: ir.Value | None) -> list[int] | None:
    tensor = ir.convenience.get_const_tensor(value) if value is not None else None
    return tensor.numpy().ravel().tolist() if tensor is not None else None
