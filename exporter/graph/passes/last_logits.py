"""Logits of each row's last tokens only.

A prompt needs the logits of one token. A step that verifies drafts needs several tokens' logits.
"""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir import tape

from quantmoe.custom_ops.op import DOMAIN, RowsSpec
from quantmoe.exporter.folder.interface import NUM_LOGITS, PAST

#: between the vocabulary's matrix and the logits: each element on its own, or each token's
_ELEMENTWISE = {"Add", "AllGather", "Cast", "Clip", "Div", "Identity", "Mul", "Tanh"}


def keep_last_logits(model: ir.Model, count: int | None = 1, token_rows: bool = False) -> bool:
    """Select what the last product reads: [B, S, H] becomes [B, n, H] with n = min(S, count).

    The n tokens of a row end with its last one that the mask shows, so that prompts may be padded on either side.
    Logits become [B, n, V].

    Args:
        count: 1 makes n a fixed size. None: a session chooses by an initializer ``num_logits``, int64 [1], which is 1
            unless it is replaced. A row of fewer tokens has logits of padding in front, or its first ones again.
        token_rows: where the graph has no TokenRows node, which gives the indices, one is added.

    Returns:
        False, and nothing is changed, when what makes the logits is not a product with a weight and then elementwise.
    """
    graph = model.graph
    if (found := head_of(graph)) is None:
        return False
    node, hidden, between = found
    ops = tape.Tape()
    made = _token_rows(graph, ops, token_rows) if count in (None, 1) else None
    if made is not None:
        index = made.outputs[1]
        if count is None:
            made.resize_inputs(4)
            made.replace_input_with(3, _num_logits(model))
            # with one_logit ONNX Runtime infers the logits' size from its rank, which a Reshape may hide
            assert between[0].shape is not None  # the logits
            hidden.shape = ir.Shape([between[0].shape[0], "sequence_length", None])
    else:
        rows = next((node.inputs[3] for node in graph if node.op_type == "CachedAttention"), None)
        last = _from_mask(graph, ops) if rows is None else _from_rows(rows, ops)
        if count != 1:
            most = _num_logits(model) if count is None else _constant(ops, count)
            last = _and_before(graph, last, most, ops)
        index = ops.op("Unsqueeze", [last, _constant(ops, 2)])
    picked = ops.op("GatherND", [hidden, index], {"batch_dims": 1})
    graph.insert_before(node, ops.nodes)
    node.replace_input_with(0, picked)
    # onnxruntime-genai allocates logits by their declared size, and replaces no initializer. Where TokenRows has the
    # number, its session entry declares 1 (genai.py), and other sessions bind memory of any size.
    size = "logits_length" if (count or 1) > 1 or (made is not None and count is None) else 1
    for output in between:
        if output.shape is not None:
            output.shape = ir.Shape([output.shape[0], size, *output.shape[2:]])
    return True


def output_hidden(model: ir.Model, name: str, size: int) -> bool:
    """Give what the last product reads as an output [B, S, size]: the hidden states after the last norm.

    Returns:
        False, and nothing is changed, as keep_last_logits.
    """
    graph = model.graph
    if (found := head_of(graph)) is None:
        return False
    node, hidden, _ = found
    ops = tape.Tape()
    output = ops.op("Identity", [hidden])
    graph.insert_before(node, ops.nodes)
    logits = next(output for output in graph.outputs if output.name == "logits")
    assert logits.shape is not None
    output.name, output.type = name, hidden.type
    output.shape = ir.Shape([*list(logits.shape)[:2], size])
    graph.outputs.insert(1, output)
    return True


def head_of(graph: ir.Graph) -> tuple[ir.Node, ir.Value, list[ir.Value]] | None:
    """Return the product with a weight that makes the logits, what it reads, and its output with the elementwise
    values after it. Without such a product, return None.

    FusedMatMul is ONNX Runtime's, which onnxscript makes for an LM head that stays in f32.
    """
    value = next(output for output in graph.outputs if output.name == "logits")
    chain: list[ir.Value] = []
    while (node := value.producer()) is not None and (node.op_type in _ELEMENTWISE or _of_features(node)):
        chain.append(value)
        value = next(i for i in node.inputs if i is not None and i.producer() is not None)
    if node is None or node.op_type not in ("MatMul", "FusedMatMul", "QuantLinear", "MatMulNBits") or node.inputs[0] is None:
        return None
    return node, node.inputs[0], [*chain, value]


