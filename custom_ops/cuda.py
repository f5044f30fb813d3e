"""The C ABI of quant_moe_cuda.h through ctypes: plans on any machine, launches on torch tensors, no engine."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import TYPE_CHECKING

from quantmoe.custom_ops import library_file
from quantmoe.custom_ops.op import LinearSpec, MoESpec, Projection, attribute_kinds, enum

if TYPE_CHECKING:
    import torch

#: what plan.cc takes of a projection's attributes, by format; group_size and perm besides, see _refusal
SCALES: dict[str, tuple[str, ...]] = {
    "int4": ("f32", "f16", "bf16"),
    "int8": ("f32", "f16", "bf16"),
    "fp8_e4m3": ("f32", "f16", "bf16", "e8m0"),
    "mxfp4": ("e8m0",),
    "nvfp4": ("e4m3",),
}
SUPPORTED: dict[str, tuple[int | str, ...]] = {
    "format": tuple(SCALES),
    "zero_points": (0, 1),
    "activation_format": ("none",),
    "pre_scale": (0,),
}
ERROR_SIZE = 512
PATHS = ("decode", "stream", "wgmma")
_I32, _I64, _U64, _PTR = ctypes.c_int32, ctypes.c_int64, ctypes.c_uint64, ctypes.c_void_p


class Device(ctypes.Structure):
    """qm_cuda_device."""

    _fields_ = [("sm", _I32), ("multiprocessors", _I32), ("shared_bytes", _I32)]


H200 = Device(90, 132, 233472)


class _MoE(ctypes.Structure):
    # qm_moe: op.def's attributes in op.def's order.
    _fields_ = [(n, ctypes.c_float if kind == "f" else _I32) for n, kind in attribute_kinds().items()]


class Problem(ctypes.Structure):
    """qm_cuda_problem."""

    _fields_ = [("moe", _MoE), ("type", _I32), ("id_bytes", _I32)] + [
        (n, _I64) for n in ("tokens", "top_k", "local_experts")
    ]


class Gemm(ctypes.Structure):
    """qm_cuda_gemm."""

    _fields_ = [(n, _I32) for n in ("panels", "n_tiles", "warps_k", "stages", "cluster", "grid", "shared_bytes")]


class Plan(ctypes.Structure):
    """qm_cuda_plan."""

    _fields_ = [("path", _I32), ("w13", Gemm), ("w2", Gemm), ("max_tiles", _I32)] + [
        (n, _U64) for n in ("gathered", "prepared", "hidden", "partial", "tiles", "sorted_pairs", "workspace_bytes")
    ]


class _Tensors(ctypes.Structure):
    _fields_ = [(n, _PTR) for n in ("hidden_states", "topk_ids", "topk_weights", "w13", "w2", "output", "workspace")]


@cache
def library() -> ctypes.CDLL:
    """The kernels: the library named by QUANTMOE_CUDA_LIBRARY, else the installed one.

    Raises:
        FileNotFoundError: neither is there.
    """
    lib = ctypes.CDLL(library_file("quantmoe.custom_ops", "libquantmoe_cuda.so", "QUANTMOE_CUDA_LIBRARY"))
    lib.qm_cuda_row_bytes.restype = ctypes.c_size_t
    return lib


def _check(status: int, err: ctypes.Array[ctypes.c_char]) -> None:
    if status:
        raise ValueError(err.value.decode())


def problem(spec: MoESpec, dtype: str, tokens: int, top_k: int, local_experts: int, id_bytes: int = 8) -> Problem:
    """qm_cuda_problem of a node and a batch; dtype "f16" or "bf16" (or "f32", which plan() refuses)."""
    moe = _MoE()
    for name, value in spec.attributes().items():
        kind = attribute_kinds()[name]
        setattr(moe, name, value if kind in ("i", "f") else enum(kind)[str(value)])
    return Problem(moe, {"f32": 0, "f16": 1, "bf16": 2}[dtype], id_bytes, tokens, top_k, local_experts)


def plan(problem: Problem, device: Device = H200) -> Plan:
    """qm_cuda_plan_moe: pure, needs no GPU.

    Raises:
        ValueError: the library's sentence about what is not supported.
    """
    found, err = Plan(), ctypes.create_string_buffer(ERROR_SIZE)
    _check(library().qm_cuda_plan_moe(ctypes.byref(problem), ctypes.byref(device), ctypes.byref(found), err), err)
    return found


def refusal(spec: MoESpec | LinearSpec) -> str:
    """Why the kernels do not run nodes with these attributes; "" when they do. Needs neither the library nor a GPU."""
    if isinstance(spec, LinearSpec):
        return "QuantLinear; the CUDA kernels run QuantMoE"
    for prefix, projection in (("w13", spec.w13), ("w2", spec.w2)):
        if reason := _refusal(prefix, projection, perms=(0, 1) if prefix == "w13" else (0,)):
            return reason
    if spec.hidden_size % 8:
        return f"hidden_size is {spec.hidden_size}; the CUDA kernels take multiples of 8"
    return ""


def _refusal(prefix: str, p: Projection, perms: tuple[int, ...]) -> str:
    """plan.cc's ValidateWeights."""
    for name, known in SUPPORTED.items():
        if (value := getattr(p, name)) not in known:
            take = ", ".join(map(str, known))
            return f"{prefix}_{name} is {value}; the CUDA kernels take {take}"
    if p.zero_points and p.format != "int4":
        return f"{prefix}_zero_points is 1; the CUDA kernels take zero points of int4 only, the format is {p.format}"
    if p.scale_type not in SCALES[p.format]:
        take = ", ".join(SCALES[p.format])
        return f"{prefix}_scale_type is {p.scale_type}; the CUDA kernels take {take} for {p.format}"
    g = p.group_size
    fixed = {"mxfp4": 32, "nvfp4": 16}.get(p.format, 32 if p.scale_type == "e8m0" else None)
    if fixed is not None and g != fixed:
        return f"{prefix}_group_size is {g}; the CUDA kernels take {fixed} for {p.format} with {p.scale_type} scales"
    if fixed is None and g not in (-1, 32) and (g < 64 or g & (g - 1)):
        return f"{prefix}_group_size is {g}; the CUDA kernels take -1, 32 and powers of two from 64"
    if p.scale_type == "f32" and g == 32:
        return (
            f"{prefix}_scale_type is f32 with group_size 32; the CUDA kernels take f32 scales of groups of 64 and "
            "more: export with --scales bf16"
        )
    if p.perm not in perms:
        return f"{prefix}_perm is {p.perm}; the CUDA kernels take {', '.join(map(str, perms))}"
    return ""


