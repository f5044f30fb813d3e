"""Kernels of quant_moe.h on NumPy arrays, without an engine. Tests run them."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from quantmoe.custom_ops.c_calls import ERROR_SIZE, checked
from quantmoe.custom_ops.native import TYPES, aligned, kernels, library, row_of  # noqa: F401 - for those who import this
from quantmoe.custom_ops.op import (
    AttentionSpec,
    LinearSpec,
    MoESpec,
    RoutingSpec,
    Spec,
    inputs,
    optional_inputs,
    outputs,
)
from quantmoe.custom_ops.structs import Shape, Tensor, node
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


_AttentionCall = _call(
    "_AttentionCall",
    "CachedAttention",
    ("cache_type", ctypes.c_int),
    *_sizes("batch", "tokens", "past_slots", "slots", "blocks", "positions", "selected_lists", "selected_size"),
)


class _NodeCall(ctypes.Structure):
    """qm_call."""

    _fields_ = [
        ("inputs", ctypes.POINTER(Tensor)),
        ("outputs", ctypes.POINTER(Tensor)),
        ("workspace", ctypes.c_void_p),
        ("lanes", ctypes.c_int),
        ("parallel_for", ctypes.c_void_p),
        ("parallel_context", ctypes.c_void_p),
    ]


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
    bias = np.zeros(spec.num_experts, np.float32) if correction_bias is None else correction_bias
    ids, weights = run(spec, logits, bias, lanes=lanes)
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
    selected: np.ndarray | None = None,
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
        selected: int32 [B, S, lists, size], or None.
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
    lists = None if selected is None else np.ascontiguousarray(selected, np.int32)
    call = _AttentionCall(
        TYPES[qkv.dtype],
        TYPES.get(past[0].dtype, 0),
        batch if block_table is None else len(block_table),
        tokens,
        before,
        slots,
        blocks,
        cos.shape[0],
        *((0, 0) if lists is None else lists.shape[2:]),
        *(None if a is None else a.ctypes.data for a in [*given, lists, output, key, value]),
        None,
        *_threads(lanes),
    )
    workspace = buffer(lib.qm_attention_workspace(attention, ctypes.byref(call)))
    call.workspace = workspace.ctypes.data
    checked(lib.qm_attention_run, attention, ctypes.byref(call))
    return output, key, value


def run(
    spec: Spec,
    *inputs: np.ndarray,
    lanes: int = 1,
    present: np.ndarray | None = None,
    buffer: Callable[[int], np.ndarray] | None = None,
) -> tuple[np.ndarray, ...]:
    """Run an operator that has a QM_CPU line through the C ABI.

    Args:
        inputs: of op.def's shapes and types; T, which is f32, f16 or bf16, is the first input's, C its input's.
        present: where the last output goes; the input that it is like: in place. buffer: as NativeMoE's.

    Returns:
        the outputs.

    Raises:
        ValueError: with the C ABI's message.
    """
    lib, op, buffer = library(), spec.OPERATOR, buffer or aligned
    own = spec.OP.encode(), ctypes.byref(node(lib, spec))
    checked(lib.qm_validate, *own)
    types = {"T": inputs[0].dtype, "float": np.dtype(np.float32), "int32": np.dtype(np.int32)}
    types["int64"] = np.dtype(np.int64)
    types |= {kind: a.dtype for a, (_, kind) in zip(inputs, op.inputs, strict=True) if kind == "C"}
    given = [np.ascontiguousarray(a, types[kind]) for a, (_, kind) in zip(inputs, op.inputs, strict=True)]
    shapes = output_shapes(op, spec.attributes(), [a.shape for a in given])
    made = []
    for shape, (_, kind) in zip(shapes, op.outputs, strict=True):
        size = math.prod(shape) * types[kind].itemsize
        made.append(buffer(size).view(types[kind]).reshape(shape))
    if present is not None:
        made[-1] = present
    tensors = [
        (Tensor * len(arrays))(
            *(Tensor(a.ctypes.data if a.size else None, TYPES.get(a.dtype, 0), Shape.of(a.shape)) for a in arrays)
        )
        for arrays in (given, made)
    ]
    call = _NodeCall(*tensors, None, *_threads(lanes))
    workspace = buffer(lib.qm_workspace(*own, ctypes.byref(call)))
    call.workspace = workspace.ctypes.data
    checked(lib.qm_run, *own, ctypes.byref(call))
    return tuple(made)


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
    kind, own = TYPES[np.dtype(dtype)], ctypes.byref(node(lib, spec))
    call: ctypes.Structure
    if isinstance(spec, RoutingSpec):
        tensor = Tensor(None, kind, Shape.of((tokens, spec.logits)))
        call = _NodeCall((Tensor * 2)(tensor), (Tensor * 2)(), None, *_threads(lanes))
        return lib.qm_workspace(spec.OP.encode(), own, ctypes.byref(call))
    if isinstance(spec, MoESpec):
        call, size = _Call(kind, 4, tokens, top_k, local_experts), lib.qm_moe_workspace
    else:
        call, size = _LinearCall(kind, tokens), lib.qm_linear_workspace
    call.lanes, call.parallel_for, _ = _threads(lanes)
    return size(own, ctypes.byref(call))


def _threads(lanes: int) -> tuple[int, object, None]:
    """lanes, parallel_for and parallel_context of a call."""
    return lanes, ctypes.cast(library().qm_parallel_threads, ctypes.c_void_p) if lanes > 1 else None, None


def infer_shapes(spec: Spec, shapes: Sequence[Sequence[int] | None]) -> list[list[int]]:
    """Return the shapes of a node's outputs, by the library's reading of op.def.

    Args:
        shapes: of the inputs, in order; None for an optional one that is left out. A size of -1 is not known.

    Raises:
        ValueError: an input cannot have its shape, with the library's words.
    """
    lib, given = library(), (Shape * len(shapes))(*map(Shape.of, shapes))
    found = (Shape * len(spec.OPERATOR.outputs))()
    checked(lib.qm_infer_shapes, spec.OP.encode(), ctypes.byref(node(lib, spec)), given, len(shapes), found)
    return [list(s.sizes[: s.rank]) for s in found]
