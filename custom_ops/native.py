"""The C ABI of quant_moe.h through ctypes: packing, unpacking, quantization and refusals."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np

from quantmoe.custom_ops import library_file, native_name
from quantmoe.custom_ops.c_calls import Description, checked
from quantmoe.custom_ops.expert import Expert
from quantmoe.custom_ops.matrix import SCALE_DTYPES, QuantizedMatrix, perm_or_none
from quantmoe.custom_ops.op import (
    LinearSpec,
    MoESpec,
    Projection,
    Spec,
    enum,
)
from quantmoe.custom_ops.op_def.structs import Shape, check_structs, node, projection
from quantmoe.custom_ops.schemes import SCHEMES

_share = threading.local()


TYPES = {np.dtype(np.float32): 0, np.dtype(np.float16): 1, np.dtype(ml_dtypes.bfloat16): 2}


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
        ("panel_rows", ctypes.c_int64),
        ("panel_bytes", ctypes.c_int64),
    ]

    def part(self, name: str) -> slice:
        """Return where one of ROW_PARTS is; an empty slice if the attributes do not name it."""
        i = ROW_PARTS.index(name)
        return slice(self.at[i], self.at[i] + self.sizes[i])


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
        "qm_workspace": ctypes.c_size_t,
        "qm_probe_read": ctypes.c_double,
        "qm_probe_int8": ctypes.c_double,
    }.items():
        getattr(lib, name).restype = restype
    return lib


def cpus() -> int:
    """Return how many CPUs this process may use, by its affinity and the CPU quota of its control groups."""
    return Description.of(library()).cpus


def share_threads(parts: int) -> None:
    """Let packing on the calling thread use one of ``parts`` equal parts of the CPUs."""
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
    rows = [_address(spec, "w13", w13_row), _address(spec, "w2", w2_row)]
    matrices = [(m, "w13") for m in (expert.gate, expert.up) if m] + [(expert.down, "w2")]
    _pack(spec, [_given(m, spec, projection) for m, projection in matrices], rows)


def pack_linear(m: QuantizedMatrix, spec: MoESpec, row: np.ndarray) -> None:
    """Write the row of a linear's matrix, ``spec`` being LinearSpec.moe; as :func:`pack_expert`."""
    to = _address(spec, "w2", row)
    _pack(_linear(spec), [_given(m, spec, "w2")], [to])


def _pack(spec: Spec, given: Sequence[tuple[_Matrix, list[np.ndarray]]], rows: Sequence[ctypes.c_void_p]) -> None:
    matrices = (_Matrix * len(given))(*(matrix for matrix, _ in given))
    to, lib = (ctypes.c_void_p * len(rows))(*rows), library()
    checked(lib.qm_pack, spec.OP.encode(), ctypes.byref(node(lib, spec)), matrices, to, *_pool())


def quantize(
    weight: np.ndarray,
    kind: str,
    group_size: int,
    *,
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
    given = _Quantization(
        format=enum("format")[kind],
        group_size=group_size,
        scale_type=enum("scale_type")[scale_type],
        zero_points=zero_points,
        type=TYPES[weight.dtype],
        n=n,
        k=k,
        weights=weight.ctypes.data,
        importance=None if own is None else own.ctypes.data,
        factor=1 / (global_scale or 1),
    )
    found = _Matrix(codes=codes.ctypes.data, scales=scales.ctypes.data)
    found.zero_points = None if zeros is None else zeros.ctypes.data
    checked(library().qm_quantize, ctypes.byref(given), ctypes.byref(found), *_pool())
    return QuantizedMatrix(
        kind=kind, codes=codes, scales=scales, group_size=group_size, zero_points=zeros, global_scale=global_scale
    )


def unpack_expert(spec: MoESpec, w13_row: np.ndarray, w2_row: np.ndarray) -> Expert:
    """Return the expert of these rows.

    What says nothing comes back as None: zero points that are all the middle, biases of 0, pre-scales of 1, the order
    of the features.

    Raises:
        ValueError: a row of another size, or with an act-order that is none.
    """
    w13_row, w2_row = np.ascontiguousarray(w13_row), np.ascontiguousarray(w2_row)
    rows = [_address(spec, "w13", w13_row), _address(spec, "w2", w2_row)]
    found = [_Unpacked(spec, projection) for projection in [*["w13"] * (2 if spec.gated else 1), "w2"]]
    *gate, up, down = _unpack(spec, rows, found)
    return Expert(gate[0] if gate else None, up, replace(down, hadamard=spec.w2_hadamard))


def unpack_linear(spec: MoESpec, row: np.ndarray) -> QuantizedMatrix:
    """Return the matrix of a linear's row, ``spec`` being LinearSpec.moe; as :func:`unpack_expert`."""
    row = np.ascontiguousarray(row)
    return _unpack(_linear(spec), [_address(spec, "w2", row)], [_Unpacked(spec, "w2")])[0]


def _unpack(spec: Spec, rows: Sequence[ctypes.c_void_p], found: Sequence[_Unpacked]) -> list[QuantizedMatrix]:
    matrices = (_Matrix * len(found))(*(m.struct for m in found))
    at, lib = (ctypes.c_void_p * len(rows))(*rows), library()
    checked(lib.qm_unpack, spec.OP.encode(), ctypes.byref(node(lib, spec)), at, matrices, *_pool())
    return [m.matrix(struct) for m, struct in zip(found, matrices, strict=True)]


def _linear(spec: MoESpec) -> LinearSpec:
    return LinearSpec(in_features=spec.intermediate_size, out_features=spec.hidden_size, w=spec.w2)


def _pool() -> tuple[int, None, None]:
    return pack_threads(), None, None


def _address(spec: MoESpec, projection: str, row: np.ndarray) -> ctypes.c_void_p:
    """Return the address of a row; raise if it has another length than the attributes give."""
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
    """The arrays of a matrix to unpack; ``struct`` points to them."""

    def __init__(self, spec: MoESpec, projection: str) -> None:
        self.p = spec.matrices(projection)[0]
        self.arrays = {name: np.empty(*of) for name, of in _arrays(spec, projection).items()}
        self.struct = _Matrix(**{name: array.ctypes.data for name, array in self.arrays.items()})

    def matrix(self, filled: _Matrix) -> QuantizedMatrix:
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
            global_scale=filled.global_scale if p.format == "nvfp4" else None,
            input_scale=filled.input_scale or None,
            **arrays,
        )


def aligned(size: int, alignment: int = 64) -> np.ndarray:
    """uint8 [size], 64-byte aligned, uninitialised."""
    raw = np.empty(size + alignment, np.uint8)
    start = -raw.ctypes.data % alignment
    return raw[start : start + size]


def refusal(spec: Spec, words: Mapping[str, int]) -> str:
    """Why the library does not run nodes with these attributes, in its words; "" when it does.

    Args:
        words: int32 words of a packed row by input, {"w13": .., "w2": ..}, {"w": ..} or none.
    """
    lib, packed = library(), [Shape.of((1, count)) for count in words.values()]
    try:
        shapes = (Shape * len(packed))(*packed) if packed else None
        checked(lib.qm_validate, spec.OP.encode(), ctypes.byref(node(lib, spec)), shapes)
    except ValueError as error:
        return str(error)
    return ""


def kernels() -> dict[str, bool]:
    """Kernel name -> usable on this machine, best first."""
    return Description.of(library()).found()
