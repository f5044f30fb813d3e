"""QuantLinear -> com.microsoft::MatMulNBits, where the weights mean the same in both.

Inputs of the operator (ONNX Runtime, docs/ContribOperators.md):

- B: codes, uint8 [N, blocks, block_size / 2], low nibble first. Their zero is 8 without zero_points.
- zero_points: uint8 [N, ceil(blocks / 2)]. scales: [N, blocks] of A's type.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from quantmoe.custom_ops.layouts import qmoe
from quantmoe.custom_ops.matrix import QuantizedMatrix
from quantmoe.custom_ops.op import LinearSpec
from quantmoe.custom_ops.schemes import SCHEMES


def to_matmul_nbits(w: ir.Value, m: QuantizedMatrix, spec: LinearSpec) -> list[tuple[ir.Value, np.ndarray]]:
    """Replace the QuantLinear node that reads ``w``.

    Requires:
        :func:`quantmoe.exporter.choosing.choose.not_ort` is "".

    Returns:
        The new node's initializers, registered, and their contents.
    """
    own = LinearSpec(in_features=m.shape[1], out_features=m.shape[0], w=qmoe.describe_down(m, "none"))
    row = np.empty(qmoe.row_bytes(own.moe, "w2"), np.uint8)
    qmoe.pack_down(m, own.moe, row)
    # int8 activations by blocks, as fast as it gets; or none
    return matmul_nbits(w, row, own, 1 if spec.w.activation_format == "none" else 4)


def matmul_nbits(
    w: ir.Value, row: np.ndarray, spec: LinearSpec, accuracy_level: int
) -> list[tuple[ir.Value, np.ndarray]]:
    """Return the node for a row that layout ``qmoe`` packed.

    Raises:
        ValueError: scales that the graph's floats do not hold.
    """
    found = qmoe.stored(spec.moe, "w2", row, np.dtype(_floats(w)))
    n, k, g, bits = spec.out_features, spec.in_features, spec.w.group_size, SCHEMES[spec.w.format].bits
    arrays = {"b": found.pop("codes").reshape(n, -1, g * bits // 8)} | found
    return _replace(w, arrays, {"K": k, "N": n, "bits": bits, "block_size": g, "accuracy_level": accuracy_level})


def _floats(w: ir.Value) -> type:
    ((node, _),) = w.uses()
    x = node.inputs[0]
    assert x is not None
    return np.float16 if x.dtype == ir.DataType.FLOAT16 else np.float32


def _replace(
    w: ir.Value, arrays: dict[str, np.ndarray], attributes: dict[str, int]
) -> list[tuple[ir.Value, np.ndarray]]:
    """Put a MatMulNBits with these inputs (and its bias's Add) in the place of the node that reads ``w``."""
    ((node, _),) = w.uses()
    graph, x = node.graph, node.inputs[0]
    assert isinstance(graph, ir.Graph)
    name = str(w.name).removesuffix(".w")
    made: dict[str, ir.Value] = {}
    for key, array in arrays.items():
        made[key] = ir.Value(
            name=f"{name}.{key}", shape=ir.Shape(array.shape), type=ir.TensorType(ir.DataType.from_numpy(array.dtype))
        )
        graph.register_initializer(_with_value(made[key], array))
    inputs = [x, made["b"], made["scales"], *([made["zero_points"]] if "zero_points" in made else [])]
    new = [ir.node("MatMulNBits", inputs, attributes, domain="com.microsoft", name=node.name)]
    if "bias" in made:
        new.append(ir.node("Add", [new[0].outputs[0], made["bias"]]))
        new[0].outputs[0].type = node.outputs[0].type
    result, old = new[-1].outputs[0], node.outputs[0]
    result.name, result.shape, result.type = old.name, old.shape, old.type
    old.name = None
    old.replace_all_uses_with(result, replace_graph_outputs=True)
    graph.insert_before(node, new)
    graph.remove(node, safe=True)
    graph.opset_imports.setdefault("com.microsoft", 1)
    return [(made[key], array) for key, array in arrays.items()]


def _with_value(value: ir.Value, array: np.ndarray) -> ir.Value:
    value.const_value = ir.Tensor(array, name=value.name)
    return value
