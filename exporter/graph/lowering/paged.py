"""CachedAttention over caches in blocks, and inputs as onnxruntime-genai's Engine (0.18) batches them.

A run has the new tokens of all requests in one row, one request after the other, without padding. Of each request the
inputs say where its tokens begin, how many its cache has, and in which blocks of the caches they are. Everything but
attention takes tokens one by one, so the row is a batch of one sequence for the rest of the graph.

Tables of cosines and sines, which the ordinary graph computes from positions, are tensors of all positions here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator
from onnx_ir import tape
from onnx_ir.passes.common import RemoveUnusedNodesPass

from quantmoe.custom_ops.op import DOMAIN, AttentionSpec
from quantmoe.custom_ops.op import inputs as inputs_of
from quantmoe.exporter.folder.interface import BLOCK, PAGED
from quantmoe.exporter.graph.passes.last_logits import head_of
from quantmoe.exporter.targets import Target

#: what the graph has no more: rows and tables tell where tokens are
_GONE = ("attention_mask", "position_ids")


@dataclass(frozen=True, eq=False)
class Table:
    """A tensor of the graph that no checkpoint has.

    Attributes:
        value: in the graph, without const_value. array: its elements.
    """

    value: ir.Value
    array: np.ndarray


def refusal(target: Target, spec: AttentionSpec) -> str:
    """Return why a CachedAttention does not run over blocks; "" where it does."""
    if spec.key_split or spec.nope_size:
        return "latent attention has no keys and values that blocks hold"
    if spec.head_size != spec.v_head_size:
        return f"head_size is {spec.head_size} and v_head_size {spec.v_head_size}, the Engine's blocks have one size"
    return target.refusal(_in_blocks(spec))


def _in_blocks(spec: AttentionSpec) -> AttentionSpec:
    return replace(spec, op_version=spec.OPERATOR.version, block_size=BLOCK)


def to_paged(model: ir.Model, context: int, every: bool) -> list[Table]:
    """Replace every CachedAttention, the inputs around them, and the logits.

    Inputs are then ``input_ids`` int64 [num_tokens], :data:`PAGED`'s, and caches [num_blocks, BLOCK, kv_num_heads,
    head_size]. Logits are [num_logits, V], of the tokens that ``logits_indices`` names. Of all tokens they are
    [num_tokens, V].

    Args:
        model: named by passes/interface.py. context: tokens of a request, at most. every: logits of all tokens.

    Requires:
        :func:`refusal` of every node is "".
    Returns:
        What is to be written beside the weights.
    Raises:
        ValueError: positions or the mask are read by something else; names it.
    """
    graph = model.graph
    given = {value.name: value for value in graph.inputs}
    head = None if every else head_of(graph)
    inputs = _inputs(graph, PAGED if head is not None else {n: s for n, s in PAGED.items() if n != "logits_indices"})
    tables: dict[tuple[ir.Value | None, ...], list[Table]] = {}
    rows = _rows(graph, inputs)
    for node in [node for node in graph if node.op_type == "CachedAttention"]:
        _replace(graph, node, inputs, rows=rows, tables=tables, context=context)
    RemoveUnusedNodesPass()(model)
    for name in _GONE:
        if users := [use.node for use in given[name].uses()]:
            raise ValueError(f"{users[0].name} ({users[0].op_type}) reads {name}, which a packed batch does not have")
        graph.inputs.remove(given[name])
    if head is not None:
        _select(graph, *head, inputs["logits_indices"])
    _flatten_logits(graph, "num_tokens" if head is None else "num_logits")
    return [table for pair in tables.values() for table in pair]


def _inputs(graph: ir.Graph, shapes: Mapping[str, Sequence[int | str]]) -> dict[str, ir.Value]:
    """Make the inputs; input_ids stays [1, num_tokens] for its users."""
    made = {
        name: ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(ir.DataType.INT32))
        for name, shape in shapes.items()
    }
    at = next(i for i, value in enumerate(graph.inputs) if value.name == "input_ids")
    ids, ops = graph.inputs[at], tape.Tape()
    row = ops.op("Unsqueeze", [ids, _numbers(ops, 0)])
    row.type = ids.type
    ids.replace_all_uses_with(row)
    row.producer().replace_input_with(0, ids)  # type: ignore[union-attr]
    ids.shape = ir.Shape(["num_tokens"])
    graph.insert_before(graph[0], ops.nodes)
    graph.inputs[at + 1 : at + 1] = made.values()
    return made


def _replace(
    graph: ir.Graph,
    node: ir.Node,
    inputs: dict[str, ir.Value],
    *,
    rows: ir.Value,
    tables: dict[tuple[ir.Value | None, ...], list[Table]],
    context: int,
) -> None:
    """Give a CachedAttention blocks, and the rows and angles of packed requests."""
    spec = _in_blocks(AttentionSpec.from_attributes({name: a.value for name, a in node.attributes.items()}))
    ids = next(value for value in graph.inputs if value.name == "input_ids")
    row = next(use.node.outputs[0] for use in ids.uses())
    given = dict(zip((name for name, _ in inputs_of("CachedAttention")), node.inputs, strict=False))
    ops = tape.Tape()
    made = (given["cos"], given["sin"])
    if spec.rotary_size:
        positions = next(value for value in graph.inputs if value.name == "position_ids")
        if made not in tables:
            tables[made] = _tables(graph, made, positions, context, len(tables))
        given |= dict(zip(("cos", "sin"), (table.value for table in tables[made]), strict=True))
    else:
        nothing = ops.op("Constant", [], {"value": ir.tensor(np.zeros((0, 0), np.float32))})
        given |= {"cos": nothing, "sin": nothing}
    given |= {"rows": rows, "attention_mask": row}
    attended = ops.op_multi_out(
        "CachedAttention",
        [*given.values(), None, None, inputs["block_table"]],
        spec.attributes(),
        num_outputs=3,
        domain=DOMAIN,
        name=node.name,
    )
    attended[0].type, attended[0].shape = node.outputs[0].type, node.outputs[0].shape
    node.outputs[0].replace_all_uses_with(attended[0])
    shape = ir.Shape(["num_blocks", spec.block_size, spec.kv_num_heads, spec.head_size])
    for name, old, present in zip(("past_key", "past_value"), node.outputs[1:], attended[1:], strict=True):
        past = given[name]
        assert past is not None
        past.shape = present.shape = shape
        present.type, present.name, old.name = old.type, old.name, None
        old.replace_all_uses_with(present, replace_graph_outputs=True)
    graph.insert_before(node, ops.nodes)
    graph.remove(node, safe=True)


def _rows(graph: ir.Graph, inputs: dict[str, ir.Value]) -> ir.Value:
    """Make the nodes' rows [batch_size, 3]: where a request's tokens begin, how many they are, how many came before."""
    ops = tape.Tape()
    cumulative, past = inputs["cumulative_sequence_lengths"], inputs["past_sequence_lengths"]
    begins, ends = (
        ops.op("Slice", [cumulative, _numbers(ops, first), _numbers(ops, end)])
        for first, end in ((0, -1), (1, np.iinfo(np.int64).max))
    )
    all_three = ops.op("Concat", [begins, ops.op("Sub", [ends, begins]), past], {"axis": 0})
    rows = ops.op("Transpose", [ops.op("Reshape", [all_three, _numbers(ops, 3, -1)])], {"perm": [1, 0]})
    graph.insert_before(graph[0], ops.nodes)
    return rows


def _tables(graph: ir.Graph, made: tuple[Any, ...], positions: ir.Value, context: int, number: int) -> list[Table]:
    """cos_cache and sin_cache [context, rotary_size / 2] as the graph makes them of positions.

    Raises:
        ValueError: of something else, too.
    """
    nodes, seen, left = [], set(), [*made]
    constants: dict[str, onnx.TensorProto] = {}
    while left:
        value = left.pop()
        if value is None or value is positions or value in seen:
            continue
        seen.add(value)
        if (node := value.producer()) is not None:
            nodes.append(node)
            left += node.inputs
        elif value.const_value is not None:
            constants[value.name] = ir.to_proto(value.const_value)
        else:
            raise ValueError(f"rotary embeddings are made of {value.name}, too, not of positions alone")
    order = {node: i for i, node in enumerate(graph)}
    protos = [ir.to_proto(node) for node in sorted(set(nodes), key=lambda node: order[node])]
    for name, tensor in constants.items():
        tensor.name = name
    outputs = [onnx.helper.make_tensor_value_info(value.name, onnx.TensorProto.FLOAT, None) for value in made]
    given = onnx.helper.make_tensor_value_info(str(positions.name), onnx.TensorProto.INT64, None)
    part = onnx.helper.make_graph(protos, "tables", [given], outputs, [*constants.values()])
    opset = [onnx.helper.make_opsetid("", graph.opset_imports[""])]
    ran = ReferenceEvaluator(onnx.helper.make_model(part, opset_imports=opset))
    found = ran.run(None, {str(positions.name): np.arange(context, dtype=np.int64)[None]})
    tables = []
    for name, array in zip(("cos_cache", "sin_cache"), found, strict=True):
        turning = np.ascontiguousarray(array[0], np.float32)
        value = ir.Value(
            name=f"{name}.{number}" if number else name,
            shape=ir.Shape(turning.shape),
            type=ir.TensorType(ir.DataType.FLOAT),
        )
        tables.append(Table(value, turning))
    return tables


def _select(graph: ir.Graph, head: ir.Node, hidden: ir.Value, made: Iterable[ir.Value], indices: ir.Value) -> None:
    """Give the head the tokens that indices name alone. made: of it, logits last."""
    ops = tape.Tape()
    head.replace_input_with(0, ops.op("Gather", [hidden, indices], {"axis": 1}))
    graph.insert_before(head, ops.nodes)
    for value in made:
        if value.shape is not None:
            value.shape = ir.Shape([1, "num_logits", *value.shape[2:]])


def _flatten_logits(graph: ir.Graph, rows: str) -> None:
    """Make logits [rows, V]."""
    at = next(i for i, value in enumerate(graph.outputs) if value.name == "logits")
    old, ops = graph.outputs[at], tape.Tape()
    assert old.shape is not None
    flat = ops.op("Squeeze", [old, _numbers(ops, 0)])
    flat.type, flat.shape = old.type, ir.Shape([rows, old.shape[-1]])
    old.name, old.shape, flat.name = "logits.row", None, "logits"
    graph.outputs[at] = flat
    graph.insert_after(graph[-1], ops.nodes)


def _numbers(ops: tape.Tape, *numbers: int) -> ir.Value:
    return ops.op("Constant", [], {"value": ir.tensor([*numbers], ir.DataType.INT64)})
