"""CachedAttention -> com.microsoft::PagedAttention, and inputs as onnxruntime-genai's Engine batches them (0.18).

A run has the new tokens of all requests in one row, one request after the other, without padding. Of each request the
Engine says where its tokens begin, how many its cache has, and in which blocks of the caches they are. Everything but
attention takes tokens one by one, so the row is a batch of one sequence for the rest of the graph.

PagedAttention normalizes and turns queries and keys itself. Tables of cosines and sines, which the ordinary graph
computes from positions, are tensors of all positions here, of the graph's type.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator
from onnx_ir import tape
from onnx_ir.passes.common import RemoveUnusedNodesPass

from quantmoe.custom_ops.op import AttentionSpec
from quantmoe.exporter.folder.interface import PAGED
from quantmoe.exporter.graph.passes.last_logits import head_of
from quantmoe.exporter.graph.passes.weights import Weight

#: of a head, at most: FlashAttention's kernels
LARGEST_HEAD = 256
#: what the graph has no more: PagedAttention is told otherwise where tokens are
_GONE = ("attention_mask", "position_ids")


@dataclass(frozen=True, eq=False)
class Table:
    """A tensor of the graph that no checkpoint has.

    Attributes:
        value: in the graph, without const_value. array: its elements.
    """

    value: ir.Value
    array: np.ndarray


def refusal(spec: AttentionSpec) -> str:
    """Why PagedAttention (ONNX Runtime 1.31, CUDA) does not compute what a CachedAttention does; "" where it does."""
    size = spec.head_size
    if spec.key_split or spec.nope_size:
        return "latent attention has no keys and values that blocks hold"
    if size != spec.v_head_size:
        return f"head_size is {size} and v_head_size {spec.v_head_size}, PagedAttention takes one size"
    multiple = 16 if spec.rotary_size else 8
    if size % multiple or size > LARGEST_HEAD:
        return f"head_size is {size}, PagedAttention takes multiples of {multiple} up to {LARGEST_HEAD}"
    if spec.rotary_size % 16:
        return f"rotary_size is {spec.rotary_size}, PagedAttention takes multiples of 16"
    if spec.qk_norm == "row":
        return "PagedAttention has no norm of all heads together (qk_norm row)"
    if spec.chunk_size:
        return f"PagedAttention has no attention in chunks (chunk_size {spec.chunk_size})"
    if spec.gated:
        return "PagedAttention has no gates"
    if spec.cache_format != "none":
        return f"a paged cache holds floats of the graph's type, not {spec.cache_format}"
    return ""


def to_paged(model: ir.Model, weights: Iterable[Weight], context: int, every: bool) -> list[Table]:
    """Replace every CachedAttention, the inputs around them, and the logits.

    Inputs are then ``input_ids`` int64 [num_tokens], :data:`PAGED`'s, and caches [num_blocks, block_size, kv_num_heads,
    head_size]; logits are [num_logits, V], of the tokens that ``logits_indices`` names, or of all [num_tokens, V].

    Args:
        model: named by passes/interface.py. weights: of the graph; norms and sinks get the graph's type.
        context: tokens of a request, at most. every: logits of all tokens.

    Requires:
        :func:`refusal` of every node is "".
    Returns:
        What is to be written beside the weights.
    Raises:
        ValueError: positions or the mask are read by something else; names it.
    """
    graph = model.graph
    graph.opset_imports.setdefault("com.microsoft", 1)
    given = {value.name: value for value in graph.inputs}
    placed = {weight.value for weight in weights}
    head = None if every else head_of(graph)
    inputs = _inputs(graph, PAGED if head is not None else {n: s for n, s in PAGED.items() if n != "logits_indices"})
    tables: dict[tuple[ir.Value | None, ...], list[Table]] = {}
    for node in [node for node in graph if node.op_type == "CachedAttention"]:
        _replace(graph, node, inputs, tables, placed, given["position_ids"], context)
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
    tables: dict[tuple[ir.Value | None, ...], list[Table]],
    placed: set[ir.Value],
    positions: ir.Value,
    context: int,
) -> None:
    spec = AttentionSpec.from_attributes({name: a.value for name, a in node.attributes.items()})
    qkv, key, value, _, _, *parts, q_norm, k_norm, sinks = node.inputs[:10]
    assert qkv is not None
    assert qkv.dtype is not None
    attributes: dict[str, Any] = {
        "num_heads": spec.num_heads,
        "kv_num_heads": spec.kv_num_heads,
        "scale": spec.scale,
        "softcap": spec.softcap,
        "local_window_size": spec.sliding_window or -1,
        "do_rotary": int(spec.rotary_size > 0),
        "rotary_interleaved": spec.rotary_interleaved,
    }
    turning: list[ir.Value | None] = [None, None]
    if spec.rotary_size:
        made = (parts[0], parts[1])
        if made not in tables:
            tables[made] = _tables(graph, made, positions, qkv.dtype, context, len(tables))
        turning = [table.value for table in tables[made]]
    norms: list[ir.Value | None] = [None, None]
    if spec.qk_norm != "none":
        norms, attributes["qk_norm_epsilon"] = [q_norm, k_norm], spec.norm_epsilon
    own = [sinks if sinks in placed else None, *norms]
    for weight in filter(None, own):
        weight.type = ir.TensorType(qkv.dtype)
    ops = tape.Tape()
    width = (spec.num_heads + 2 * spec.kv_num_heads) * spec.head_size
    rows = ops.op("Reshape", [qkv, _numbers(ops, -1, width)])
    lengths = [inputs[name] for name in ("cumulative_sequence_lengths", "past_sequence_lengths", "block_table")]
    attended = ops.op_multi_out(
        "PagedAttention",
        [rows, None, None, key, value, *lengths, *turning, None, *own, None, None, inputs["attention_metadata"]],
        attributes,
        num_outputs=3,
        domain="com.microsoft",
        name=node.name,
    )
    output = ops.op("Unsqueeze", [attended[0], _numbers(ops, 0)])
    output.type = node.outputs[0].type
    node.outputs[0].replace_all_uses_with(output)
    shape = ir.Shape(["num_blocks", "block_size", spec.kv_num_heads, spec.head_size])
    for past, old, present in zip((key, value), node.outputs[1:], attended[1:], strict=True):
        assert past is not None
        past.shape = present.shape = shape
        present.type, present.name, old.name = old.type, old.name, None
        old.replace_all_uses_with(present, replace_graph_outputs=True)
    graph.insert_before(node, ops.nodes)
    graph.remove(node, safe=True)


def _tables(
    graph: ir.Graph, made: tuple[Any, ...], positions: ir.Value, dtype: ir.DataType, context: int, number: int
) -> list[Table]:
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
        rounded = np.ascontiguousarray(array[0].astype(dtype.numpy()))
        value = ir.Value(
            name=f"{name}.{number}" if number else name, shape=ir.Shape(rounded.shape), type=ir.TensorType(dtype)
        )
        tables.append(Table(value, rounded))
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
