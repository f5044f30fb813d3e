"""Hyper-connections whose mixing matrix has rows and columns of sum 1 (DeepSeek-V4, GLM-5-Next).

Rows and columns are divided by their sums in turn, 20 times in published models. Traced, these are 40 operations of
each connection. ONNX' Loop has one round as its body.
"""

from __future__ import annotations

from functools import cache
from types import MethodType
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from onnx.defs import OpSchema
from onnxscript.values import Op, Opset


def attach(model: torch.nn.Module) -> None:
    """Make all rounds but the first one a Loop."""
    for module in model.modules():
        own: Any = module
        if hasattr(module, "hc_sinkhorn_iters"):
            own.rounds, own.hc_sinkhorn_iters = own.hc_sinkhorn_iters - 1, 1
            own.forward = MethodType(_forward, module)


def _forward(self: Any, hidden_streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    post, mix, collapsed = type(self).forward(self, hidden_streams)
    return post, torch.ops.quantmoe.balance(mix, self.rounds, self.hc_eps), collapsed


@torch.library.custom_op("quantmoe::balance", mutates_args=())
def balance(mix: torch.Tensor, rounds: int, eps: float) -> torch.Tensor:
    """Return matrices [.., N, N] whose rows, then columns, were divided by their sums plus eps so many times."""
    mix = mix.clone()
    for _ in range(rounds):
        for axis in (-1, -2):
            mix = mix / (mix.sum(axis, keepdim=True) + eps)
    return mix


@balance.register_fake
def _fake(mix: torch.Tensor, rounds: int, eps: float) -> torch.Tensor:
    return torch.empty_like(mix)


@cache
def _loop() -> Op:
    """Return ONNX' Loop of one carried tensor, as onnxscript calls it."""
    types = {"rounds": "tensor(int64)", "condition": "tensor(bool)", "mix": "tensor(float)"}
    own = OpSchema(
        "Loop",
        "",
        16,
        inputs=[OpSchema.FormalParameter(name, type_) for name, type_ in types.items()],
        outputs=[OpSchema.FormalParameter("balanced", "tensor(float)")],
        attributes=[OpSchema.Attribute("body", OpSchema.AttrType.GRAPH, "")],
    )
    return Op(Opset("", 18), "Loop", own)


def _body(eps: float) -> ir.Graph:
    """Return one round: inputs are its number, a condition and the matrices."""
    kinds = {"round": ir.DataType.INT64, "condition": ir.DataType.BOOL, "mix": ir.DataType.FLOAT}
    given = [ir.Value(name=f"balance_{name}", type=ir.TensorType(kind)) for name, kind in kinds.items()]
    given[0].shape = given[1].shape = ir.Shape([])
    nodes: list[ir.Node] = []

    def node(op: str, *inputs: ir.Value, **attributes: Any) -> ir.Value:
        nodes.append(ir.node(op, list(inputs), attributes))
        made = nodes[-1].outputs[0]
        made.name = f"balance_{op.lower()}_{len(nodes)}"
        return made

    small, mix = node("Constant", value=ir.tensor(np.float32(eps))), given[2]
    for axis in (-1, -2):
        axes = node("Constant", value=ir.tensor(np.array([axis])))
        mix = node("Div", mix, node("Add", node("ReduceSum", mix, axes, keepdims=1), small))
    mix.type = ir.TensorType(ir.DataType.FLOAT)
    go_on = node("Identity", given[1])
    go_on.type, go_on.shape = ir.TensorType(ir.DataType.BOOL), ir.Shape([])
    return ir.Graph(given, [go_on, mix], nodes=nodes, name="balance")


def onnx_balance(mix: Any, rounds: int, eps: float) -> Any:
    """Return the entry of the exporter's translation table for ``balance``."""
    from onnxscript.onnx_opset import opset18 as op

    always = op.Constant(value=ir.tensor(np.ones((), bool)))
    return _loop()(op.Constant(value_int=rounds), always, mix, body=_body(eps))


#: for the exporter's translation table
ONNX = {torch.ops.quantmoe.balance.default: onnx_balance}
