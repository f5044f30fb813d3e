"""Attention of a vision tower: each patch attends to all patches of its frame.

ONNX Runtime's MultiHeadAttention keeps no product of all patches with all in memory."""

from __future__ import annotations

import onnx_ir as ir
import torch
from onnx_ir import tape

_NAME = "FrameAttention"


def attend_in_frames(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, frames: torch.Tensor, scale: float
) -> torch.Tensor:
    """Put a node into a trace that :func:`place_attention` replaces.

    Args:
        query, key, value: f32 [patches, heads, width]. frames: int64 [2], their number and the patches of each.

    Returns:
        [patches, heads * width].
    """
    heads = query.shape[1]
    given = [t.flatten(1) for t in (query, key, value)]
    return torch.onnx.ops.symbolic(
        f"quantmoe::{_NAME}",
        (*given, frames),
        {"num_heads": heads, "scale": scale},
        dtype=query.dtype,
        shape=given[0].shape,
        version=1,
    )


def place_attention(model: ir.Model, dtype: ir.DataType) -> None:
    """Give each of those nodes its final form.

    Args:
        dtype: that ONNX Runtime's provider attends in: f32 on the CPU, f16 with CUDA.
    """
    graph = model.graph
    wide = ir.DataType.FLOAT
    for node in [node for node in graph if node.op_type == _NAME]:
        ops = tape.Tape()
        *given, frames = node.inputs
        assert given[0] is not None
        width = ops.op("Shape", [given[0]], {"start": 1})
        rows = ops.op("Concat", [frames, width], {"axis": 0})
        parts = [ops.op("Reshape", [value, rows]) for value in given]
        if dtype != wide:
            parts = [ops.op("Cast", [part], {"to": dtype}) for part in parts]
        made = ops.op("MultiHeadAttention", parts, dict(node.attributes), domain="com.microsoft")
        if dtype != wide:
            made = ops.op("Cast", [made], {"to": wide})
        output = ops.op("Flatten", [made], {"axis": 2})
        graph.insert_before(node, ops.nodes)
        node.outputs[0].replace_all_uses_with(output)
        graph.remove(node, safe=True)
    model.opset_imports.pop("quantmoe", None)
    model.opset_imports["com.microsoft"] = 1
