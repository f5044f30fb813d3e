"""The C ABI of quant_moe_cuda.h through ctypes: plans on any machine, launches on torch tensors, no engine."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

from quantmoe.custom_ops import library_file
from quantmoe.custom_ops.layouts.marlin import GROUPED
from quantmoe.custom_ops.op import (
    AttentionSpec,
    ConvSpec,
    DeltaSpec,
    LinearSpec,
    MoESpec,
    NormSpec,
    Projection,
    RouterSpec,
    RoutingSpec,
    RowsSpec,
    enum,
)
from quantmoe.custom_ops.structs import ERROR_SIZE, STRUCTS, check_status, check_structs, node

if TYPE_CHECKING:
    import torch

#: what plan.cc takes of a projection's attributes, by format; group_size besides, see _refusal
SCALES: dict[str, tuple[str, ...]] = {
    "int4": ("f16", "bf16"),
    "int8": ("f32", "f16", "bf16"),
    "fp8_e4m3": ("f32", "f16", "bf16", "e8m0"),
    "mxfp4": ("e8m0",),
    "nvfp4": ("e4m3",),
}
#: of linears, whose activations are of the same type
FLOATS = ("bf16", "f16")
SUPPORTED: dict[str, tuple[int | str, ...]] = {
    "format": tuple(SCALES),
    "zero_points": (0, 1),
    "activation_format": tuple(enum("activation_format")),
    "pre_scale": (0, 1),
    "perm": (0, 1),  # 2 as well of a gated w13
    "bias": (0, 1),
}
#: head_size and v_head_size of attention.h
HEAD_SIZES = ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))
PATHS = ("decode", "stream", "wgmma", "fp8", "dense")
_I32, _I64, _U64, _PTR = ctypes.c_int32, ctypes.c_int64, ctypes.c_uint64, ctypes.c_void_p
_TYPES = {"f32": 0, "f16": 1, "bf16": 2}


class Device(ctypes.Structure):
    """qm_cuda_device."""

    _fields_ = [("sm", _I32), ("multiprocessors", _I32), ("shared_bytes", _I32)]


H200 = Device(90, 132, 233472)


class Problem(ctypes.Structure):
    """qm_cuda_problem."""

    _fields_ = [
        ("moe", STRUCTS["QuantMoE"]),
        ("type", _I32),
        ("id_bytes", _I32),
        ("tokens", _I64),
        ("top_k", _I64),
        ("local_experts", _I64),
    ]


class LinearProblem(ctypes.Structure):
    """qm_cuda_linear_problem."""

    _fields_ = [("linear", STRUCTS["QuantLinear"]), ("type", _I32), ("rows", _I64)]


class RoutingProblem(ctypes.Structure):
    """qm_cuda_routing_problem."""

    _fields_ = [("routing", STRUCTS["MoERouting"]), ("type", _I32), ("tokens", _I64)]


class RouterProblem(ctypes.Structure):
    """qm_cuda_router_problem."""

    _fields_ = [("router", STRUCTS["MoERouter"]), ("type", _I32), ("tokens", _I64)]


class RouterPlan(ctypes.Structure):
    """qm_cuda_router_plan."""

    _fields_ = [("path", _I32), ("workspace_bytes", _U64)]


class NormProblem(ctypes.Structure):
    """qm_cuda_norm_problem."""

    _fields_ = [("norm", STRUCTS["AddRMSNorm"]), ("type", _I32), ("rows", _I64), ("columns", _I64)]


class RowsProblem(ctypes.Structure):
    """qm_cuda_rows_problem."""

    _fields_ = [("node", STRUCTS["TokenRows"])] + [(n, _I64) for n in ("batch", "tokens", "past_slots", "length")]


class AttentionProblem(ctypes.Structure):
    """qm_cuda_attention_problem."""

    _fields_ = [
        ("attention", STRUCTS["CachedAttention"]),
        ("type", _I32),
        ("batch", _I64),
        ("tokens", _I64),
        ("past_slots", _I64),
        ("slots", _I64),
    ]


class AttentionPlan(ctypes.Structure):
    """qm_cuda_attention_plan."""

    _fields_ = [(n, _I32) for n in ("tile_rows", "splits", "cluster", "stages", "wgmma")] + [
        (n, _U64) for n in ("queries", "sums", "partial", "workspace_bytes")
    ]


class ConvProblem(ctypes.Structure):
    """qm_cuda_conv_problem."""

    _fields_ = [("conv", STRUCTS["CausalConv"]), ("type", _I32), ("batch", _I64), ("tokens", _I64)]


class DeltaProblem(ctypes.Structure):
    """qm_cuda_delta_problem."""

    _fields_ = [("delta", STRUCTS["GatedDelta"]), ("type", _I32), ("batch", _I64), ("tokens", _I64)]


class DeltaPlan(ctypes.Structure):
    """qm_cuda_delta_plan."""

    _fields_ = [("columns", _I32), ("cluster", _I32), ("chunked", _I32), ("workspace_bytes", _U64)]


class Gemm(ctypes.Structure):
    """qm_cuda_gemm."""

    _fields_ = [
        (n, _I32) for n in ("panels", "n_tiles", "warps_k", "stages", "cluster", "packed", "grid", "shared_bytes")
    ]


class Plan(ctypes.Structure):
    """qm_cuda_plan."""

    _fields_ = [("path", _I32), ("w13", Gemm), ("w2", Gemm), ("max_tiles", _I32)] + [
        (n, _U64)
        for n in (
            *("rounded", "gathered", "prepared", "hidden", "packed_hidden", "partial", "tiles", "sorted_pairs"),
            *("positions", "workspace_bytes"),
        )
    ]


class _Tensors(ctypes.Structure):
    _fields_ = [(n, _PTR) for n in ("hidden_states", "topk_ids", "topk_weights", "w13", "w2", "output", "workspace")]


@cache
def library() -> ctypes.CDLL:
    """The kernels: the library named by QUANTMOE_CUDA_LIBRARY, else the installed one.

    Raises:
        FileNotFoundError: neither is there.
        OSError: it was built from another op.def.
    """
    lib = ctypes.CDLL(library_file("quantmoe.custom_ops", "libquantmoe_cuda.so", "QUANTMOE_CUDA_LIBRARY"))
    check_structs(lib)
    lib.qm_cuda_row_bytes.restype = lib.qm_cuda_linear_row_bytes.restype = ctypes.c_size_t
    return lib


def problem(spec: MoESpec, dtype: str, tokens: int, top_k: int, local_experts: int, id_bytes: int = 8) -> Problem:
    """qm_cuda_problem of a node and a batch; dtype "f16" or "bf16" (or "f32", which plan() refuses)."""
    return Problem(node(library(), spec), _TYPES[dtype], id_bytes, tokens, top_k, local_experts)


def linear_problem(spec: LinearSpec, dtype: str, rows: int) -> LinearProblem:
    """qm_cuda_linear_problem of a node and a batch."""
    return LinearProblem(node(library(), spec), _TYPES[dtype], rows)


def plan(problem: Problem | LinearProblem, device: Device = H200) -> Plan:
    """qm_cuda_plan_moe or qm_cuda_plan_linear: pure, needs no GPU.

    Raises:
        ValueError: the library's sentence about what is not supported.
    """
    found, err = Plan(), ctypes.create_string_buffer(ERROR_SIZE)
    make = library().qm_cuda_plan_moe if isinstance(problem, Problem) else library().qm_cuda_plan_linear
    check_status(make(ctypes.byref(problem), ctypes.byref(device), ctypes.byref(found), err), err)
    return found


def check_plan(problem: Problem | LinearProblem, plan: Plan) -> None:
    """qm_cuda_check_plan and its like: pure, needs no GPU.

    Raises:
        ValueError: the plan names a kernel that the library does not have.
    """
    err = ctypes.create_string_buffer(ERROR_SIZE)
    lib = library()
    check = lib.qm_cuda_check_plan if isinstance(problem, Problem) else lib.qm_cuda_check_plan_linear
    check_status(check(ctypes.byref(problem), ctypes.byref(plan), err), err)


def check_order(problem: Problem | LinearProblem, rows: torch.Tensor) -> None:
    """qm_cuda_check_moe and its like: the act-orders in w13, or in a linear's w (CUDA tensors).

    Raises:
        ValueError: one does not have each feature once.
    """
    err = ctypes.create_string_buffer(ERROR_SIZE)
    check = library().qm_cuda_check_moe if isinstance(problem, Problem) else library().qm_cuda_check_linear
    check_status(check(ctypes.byref(problem), _PTR(rows.data_ptr()), None, err), err)


def refusal(spec: MoESpec | LinearSpec | AttentionSpec | ConvSpec | DeltaSpec) -> str:
    """Why the kernels do not run nodes with these attributes; "" when they do. Needs neither the library nor a GPU."""
    if isinstance(spec, AttentionSpec):
        return _attention_refusal(spec)
    if isinstance(spec, ConvSpec | DeltaSpec):
        return _state_refusal(spec)
    if isinstance(spec, LinearSpec):
        if spec.in_features % 8:
            return f"in_features is {spec.in_features}; the CUDA kernels take multiples of 8"
        return _float_refusal(spec.w) if spec.w.format in FLOATS else _refusal("w", spec.w)
    for name in ("gated", "apply_router_weight_on_input"):
        if (value := getattr(spec, name)) not in (0, 1):
            return f"{name} is {value}, expected 0 or 1"
    w13 = replace(spec.w13, perm=1) if spec.gated and spec.w13.perm == 2 else spec.w13
    for prefix, projection in (("w13", w13), ("w2", spec.w2)):
        if reason := _refusal(prefix, projection):
            return reason
    if spec.w2.perm and spec.w2.activation_format in GROUPED:
        return (
            f"w2_perm is 1 with w2_activation_format {spec.w2.activation_format}, whose groups are of the features "
            "before the act-order, which the CUDA kernels do not apply to w2: export with --activations float"
        )
    if spec.hidden_size % 8:
        return f"hidden_size is {spec.hidden_size}; the CUDA kernels take multiples of 8"
    return ""


def _attention_refusal(spec: AttentionSpec) -> str:
    """attention_plan.cc's ValidateAttributes, as far as the operator allows more."""
    if spec.cache_format == "int8_token":
        return "cache_format is int8_token, the CUDA kernels take none, int8 and fp8_e4m3"
    if spec.key_split:
        return f"key_split is {spec.key_split}, the CUDA kernels take 0: no latent attention"
    if (spec.head_size, spec.v_head_size) not in HEAD_SIZES:
        return (
            f"head_size is {spec.head_size} and v_head_size {spec.v_head_size}, the CUDA kernels take 64, 96, 128, 192 "
            "and 256 of both, or 192 and 128"
        )
    return ""


