"""The C ABI of quant_moe_cuda.h through ctypes: plans and refusals, on any machine."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache

from quantmoe.custom_ops import library_file, native, native_name
from quantmoe.custom_ops.c_calls import checked
from quantmoe.custom_ops.op import LinearSpec, MoESpec, Projection, Spec
from quantmoe.custom_ops.op_def.structs import Shape, Tensor, check_structs, node
from quantmoe.custom_ops.op_def.tensor_shapes import input_shapes

#: whose activations are of the same type
FLOATS = ("bf16", "f16")


_I32 = ctypes.c_int32


TYPES = {"f32": 0, "f16": 1, "bf16": 2}
#: qm_tensor's types of ids
INT32, INT64 = 3, 4


class Device(ctypes.Structure):
    """qm_cuda_device."""

    _fields_ = [("sm", _I32), ("multiprocessors", _I32), ("shared_bytes", _I32)]


H200 = Device(90, 132, 233472)


#: QM_CUDA_PLAN_WORDS
_PLAN_WORDS = 264


class NodePlan(ctypes.Structure):
    """qm_cuda_node_plan."""

    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("workspace_bytes", "slot_bytes", "state_bytes")),
        ("chosen", _I32 * _PLAN_WORDS),
    ]


class NodeCall(ctypes.Structure):
    """qm_cuda_call."""

    _fields_ = [
        ("inputs", ctypes.POINTER(Tensor)),
        ("outputs", ctypes.POINTER(Tensor)),
        *((name, ctypes.c_void_p) for name in ("workspace", "stream", "experts", "peers")),
    ]


@cache
def library() -> ctypes.CDLL:
    """Return the kernels: the library named by QUANTMOE_CUDA_LIBRARY, else the installed one.

    Raises:
        FileNotFoundError: neither is there.
        OSError: it was built from another op.def.
    """
    lib = ctypes.CDLL(library_file("quantmoe.custom_ops", native_name("quantmoe_cuda"), "QUANTMOE_CUDA_LIBRARY"))
    check_structs(lib)
    return lib


def refusal(spec: Spec, lists: bool = False) -> str:
    """Return why the kernels do not run nodes with these attributes, "" when they do.

    The plan of one token on an H200 says it. The library of the CPU kernels has this plan, too.

    Args:
        lists: nodes of CachedAttention have the input ``selected``.
    """
    try:
        _plan_one(spec, H200, native.library(), **({"G": 1, "E": 1} if lists else {}))
    except ValueError as error:
        return str(error)
    return ""


def _plan_one(spec: Spec, device: Device, lib: ctypes.CDLL, **sizes: int) -> NodePlan:
    """Plan a call of one token. sizes: of optional inputs, by their letters."""
    kind, experts = "bf16", 1
    if isinstance(spec, LinearSpec):
        kind = _type_of(spec.w)
    elif isinstance(spec, MoESpec):
        kind = _type_of(spec.w13 if spec.w13.format in FLOATS else spec.w2)
        experts = spec.num_experts - spec.expert_offset
    return plan_node(spec, kind, 1, tokens=1, device=device, lib=lib, experts=experts, **sizes)


def _type_of(weights: Projection) -> str:
    """Return a type of activations that the kernels multiply such weights with."""
    return weights.format if weights.format in FLOATS else "bf16"


def absence(spec: MoESpec | LinearSpec) -> str:
    """Return why this machine does not run nodes that :func:`refusal` takes, "" when it does.

    There is no library, no GPU, or a GPU that the kernels do not run on.
    """
    try:
        device = query()
    except FileNotFoundError:
        return "library not found"
    except OSError as error:
        return f"library cannot be loaded: {error}"
    except ValueError as error:
        return f"compiled, no GPU here ({error})"
    try:
        _plan_one(spec, device, library())
    except ValueError as error:
        return str(error)
    return ""


def query(ordinal: int = 0) -> Device:
    """Return the device as the plan sees it."""
    found = Device()
    checked(library().qm_cuda_query, ordinal, ctypes.byref(found))
    return found


def plan_node(
    spec: Spec,
    dtype: str,
    batch: int,
    *,
    tokens: int,
    device: Device = H200,
    lib: ctypes.CDLL | None = None,
    experts: int = 1,
    **sizes: int,
) -> NodePlan:
    """Plan a call. Pure, needs no GPU.

    Args:
        dtype: "f16" or "bf16" (or "f32", which most refuse).
        batch, tokens: the sizes B and S of op.def, and its "..". sizes: others by their letters; absent: 1.
        lib: the library that plans; None: the CUDA library. experts: of packed weights.

    Raises:
        ValueError: the library's sentence about an attribute or a shape.
    """
    free = {letter: 1 for letter in "HKLMNPR"} | {"B": batch, "S": tokens, "..": [batch, tokens], **sizes}
    return plan_shapes(
        spec, dtype, input_shapes(spec.OPERATOR, spec.attributes(), free), device=device, lib=lib, experts=experts
    )


def plan_shapes(
    spec: Spec,
    dtype: str,
    shapes: Sequence[Sequence[int] | None],
    *,
    device: Device = H200,
    lib: ctypes.CDLL | None = None,
    experts: int = 1,
) -> NodePlan:
    """Plan a call as :func:`plan_node`, for inputs of these shapes."""
    found, given = NodePlan(), tensors(spec, dtype, shapes, experts)
    plan_call(lib or library(), spec.OP, node(native.library(), spec), call=NodeCall(given), device=device, found=found)
    return found


def tensors(
    spec: Spec, dtype: str, shapes: Sequence[Sequence[int] | None], experts: int = 1, id_type: int = INT64
) -> ctypes.Array[Tensor]:
    """Return an operator's inputs without data; optional ones that have no shape are left out."""
    op = spec.OPERATOR
    names = [*op.inputs, *op.optional_inputs]
    types = {"T": TYPES[dtype], "C": TYPES[dtype], "I": id_type}
    found = (Tensor * len(names))(*[Tensor(None, 0, Shape.of(None))] * len(names))
    for tensor, (name, kind), shape in zip(found, names, shapes, strict=False):
        tensor.type = types.get(kind, 0)
        tensor.shape = Shape.of((experts, -1) if op.shapes[name] == "packed" else shape)
    return found


def plan_call(
    lib: ctypes.CDLL, op: str, own: ctypes.Structure, *, call: NodeCall, device: Device, found: ctypes.Structure
) -> None:
    """qm_cuda_plan_node.

    Raises:
        ValueError: the library's sentence about an attribute or a shape.
    """
    checked(lib.qm_cuda_plan_node, op.encode(), *map(ctypes.byref, (own, call, device, found)))
