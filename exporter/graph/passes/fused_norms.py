"""Norms that onnxscript fused, in the types and the domain that other programs expect.

gpt-oss multiplies by its weights in f32 and rounds afterwards. The fused norm rounds itself. Its rule leaves f32 as
the type of the result, so that a session of a graph in f16 does not load.

A norm of a sum is com.microsoft's SkipSimplifiedLayerNormalization. The norm of anything else is
SimplifiedLayerNormalization. ONNX Runtime has it in ONNX's own domain, but ONNX does not: the checker and the version
converter refuse the model. It is written in ONNX's operators. ONNX Runtime fuses them to the same node when it creates
a session; RMSNormalization of ONNX 23 needs a later release than :data:`quantmoe.ort_ext.OLDEST`.
"""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir import tape
from transformers.exporters.onnxruntime_fusions import fuse_for_onnxruntime

#: the input that has the weights
WEIGHTS = {"SimplifiedLayerNormalization": 1, "SkipSimplifiedLayerNormalization": 2}


def fuse(model: ir.Model) -> None:
    """Make norms and sums the operators that ONNX Runtime fuses them to."""
    fuse_for_onnxruntime(model, "cpu")


def type_fused_norms(model: ir.Model) -> None:
    """Set the type of each result of another type than the weights'.

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


def spell_norms(model: ir.Model) -> None:
    """Replace every SimplifiedLayerNormalization by x / sqrt(mean(x^2) + epsilon) in f32, cast, times the weight.

    Requires:
        :func:`type_fused_norms` has run.
    """
    for node in [node for node in model.graph if node.op_type == "SimplifiedLayerNormalization"]:
        (x, weight), y, ops = node.inputs, node.outputs[0], tape.Tape()
        assert x is not None
        assert weight is not None
        assert weight.dtype is not None
        wide = x if x.dtype == ir.DataType.FLOAT else ops.op("Cast", [x], {"to": ir.DataType.FLOAT})
        square = ops.op("Pow", [wide, ops.op("Constant", [], {"value_float": 2.0})])
        mean = ops.op("ReduceMean", [square, ops.op("Constant", [], {"value_ints": [-1]})], {"keepdims": 1})
        epsilon = ops.op("Constant", [], {"value_float": node.attributes["epsilon"].as_float()})
        normed = ops.op("Div", [wide, ops.op("Sqrt", [ops.op("Add", [mean, epsilon])])])
        if weight.dtype != ir.DataType.FLOAT:
            normed = ops.op("Cast", [normed], {"to": weight.dtype})
        made = ops.op("Mul", [weight, normed], name=node.name)
        made.type, made.shape = y.type, y.shape
        ir.convenience.replace_nodes_and_values(model.graph, node, [node], ops.nodes, [y], [made])
