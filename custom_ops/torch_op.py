"""``torch.ops.quantmoe.quant_moe``: QuantMoE in PyTorch; eager it is reference.py, exported the ONNX node."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import numpy as np
import torch
from onnx.defs import OpSchema
from onnxscript.values import Op, Opset

from quantmoe.custom_ops.layouts import LAYOUTS
from quantmoe.custom_ops.op import DOMAIN, MoESpec, attribute_kinds, inputs, op_version
from quantmoe.custom_ops.reference import quant_moe as reference


@torch.library.custom_op("quantmoe::quant_moe", mutates_args=())
def quant_moe(
    hidden_states: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    attributes: str,
) -> torch.Tensor:
    """One mixture-of-experts layer on packed weights, by the float64 reference (slow, for checking).

    Args:
        hidden_states: [T, H]. topk_ids: [T, k]. topk_weights: f32 [T, k].
        w13, w2: int32 [E, row words], packed by a layout.
        attributes: JSON of MoESpec.attributes().

    Returns:
        [T, H], of hidden_states' dtype.
    """
    spec = MoESpec.from_attributes(json.loads(attributes))
    unpack = LAYOUTS[spec.w13.layout].unpack
    rows = [w.numpy().view(np.uint8) for w in (w13, w2)]
    used = set(topk_ids.unique().tolist())
    out = np.zeros(hidden_states.shape)
    for row in range(len(w13)):
        if row + spec.expert_offset in used:
            # one expert at a time: a slice that holds only it, combined in ascending id as the kernels do
            expert = unpack(spec, rows[0][row], rows[1][row])
            ids = torch.where(topk_ids == row + spec.expert_offset, topk_ids, -1).numpy()
            own = json.loads(attributes) | {"expert_offset": row + spec.expert_offset}
            out += reference(
                MoESpec.from_attributes(own), [expert], hidden_states.float().numpy(), ids, topk_weights.numpy()
            )
    return torch.from_numpy(out).to(hidden_states.dtype)


@quant_moe.register_fake
def _(
    hidden_states: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    attributes: str,
) -> torch.Tensor:
    return torch.empty_like(hidden_states)


@cache
def onnx_op() -> Op:
    """The ONNX operator as onnxscript calls it, its schema built from op.def."""
    types = {"T": ("T", ["float", "float16", "bfloat16"]), "I": ("I", ["int32", "int64"])}
    kinds = {"i": OpSchema.AttrType.INT, "f": OpSchema.AttrType.FLOAT}
    schema = OpSchema(
        "QuantMoE",
        DOMAIN,
        op_version("QuantMoE"),
        inputs=[OpSchema.FormalParameter(n, t if t in types else f"tensor({t})") for n, t in inputs("QuantMoE")],
        outputs=[OpSchema.FormalParameter("output", "T")],
        type_constraints=[(n, [f"tensor({t})" for t in names], "") for n, names in types.values()],
        attributes=[
            OpSchema.Attribute(name, kinds.get(kind, OpSchema.AttrType.STRING), "")
            for name, kind in attribute_kinds().items()
        ],
    )
    return Op(Opset(DOMAIN, op_version("QuantMoE")), "QuantMoE", schema)


def onnx_quant_moe(hidden_states: Any, topk_ids: Any, topk_weights: Any, w13: Any, w2: Any, attributes: str) -> Any:
    """The entry of the exporter's translation table for ``quant_moe``."""
    return onnx_op()(hidden_states, topk_ids, topk_weights, w13, w2, **json.loads(attributes))