def _of_features(node: ir.Node) -> bool:
    """Return whether a node selects or joins the logits of each token: Inkling's without padding, an EAGLE-3 head's."""
    if node.op_type in ("Concat", "Gather"):
        return node.attributes["axis"].as_int() in (-1, 2)
    axes = node.inputs[3] if node.op_type == "Slice" and len(node.inputs) > 3 else None
    tensor = ir.convenience.get_const_tensor(axes) if axes is not None else None
    return tensor is not None and tensor.numpy().tolist() in ([-1], [2])


def _token_rows(graph: ir.Graph, ops: tape.Tape, add: bool) -> ir.Node | None:
    """Return the graph's TokenRows node, or a new one with ``add``; None: there is none, or the graph lacks inputs."""
    if (node := next((node for node in graph if node.op_type == "TokenRows"), None)) is not None or not add:
        return node
    inputs = {str(value.name): value for value in graph.inputs}
    key = next((name for name in inputs if name.startswith(PAST) and name.endswith(".key")), None)
    if key is None or "input_ids" not in inputs:
        return None
    given = [inputs[name] for name in (key, "input_ids", "attention_mask")]
    rows, _ = ops.op_multi_out("TokenRows", given, RowsSpec().attributes(), num_outputs=2, domain=DOMAIN)
    return rows.producer()


def _num_logits(model: ir.Model) -> ir.Value:
    """Add the initializer ``num_logits``, which a session may replace."""
    one = ir.tensor([1], ir.DataType.INT64, name=NUM_LOGITS)
    value = ir.Value(name=NUM_LOGITS, shape=ir.Shape([1]), type=ir.TensorType(one.dtype), const_value=one)
    model.graph.register_initializer(value)
    model.metadata_props[NUM_LOGITS] = "1"
    return value


def _and_before(graph: ir.Graph, last: ir.Value, most: ir.Value, ops: tape.Tape) -> ir.Value:
    """Return the indices of the last n tokens, int64 [B, n], never below 0.

    Args:
        last: index of the last token, [B, 1]. most: n, unless there are fewer new tokens, [1].
    """
    kept = ops.op("Min", [_new(graph, ops), most])
    one = ops.op("Constant", [], {"value_int": 1})
    first = ops.op("Sub", [one, ops.op("Squeeze", [kept, _constant(ops, 0)])])
    return ops.op("Max", [ops.op("Add", [last, ops.op("Range", [first, one, one])]), _constant(ops, 0)])


def _from_rows(rows: ir.Value, ops: tape.Tape) -> ir.Value:
    """Index of each row's last token that counts, int64 [B, 1], from CachedAttention's rows: begin + count - 1."""
    two = ops.op("Slice", [rows, _constant(ops, 0), _constant(ops, 2), _constant(ops, 1)])
    end = ops.op("ReduceSum", [ops.op("Cast", [two], {"to": ir.DataType.INT64}), _constant(ops, 1)], {"keepdims": 1})
    return ops.op("Sub", [end, _constant(ops, 1)])


def _from_mask(graph: ir.Graph, ops: tape.Tape) -> ir.Value:
    """Return the positions from the last columns of the mask."""
    mask, new = next(i for i in graph.inputs if i.name == "attention_mask"), _new(graph, ops)
    seen = ops.op("Slice", [mask, ops.op("Neg", [new]), _constant(ops, 2**31 - 1), _constant(ops, 1)])
    count = ops.op("Squeeze", [new, _constant(ops, 0)])
    zero, one = (ops.op("Constant", [], {"value_int": number}) for number in (0, 1))
    order = ops.op("Mul", [seen, ops.op("Range", [zero, count, one])])
    return ops.op("ReduceMax", [order, _constant(ops, 1)], {"keepdims": 1})


def _new(graph: ir.Graph, ops: tape.Tape) -> ir.Value:
    """Return how many new tokens there are, int64 [1]."""
    given = next(i for i in graph.inputs if i.name in ("input_ids", "inputs_embeds"))
    return ops.op("Shape", [given], {"start": 1, "end": 2})


def _constant(ops: tape.Tape, number: int) -> ir.Value:
    return ops.op("Constant", [], {"value": ir.tensor([number], ir.DataType.INT64)})
