"""CachedAttention alone as an ONNX model, for TensorRT's parsers."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from quantmoe.custom_ops.op import AttentionSpec


def attention_model(spec: AttentionSpec, kind: int, given: bool = False) -> onnx.ModelProto:
    """A model of the one node; its norms and sinks are constants, or inputs where they are given and not empty."""
    heads, groups, d = spec.num_heads, spec.kv_num_heads, spec.head_size
    cache, table = ["batch", groups, "past", d], ["batch", "new", spec.rotary_size // 2]
    inputs = {
        "qkv": (kind, ["batch", "new", (heads + 2 * groups) * d]), "past_key": (kind, cache),
        "past_value": (kind, cache), "rows": (TensorProto.INT32, ["batch", 3]),
        "attention_mask": (TensorProto.INT64, ["batch", "total"]),
        "cos": (TensorProto.FLOAT, table), "sin": (TensorProto.FLOAT, table),
    }  # fmt: skip
    norms = {"none": (0, 0), "head": (d, d), "row": (heads * d, groups * d)}[spec.qk_norm]
    constants = {"q_norm": np.ones(norms[0]), "k_norm": np.ones(norms[1]), "sinks": np.full(heads, -np.inf)}
    names = [*inputs, *constants]
    if given:
        inputs |= {n: (TensorProto.FLOAT, list(values.shape)) for n, values in constants.items() if values.size}
    outputs = {"output": ["batch", "new", heads * d], "present_key": cache, "present_value": cache}
    node = helper.make_node(
        "CachedAttention", names, list(outputs), "attention", domain="quantmoe", **spec.attributes()
    )
    graph = helper.make_graph(
        [node],
        "attention",
        [helper.make_tensor_value_info(n, *value) for n, value in inputs.items()],
        [
            helper.make_tensor_value_info(n, kind, [d if d != "past" else "present" for d in dims])
            for n, dims in outputs.items()
        ],
        [numpy_helper.from_array(values.astype(np.float32), n) for n, values in constants.items() if n not in inputs],
    )
    imports = [helper.make_opsetid("", 20), helper.make_opsetid("quantmoe", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10)