def _state_refusal(spec: ConvSpec | DeltaSpec) -> str:
    """linear_attention_plan.cc's, as far as the operators allow more."""
    if isinstance(spec, DeltaSpec):
        if {spec.k_head_size, spec.v_head_size} <= {64, 128}:
            return ""
        sizes = f"k_head_size is {spec.k_head_size} and v_head_size {spec.v_head_size}"
        return f"{sizes}, the CUDA kernels take 64 and 128"
    if spec.channels % 2:
        return f"channels is {spec.channels}, the CUDA kernel takes even numbers"
    if not 2 <= spec.width <= 4:
        return f"width is {spec.width}, the CUDA kernel takes 2 to 4"
    return ""


def _float_refusal(w: Projection) -> str:
    """plan.cc's ValidateFloats."""
    plain = {"group_size": -1, "block_n": 1, "scale_type": "f32", "zero_points": 0, "activation_format": "none"}
    for name, want in (plain | {"perm": 0, "pre_scale": 0}).items():
        if (value := getattr(w, name)) != want:
            return f"w_{name} is {value}; the CUDA kernels take {want} for floats"
    return "" if w.bias in (0, 1) else f"w_bias is {w.bias}, expected 0 or 1"


def _refusal(prefix: str, p: Projection) -> str:
    """plan.cc's ValidateWeights."""
    for name, known in SUPPORTED.items():
        if (value := getattr(p, name)) not in known:
            take = ", ".join(map(str, known))
            return f"{prefix}_{name} is {value}; the CUDA kernels take {take}"
    if p.zero_points and p.format not in ("int4", "int8"):
        return f"{prefix}_zero_points is 1; the CUDA kernels take them of int4 and int8, the format is {p.format}"
    if p.scale_type not in SCALES[p.format]:
        take = ", ".join(SCALES[p.format])
        way = ": export with --scales bf16" if p.scale_type == "f32" and "bf16" in SCALES[p.format] else ""
        return f"{prefix}_scale_type is {p.scale_type}; the CUDA kernels take {take} for {p.format}{way}"
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
    return ""


