"""Gives norms that onnxscript fused the type that ONNX Runtime says they have: that of their weights.

gpt-oss multiplies by its weights in f32 and rounds afterwards. The fused norm rounds itself, and its rule leaves f32 as
the type of what it returns, so that a session of a graph in f16 does not load.
"""

from __future__ import annotations

import onnx_ir as ir

#: the input that has the weights
WEIGHTS = {"SimplifiedLayerNormalization": 1, "SkipSimplifiedLayerNormalization": 2}


def type_fused_norms(model: ir.Model) -> None:
    """Sets the type of each result of another type than the weights'.

    What reads it as it was, where that is not a Cast, reads a Cast, and so does what a graph returns.
    """
    for node in list(model.graph):
        weights = node.inputs[WEIGHTS[node.op_type]] if node.op_type in WEIGHTS else None
        y, wide = node.outputs[0], node.outputs[0].dtype
        if weights is None or wide is None or weights.dtype in (None, wide):
            continue
        if y.is_graph_output() or any(user.op_type != "Cast" for user in y.consumers()):
            cast = ir.node("Cast", [y], {"to": wide}, name=f"{node.name}_cast")
            cast.outputs[0].dtype, cast.outputs[0].shape = wide, y.shape
            y.replace_all_uses_with(cast.outputs[0], replace_graph_outputs=True)
            cast.replace_input_with(0, y)
            cast.outputs[0].name, y.name = y.name, f"{y.name}_narrow"
            model.graph.insert_after(node, cast)
        y.dtype = weights.dtype