def query(ordinal: int = 0) -> Device:
    """The device as the plan sees it."""
    found, err = Device(), ctypes.create_string_buffer(ERROR_SIZE)
    _check(library().qm_cuda_query(ordinal, ctypes.byref(found), err), err)
    return found


class CudaMoE:
    """One layer on the current CUDA device.

    Args:
        spec: the node's attributes, layout marlin.
        w13, w2: uint8 CUDA tensors [local experts, row bytes].
    """

    def __init__(self, spec: MoESpec, w13: torch.Tensor, w2: torch.Tensor) -> None:
        self.spec, self.w13, self.w2 = spec, w13, w2
        self.device = query(w13.device.index or 0)

    def prepare(self, hidden: torch.Tensor, topk_ids: torch.Tensor) -> tuple[Problem, Plan]:
        """Problem and plan of a batch."""
        dtype = {"torch.float16": "f16", "torch.bfloat16": "bf16"}.get(str(hidden.dtype), "f32")
        tokens, top_k = topk_ids.shape
        p = problem(self.spec, dtype, tokens, top_k, len(self.w13), topk_ids.element_size())
        for moe, rows in ((13, self.w13), (2, self.w2)):
            want = library().qm_cuda_row_bytes(ctypes.byref(p.moe), moe)
            if rows.shape[1] != want:
                raise ValueError(f"w{moe} has rows of {rows.shape[1]} bytes, the attributes say {want}")
        return p, plan(p, self.device)

    def launch(
        self,
        prepared: tuple[Problem, Plan],
        hidden: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        output: torch.Tensor,
        workspace: torch.Tensor,
    ) -> None:
        """Enqueues on torch's current stream. All tensors contiguous; workspace uint8 of plan.workspace_bytes."""
        import torch

        pointers = (hidden, topk_ids, topk_weights, self.w13, self.w2, output, workspace)
        tensors = _Tensors(*(x.data_ptr() for x in pointers))
        err = ctypes.create_string_buffer(ERROR_SIZE)
        stream = _PTR(torch.cuda.current_stream().cuda_stream)
        p, chosen = prepared
        _check(library().qm_cuda_launch(ctypes.byref(p), ctypes.byref(chosen), ctypes.byref(tensors), stream, err), err)

    def __call__(self, hidden: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
        """hidden f16 or bf16 [T, H], topk_ids int32 or int64 [T, k], topk_weights f32 [T, k] -> [T, H]."""
        import torch

        prepared = self.prepare(hidden, topk_ids)
        # NaN everywhere: a result that was not written, or scratch that was read before it was, shows.
        output = torch.full_like(hidden, float("nan"))
        workspace = torch.full((max(1, prepared[1].workspace_bytes),), 0xFF, dtype=torch.uint8, device=hidden.device)
        self.launch(prepared, hidden, topk_ids, topk_weights, output, workspace)
        return output
