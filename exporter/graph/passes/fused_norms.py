"""Gives norms that onnxscript fused the type that ONNX Runtime says they have: that of their weights.

gpt-oss multiplies by its weights in f32 and rounds afterwards. The fused norm rounds itself, and its rule leaves f32 as
the type of what it returns, so that a session of a graph in f16 does not load.
"""

from __future__ import annotations

import onnx_ir as ir

#: the input that has the weights
WEIGHTS = {"SimplifiedLayerNormalization": 1, "SkipSimplifiedLayerNormalization": 2}


def type_fused_norms(model: ir.Model) -> None:
    """Sets the type of each result of another type than the weights'; what reads it, but for a Cast, gets a Cast."""
    for node in list(model.graph):
        weights = node.inputs[WEIGHTS[node.op_type]] if node.op_type in WEIGHTS else None
        y, wide = node.outputs[0], node.outputs[0].dtype
        if weights is None or wide is None or weights.dtype in (None, wide):
            continue
        y.dtype = weights.dtype
        if others := [(user, index) for user, index in y.uses() if user.op_type != "Cast"]:
            cast = ir.node("Cast", [y], {"to": wide})
            cast.outputs[0].dtype, cast.outputs[0].shape = wide, y.shape
            for user, index in others:
                user.replace_input_with(index, cast.outputs[0])
            model.graph.insert_after(node, cast)
