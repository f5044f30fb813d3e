"""Names the graph's inputs, outputs and sizes as onnxruntime-genai has them, so that its and our clients find them."""

from __future__ import annotations

import re

import onnx_ir as ir

_KV = re.compile(r"(?:input|output)\.past_key_values\.layers\.(\d+)\.(key|value)s")


def name_interface(model: ir.Model) -> None:
    """past_key_values.N.key, present.N.key; batch_size, sequence_length, past_sequence_length, total_sequence_length.

    Ensures:
        every dynamic size of an input has one of these names; no other value keeps a symbolic shape of its own (engines
        infer them).
    """
    graph = model.graph
    sizes = {
        "input_ids": ("batch_size", "sequence_length"),
        "attention_mask": ("batch_size", "total_sequence_length"),
        "position_ids": ("batch_size", "sequence_length"),
        "logits": ("batch_size", "sequence_length"),
    }
    for values, prefix, length in (
        (graph.inputs, "past_key_values", "past_sequence_length"),
        (graph.outputs, "present", "total_sequence_length"),
    ):
        for value in values:
            assert value.name is not None
            assert value.shape is not None
            shape: list[int | ir.SymbolicDim | str] = list(value.shape)
            if match := _KV.fullmatch(value.name):
                value.name = f"{prefix}.{match[1]}.{match[2]}"
                shape[0], shape[2] = "batch_size", length
            else:
                shape[:2] = sizes[value.name]
            value.shape = ir.Shape(shape)
    ends = {*graph.inputs, *graph.outputs}
    for node in graph.all_nodes():
        for value in node.outputs:
            if value not in ends and value.shape is not None and not value.shape.is_static():
                value.shape = None
