"""Leaves attributes out that say what ONNX means without them.

TensorRT 10's parser refuses attributes that it does not know, also with their default: ScatterND's ``reduction``.
"""

from __future__ import annotations

import onnx
import onnx_ir as ir


def drop_defaults(model: ir.Model) -> None:
    """Remove the attributes of ai.onnx's nodes that equal the default of the model's operator set."""
    for node in model.graph.all_nodes():
        if node.domain != "":
            continue
        known = onnx.defs.get_schema(node.op_type, model.opset_imports[""]).attributes
        for name, attribute in list(node.attributes.items()):
            default = known[name].default_value
            if default.type and ir.serde.deserialize_attribute(default).value == attribute.value:
                del node.attributes[name]
