"""The C ABI of quant_moe.h through ctypes: packing for the converters, kernels without an engine for the tests."""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np

from quantmoe.custom_ops import library_file, native_name
from quantmoe.custom_ops.expert import Expert
from quantmoe.custom_ops.matrix import SCALE_DTYPES, QuantizedMatrix, perm_or_none
from quantmoe.custom_ops.op import (
    AttentionSpec,
    ConvSpec,
    DeltaSpec,
    LinearSpec,
    MoESpec,
    Projection,
    RoutingSpec,
    SpaceSpec,
    Spec,
    enum,
    inputs,
    optional_inputs,
    outputs,
)
from quantmoe.custom_ops.schema import schema
from quantmoe.custom_ops.schemes import SCHEMES
from quantmoe.custom_ops.structs import ERROR_SIZE, check_structs, checked, node, projection
from quantmoe.custom_ops.tensor_shapes import output_shapes

_share = threading.local()
#: operator -> its functions' name, of those that the CPU kernels run
_NAMES = {
    op: schema().operators[op].name_c
    for op in ("QuantMoE", "QuantLinear", "MoERouting", "CachedAttention", "CausalConv", "GatedDelta", "StateSpace")
}
_TYPES = {np.dtype(np.float32): 0, np.dtype(np.float16): 1, np.dtype(ml_dtypes.bfloat16): 2}


class _Matrix(ctypes.Structure):
    """qm_matrix."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("codes", "scales", "zero_points", "bias", "pre_scale", "perm")),
        ("global_scale", ctypes.c_float),
        ("input_scale", ctypes.c_float),
    ]


class _Quantization(ctypes.Structure):
    """qm_quantization."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("format", "group_size", "scale_type", "zero_points")),
        ("type", ctypes.c_int),
        ("n", ctypes.c_int64),
        ("k", ctypes.c_int64),
        ("weights", ctypes.c_void_p),
        ("importance", ctypes.c_void_p),
        ("factor", ctypes.c_float),
    ]


#: qm_row's parts of a packed row, in its order
ROW_PARTS = ("codes", "scales", "zero_points", "global_scale", "bias", "perm", "input_scale", "pre_scale")


class Row(ctypes.Structure):
    """qm_row: the bytes of a packed row and where its parts are."""

    _fields_ = [
        ("bytes", ctypes.c_int64),
        ("at", ctypes.c_int64 * len(ROW_PARTS)),
        ("sizes", ctypes.c_int64 * len(ROW_PARTS)),
    ]

    def part(self, name: str) -> slice:
        """Where one of ROW_PARTS is; empty where the attributes do not name it."""
        i = ROW_PARTS.index(name)
        return slice(self.at[i], self.at[i] + self.sizes[i])


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


@cache
def library() -> ctypes.CDLL:
    """``libquantmoe.so`` or ``quantmoe.dll``; QUANTMOE_LIBRARY names another build of it (sanitizers).

    Raises:
        FileNotFoundError: it is not there.
        OSError: it was built from another op.def.
    """
    lib = ctypes.CDLL(library_file("quantmoe.custom_ops", native_name("quantmoe"), "QUANTMOE_LIBRARY"))
    check_structs(lib)
    for name, restype in {
        "qm_row_bytes": ctypes.c_size_t,
        **dict.fromkeys((f"qm_{name}_workspace" for name in _NAMES.values()), ctypes.c_size_t),
        "qm_kernel_name": ctypes.c_char_p,
        "qm_kernel_selected": ctypes.c_char_p,
        "qm_version": ctypes.c_char_p,
        "qm_probe_read": ctypes.c_double,
        "qm_probe_int8": ctypes.c_double,
    }.items():
        getattr(lib, name).restype = restype
    return lib


def cpus() -> int:
    """CPUs that this process may use: those of its affinity, within the CPU quota of its control groups."""
    return library().qm_cpus(0, b"")


def share_threads(parts: int) -> None:
    """From now on packing on the calling thread uses one of so many equal parts of the CPUs."""
    _share.parts = parts