def absence(spec: MoESpec | LinearSpec) -> str:
    """Why the kernels do not run nodes with these attributes on this machine, which :func:`refusal` has none for: there
    is no library, no GPU or one that they do not run on; "" when they do."""
    try:
        device = query()
    except FileNotFoundError:
        return "library not found"
    except OSError as error:
        return f"library cannot be loaded: {error}"
    except ValueError as error:
        return f"compiled, no GPU here ({error})"
    try:
        if isinstance(spec, LinearSpec):
            plan(linear_problem(spec, spec.w.format if spec.w.format in FLOATS else "bf16", 1), device)
        else:
            plan(problem(spec, "bf16", 1, 1, spec.num_experts), device)
    except ValueError as error:
        return str(error)
    return ""


def query(ordinal: int = 0) -> Device:
    """The device as the plan sees it."""
    found, err = Device(), ctypes.create_string_buffer(ERROR_SIZE)
    check_status(library().qm_cuda_query(ordinal, ctypes.byref(found), err), err)
    return found


def _dtype(x: torch.Tensor) -> str:
    return {"torch.float16": "f16", "torch.bfloat16": "bf16"}.get(str(x.dtype), "f32")


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
        tokens, top_k = topk_ids.shape
        p = problem(self.spec, _dtype(hidden), tokens, top_k, len(self.w13), topk_ids.element_size())
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
        check_status(
            library().qm_cuda_launch(ctypes.byref(p), ctypes.byref(chosen), ctypes.byref(tensors), stream, err), err
        )

    def __call__(self, hidden: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
        """hidden f16 or bf16 [T, H], topk_ids int32 or int64 [T, k], topk_weights f32 [T, k] -> [T, H]."""
        import torch

        prepared = self.prepare(hidden, topk_ids)
        # NaN everywhere: a result that was not written, or scratch that was read before it was, shows.
        output = torch.full_like(hidden, float("nan"))
        workspace = torch.full((max(1, prepared[1].workspace_bytes),), 0xFF, dtype=torch.uint8, device=hidden.device)
        self.launch(prepared, hidden, topk_ids, topk_weights, output, workspace)
        return output


class CudaLinear:
    """A QuantLinear on the current CUDA device; w: uint8 CUDA tensor [1, row bytes]."""

    def __init__(self, spec: LinearSpec, w: torch.Tensor) -> None:
        self.spec, self.w = spec, w
        self.device = query(w.device.index or 0)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x f16 or bf16 [rows, in_features] -> [rows, out_features]."""
        import torch

        p = linear_problem(self.spec, _dtype(x), len(x))
        if self.w.shape[1] != (want := library().qm_cuda_linear_row_bytes(ctypes.byref(p.linear))):
            raise ValueError(f"w has a row of {self.w.shape[1]} bytes, the attributes say {want}")
        chosen = plan(p, self.device)
        y = torch.full((len(x), self.spec.out_features), float("nan"), dtype=x.dtype, device=x.device)
        workspace = torch.full((max(1, chosen.workspace_bytes),), 0xFF, dtype=torch.uint8, device=x.device)
        self.launch(p, chosen, x, y, workspace)
        return y

    def launch(self, p: LinearProblem, chosen: Plan, x: torch.Tensor, y: torch.Tensor, workspace: torch.Tensor) -> None:
        """Enqueues on torch's current stream. All tensors contiguous; workspace uint8 of plan.workspace_bytes."""
        import torch

        tensors = (_PTR * 4)(*(t.data_ptr() for t in (x, self.w, y, workspace)))
        err = ctypes.create_string_buffer(ERROR_SIZE)
        stream = _PTR(torch.cuda.current_stream().cuda_stream)
        launch = library().qm_cuda_launch_linear
        check_status(launch(ctypes.byref(p), ctypes.byref(chosen), tensors, stream, err), err)


def check_routing(spec: RoutingSpec) -> None:
    """qm_cuda_validate_routing: pure, needs no GPU.

    Raises:
        ValueError: the library's sentence about an attribute.
    """
    err = ctypes.create_string_buffer(ERROR_SIZE)
    found = RoutingProblem(node(library(), spec), _TYPES["f32"], 1)
    check_status(library().qm_cuda_validate_routing(ctypes.byref(found), err), err)


def route(spec: RoutingSpec, logits: torch.Tensor, correction_bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """MoERouting: logits f32, f16 or bf16 [T, logits], correction_bias f32 [E] -> ids int32, weights f32 [T, slots].

    Raises:
        ValueError: the library's sentence about an attribute.
    """
    import torch

    ids = torch.full((len(logits), spec.slots), -1, dtype=torch.int32, device=logits.device)
    weights = torch.full(ids.shape, float("nan"), device=logits.device)
    problem = RoutingProblem(node(library(), spec), _TYPES[_dtype(logits)], len(logits))
    tensors = (_PTR * 4)(*(t.data_ptr() for t in (logits, correction_bias, ids, weights)))
    err = ctypes.create_string_buffer(ERROR_SIZE)
    stream = _PTR(torch.cuda.current_stream().cuda_stream)
    check_status(library().qm_cuda_launch_routing(ctypes.byref(problem), tensors, stream, err), err)
    return ids, weights


def router_problem(spec: RouterSpec, dtype: str, tokens: int) -> RouterProblem:
    """qm_cuda_router_problem of a node and its tokens; dtype "f16" or "bf16" (or "f32", which is refused)."""
    return RouterProblem(node(library(), spec), _TYPES[dtype], tokens)


def plan_router(problem: RouterProblem, device: Device = H200) -> RouterPlan:
    """qm_cuda_plan_router: pure, needs no GPU.

    Raises:
        ValueError: the library's sentence about an attribute or a size.
    """
    found, err = RouterPlan(), ctypes.create_string_buffer(ERROR_SIZE)
    plan = library().qm_cuda_plan_router
    check_status(plan(ctypes.byref(problem), ctypes.byref(device), ctypes.byref(found), err), err)
    return found


def launch_router(problem: RouterProblem, plan: RouterPlan, *tensors: torch.Tensor) -> None:
    """Enqueues on torch's current stream.

    Args:
        tensors: hidden_states, weight, bias, correction_bias ([0]: none), topk_ids, topk_weights, workspace (uint8 of
            plan.workspace_bytes), contiguous.
    """
    import torch

    pointers = (_PTR * 7)(*(t.data_ptr() if t.numel() else None for t in tensors))
    err = ctypes.create_string_buffer(ERROR_SIZE)
    stream = _PTR(torch.cuda.current_stream().cuda_stream)
    launch = library().qm_cuda_launch_router
    check_status(launch(ctypes.byref(problem), ctypes.byref(plan), pointers, stream, err), err)


def router(spec: RouterSpec, *inputs: torch.Tensor, device: Device | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """MoERouter on the current CUDA device, as planned for ``device``: op.def's inputs, hidden_states [T, H].

    Raises:
        ValueError: the library's sentence about an attribute or a size.
    """
    import torch

    hidden = inputs[0]
    ids = torch.full((len(hidden), spec.routing.slots), -1, dtype=torch.int32, device=hidden.device)
    weights = torch.full(ids.shape, float("nan"), device=hidden.device)
    problem = router_problem(spec, _dtype(hidden), len(hidden))
    plan = plan_router(problem, device or query(hidden.device.index or 0))
    workspace = torch.full((max(1, plan.workspace_bytes),), 0xFF, dtype=torch.uint8, device=hidden.device)
    launch_router(problem, plan, *inputs, ids, weights, workspace)
    return ids, weights


def norm_problem(spec: NormSpec, dtype: str, rows: int, columns: int) -> NormProblem:
    """qm_cuda_norm_problem of a node and its sizes; dtype "f16" or "bf16" (or "f32", which is refused)."""
    return NormProblem(node(library(), spec), _TYPES[dtype], rows, columns)


def check_norm(problem: NormProblem) -> None:
    """qm_cuda_validate_norm: pure, needs no GPU.

    Raises:
        ValueError: the library's sentence about an attribute or a size.
    """
    err = ctypes.create_string_buffer(ERROR_SIZE)
    check_status(library().qm_cuda_validate_norm(ctypes.byref(problem), err), err)


def launch_norm(problem: NormProblem, *tensors: torch.Tensor) -> None:
    """Enqueues on torch's current stream.

    Args:
        tensors: x, residual, weight, y, sum, contiguous.

    Raises:
        ValueError: the library's sentence about an attribute or a size.
    """
    import torch

    pointers, err = (_PTR * 5)(*(t.data_ptr() for t in tensors)), ctypes.create_string_buffer(ERROR_SIZE)
    stream = _PTR(torch.cuda.current_stream().cuda_stream)
    check_status(library().qm_cuda_launch_norm(ctypes.byref(problem), pointers, stream, err), err)


def add_norm(spec: NormSpec, *inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """AddRMSNorm on the current CUDA device: op.def's inputs and outputs, x [T, H].

    Raises:
        ValueError: the library's sentence about an attribute or a size.
    """
    import torch

    y, total = (torch.full_like(inputs[0], float("nan")) for _ in range(2))
    launch_norm(norm_problem(spec, _dtype(y), *y.shape), *inputs, y, total)
    return y, total


def rows_problem(spec: RowsSpec, batch: int, tokens: int, past_slots: int, length: int) -> RowsProblem:
    """qm_cuda_rows_problem of a node's sizes."""
    return RowsProblem(node(library(), spec), batch, tokens, past_slots, length)


def token_rows(spec: RowsSpec, mask: torch.Tensor, new: int, past: int) -> tuple[torch.Tensor, torch.Tensor]:
    """TokenRows on the current CUDA device: mask int64 [B, L], S and P -> op.def's outputs.

    Raises:
        ValueError: the library's sentence about a size.
    """
    import torch

    rows = torch.full((len(mask), 3), -1, dtype=torch.int32, device=mask.device)
    last = torch.full((len(mask), 1, 1), -9, dtype=torch.int64, device=mask.device)
    problem, err = rows_problem(spec, len(mask), new, past, mask.shape[1]), ctypes.create_string_buffer(ERROR_SIZE)
    tensors = (_PTR * 3)(*(t.data_ptr() for t in (mask, rows, last)))
    stream = _PTR(torch.cuda.current_stream().cuda_stream)
    check_status(library().qm_cuda_launch_rows(ctypes.byref(problem), tensors, stream, err), err)
    return rows, last


def attention_problem(
    spec: AttentionSpec, dtype: str, batch: int, tokens: int, past_slots: int, slots: int
) -> AttentionProblem:
    """qm_cuda_attention_problem of a node and its shapes; dtype "f16" or "bf16" (or "f32", which is refused)."""
    return AttentionProblem(node(library(), spec), _TYPES[dtype], batch, tokens, past_slots, slots)


def plan_attention(problem: AttentionProblem, device: Device = H200) -> AttentionPlan:
    """qm_cuda_plan_attention: pure, needs no GPU.

    Raises:
        ValueError: the library's sentence about an attribute or a shape.
    """
    found, err = AttentionPlan(), ctypes.create_string_buffer(ERROR_SIZE)
    plan = library().qm_cuda_plan_attention
    check_status(plan(ctypes.byref(problem), ctypes.byref(device), ctypes.byref(found), err), err)
    return found


def launch_attention(problem: AttentionProblem, plan: AttentionPlan, *tensors: torch.Tensor) -> None:
    """Enqueues on torch's current stream.

    Args:
        tensors: qkv, past_key, past_value, rows, cos, sin, q_norm, k_norm, sinks, output, present_key, present_value,
            workspace (uint8 of plan.workspace_bytes), contiguous.

    Raises:
        ValueError: present is past's memory, but has more slots.
    """
    import torch

    pointers = (_PTR * 13)(*(t.data_ptr() for t in tensors))
    err = ctypes.create_string_buffer(ERROR_SIZE)
    stream = _PTR(torch.cuda.current_stream().cuda_stream)
    launch = library().qm_cuda_launch_attention
    check_status(launch(ctypes.byref(problem), ctypes.byref(plan), pointers, stream, err), err)


def attention(
    spec: AttentionSpec,
    qkv: torch.Tensor,
    past_key: torch.Tensor,
    past_value: torch.Tensor,
    rows: torch.Tensor,
    length: int,
    *tables: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """CachedAttention on the current CUDA device: op.def's inputs, attention_mask as its length.

    Args:
        tables: cos, sin, q_norm, k_norm, sinks.

    Returns:
        output, present_key and present_value: past's memory where that has the slots, else new memory.

    Raises:
        ValueError: the library's sentence about an attribute or a shape.
    """
    import torch

    batch, tokens, _ = qkv.shape
    slots = max(past_key.shape[2], length)
    p = attention_problem(spec, _dtype(qkv), batch, tokens, past_key.shape[2], slots)
    chosen = plan_attention(p, query(qkv.device.index or 0))
    output = qkv.new_full((batch, tokens, spec.num_heads * spec.v_head_size), float("nan"))
    present = [past_key, past_value]
    if slots > past_key.shape[2]:
        other = float("nan") if spec.cache_format == "none" else 0x7F
        present = [past.new_full((*past.shape[:2], slots, past.shape[3]), other) for past in present]
    workspace = torch.full((max(1, chosen.workspace_bytes),), 0xFF, dtype=torch.uint8, device=qkv.device)
    launch_attention(p, chosen, qkv, past_key, past_value, rows, *tables, output, *present, workspace)
    return output, present[0], present[1]


def conv_problem(spec: ConvSpec, dtype: str, batch: int, tokens: int) -> ConvProblem:
    """qm_cuda_conv_problem of a node and its shapes; dtype "f16" or "bf16" (or "f32", which is refused)."""
    return ConvProblem(node(library(), spec), _TYPES[dtype], batch, tokens)


def check_conv(problem: ConvProblem) -> None:
    """qm_cuda_validate_conv: pure, needs no GPU.

    Raises:
        ValueError: the library's sentence about an attribute or a shape.
    """
    err = ctypes.create_string_buffer(ERROR_SIZE)
    check_status(library().qm_cuda_validate_conv(ctypes.byref(problem), err), err)


def launch_conv(problem: ConvProblem, *tensors: torch.Tensor) -> None:
    """Enqueues on torch's current stream.

    Args:
        tensors: x, weight, bias, past_conv, rows, y, present_conv, contiguous.

    Raises:
        ValueError: the library's sentence about an attribute or a shape.
    """
    import torch

    pointers = (_PTR * 7)(*(t.data_ptr() if t.numel() else None for t in tensors))
    err = ctypes.create_string_buffer(ERROR_SIZE)
    stream = _PTR(torch.cuda.current_stream().cuda_stream)
    check_status(library().qm_cuda_launch_conv(ctypes.byref(problem), pointers, stream, err), err)


def conv(spec: ConvSpec, *inputs: torch.Tensor, in_place: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """CausalConv on the current CUDA device: op.def's inputs and outputs; present_conv is past_conv if ``in_place``.

    Raises:
        ValueError: the library's sentence about an attribute or a shape.
    """
    import torch

    x, past_conv = inputs[0], inputs[3]
    y = torch.full((*x.shape[:2], spec.channels), float("nan"), dtype=x.dtype, device=x.device)
    present = past_conv if in_place else torch.full_like(past_conv, float("nan"))
    launch_conv(conv_problem(spec, _dtype(x), *x.shape[:2]), *inputs, y, present)
    return y, present


def delta_problem(spec: DeltaSpec, dtype: str, batch: int, tokens: int) -> DeltaProblem:
    """qm_cuda_delta_problem of a node and its shapes; dtype "f16" or "bf16" (or "f32", which is refused)."""
    return DeltaProblem(node(library(), spec), _TYPES[dtype], batch, tokens)


def plan_delta(problem: DeltaProblem, device: Device = H200) -> DeltaPlan:
    """qm_cuda_plan_delta: pure, needs no GPU.

    Raises:
        ValueError: the library's sentence about an attribute or a shape.
    """
    found, err = DeltaPlan(), ctypes.create_string_buffer(ERROR_SIZE)
    plan = library().qm_cuda_plan_delta
    check_status(plan(ctypes.byref(problem), ctypes.byref(device), ctypes.byref(found), err), err)
    return found


def launch_delta(problem: DeltaProblem, plan: DeltaPlan, *tensors: torch.Tensor) -> None:
    """Enqueues on torch's current stream.

    Args:
        tensors: qkv, a, b, z, a_log, dt_bias, norm, past_state, rows, y, present_state, workspace (uint8 of
            plan.workspace_bytes), contiguous.
    """
    import torch

    pointers = (_PTR * 12)(*(t.data_ptr() for t in tensors))
    err = ctypes.create_string_buffer(ERROR_SIZE)
    stream = _PTR(torch.cuda.current_stream().cuda_stream)
    launch = library().qm_cuda_launch_delta
    check_status(launch(ctypes.byref(problem), ctypes.byref(plan), pointers, stream, err), err)


def delta(spec: DeltaSpec, *inputs: torch.Tensor, in_place: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """GatedDelta on the current CUDA device: op.def's inputs and outputs; present_state is past_state if ``in_place``.

    Raises:
        ValueError: the library's sentence about an attribute or a shape.
    """
    import torch

    qkv, past_state = inputs[0], inputs[7]
    width = spec.num_v_heads * spec.v_head_size
    y = torch.full((*qkv.shape[:2], width), float("nan"), dtype=qkv.dtype, device=qkv.device)
    present = past_state if in_place else torch.full_like(past_state, float("nan"))
    problem = delta_problem(spec, _dtype(qkv), *qkv.shape[:2])
    plan = plan_delta(problem, query(qkv.device.index or 0))
    workspace = torch.full((max(1, plan.workspace_bytes),), 0xFF, dtype=torch.uint8, device=qkv.device)
    launch_delta(problem, plan, *inputs, y, present, workspace)
    return y, present
