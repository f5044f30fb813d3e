"""The operators as ``torch.ops.quantmoe.*``: eager they are reference.py, exported the ONNX nodes."""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import ml_dtypes
import numpy as np
import torch
from onnx.defs import OpSchema
from onnxscript.values import Op, Opset

from quantmoe.custom_ops import nodes
from quantmoe.custom_ops.layouts import LAYOUTS
from quantmoe.custom_ops.op import (
    DOMAIN,
    AttentionSpec,
    LinearSpec,
    MoESpec,
    RouterSpec,
    RoutingSpec,
    RowsSpec,
    attribute_kinds,
    inputs,
    optional_inputs,
    outputs,
)
from quantmoe.custom_ops.reference import attention as reference_attention
from quantmoe.custom_ops.reference import linear as reference_linear
from quantmoe.custom_ops.reference import quant_moe as reference
from quantmoe.custom_ops.reference import route as reference_route
from quantmoe.custom_ops.reference import router as reference_router
from quantmoe.custom_ops.reference import token_rows as reference_rows
from quantmoe.custom_ops.schema import Operator, schema
from quantmoe.custom_ops.tensor_shapes import output_shapes


@torch.library.custom_op("quantmoe::quant_moe", mutates_args=())
def quant_moe(
    hidden_states: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    attributes: str,
) -> torch.Tensor:
    """Compute one mixture-of-experts layer on packed weights, by the float64 reference (slow, for checking).

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


@torch.library.custom_op("quantmoe::quant_linear", mutates_args=())
def quant_linear(x: torch.Tensor, w: torch.Tensor, attributes: str) -> torch.Tensor:
    """Compute one linear on packed weights, by the float64 reference.

    Args:
        x: [.., K]. w: int32 [1, row words]. attributes: JSON of LinearSpec.attributes().

    Returns:
        [.., N], of x's dtype.
    """
    spec = LinearSpec.from_attributes(json.loads(attributes))
    matrix = LAYOUTS[spec.w.layout].unpack_down(spec.moe, w.numpy().view(np.uint8)[0])
    rows = x.float().numpy().reshape(-1, spec.in_features)
    y = reference_linear(rows, matrix, spec.w.activation_format)
    return torch.from_numpy(y).to(x.dtype).reshape(*x.shape[:-1], spec.out_features)


@torch.library.custom_op("quantmoe::moe_routing", mutates_args=())
def moe_routing(
    logits: torch.Tensor, correction_bias: torch.Tensor, attributes: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the experts of each token, by the float64 reference.

    Args:
        logits: [T, spec.logits]. correction_bias: f32 [E]. attributes: JSON of RoutingSpec.attributes().

    Returns:
        ids int32 and weights f32, [T, spec.slots].
    """
    spec = RoutingSpec.from_attributes(json.loads(attributes))
    ids, weights = reference_route(spec, logits.float().numpy(), correction_bias.numpy())
    return torch.from_numpy(ids), torch.from_numpy(weights).float()


