"""Logits of each row's last token only: of a prompt, generation needs no others."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir import tape

#: between the vocabulary's matrix and the logits: each element on its own
_ELEMENTWISE = {"Add", "Cast", "Clip", "Div", "Identity", "Mul", "Tanh"}


def keep_last_logits(model: ir.Model) -> bool:
    """Selects what the last product reads: [B, S, H] becomes [B, 1, H] at each row's last token that the mask shows, so
    that prompts may be padded on either side. Logits become [B, 1, V].

    Returns:
        False, and nothing is changed, when what makes the logits is not a product with a weight and then elementwise.
    """
    graph = model.graph
    value = next(output for output in graph.outputs if output.name == "logits")
    chain: list[ir.Value] = []
    while (node := value.producer()) is not None and node.op_type in _ELEMENTWISE:
        chain.append(value)
        value = next(i for i in node.inputs if i is not None and i.producer() is not None)
    if node is None or node.op_type not in ("MatMul", "QuantLinear", "MatMulNBits"):
        return False
    hidden = node.inputs[0]
    assert hidden is not None
    ops = tape.Tape()
    ids, mask = (next(i for i in graph.inputs if i.name == name) for name in ("input_ids", "attention_mask"))

    def constant(*numbers: int) -> ir.Value:
        return ops.op("Constant", [], {"value": ir.tensor(list(numbers), ir.DataType.INT64)})

    new = ops.op("Shape", [ids], {"start": 1, "end": 2})
    seen = ops.op("Slice", [mask, ops.op("Neg", [new]), constant(2**31 - 1), constant(1)])
    count = ops.op("Squeeze", [new, constant(0)])
    zero, one = (ops.op("Constant", [], {"value_int": number}) for number in (0, 1))
    order = ops.op("Mul", [seen, ops.op("Range", [zero, count, one])])
    last = ops.op("ReduceMax", [order, constant(1)], {"keepdims": 1})
    picked = ops.op("GatherND", [hidden, ops.op("Unsqueeze", [last, constant(2)])], {"batch_dims": 1})
    graph.insert_before(node, ops.nodes)
    node.replace_input_with(0, picked)
    for output in (*chain, value):
        if output.shape is not None:
            output.shape = ir.Shape([output.shape[0], 1, *output.shape[2:]])
    return True
