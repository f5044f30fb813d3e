"""AddRMSNorm and the MoERouter of its y -> AddRMSNormRouter, of the graph with weights.

Experts then take y as it is, before the model makes rows of it. A router whose ids something else takes, as a gather of
data-parallel ranks does, stays."""

from __future__ import annotations

import onnx_ir as ir

from quantmoe.custom_ops.op import DOMAIN, NormRouterSpec, RouterSpec
from quantmoe.exporter.graph.passes.divided_norms import producer


def join_norms(model: ir.Model) -> None:
    """Replace each norm whose y a router takes, by itself or as rows."""
    for router in [node for node in model.graph if node.op_type == "MoERouter"]:
        x = router.inputs[0]
        rows = producer(x, "Reshape")
        norm = producer(x if rows is None else rows.inputs[0], "AddRMSNorm")
        experts = {user for value in router.outputs for user in value.consumers()}
        if (
            norm is None
            or any(value is None or value.producer() is not None for value in router.inputs[1:])
            or any(value.is_graph_output() for value in router.outputs)
            or any(node.op_type != "QuantMoE" or node.inputs[0] is not x for node in experts)
        ):
            continue
        own = RouterSpec.from_attributes({name: value.value for name, value in router.attributes.items()}).attributes()
        epsilon = norm.attributes["norm_epsilon"].as_float()
        spec = NormRouterSpec(**own | {"op_version": NormRouterSpec.OPERATOR.version, "norm_epsilon": epsilon})
        inputs = [*norm.inputs, *router.inputs[1:]]
        made = ir.node(spec.OPERATOR.name, inputs, spec.attributes(), domain=DOMAIN, num_outputs=4, name=router.name)
        y, total, *chosen = made.outputs
        for value, old in zip((y, total), norm.outputs, strict=True):
            value.type, value.shape = old.type, old.shape
        for value, old in zip(chosen, router.outputs, strict=True):
            value.type = old.type
            if y.shape is not None and old.shape is not None:
                value.shape = ir.Shape([*y.shape[:-1], old.shape[-1]])
        for node in experts:
            node.replace_input_with(0, norm.outputs[0])
            node.outputs[0].shape = y.shape
        ir.convenience.replace_nodes_and_values(
            model.graph, norm, [norm, router], [made], [*norm.outputs, *router.outputs], made.outputs
        )
        if rows is not None and not rows.outputs[0].uses():
            model.graph.remove(rows, safe=True)
