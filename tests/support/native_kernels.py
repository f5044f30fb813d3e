"""Kernels of quant_moe.h on NumPy arrays, without an engine. Tests run them."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from quantmoe.custom_ops.native import TYPES, aligned, kernels, library, row_of  # noqa: F401 - for those who import this
from quantmoe.custom_ops.op import (
    AttentionSpec,
    ConvSpec,
    DeltaSpec,
    LinearSpec,
    MoESpec,
    RoutingSpec,
    SpaceSpec,
    Spec,
    inputs,
    optional_inputs,
    outputs,
)
from quantmoe.custom_ops.structs import ERROR_SIZE, checked, node
from quantmoe.custom_ops.tensor_shapes import output_shapes


def _call(name: str, op: str, *shape: tuple[str, Any]) -> type[ctypes.Structure]:
    """Return the C struct of a call: types and sizes, op.def's tensors but the mask, of which only the length is read,
    and what all calls have."""
    tensors = [name for name, _ in (*inputs(op), *optional_inputs(op), *outputs(op)) if name != "attention_mask"]
    fields = [
        ("type", ctypes.c_int),
        *shape,
        *((tensor, ctypes.c_void_p) for tensor in (*tensors, "workspace")),
        ("lanes", ctypes.c_int),
        ("parallel_for", ctypes.c_void_p),
        ("parallel_context", ctypes.c_void_p),
    ]
    return type(name, (ctypes.Structure,), {"_fields_": fields + [("experts", ctypes.c_void_p)] * (op == "QuantMoE")})


def _sizes(*names: str) -> list[tuple[str, Any]]:
    return [(name, ctypes.c_int64) for name in names]


_Call = _call("_Call", "QuantMoE", ("id_bytes", ctypes.c_int), *_sizes("tokens", "top_k", "local_experts"))


_LinearCall = _call("_LinearCall", "QuantLinear", *_sizes("rows"))


_RoutingCall = _call("_RoutingCall", "MoERouting", *_sizes("tokens"))


_AttentionCall = _call(
    "_AttentionCall",
    "CachedAttention",
    ("cache_type", ctypes.c_int),
    *_sizes("batch", "tokens", "past_slots", "slots", "blocks", "positions"),
)


_ConvCall = _call("_ConvCall", "CausalConv", *_sizes("batch", "tokens"))


_DeltaCall = _call("_DeltaCall", "GatedDelta", *_sizes("batch", "tokens"))


_SpaceCall = _call("_SpaceCall", "StateSpace", *_sizes("batch", "tokens"))


class NativeMoE:
    """A QuantMoE layer run straight through the C ABI, as the engines do.

    Args:
        spec: the node's attributes.
        w13, w2: uint8 [E, row bytes], rows as packed by the layout, 64-byte aligned.

    Raises:
        ValueError: with the C ABI's message, when the attributes or shapes are not valid.
    """

    def __init__(self, spec: MoESpec, w13: np.ndarray, w2: np.ndarray):
        self.w13, self.w2, self.spec = w13, w2, spec
        self._lib = library()
        self._moe = ctypes.byref(node(self._lib, spec))
        shapes = [(ctypes.c_int64 * 2)(len(w), w.shape[1] // 4) for w in (w13, w2)]
        checked(self._lib.qm_moe_validate, self._moe, *shapes)

    @property
    def kernel(self) -> str:
        """Name of the kernel this machine selects."""
        err = ctypes.create_string_buffer(ERROR_SIZE)
        return self._lib.qm_kernel_selected(self._moe, err).decode()

    def __call__(
        self,
        hidden: np.ndarray,
        topk_ids: np.ndarray,
        topk_weights: np.ndarray,
        lanes: int = 1,
        buffer: Callable[[int], np.ndarray] | None = None,
    ) -> np.ndarray:
        """hidden [T, H] f32, f16 or bf16; topk_ids [T, k] int32 or int64; topk_weights [T, k] f32 -> [T, H].

        buffer: gives uint8 [size] memory, 64-byte aligned, for the output and the workspace.
        """
        buffer = buffer or aligned
        hidden, topk_ids = np.ascontiguousarray(hidden), np.ascontiguousarray(topk_ids)
        topk_weights = np.ascontiguousarray(topk_weights, np.float32)
        output = buffer(hidden.nbytes).view(hidden.dtype).reshape(hidden.shape)
        call = _Call(
            TYPES[hidden.dtype],
            topk_ids.dtype.itemsize,
            *topk_ids.shape,
            len(self.w13),
            hidden.ctypes.data,
            topk_ids.ctypes.data,
            topk_weights.ctypes.data,
            self.w13.ctypes.data,
            self.w2.ctypes.data,
            output.ctypes.data,
            None,
            *_threads(lanes),
        )
        workspace = buffer(self._lib.qm_moe_workspace(self._moe, ctypes.byref(call)))
        call.workspace = workspace.ctypes.data
        checked(self._lib.qm_moe_run, self._moe, ctypes.byref(call))
        return output


class NativeLinear:
    """A QuantLinear node run straight through the C ABI.

    Args:
        spec: the node's attributes.
        w: uint8 [1, row bytes], packed by the layout, 64-byte aligned.

    Raises:
        ValueError: with the C ABI's message.
    """

    def __init__(self, spec: LinearSpec, w: np.ndarray):
        self.w, self.spec = w, spec
        self._lib = library()
        self._linear = ctypes.byref(node(self._lib, spec))
        shape = (ctypes.c_int64 * 2)(len(w), w.shape[1] // 4)
        checked(self._lib.qm_linear_validate, self._linear, shape)

    def __call__(self, x: np.ndarray, lanes: int = 1) -> np.ndarray:
        """x [T, K] f32, f16 or bf16 -> [T, N]."""
        x = np.ascontiguousarray(x)
        y = np.empty((len(x), self.spec.out_features), x.dtype)
        call = _LinearCall(
            TYPES[x.dtype], len(x), x.ctypes.data, self.w.ctypes.data, y.ctypes.data, None, *_threads(lanes)
        )
        workspace = aligned(self._lib.qm_linear_workspace(self._linear, ctypes.byref(call)))
        call.workspace = workspace.ctypes.data
        checked(self._lib.qm_linear_run, self._linear, ctypes.byref(call))
        return y


def route(
    spec: RoutingSpec, logits: np.ndarray, correction_bias: np.ndarray | None = None, lanes: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """MoERouting through the C ABI: logits [T, logits] f32, f16 or bf16 -> ids int32, weights f32, [T, slots].

    Raises:
        ValueError: with the C ABI's message.
    """
    lib = library()
    routing = ctypes.byref(node(lib, spec))
    checked(lib.qm_routing_validate, routing)
    logits = np.ascontiguousarray(logits)
    bias = np.zeros(spec.num_experts, np.float32) if correction_bias is None else correction_bias.astype(np.float32)
    ids, weights = (np.empty((len(logits), spec.slots), dtype) for dtype in (np.int32, np.float32))
    pointers = (a.ctypes.data for a in (logits, bias, ids, weights))
    call = _RoutingCall(TYPES[logits.dtype], len(logits), *pointers, None, *_threads(lanes))
    workspace = aligned(lib.qm_routing_workspace(routing, ctypes.byref(call)))
    call.workspace = workspace.ctypes.data
    checked(lib.qm_routing_run, routing, ctypes.byref(call))
    return ids, weights


def attention(
    spec: AttentionSpec,
    qkv: np.ndarray,
    past: tuple[np.ndarray, np.ndarray],
    rows: np.ndarray,
    length: int,
    cos: np.ndarray,
    sin: np.ndarray,
    q_norm: np.ndarray,
    k_norm: np.ndarray,
    sinks: np.ndarray,
    ups: tuple[np.ndarray, np.ndarray] | None = None,
    block_table: np.ndarray | None = None,
    lanes: int = 1,
    present: tuple[np.ndarray, np.ndarray] | None = None,
    buffer: Callable[[int], np.ndarray] | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """CachedAttention through the C ABI.

    Args:
        qkv: [B, S, ..] f32, f16 or bf16. length: L, attention_mask's.
        past: keys and values [B, kv_num_heads, P, ..], f32 or f16, or codes by the spec's cache_format.
        ups: k_up and v_up of qkv's type, where the spec has a nope_size.
        block_table: int32 [R, M], where the spec has a block_size; past is then [N, block_size, kv_num_heads, ..].
        present: where keys and values go, of max(P, L) slots or past's blocks; past itself: in place.
        buffer: as NativeMoE's.

    Returns:
        output of qkv's type, present_key and present_value of past's.

    Raises:
        ValueError: with the C ABI's message.
    """
    lib = library()
    buffer = buffer or aligned
    attention = ctypes.byref(node(lib, spec))
    checked(lib.qm_attention_validate, attention)
    batch, tokens, _ = qkv.shape
    blocks, columns = (0, 0) if block_table is None else (past[0].shape[0], block_table.shape[1])
    before = past[0].shape[2] if block_table is None else columns * spec.block_size
    slots = max(before, length) if block_table is None else before
    shapes = [(*c.shape[:2], slots, c.shape[3]) if block_table is None else c.shape for c in past]

    def empty(like: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        return buffer(math.prod(shape) * like.itemsize).view(like.dtype).reshape(shape)

    output = empty(qkv, (batch, tokens, spec.num_heads * spec.output_size))
    key, value = present or map(empty, past, shapes)
    floats = (np.ascontiguousarray(a, np.float32) for a in (cos, sin, q_norm, k_norm, sinks))
    given = [*(np.ascontiguousarray(a) for a in (qkv, *past)), np.ascontiguousarray(rows, np.int32), *floats]
    given += [np.ascontiguousarray(a, qkv.dtype) for a in ups or (qkv[:0], qkv[:0])]
    given.append(np.ascontiguousarray(rows[:0] if block_table is None else block_table, np.int32))
    call = _AttentionCall(
        TYPES[qkv.dtype],
        TYPES.get(past[0].dtype, 0),
        batch if block_table is None else len(block_table),
        tokens,
        before,
        slots,
        blocks,
        cos.shape[0],
        *(a.ctypes.data for a in [*given, output, key, value]),
        None,
        *_threads(lanes),
    )
    workspace = buffer(lib.qm_attention_workspace(attention, ctypes.byref(call)))
    call.workspace = workspace.ctypes.data
    checked(lib.qm_attention_run, attention, ctypes.byref(call))
    return output, key, value


def conv(
    spec: ConvSpec,
    x: np.ndarray,
    weight: np.ndarray,
    bias: np.ndarray,
    past: np.ndarray,
    rows: np.ndarray,
    lanes: int = 1,
    present: np.ndarray | None = None,
    buffer: Callable[[int], np.ndarray] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """CausalConv through the C ABI.

    Args:
        x: [B, S, C or x_size] f32, f16 or bf16. past: [B, C, W - 1] of x's type, with a state_window of N > 1
            [N, B, C, W - 1].
        present: where the state goes; past itself: in place. buffer: as NativeMoE's.

    Returns:
        y and present_conv, of x's type.

    Raises:
        ValueError: with the C ABI's message.
    """
    floats = [np.ascontiguousarray(a, np.float32) for a in (weight, bias)]
    given = [np.ascontiguousarray(x), *floats, np.ascontiguousarray(past), np.ascontiguousarray(rows, np.int32)]
    return _stateful("conv", _ConvCall, spec, given, present, lanes, buffer)


def delta(
    spec: DeltaSpec,
    qkv: np.ndarray,
    a: np.ndarray,
    b: np.ndarray,
    z: np.ndarray,
    a_log: np.ndarray,
    dt_bias: np.ndarray,
    norm: np.ndarray,
    past: np.ndarray,
    rows: np.ndarray,
    lanes: int = 1,
    present: np.ndarray | None = None,
    buffer: Callable[[int], np.ndarray] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """GatedDelta through the C ABI.

    Args:
        qkv: [B, S, 2 G K + H V], a, b, z (as wide as the attributes say): of one type, f32, f16 or bf16.
        past: f32 [B, H, K, V] or [N, B, H, K, V].
        present, buffer: as :func:`conv`'s.

    Returns:
        y of qkv's type and present_state f32.

    Raises:
        ValueError: with the C ABI's message.
    """
    floats = [np.ascontiguousarray(t, np.float32) for t in (a_log, dt_bias, norm)]
    given = [*(np.ascontiguousarray(t) for t in (qkv, a, b, z)), *floats, np.ascontiguousarray(past)]
    given.append(np.ascontiguousarray(rows, np.int32))
    return _stateful("delta", _DeltaCall, spec, given, present, lanes, buffer)


def space(
    spec: SpaceSpec,
    xbc: np.ndarray,
    dt: np.ndarray,
    z: np.ndarray,
    a_log: np.ndarray,
    dt_bias: np.ndarray,
    d: np.ndarray,
    norm: np.ndarray,
    past: np.ndarray,
    rows: np.ndarray,
    lanes: int = 1,
    present: np.ndarray | None = None,
    buffer: Callable[[int], np.ndarray] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """StateSpace through the C ABI.

    Args:
        xbc: [B, S, H P + 2 G N], dt, z (as wide as the attributes say): of one type, f32, f16 or bf16.
        past: f32 [B, H, N, P], with a state_window of W > 1 [W, B, H, N, P].
        present, buffer: as :func:`conv`'s.

    Returns:
        y of xbc's type and present_state f32.

    Raises:
        ValueError: with the C ABI's message.
    """
    floats = [np.ascontiguousarray(t, np.float32) for t in (a_log, dt_bias, d, norm)]
    given = [*(np.ascontiguousarray(t) for t in (xbc, dt, z)), *floats, np.ascontiguousarray(past)]
    given.append(np.ascontiguousarray(rows, np.int32))
    return _stateful("space", _SpaceCall, spec, given, present, lanes, buffer)


def _stateful(
    name: str,
    call_type: type[ctypes.Structure],
    spec: Spec,
    given: list[np.ndarray],
    present: np.ndarray | None,
    lanes: int,
    buffer: Callable[[int], np.ndarray] | None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return output, of the first input's type, and state of a call whose inputs end with a state and ``rows``."""
    lib = library()
    buffer = buffer or aligned
    spec_node = ctypes.byref(node(lib, spec))
    checked(getattr(lib, f"qm_{name}_validate"), spec_node)
    x, past = given[0], given[-2]
    shape, _ = output_shapes(spec.OPERATOR, spec.attributes(), [array.shape for array in given])
    y = buffer(math.prod(shape) * x.itemsize).view(x.dtype).reshape(shape)
    if present is None:
        present = buffer(past.nbytes).view(past.dtype).reshape(past.shape)
    pointers = [array.ctypes.data if array.size else None for array in [*given, y, present]]
    call = call_type(TYPES[x.dtype], *shape[:2], *pointers, None, *_threads(lanes))
    workspace = buffer(getattr(lib, f"qm_{name}_workspace")(spec_node, ctypes.byref(call)))
    call.workspace = workspace.ctypes.data  # type: ignore[attr-defined]
    checked(getattr(lib, f"qm_{name}_run"), spec_node, ctypes.byref(call))
    return y, present