def pack_threads() -> int:
    """Return the threads that packing uses on the calling thread."""
    return max(1, cpus() // getattr(_share, "parts", 1))


@cache
def row_of(p: Projection, n: int, k: int, halves: int) -> Row:
    """Geometry of a packed row of one matrix [n, k], or of gate and up.

    Raises:
        ValueError: the layout or its kernels refuse the attributes, in the library's words.
    """
    found, sizes = Row(), (ctypes.c_int64(n), ctypes.c_int64(k))
    checked(library().qm_row_of, ctypes.byref(projection(p)), *sizes, halves, ctypes.byref(found))
    return found


def check_marlin_layer(w13: Projection, w2: Projection) -> None:
    """Raise ValueError where a layer in layout marlin cannot have both, in the library's words."""
    checked(library().qm_check_marlin_layer, *(ctypes.byref(projection(p)) for p in (w13, w2)))


def pack_expert(expert: Expert, spec: MoESpec, w13_row: np.ndarray, w2_row: np.ndarray) -> None:
    """Write an expert, whose matrices are what ``spec`` says, into its rows (uint8 [row bytes]).

    Raises:
        ValueError: an array or a row of another size, or the library's words.
    """
    lib, rows = library(), [_address(spec, "w13", w13_row), _address(spec, "w2", w2_row)]
    given = [
        m and _given(m, spec, projection)
        for m, projection in ((expert.gate, "w13"), (expert.up, "w13"), (expert.down, "w2"))
    ]
    matrices = [m and ctypes.byref(m[0]) for m in given]
    checked(lib.qm_pack_expert, ctypes.byref(node(lib, spec)), *matrices, *rows, *_pool())


def pack_linear(m: QuantizedMatrix, spec: MoESpec, row: np.ndarray) -> None:
    """Write the row of a linear's matrix, ``spec`` being LinearSpec.moe; as :func:`pack_expert`."""
    lib, to = library(), _address(spec, "w2", row)
    matrix, _arrays = _given(m, spec, "w2")
    checked(lib.qm_pack_linear, ctypes.byref(node(lib, _linear(spec))), ctypes.byref(matrix), to, *_pool())


def quantize(
    weight: np.ndarray,
    kind: str,
    group_size: int,
    scale_type: str,
    zero_points: bool = False,
    importance: np.ndarray | None = None,
    global_scale: float | None = None,
) -> QuantizedMatrix:
    """Search codes and scales of the least square error for floats.

    Args:
        weight: [N, K] f32, f16 or bf16, finite.
        kind: int4, int8, mxfp4, nvfp4 or a K-quant. group_size: what it has.
        importance: f32 [K], of the squared errors of each input feature; None: all alike.

    Raises:
        ValueError: with the library's words.
    """
    (n, k), weight = weight.shape, np.ascontiguousarray(weight)
    groups = (n, 1 if group_size == -1 else -(-k // group_size))
    codes, scales = np.empty((n, k), np.uint8), np.empty(groups, SCALE_DTYPES[scale_type])
    zeros = np.empty(groups, np.uint8) if zero_points else None
    own = None if importance is None else np.ascontiguousarray(importance, np.float32)
    if own is not None and own.shape != (k,):
        raise ValueError(f"importance has shape {list(own.shape)}, expected [{k}]")
    enums = (enum("format")[kind], group_size, enum("scale_type")[scale_type], int(zero_points))
    pointers = (weight.ctypes.data, None if own is None else own.ctypes.data)
    given = _Quantization(*enums, _TYPES[weight.dtype], n, k, *pointers, 1 / (global_scale or 1))
    found = _Matrix(codes=codes.ctypes.data, scales=scales.ctypes.data)
    found.zero_points = None if zeros is None else zeros.ctypes.data
    checked(library().qm_quantize, ctypes.byref(given), ctypes.byref(found), *_pool())
    return QuantizedMatrix(kind, codes, scales, group_size, zero_points=zeros, global_scale=global_scale)


def unpack_expert(spec: MoESpec, w13_row: np.ndarray, w2_row: np.ndarray) -> Expert:
    """Return the expert of these rows.

    What says nothing comes back as None: zero points that are all the middle, biases of 0, pre-scales of 1, the order
    of the features.

    Raises:
        ValueError: a row of another size, or with an act-order that is none.
    """
    lib, w13_row, w2_row = library(), np.ascontiguousarray(w13_row), np.ascontiguousarray(w2_row)
    rows = [_address(spec, "w13", w13_row), _address(spec, "w2", w2_row)]
    up, down = _Unpacked(spec, "w13"), _Unpacked(spec, "w2")
    gate = _Unpacked(spec, "w13") if spec.gated else None
    matrices = [m and ctypes.byref(m.struct) for m in (gate, up, down)]
    checked(lib.qm_unpack_expert, ctypes.byref(node(lib, spec)), *rows, *matrices, *_pool())
    return Expert(gate.matrix() if gate else None, up.matrix(), down.matrix())


def unpack_linear(spec: MoESpec, row: np.ndarray) -> QuantizedMatrix:
    """Return the matrix of a linear's row, ``spec`` being LinearSpec.moe; as :func:`unpack_expert`."""
    lib, row = library(), np.ascontiguousarray(row)
    at, m = _address(spec, "w2", row), _Unpacked(spec, "w2")
    checked(lib.qm_unpack_linear, ctypes.byref(node(lib, _linear(spec))), at, ctypes.byref(m.struct), *_pool())
    return m.matrix()


def _linear(spec: MoESpec) -> LinearSpec:
    return LinearSpec(in_features=spec.intermediate_size, out_features=spec.hidden_size, w=spec.w2)


def _pool() -> tuple[int, Any, None]:
    return pack_threads(), library().qm_parallel_threads, None


def _address(spec: MoESpec, projection: str, row: np.ndarray) -> ctypes.c_void_p:
    """Of a row that is as long as it should be."""
    try:
        want = row_of(*spec.matrices(projection)).bytes
    except ValueError as error:
        raise ValueError(f"{projection}: {error}") from error
    if row.shape != (want,) or row.dtype != np.uint8 or not row.flags.c_contiguous:
        raise ValueError(f"packed row is {row.dtype} {list(row.shape)}, expected uint8 [{want}]")
    return ctypes.c_void_p(row.ctypes.data)


def _arrays(spec: MoESpec, projection: str) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """Return shapes and types of a matrix's arrays."""
    p, n, k, _ = spec.matrices(projection)
    f32, groups = np.dtype(np.float32), (-(-n // p.block_n), 1 if p.group_size == -1 else -(-k // p.group_size))
    found = {
        "codes": ((n, k), np.dtype(np.uint16 if SCHEMES[p.format].bits == 16 else np.uint8)),
        "scales": (groups, SCALE_DTYPES[p.scale_type]),
        "zero_points": (groups, np.dtype(np.uint8)),
        "bias": ((n,), f32),
        "pre_scale": ((k,), f32),
        "perm": ((k,), np.dtype(np.int32)),
    }
    return {name: of for name, of in found.items() if getattr(p, name, True)}


def _given(m: QuantizedMatrix, spec: MoESpec, projection: str) -> tuple[_Matrix, list[np.ndarray]]:
    """Return a matrix to pack, and the arrays that it points to."""
    factor = 1.0 if m.global_scale is None else m.global_scale
    found, arrays = _Matrix(global_scale=factor, input_scale=m.input_scale or 0), []
    for name, (shape, dtype) in _arrays(spec, projection).items():
        if (array := getattr(m, name)) is not None:
            if array.shape != shape:
                raise ValueError(f"{name} has shape {list(array.shape)}, expected {list(shape)}")
            arrays.append(np.ascontiguousarray(array, dtype))
            setattr(found, name, arrays[-1].ctypes.data)
    return found, arrays


class _Unpacked:
    """A matrix that is unpacked through ``struct``."""

    def __init__(self, spec: MoESpec, projection: str) -> None:
        self.p = spec.matrices(projection)[0]
        self.arrays = {name: np.empty(*of) for name, of in _arrays(spec, projection).items()}
        self.struct = _Matrix(**{name: array.ctypes.data for name, array in self.arrays.items()})

    def matrix(self) -> QuantizedMatrix:
        p, silent = self.p, {"zero_points": SCHEMES[self.p.format].zero, "bias": 0, "pre_scale": 1}
        arrays: dict[str, Any] = {
            name: a for name, a in self.arrays.items() if name not in silent or (a != silent[name]).any()
        }
        if "perm" in arrays:
            arrays["perm"] = perm_or_none(arrays["perm"])
        return QuantizedMatrix(
            kind=p.format,
            group_size=p.group_size,
            block_n=p.block_n,
            global_scale=self.struct.global_scale if p.format == "nvfp4" else None,
            input_scale=self.struct.input_scale or None,
            **arrays,
        )


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
            _TYPES[hidden.dtype],
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
            _TYPES[x.dtype], len(x), x.ctypes.data, self.w.ctypes.data, y.ctypes.data, None, *_threads(lanes)
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
    call = _RoutingCall(_TYPES[logits.dtype], len(logits), *pointers, None, *_threads(lanes))
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
        _TYPES[qkv.dtype],
        _TYPES.get(past[0].dtype, 0),
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
    call = call_type(_TYPES[x.dtype], *shape[:2], *pointers, None, *_threads(lanes))
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
    kind = _TYPES[np.dtype(dtype)]
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


def aligned(size: int, alignment: int = 64) -> np.ndarray:
    """uint8 [size], 64-byte aligned, uninitialised."""
    raw = np.empty(size + alignment, np.uint8)
    start = -raw.ctypes.data % alignment
    return raw[start : start + size]


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


def refusal(spec: Spec, words: Mapping[str, int]) -> str:
    """Why the library does not run nodes with these attributes, in its words; "" when it does.

    Args:
        words: int32 words of a packed row by input, {"w13": .., "w2": ..}, {"w": ..} or none.
    """
    lib, shapes = library(), [(ctypes.c_int64 * 2)(1, count) for count in words.values()]
    try:
        checked(getattr(lib, f"qm_{_NAMES[spec.OP]}_validate"), ctypes.byref(node(lib, spec)), *shapes)
    except ValueError as error:
        return str(error)
    return ""


def kernels() -> dict[str, bool]:
    """Kernel name -> usable on this machine, best first."""
    found, usable, index = {}, ctypes.c_int(), 0
    while name := library().qm_kernel_name(ctypes.c_size_t(index), ctypes.byref(usable)):
        found[name.decode()] = bool(usable.value)
        index += 1
    return found
