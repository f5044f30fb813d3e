"""The operators as ``torch.ops.quantmoe.*``: eager they are the float64 references, exported the ONNX nodes.

Inputs, outputs, shapes and types are op.def's. ``attributes`` is JSON of the attributes. Optional inputs come after it.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import ml_dtypes
import numpy as np
import torch
from onnx.defs import OpSchema
from onnxscript.values import Op, Opset

from quantmoe.custom_ops import reference
from quantmoe.custom_ops.layouts import LAYOUTS
from quantmoe.custom_ops.op import (
    DOMAIN,
    AttentionSpec,
    LinearSpec,
    MoESpec,
    RouterSpec,
    RoutingSpec,
    attribute_kinds,
    inputs,
    optional_inputs,
    outputs,
)
from quantmoe.custom_ops.op_def import nodes
from quantmoe.custom_ops.op_def.schema import Operator, schema
from quantmoe.custom_ops.op_def.tensor_shapes import output_shapes

#: (attributes, inputs) -> outputs: one tensor or a tuple
Run = Callable[..., Any]
#: nodes' attributes that have more than op.def says
SPECS: dict[str, Any] = {spec.OP: spec for spec in (MoESpec, LinearSpec, RoutingSpec, RouterSpec, AttentionSpec)}


def quant_moe(
    spec: MoESpec, x: torch.Tensor, topk_ids: torch.Tensor, weights: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor
) -> torch.Tensor:
    """Compute one mixture-of-experts layer on packed weights."""
    unpack = LAYOUTS[spec.w13.layout].unpack
    rows = [w.numpy().view(np.uint8) for w in (w13, w2)]
    used = set(topk_ids.unique().tolist())
    out = np.zeros(x.shape)
    for row in range(len(w13)):
        if row + spec.expert_offset in used:
            # one expert at a time: a slice that holds only it, combined in ascending id as the kernels do
            expert = unpack(spec, rows[0][row], rows[1][row])
            ids = torch.where(topk_ids == row + spec.expert_offset, topk_ids, -1).numpy()
            own = MoESpec.from_attributes(spec.attributes() | {"expert_offset": row + spec.expert_offset})
            out += reference.quant_moe(own, [expert], x.float().numpy(), ids, weights.numpy())
    return torch.from_numpy(out).to(x.dtype)


def quant_linear(spec: LinearSpec, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Compute one linear on packed weights."""
    matrix = LAYOUTS[spec.w.layout].unpack_down(spec.moe, w.numpy().view(np.uint8)[0])
    y = reference.linear(x.float().numpy().reshape(-1, spec.in_features), matrix, spec.w.activation_format)
    return torch.from_numpy(y).to(x.dtype).reshape(*x.shape[:-1], spec.out_features)


