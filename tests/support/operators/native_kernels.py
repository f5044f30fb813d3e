"""Kernels of quant_moe.h on NumPy arrays, without an engine. Tests run them."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence

import numpy as np

from quantmoe.custom_ops.c_calls import Description, checked
from quantmoe.custom_ops.native import TYPES, aligned, kernels, library, row_of  # noqa: F401 - for those who import this
from quantmoe.custom_ops.op import (
    AttentionSpec,
    LinearSpec,
    MoESpec,
    RoutingSpec,
    Spec,
)
from quantmoe.custom_ops.op_def.structs import Shape, Tensor, node
from quantmoe.custom_ops.op_def.tensor_shapes import output_shapes

#: qm_tensor's types of T, C and I
_TYPES = TYPES | {np.dtype(np.int32): 3, np.dtype(np.int64): 4}


class _Call(ctypes.Structure):
    """qm_call."""

    _fields_ = [
        ("inputs", ctypes.POINTER(Tensor)),
        ("outputs", ctypes.POINTER(Tensor)),
        ("workspace", ctypes.c_void_p),
        ("lanes", ctypes.c_int),
        ("parallel_for", ctypes.c_void_p),
        ("parallel_context", ctypes.c_void_p),
        ("read_experts", ctypes.c_void_p),
        ("experts_context", ctypes.c_void_p),
    ]


def _tensor(array: np.ndarray | None) -> Tensor:
    if array is None:
        return Tensor(None, 0, Shape.of(None))
    return Tensor(array.ctypes.data if array.size else None, _TYPES.get(array.dtype, 0), Shape.of(array.shape))


def _tensors(arrays: Sequence[np.ndarray | None]) -> ctypes.Array[Tensor]:
    return (Tensor * len(arrays))(*map(_tensor, arrays))


def _packed(*rows: np.ndarray) -> ctypes.Array[Shape]:
    """Shapes of packed inputs, uint8 [experts, row bytes]."""
    return (Shape * len(rows))(*(Shape.of((len(w), w.shape[1] // 4)) for w in rows))


def _words(rows: np.ndarray) -> np.ndarray:
    return rows.view(np.int32)


def _run(
    spec: Spec,
    given: Sequence[np.ndarray | None],
    made: Sequence[np.ndarray],
    lanes: int,
    buffer: Callable[[int], np.ndarray],
) -> None:
    """Run an operator with a workspace of ``buffer``; all arrays have op.def's types and shapes, None: left out."""
    own, lib = (spec.OP.encode(), ctypes.byref(node(library(), spec))), library()
    call = _Call(_tensors(given), _tensors(made), None, lanes)
    workspace = buffer(lib.qm_workspace(*own, ctypes.byref(call)))
    call.workspace = workspace.ctypes.data
    checked(lib.qm_run, *own, ctypes.byref(call))


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
        checked(library().qm_validate, b"QuantMoE", ctypes.byref(node(library(), spec)), _packed(w13, w2))

    @property
    def kernel(self) -> str:
        """Name of the kernel this machine selects."""
        return Description.of(library()).kernel.decode()

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
        given = [hidden, topk_ids, topk_weights, _words(self.w13), _words(self.w2)]
        _run(self.spec, given, [output], lanes, buffer)
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
        checked(library().qm_validate, b"QuantLinear", ctypes.byref(node(library(), spec)), _packed(w))

    def __call__(self, x: np.ndarray, lanes: int = 1) -> np.ndarray:
        """x [T, K] f32, f16 or bf16 -> [T, N]."""
        x = np.ascontiguousarray(x)
        y = np.empty((len(x), self.spec.out_features), x.dtype)
        _run(self.spec, [x, _words(self.w)], [y], lanes, aligned)
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
    buffer = buffer or aligned
    checked(library().qm_validate, spec.OP.encode(), ctypes.byref(node(library(), spec)), None)
    batch, tokens, _ = qkv.shape
    slots = max(past[0].shape[2], length)
    shapes = [(*c.shape[:2], slots, c.shape[3]) if block_table is None else c.shape for c in past]

    def empty(like: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        return buffer(math.prod(shape) * like.itemsize).view(like.dtype).reshape(shape)

    output = empty(qkv, (batch, tokens, spec.num_heads * spec.output_size))
    key, value = present or map(empty, past, shapes)
    floats = (np.ascontiguousarray(a, np.float32) for a in (cos, sin, q_norm, k_norm, sinks))
    given = [*(np.ascontiguousarray(a) for a in (qkv, *past)), np.ascontiguousarray(rows, np.int32)]
    given += [np.empty((batch, length), np.int64), *floats]  # of attention_mask the length is read
    given += [a if a is None else np.ascontiguousarray(a, qkv.dtype) for a in ups or (None, None)]
    given += [a if a is None else np.ascontiguousarray(a, np.int32) for a in (block_table, selected)]
    _run(spec, given, [output, key, value], lanes, buffer)
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
    op, buffer = spec.OPERATOR, buffer or aligned
    checked(library().qm_validate, spec.OP.encode(), ctypes.byref(node(library(), spec)), None)
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
    _run(spec, given, made, lanes, buffer)
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
    own = ctypes.byref(node(library(), spec))
    given = [((tokens, top_k), 3)] * 2 + [((local_experts, 1), 0)] * 2 if isinstance(spec, MoESpec) else []
    width = spec.logits if isinstance(spec, RoutingSpec) else 1
    shapes = [((tokens, width), TYPES[np.dtype(dtype)]), *given]
    inputs = (Tensor * 5)(*(Tensor(None, kind, Shape.of(shape)) for shape, kind in shapes))
    call = _Call(inputs, (Tensor * 2)(), None, lanes)
    return library().qm_workspace(spec.OP.encode(), own, ctypes.byref(call))


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