@torch.library.custom_op("quantmoe::moe_router", mutates_args=())
def moe_router(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    correction_bias: torch.Tensor,
    attributes: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the experts of each token from its hidden state, by the float64 reference.

    Args:
        hidden_states: [T, H]. weight: [E + shared_gate, H]. bias, correction_bias: f32 as op.def's, or [0] for none.
        attributes: JSON of RouterSpec.attributes().

    Returns:
        ids int32 and weights f32, [T, routing.slots].
    """
    spec = RouterSpec.from_attributes(json.loads(attributes))
    given = (t.float().numpy() for t in (hidden_states, weight, bias, correction_bias))
    ids, weights = reference_router(spec, *given)
    return torch.from_numpy(ids), torch.from_numpy(weights).float()


@torch.library.custom_op("quantmoe::all_reduce", mutates_args=())
def all_reduce(x: torch.Tensor, attributes: str) -> torch.Tensor:
    """Return the sum of all ranks' x, [..].

    Raises:
        NotImplementedError: PyTorch has no other ranks here.
    """
    raise NotImplementedError("quantmoe::all_reduce is for exporting; reference.all_reduce adds what all ranks have")


@torch.library.custom_op("quantmoe::all_gather", mutates_args=())
def all_gather(x: torch.Tensor, attributes: str) -> torch.Tensor:
    """Return all ranks' x, [.., N] or for axis 0 [N, ..], one after the other, [.., world N] or [world N, ..].

    Raises:
        NotImplementedError: PyTorch has no other ranks here.
    """
    raise NotImplementedError("quantmoe::all_gather is for exporting; reference.all_gather joins what all ranks have")


@torch.library.custom_op("quantmoe::token_rows", mutates_args=())
def token_rows(
    past_key: torch.Tensor, input_ids: torch.Tensor, attention_mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """CachedAttention's rows and each row's last token, by the reference.

    Args:
        past_key: [B, heads, P, D]. input_ids: [B, S]. attention_mask: int64 [B, L].

    Returns:
        rows int32 [B, 3], last int64 [B, 1, 1].
    """
    rows, last = reference_rows(attention_mask.numpy(), input_ids.shape[1], past_key.shape[2])
    return torch.from_numpy(rows), torch.from_numpy(last)


@torch.library.custom_op("quantmoe::cached_attention", mutates_args=())
def cached_attention(
    qkv: torch.Tensor,
    past_key: torch.Tensor,
    past_value: torch.Tensor,
    rows: torch.Tensor,
    attention_mask: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_norm: torch.Tensor,
    k_norm: torch.Tensor,
    sinks: torch.Tensor,
    attributes: str,
    k_up: torch.Tensor | None = None,
    v_up: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attention of new tokens over a cache and themselves, by the float64 reference.

    Args:
        qkv: [B, S, (num_heads + kv_num_heads) * D + kv_num_heads * V], gated: num_heads * V more before.
        past_key, past_value: [B, kv_num_heads, P, D] and [.., V], one type.
        rows: int32 [B, 3]: the first new token that counts, how many do, tokens in the cache before them.
        attention_mask: int64 [B, L]; only L is read.
        cos, sin: f32 [B, S, rotary_size / 2].
        q_norm, k_norm: f32, [0], [D] or [heads * D], by qk_norm.
        sinks: f32 [num_heads], -infinity for none.
        attributes: JSON of AttentionSpec.attributes().
        k_up, v_up: with a nope_size, of qkv's dtype, [num_heads, nope_size, V] and [num_heads, V, out_size].

    Returns:
        output [B, S, num_heads * V], or out_size for V, of qkv's dtype; present_key and present_value, past's with
        max(P, L) slots.
    """
    spec = AttentionSpec.from_attributes(json.loads(attributes))
    x, *caches = (t.float().numpy() for t in (qkv, past_key, past_value))
    # NumPy has no bfloat16: what the reference stores, it rounds as the cache's type does
    dtype = ml_dtypes.bfloat16 if past_key.dtype == torch.bfloat16 else past_key.new_empty(0).numpy().dtype
    key, value = (cache.astype(dtype) for cache in caches)
    others = [t.numpy() for t in (cos, sin, q_norm, k_norm, sinks)]
    others += [t.float().numpy() for t in (k_up, v_up) if t is not None]
    output, *present = reference_attention(spec, x, key, value, rows.numpy(), attention_mask.shape[1], *others)
    new_key, new_value = (torch.from_numpy(cache.astype(np.float32)).to(past_key.dtype) for cache in present)
    return torch.from_numpy(output).to(qkv.dtype), new_key, new_value


def output_types(operator: Operator, inputs: Sequence[torch.Tensor]) -> list[torch.dtype]:
    """Return the types of a node's outputs, as op.def states them."""
    types = {"float": torch.float32, "int32": torch.int32, "int64": torch.int64}
    for (_, type_), tensor in zip(operator.inputs, inputs, strict=False):
        types.setdefault(type_, tensor.dtype)
    return [types[type_] for _, type_ in operator.outputs]


def _add_shapes(custom_op: Any, operator: Operator) -> None:
    """Give an operator of torch the outputs' shapes and types that op.def states."""

    def fake(*given: Any, **named: Any) -> Any:
        values = (*given, *named.values())
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        attributes: dict[str, Any] = next((json.loads(value) for value in values if isinstance(value, str)), {})
        shapes = output_shapes(operator, attributes, [tensor.shape for tensor in tensors], torch.sym_max)
        types = output_types(operator, tensors)
        made = [tensors[0].new_empty(shape, dtype=type_) for shape, type_ in zip(shapes, types, strict=True)]
        return made[0] if len(made) == 1 else tuple(made)

    custom_op.register_fake(fake)


for custom_op, op in (
    (quant_moe, "QuantMoE"),
    (quant_linear, "QuantLinear"),
    (moe_routing, "MoERouting"),
    (moe_router, "MoERouter"),
    (all_reduce, "AllReduce"),
    (all_gather, "AllGather"),
    (token_rows, "TokenRows"),
    (cached_attention, "CachedAttention"),
):
    _add_shapes(custom_op, schema().operators[op])


@cache
def onnx_op(op: str) -> Op:
    """Return an ONNX operator as onnxscript calls it, its schema built from op.def. The domain stays at version 1: a
    node's own is its op_version."""
    floats = ["float", "float16", "bfloat16"]
    types = {"T": ("T", floats), "C": ("C", floats), "I": ("I", ["int32", "int64"])}
    kinds = {"i": OpSchema.AttrType.INT, "f": OpSchema.AttrType.FLOAT}

    def formal(values: tuple[tuple[str, str], ...], **option: Any) -> list[OpSchema.FormalParameter]:
        return [OpSchema.FormalParameter(n, t if t in types else f"tensor({t})", **option) for n, t in values]

    used = {t for _, t in [*inputs(op), *outputs(op)]}
    own = OpSchema(
        op,
        DOMAIN,
        1,
        inputs=formal(inputs(op)) + formal(optional_inputs(op), param_option=OpSchema.FormalParameterOption.Optional),
        outputs=formal(outputs(op)),
        type_constraints=[(n, [f"tensor({t})" for t in names], "") for n, names in types.values() if n in used],
        attributes=[
            OpSchema.Attribute(name, kinds.get(kind, OpSchema.AttrType.STRING), "")
            for name, kind in attribute_kinds(op).items()
        ],
    )
    return Op(Opset(DOMAIN, 1), op, own)


def onnx_quant_moe(hidden_states: Any, topk_ids: Any, topk_weights: Any, w13: Any, w2: Any, attributes: str) -> Any:
    return onnx_op("QuantMoE")(hidden_states, topk_ids, topk_weights, w13, w2, **json.loads(attributes))


def onnx_quant_linear(x: Any, w: Any, attributes: str) -> Any:
    return onnx_op("QuantLinear")(x, w, **json.loads(attributes))


def onnx_moe_routing(logits: Any, correction_bias: Any, attributes: str) -> Any:
    return onnx_op("MoERouting")(logits, correction_bias, **json.loads(attributes))


def onnx_moe_router(hidden_states: Any, weight: Any, bias: Any, correction_bias: Any, attributes: str) -> Any:
    return onnx_op("MoERouter")(hidden_states, weight, bias, correction_bias, **json.loads(attributes))


def onnx_all_reduce(x: Any, attributes: str) -> Any:
    """Return the entry of the exporter's translation table for ``all_reduce``."""
    return onnx_op("AllReduce")(x, **json.loads(attributes))


def onnx_all_gather(x: Any, attributes: str) -> Any:
    return onnx_op("AllGather")(x, **json.loads(attributes))


def onnx_token_rows(past_key: Any, input_ids: Any, attention_mask: Any) -> Any:
    return onnx_op("TokenRows")(past_key, input_ids, attention_mask, **RowsSpec().attributes())


def onnx_cached_attention(
    qkv: Any,
    past_key: Any,
    past_value: Any,
    rows: Any,
    attention_mask: Any,
    cos: Any,
    sin: Any,
    q_norm: Any,
    k_norm: Any,
    sinks: Any,
    attributes: str,
    k_up: Any = None,
    v_up: Any = None,
) -> Any:
    given = [qkv, past_key, past_value, rows, attention_mask, cos, sin, q_norm, k_norm, sinks]
    given += [] if k_up is None else [k_up, v_up]
    return onnx_op("CachedAttention")(*given, **json.loads(attributes))


#: the exporter's translation table: operator of torch -> a function that makes its node
ONNX = {
    torch.ops.quantmoe.quant_moe.default: onnx_quant_moe,
    torch.ops.quantmoe.quant_linear.default: onnx_quant_linear,
    torch.ops.quantmoe.cached_attention.default: onnx_cached_attention,
    torch.ops.quantmoe.moe_routing.default: onnx_moe_routing,
    torch.ops.quantmoe.moe_router.default: onnx_moe_router,
    torch.ops.quantmoe.token_rows.default: onnx_token_rows,
    torch.ops.quantmoe.all_reduce.default: onnx_all_reduce,
    torch.ops.quantmoe.all_gather.default: onnx_all_gather,
}


def define(operator: Operator) -> None:
    """Define an operator of torch by op.def and ``reference``, its function in ops/<operator>.py, and its ONNX node."""
    name, spec = operator.snake, getattr(nodes, operator.name)
    reference = getattr(import_module(f"quantmoe.custom_ops.ops.{name}"), name)
    tensors = [tensor for tensor, _ in operator.inputs]
    given = ", ".join(f"Tensor {tensor}" for tensor in tensors)
    schema = f"({given}, str attributes) -> ({', '.join('Tensor' for _ in operator.outputs)})"

    @torch.library.custom_op(f"quantmoe::{name}", mutates_args=(), schema=schema)
    def run(*given: Any) -> Any:
        *inputs, attributes = given
        arrays = [tensor.float().numpy() if tensor.is_floating_point() else tensor.numpy() for tensor in inputs]
        found = reference(spec.from_attributes(json.loads(attributes)), *arrays)
        made = found if isinstance(found, tuple) else (found,)
        types = output_types(operator, inputs)
        results = tuple(torch.from_numpy(array).to(type_) for array, type_ in zip(made, types, strict=True))
        return results if len(results) > 1 else results[0]

    _add_shapes(run, operator)

    def node(*given: Any, **named: Any) -> Any:
        values = signature.bind(*given, **named).arguments
        return onnx_op(operator.name)(*(values[tensor] for tensor in tensors), **json.loads(values["attributes"]))

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    signature = inspect.Signature([inspect.Parameter(parameter, kind) for parameter in (*tensors, "attributes")])
    node.__name__, node.__signature__ = f"onnx_{name}", signature  # type: ignore[attr-defined]
    node.__annotations__ = {"attributes": str}  # an attribute to torch.onnx, the others are values
    ONNX[getattr(torch.ops.quantmoe, name).default] = node


for operator in schema().operators.values():
    if find_spec(f"quantmoe.custom_ops.ops.{operator.snake}"):
        define(operator)