def token_rows(
    _: Any, past_key: np.ndarray, input_ids: np.ndarray, mask: np.ndarray, num_logits: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return CachedAttention's rows, and each row's last tokens."""
    most = 1 if num_logits is None else int(num_logits[0])
    return reference.token_rows(mask, input_ids.shape[1], past_key.shape[2], most)


def cached_attention(
    spec: AttentionSpec,
    qkv: torch.Tensor,
    past_key: torch.Tensor,
    past_value: torch.Tensor,
    rows: torch.Tensor,
    attention_mask: torch.Tensor,
    *others: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    """Attend over a cache and the new tokens."""
    x, *caches = (t.float().numpy() for t in (qkv, past_key, past_value))
    # NumPy has no bfloat16: what the reference stores, it rounds as the cache's type does
    dtype = ml_dtypes.bfloat16 if past_key.dtype == torch.bfloat16 else past_key.new_empty(0).numpy().dtype
    key, value = (cache.astype(dtype) for cache in caches)
    given: list[Any] = [t if t is None else t.float().numpy() if t.is_floating_point() else t.numpy() for t in others]
    output, *present = reference.attention(spec, x, key, value, rows.numpy(), attention_mask.shape[1], *given)
    made = (torch.from_numpy(cache.astype(np.float32)).to(past_key.dtype) for cache in present)
    return torch.from_numpy(output).to(qkv.dtype), *made


def in_numpy(operator: Operator, function: Run) -> Run:
    """Return a reference in NumPy as a function of tensors."""

    def run(spec: Any, *tensors: torch.Tensor) -> Any:
        arrays = (tensor.float().numpy() if tensor.is_floating_point() else tensor.numpy() for tensor in tensors)
        found = function(spec, *arrays)
        made = found if isinstance(found, tuple) else (found,)
        types = output_types(operator, tensors)
        results = tuple(torch.from_numpy(array).to(type_) for array, type_ in zip(made, types, strict=True))
        return results if len(results) > 1 else results[0]

    return run


def of_other_ranks(name: str) -> Run:
    """Return a function that refuses to run: PyTorch has no other ranks here."""

    def run(spec: Any, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError(f"quantmoe::{name} is for exporting; reference.{name} takes what all ranks have")

    return run


def output_types(operator: Operator, inputs: Sequence[torch.Tensor]) -> list[torch.dtype]:
    """Return the types of a node's outputs, as op.def states them."""
    types = {"float": torch.float32, "int32": torch.int32, "int64": torch.int64}
    for (_, type_), tensor in zip(operator.inputs, inputs, strict=False):
        types.setdefault(type_, tensor.dtype)
    return [types[type_] for _, type_ in operator.outputs]


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


#: the exporter's translation table: operator of torch -> a function that makes its node
ONNX: dict[Any, Callable[..., Any]] = {}


def define(operator: Operator, run: Run) -> None:
    """Define an operator of torch by op.def and the function that computes it, and its ONNX node."""
    name, spec = operator.snake, SPECS.get(operator.name) or getattr(nodes, operator.name)
    required = [tensor for tensor, _ in operator.inputs]
    optional = [tensor for tensor, _ in operator.optional_inputs]
    names = [*required, "attributes", *optional]
    host_sizes = {name: [*required, *optional].index(name) for name in operator.host_sizes}
    given = [f"Tensor {tensor}" for tensor in required] + ["str attributes"]
    given += [f"Tensor? {tensor}=None" for tensor in optional]

    def split(values: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        at = names.index("attributes")
        tensors = [*values[:at], *values[at + 1 :]]
        while tensors[-1] is None:
            tensors.pop()
        return tensors, json.loads(values[at])

    @torch.library.custom_op(
        f"quantmoe::{name}",
        mutates_args=(),
        schema=f"({', '.join(given)}) -> ({', '.join('Tensor' for _ in operator.outputs)})",
    )
    def call(*values: Any) -> Any:
        tensors, attributes = split(values)
        return run(spec.from_attributes(attributes), *tensors)

    @call.register_fake
    def _(*values: Any) -> Any:
        tensors, attributes = split(values)
        given = [None if tensor is None else tensor.shape for tensor in tensors]
        numbers = {name: tensors[at].item() for name, at in host_sizes.items() if at < len(tensors)}
        shapes = output_shapes(
            operator, attributes, given, largest=torch.sym_max, smallest=torch.sym_min, host_sizes=numbers
        )
        types = output_types(operator, tensors)
        made = [tensors[0].new_empty(shape, dtype=type_) for shape, type_ in zip(shapes, types, strict=True)]
        return made[0] if len(made) == 1 else tuple(made)

    def node(*values: Any, **named: Any) -> Any:
        tensors, attributes = split([*signature.bind(*values, **named).arguments.values()])
        return onnx_op(operator.name)(*tensors, **attributes)

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    signature = inspect.Signature(
        [inspect.Parameter(n, kind, default=None if n in optional else inspect.Parameter.empty) for n in names]
    )
    node.__name__, node.__signature__ = f"onnx_{name}", signature  # type: ignore[attr-defined]
    node.__annotations__ = {"attributes": str}  # an attribute to torch.onnx, the others are values
    ONNX[getattr(torch.ops.quantmoe, name).default] = node


def _define_all() -> None:
    own: dict[str, Run] = {"QuantMoE": quant_moe, "QuantLinear": quant_linear, "CachedAttention": cached_attention}
    references: dict[str, Run] = {"MoERouting": reference.route, "MoERouter": reference.router, "TokenRows": token_rows}
    for name, operator in schema().operators.items():
        module = f"quantmoe.custom_ops.ops.{operator.snake}"
        if find_spec(module):
            define(operator, in_numpy(operator, getattr(import_module(module), operator.snake)))
        elif name in references:
            define(operator, in_numpy(operator, references[name]))
        elif name in own:
            define(operator, own[name])
        elif name in ("AllReduce", "AllGather"):
            define(operator, of_other_ranks(operator.snake))


_define_all()
