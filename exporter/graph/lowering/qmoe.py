"""QuantMoE -> com.microsoft::QMoE: the last of our operators in a graph for ONNX Runtime alone, with its weights as
layout ``qmoe`` has them.

Routers are a MoERouting of method topk_softmax, which QMoE computes from its logits on every provider. A factor of the
weights then multiplies the output (modules/routers.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import onnx_ir as ir
from onnx_ir import tape
from onnx_ir.passes.common import RemoveUnusedNodesPass

from quantmoe.custom_ops.layouts import qmoe
from quantmoe.custom_ops.op import DOMAIN, MoESpec
from quantmoe.exporter.graph.lowering.weights import Weight

#: of tensors in the graph and in the data files, by a row's part
NAMES = {"codes": "experts_weights", "scales": "scales", "bias": "experts_bias", "zero_points": "zero_points"}
FC = {"w13": "fc1", "w2": "fc2"}


def tensor_name(projection: str, part: str) -> str:
    """``fc1_experts_weights`` of w13's codes, as QMoE's inputs are called."""
    return f"{FC[projection]}_{NAMES[part]}"


def to_qmoe(
    model: ir.Model, weights: Iterable[Weight], specs: Mapping[str, MoESpec], accuracy_level: int
) -> list[Weight]:
    """Replace every QuantMoE node of layout ``qmoe``.

    Args:
        weights: of the graph. specs: experts module -> its node's attributes. accuracy_level: of the nodes.

    Returns:
        The weights, w13 and w2 of each node replaced by its tensors, parameter ``<module>.<tensor_name>``.

    Raises:
        ValueError: QMoE does not compute a layer's router; names the layer.
    """
    kept: list[Weight] = []
    found: dict[str, dict[str, ir.Value]] = {}
    for weight in weights:
        module, _, leaf = weight.parameter.rpartition(".")
        if module in specs:
            found.setdefault(module, {})[leaf] = weight.value
        else:
            kept.append(weight)
    for module, values in found.items():
        ((node, _),) = values["w13"].uses()
        kept += [Weight(value, value.name or "") for value in _replace(module, node, specs[module], accuracy_level)]
    RemoveUnusedNodesPass()(model)
    return kept


def _replace(module: str, node: ir.Node, spec: MoESpec, accuracy_level: int) -> list[ir.Value]:
    x, ids, weights = node.inputs[:3]
    graph, dtype = node.graph, x.dtype  # type: ignore[union-attr]
    assert isinstance(graph, ir.Graph)
    assert ids is not None
    assert dtype is not None
    ops = tape.Tape()
    router, attributes = ids.producer(), qmoe.attributes(spec)
    inputs: list[ir.Value | None] = [x, *[None] * qmoe.GLOBAL_SCALES[-1]]
    factors = _factors(weights, router) if router is not None and router.op_type == "MoERouting" else None
    if router is None or factors is None:
        raise ValueError(
            f"{module}: its router is none that QMoE computes: a softmax of logits, or other weights that export "
            "recognises and that are not negative"
        )
    inputs[1] = _as(ops, router.inputs[0], dtype)
    attributes |= {"k": router.attributes["top_k"].as_int(), "normalize_routing_weights": 1}
    if accuracy_level:
        attributes["accuracy_level"] = accuracy_level
    made = []
    for (projection, part), index in qmoe.INPUTS.items():
        if part not in (row := qmoe.parts(spec, projection)):
            continue
        shape = qmoe.shape(spec, projection, part)
        own = ir.DataType.from_numpy(row[part].dtype)
        value = ir.Value(
            name=f"{module}.{tensor_name(projection, part)}",
            shape=ir.Shape(shape),
            type=ir.TensorType(own if own in (ir.DataType.UINT8, ir.DataType.FLOAT8E8M0) else dtype),
        )
        inputs[index] = value
        made.append(value)
    if "quant_type" in attributes:
        one = ir.tensor(np.ones(spec.num_experts, np.float32), name=f"{module}.global_scale")
        ones = ir.Value(
            name=one.name, shape=ir.Shape([spec.num_experts]), type=ir.TensorType(one.dtype), const_value=one
        )
        graph.register_initializer(ones)
        for index in qmoe.GLOBAL_SCALES:
            inputs[index] = ones
    while inputs[-1] is None:
        inputs.pop()
    y, old = ops.op("QMoE", inputs, attributes, domain="com.microsoft", name=node.name), node.outputs[0]
    for factor in factors:
        y.type = old.type
        y = ops.op("Mul", [y, _as(ops, factor, dtype)])
    y.name, y.shape, y.type = old.name, old.shape, old.type
    old.name = None
    old.replace_all_uses_with(y, replace_graph_outputs=True)
    graph.insert_before(node, ops.nodes)
    graph.remove(node, safe=True)
    graph.opset_imports.setdefault("com.microsoft", 1)
    return made


def _factors(weights: ir.Value | None, router: ir.Node) -> list[ir.Value] | None:
    """Return what a router's weights are multiplied by on their way, [T, 1] or a number each; None where more is
    done."""
    found = []
    while weights is not None and weights is not router.outputs[1]:
        node = weights.producer()
        if node is None or node.op_type not in ("Cast", "Mul"):
            return None
        way = [value for value in node.inputs if value is not None and _reads(value, router)]
        others = [value for value in node.inputs if value is not None and not _reads(value, router)]
        if len(way) != 1 or not all(_one_a_token(value) for value in others):
            return None
        found += others
        (weights,) = way
    return None if weights is None else found


def _reads(value: ir.Value, router: ir.Node) -> bool:
    """Return whether a value is the router's, or made of it by Cast and Mul."""
    node = value.producer()
    if node is None or node is router:
        return node is router
    return node.op_type in ("Cast", "Mul") and any(v is not None and _reads(v, router) for v in node.inputs)


def _one_a_token(value: ir.Value) -> bool:
    return value.shape is not None and (value.shape.rank() == 0 or value.shape[-1] == 1)


def _as(ops: tape.Tape, value: ir.Value | None, dtype: ir.DataType) -> ir.Value:
    assert value is not None
    return value if value.dtype == dtype else ops.op("Cast", [value], {"to": dtype})


def check_domains(model: ir.Model) -> None:
    """Take our domain out of a graph's imports.

    Raises:
        ValueError: a node of ours is left; names it.
    """
    for node in model.graph.all_nodes():
        if node.domain == DOMAIN:
            raise ValueError(f"{node.name} is a {node.op_type}, which ONNX Runtime does not have")
    model.graph.opset_imports.pop(DOMAIN, None)
