"""Ids of experts -> rows of a rank's file, where a map says which experts are where: a table for each layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from quantmoe.custom_ops.op import DOMAIN, GatherSpec
from quantmoe.exporter.reading.slices import Slice


def place_experts(model: ir.Model, tables: Mapping[str, np.ndarray], part: Slice | None = None) -> None:
    """Put a Gather before each QuantMoE that a table is for.

    An expert that stands several times is taken by turns, as a token's position says. All ranks know it, so they agree
    without a word; a token's id is one rank's, and -1 in the tables of the others. Ranks with tokens of their own tell
    each other the turns, once a run.

    Args:
        tables: by the experts' module, int64 [copies, experts]: :meth:`MoELayer.table`. part: the rank's.
    """
    offsets: dict[tuple[int, ...], ir.Value] = {}
    for node in [node for node in model.graph if node.op_type == "QuantMoE"]:
        weights, ids = node.inputs[3], node.inputs[1]
        assert weights is not None
        assert ids is not None
        module = str(weights.name).removesuffix(".w13")
        if (table := tables.get(module)) is None:
            continue
        kind = np.int32 if ids.dtype != ir.DataType.INT64 else np.int64
        found = _constant(model, f"{module}.placement", table.astype(kind).reshape(-1))
        if len(table) > 1:
            if table.shape not in offsets:
                offsets[table.shape] = _turns(model, len(table), table.shape[1], kind, part)
            ids = _add(node, "Add", [ids, offsets[table.shape]], ids)
        node.replace_input_with(1, _add(node, "Gather", [found, ids], ids))


def _turns(model: ir.Model, copies: int, experts: int, kind: type, part: Slice | None) -> ir.Value:
    """Return where a token's row begins in a flat table: position % copies * experts, [tokens, 1]."""
    (positions,) = [value for value in model.graph.inputs if value.name == "position_ids"]
    first = next(iter(model.graph))
    column = _constant(model, f"placement.{copies}.column", np.array([-1, 1]))
    count = _constant(model, f"placement.{copies}.copies", np.array([copies]))
    width = _constant(model, f"placement.{copies}.{experts}.experts", np.array([experts]))
    flat = _add(first, "Reshape", [positions, column], positions)
    turn = _add(first, "Mod", [flat, count], flat)
    if part is not None and part.own_tokens:
        turn = _of_all_ranks(model, first, turn, part)
    turn = _add(first, "Mul", [turn, width], flat)
    if kind is np.int64:
        return turn
    cast = _add(first, "Cast", [turn], turn, to=ir.DataType.INT32.value)
    cast.type = ir.TensorType(ir.DataType.INT32)
    return cast


def _of_all_ranks(model: ir.Model, before: ir.Node, turn: ir.Value, part: Slice) -> ir.Value:
    """Small integers [tokens, 1] of all ranks, in the type that the experts' tokens have: AllGather takes floats."""
    x = next(node for node in model.graph if node.op_type == "QuantMoE").inputs[0]
    assert x is not None
    assert x.type is not None
    assert turn.type is not None
    spec = GatherSpec(**part.place, axis=0)
    floats = _add(before, "Cast", [turn], x, to=x.type.dtype.value)
    every = _add(before, "AllGather", [floats], x, domain=DOMAIN, **spec.attributes())
    return _add(before, "Cast", [every], turn, to=turn.type.dtype.value)


def _add(
    before: ir.Node, op: str, inputs: list[ir.Value], like: ir.Value, domain: str = "", **attributes: Any
) -> ir.Value:
    node = ir.node(op, inputs, attributes, domain=domain)
    node.outputs[0].type = like.type
    assert isinstance(before.graph, ir.Graph)
    before.graph.insert_before(before, node)
    return node.outputs[0]


def _constant(model: ir.Model, name: str, array: np.ndarray) -> ir.Value:
    if (found := model.graph.initializers.get(name)) is not None:
        return found
    tensor = ir.Tensor(array, name=name)
    value = ir.Value(name=name, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype), const_value=tensor)
    model.graph.register_initializer(value)
    return value