def workspace(
    spec: MoESpec | LinearSpec | RoutingSpec,
    tokens: int,
    lanes: int = 1,
    dtype: np.dtype | type = np.float32,
    top_k: int = 1,
    local_experts: int = 1,
) -> int:
    """Return the bytes that a call of ``tokens`` rows of ``dtype`` needs beside its tensors; experts: of QuantMoE."""
    lib = library()
    kind = TYPES[np.dtype(dtype)]
    call: ctypes.Structure
    if isinstance(spec, MoESpec):
        call, size = _Call(kind, 4, tokens, top_k, local_experts), lib.qm_moe_workspace
    elif isinstance(spec, LinearSpec):
        call, size = _LinearCall(kind, tokens), lib.qm_linear_workspace
    else:
        call, size = _RoutingCall(kind, tokens), lib.qm_routing_workspace
    call.lanes, call.parallel_for, _ = _threads(lanes)
    return size(ctypes.byref(node(lib, spec)), ctypes.byref(call))


def _threads(lanes: int) -> tuple[int, object, None]:
    """lanes, parallel_for and parallel_context of a call."""
    return lanes, ctypes.cast(library().qm_parallel_threads, ctypes.c_void_p) if lanes > 1 else None, None


class _Shape(ctypes.Structure):
    _fields_ = [("rank", ctypes.c_int32), ("sizes", ctypes.c_int64 * 8)]


def infer_shapes(spec: Spec, shapes: Sequence[Sequence[int] | None]) -> list[list[int]]:
    """Return the shapes of a node's outputs, by the library's reading of op.def.

    Args:
        shapes: of the inputs, in order; None for an optional one that is left out. A size of -1 is not known.

    Raises:
        ValueError: an input cannot have its shape, with the library's words.
    """
    lib, given = (
        library(),
        (_Shape * len(shapes))(
            *(_Shape(-1) if s is None else _Shape(len(s), (ctypes.c_int64 * 8)(*s)) for s in shapes)
        ),
    )
    found = (_Shape * len(spec.OPERATOR.outputs))()
    checked(lib.qm_infer_shapes, spec.OP.encode(), ctypes.byref(node(lib, spec)), given, len(shapes), found)
    return [list(s.sizes[: s.rank]) for s in found]
