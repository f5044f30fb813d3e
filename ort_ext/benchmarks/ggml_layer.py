"""ggml, llama.cpp's kernels, as a peer of ``quantmoe bench``: the same layer as a graph of its own operators.

Weights are Q4_0, in the buffer type that repacks them for this machine's kernels, or Q8_0, which ggml repacks for no
x86. The graph is what llama.cpp builds for SwiGLU experts: three mul_mat_id, the activation, a product with the
weights, k - 1 additions. ggml quantizes activations to int8 in blocks of 32. Sources: ggml.h, ggml-backend.h,
ggml-cpu.h and llama.cpp's build_moe_ffn.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from quantmoe.benchmarks.layer_sizes import Shape
from quantmoe.custom_ops.expert import Expert
from quantmoe.custom_ops.matrix import QuantizedMatrix

#: ggml_type
F32, Q4_0, Q8_0, I32 = 0, 2, 8, 26
#: weight format -> ggml_type; both have groups of 32 and an f16 scale
TYPES = {"int4": Q4_0, "int8": Q8_0}


_P, _I, _L, _Z, _F = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_size_t, ctypes.c_float


class _InitParams(ctypes.Structure):
    _fields_ = [("mem_size", _Z), ("mem_buffer", _P), ("no_alloc", ctypes.c_bool)]


#: functions of libggml-base and libggml-cpu -> type of the result, of the arguments
BASE = {
    "ggml_init": (_P, _InitParams),
    "ggml_nbytes": (_Z, _P),
    "ggml_new_tensor_2d": (_P, _P, _I, _L, _L),
    "ggml_new_tensor_3d": (_P, _P, _I, _L, _L, _L),
    "ggml_view_2d": (_P, _P, _P, _L, _L, _Z, _Z),
    "ggml_mul_mat_id": (_P, _P, _P, _P, _P),
    "ggml_swiglu_split": (_P, _P, _P, _P),
    "ggml_swiglu_oai": (_P, _P, _P, _P, _F, _F),
    "ggml_mul": (_P, _P, _P, _P),
    "ggml_add": (_P, _P, _P, _P),
    "ggml_cont": (_P, _P, _P),
    "ggml_new_graph": (_P, _P),
    "ggml_build_forward_expand": (None, _P, _P),
    "ggml_backend_alloc_ctx_tensors": (_P, _P, _P),
    "ggml_backend_alloc_ctx_tensors_from_buft": (_P, _P, _P),
    "ggml_backend_buft_name": (ctypes.c_char_p, _P),
    "ggml_backend_get_default_buffer_type": (_P, _P),
    "ggml_backend_graph_compute": (_I, _P, _P),
    "ggml_backend_reg_dev_get": (_P, _P, _Z),
    "ggml_backend_reg_get_proc_address": (_P, _P, ctypes.c_char_p),
    "ggml_backend_tensor_get": (None, _P, _P, _Z, _Z),
    "ggml_backend_tensor_set": (None, _P, _P, _Z, _Z),
}
CPU = {
    "ggml_backend_cpu_init": (_P,),
    "ggml_backend_cpu_reg": (_P,),
    "ggml_backend_cpu_set_n_threads": (None, _P, _I),
}


def library() -> Any:
    """ggml's functions, from the folder that QUANTMOE_GGML names or where the system has it.

    Raises:
        OSError: it is not there.
    """
    folder, found = os.environ.get("QUANTMOE_GGML", ""), SimpleNamespace()
    for name, functions in (("libggml-base.so", BASE), ("libggml-cpu.so", CPU)):
        try:
            lib = ctypes.CDLL(os.path.join(folder, name), mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            raise OSError(
                f"{error}: --against ggml needs the folder of libggml-base.so and libggml-cpu.so in QUANTMOE_GGML: "
                f"llama_cpp/lib of PyPI's llama-cpp-python, Debian's libggml, or ggml built with -DBUILD_SHARED_LIBS=ON"
            ) from None
        for function, (result, *arguments) in functions.items():
            getattr(lib, function).restype, getattr(lib, function).argtypes = result, arguments
            setattr(found, function, getattr(lib, function))
    return found


class Ggml:
    """A layer on ggml's CPU backend.

    Args:
        shape, kind, group_size, experts: of the bench's layer; expert e is ``experts[e % len(experts)]``.
        threads: that compute.

    Raises:
        ValueError: ggml cannot hold the layer.
        OSError: see :func:`library`.
    """

    def __init__(self, shape: Shape, kind: str, group_size: int, experts: list[Expert], threads: int):
        if kind not in TYPES or group_size != 32:
            raise ValueError(
                f"ggml has {' and '.join(TYPES)} with groups of 32, not {kind} with groups of {group_size}"
            )
        self._lib, self._shape = library(), shape
        self._graphs: dict[int, tuple[list[int], int, int]] = {}
        lib = self._lib
        self._backend = lib.ggml_backend_cpu_init()
        lib.ggml_backend_cpu_set_n_threads(self._backend, threads)
        context = lib.ggml_init(_InitParams(mem_size=1 << 16, no_alloc=True))
        h, i, e = shape.hidden, shape.intermediate, shape.experts
        self._weights = [lib.ggml_new_tensor_3d(context, TYPES[kind], k, n, e) for n, k in ((i, h), (i, h), (h, i))]
        lib.ggml_backend_alloc_ctx_tensors_from_buft(context, self._buffer_type(kind == "int4"))
        for tensor, role in zip(self._weights, ("gate", "up", "down"), strict=True):
            blocks = [_blocks(getattr(expert, role), kind) for expert in experts]
            data = np.stack([blocks[n % len(blocks)] for n in range(e)])
            assert data.nbytes == lib.ggml_nbytes(tensor)
            lib.ggml_backend_tensor_set(tensor, data.ctypes.data, 0, data.nbytes)

    def _buffer_type(self, repacked: bool) -> int:
        """Return the plain one, also where ggml was built without the other."""
        lib = self._lib
        registry = lib.ggml_backend_cpu_reg()
        device = lib.ggml_backend_reg_dev_get(registry, 0)
        found = lib.ggml_backend_reg_get_proc_address(registry, b"ggml_backend_dev_get_extra_bufts")
        types = ctypes.CFUNCTYPE(ctypes.POINTER(_P), _P)(found)(device)
        at = 0
        while repacked and types and types[at]:
            if b"REPACK" in lib.ggml_backend_buft_name(types[at]):
                return int(types[at])
            at += 1
        return int(lib.ggml_backend_get_default_buffer_type(self._backend))

    def _graph(self, tokens: int) -> tuple[list[int], int, int]:
        """Return inputs x, ids, weights; the output; the graph."""
        lib, s = self._lib, self._shape
        context = lib.ggml_init(_InitParams(mem_size=1 << 20, no_alloc=True))
        x = lib.ggml_new_tensor_3d(context, F32, s.hidden, 1, tokens)
        ids = lib.ggml_new_tensor_2d(context, I32, s.top_k, tokens)
        weights = lib.ggml_new_tensor_3d(context, F32, 1, s.top_k, tokens)
        gate, up = (lib.ggml_mul_mat_id(context, w, x, ids) for w in self._weights[:2])
        if s.activation == "swiglu_oai":
            h = lib.ggml_swiglu_oai(context, gate, up, 1.702, 7.0)
        else:
            h = lib.ggml_swiglu_split(context, gate, up)
        y = lib.ggml_mul(context, lib.ggml_mul_mat_id(context, self._weights[2], h, ids), weights)
        row = 4 * s.hidden
        slots = [lib.ggml_view_2d(context, y, s.hidden, tokens, row * s.top_k, row * slot) for slot in range(s.top_k)]
        output = slots[0]
        for slot in slots[1:]:
            output = lib.ggml_add(context, output, slot)
        if s.top_k == 1:
            output = lib.ggml_cont(context, output)
        graph = lib.ggml_new_graph(context)
        lib.ggml_build_forward_expand(graph, output)
        lib.ggml_backend_alloc_ctx_tensors(context, self._backend)
        return [x, ids, weights], output, graph

    def bind(
        self, x: np.ndarray, ids: np.ndarray, weights: np.ndarray
    ) -> tuple[Callable[[], None], Callable[[], np.ndarray]]:
        """Return what runs the call, and what then reads y [n, H]."""
        lib, tokens = self._lib, len(x)
        if tokens not in self._graphs:
            self._graphs[tokens] = self._graph(tokens)
        inputs, output, graph = self._graphs[tokens]
        for tensor, array in zip(inputs, (x, ids.astype(np.int32), weights), strict=True):
            array = np.ascontiguousarray(array)
            lib.ggml_backend_tensor_set(tensor, array.ctypes.data, 0, array.nbytes)

        def read() -> np.ndarray:
            y = np.empty_like(x)
            lib.ggml_backend_tensor_get(output, y.ctypes.data, 0, y.nbytes)
            return y

        return lambda: lib.ggml_backend_graph_compute(self._backend, graph), read  # type: ignore[return-value]


def _blocks(m: QuantizedMatrix, kind: str) -> np.ndarray:
    """uint8 [N, bytes]: blocks of 32 columns, an f16 scale and then the codes. Q4_0: columns j and j + 16 in a byte."""
    n, k = m.shape
    scales = m.scales.astype(np.float16).reshape(n, k // 32, 1).view(np.uint8)
    codes = m.codes.reshape(n, k // 32, 32)
    codes = codes[..., :16] | codes[..., 16:] << 4 if kind == "int4" else codes ^ 0x80  # int8: two's complement
    return np.concatenate([scales, codes], axis=-1).reshape(n, -1)
