"""The C ABI of quant_moe_cuda.h through ctypes: plans and refusals, on any machine."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache

from quantmoe.custom_ops import library_file, native, native_name
from quantmoe.custom_ops.c_calls import checked
from quantmoe.custom_ops.op import AttentionSpec, LinearSpec, MoESpec, Projection, Spec
from quantmoe.custom_ops.structs import STRUCTS, Shape, Tensor, check_structs, node
from quantmoe.custom_ops.tensor_shapes import input_shapes

#: whose activations are of the same type
FLOATS = ("bf16", "f16")


_I32, _I64, _U64, _PTR = ctypes.c_int32, ctypes.c_int64, ctypes.c_uint64, ctypes.c_void_p


TYPES = {"f32": 0, "f16": 1, "bf16": 2}


class Device(ctypes.Structure):
    """qm_cuda_device."""

    _fields_ = [("sm", _I32), ("multiprocessors", _I32), ("shared_bytes", _I32)]


H200 = Device(90, 132, 233472)


class Problem(ctypes.Structure):
    """qm_cuda_problem."""

    PLAN = "qm_cuda_plan_moe"
    _fields_ = [
        ("moe", STRUCTS["QuantMoE"]),
        ("type", _I32),
        ("id_bytes", _I32),
        ("tokens", _I64),
        ("top_k", _I64),
        ("local_experts", _I64),
        ("slots", _I32),
        ("staging", _I32),
        ("host_share", _I32),
        ("host_layer", _I32),
    ]


class LinearProblem(ctypes.Structure):
    """qm_cuda_linear_problem."""

    PLAN = "qm_cuda_plan_linear"
    _fields_ = [("linear", STRUCTS["QuantLinear"]), ("type", _I32), ("rows", _I64)]


class AttentionProblem(ctypes.Structure):
    """qm_cuda_attention_problem."""

    PLAN = "qm_cuda_plan_attention"
    _fields_ = [
        ("attention", STRUCTS["CachedAttention"]),
        ("type", _I32),
        ("batch", _I64),
        ("tokens", _I64),
        ("past_slots", _I64),
        ("slots", _I64),
        ("blocks", _I64),
        ("positions", _I64),
    ]


class AttentionPlan(ctypes.Structure):
    """qm_cuda_attention_plan."""

    _fields_ = [(n, _I32) for n in ("tile_rows", "splits", "cluster", "stages", "wgmma", "few_tokens", "many_rows")] + [
        (n, _U64) for n in ("queries", "sums", "partial", "workspace_bytes")
    ]


class NodePlan(ctypes.Structure):
    """qm_cuda_node_plan."""

    _fields_ = [("chosen", _I32 * 4), ("workspace_bytes", _U64)]


#: qm_cuda_step_kind
STEPS = (
    *("round", "gather", "route", "quantize", "gate_up", "round_hidden", "quantize_hidden", "down", "combine"),
    *("linear", "resolve", "fill", "add_host"),
)


class PlanStep(ctypes.Structure):
    """qm_cuda_step."""

    _fields_ = [
        (n, _I32)
        for n in (
            *("kind", "grid", "grid_y", "block", "block_y", "shared_bytes", "cluster", "dependent"),
            *("panels", "n_tiles", "stages", "warps_k", "packed", "weighted", "ordered"),
            *("in_rows", "in_columns", "out_rows", "out_columns"),
        )
    ] + [("in_at", _U64), ("out_at", _U64)]
    #: of a product: which instance, on how many blocks
    instance = ("panels", "n_tiles", "stages", "warps_k", "packed", "grid", "block", "shared_bytes", "cluster")


class Plan(ctypes.Structure):
    """qm_cuda_plan."""

    _fields_ = [
        ("path", _I32),
        ("step_count", _I32),
        ("all_steps", PlanStep * 10),
        ("max_tiles", _I32),
        ("down_max_tiles", _I32),
        *((n, _U64) for n in ("tiles", "down_tiles", "sorted_pairs", "positions")),
        *((n, _U64) for n in ("where", "copies", "kept", "workspace_bytes")),
    ]

    @property
    def steps(self) -> dict[str, PlanStep]:
        """By name (STEPS), in the order in which they run; changing one changes the plan."""
        return {STEPS[s.kind]: s for s in self.all_steps[: self.step_count]}

    @property
    def w13(self) -> PlanStep:
        """A layer's product with w13."""
        return self.steps["gate_up"]

    @property
    def w2(self) -> PlanStep:
        """A layer's product with w2, or a linear's."""
        steps = self.steps
        return steps["down"] if "down" in steps else steps["linear"]


@cache
def library() -> ctypes.CDLL:
    """Return the kernels: the library named by QUANTMOE_CUDA_LIBRARY, else the installed one.

    Raises:
        FileNotFoundError: neither is there.
        OSError: it was built from another op.def.
    """
    lib = ctypes.CDLL(library_file("quantmoe.custom_ops", native_name("quantmoe_cuda"), "QUANTMOE_CUDA_LIBRARY"))
    check_structs(lib)
    for size in ("row_bytes", "linear_row_bytes", "slot_bytes", "cache_state_bytes", "box_bytes"):
        getattr(lib, f"qm_cuda_{size}").restype = ctypes.c_size_t
    return lib


def problem(spec: MoESpec, dtype: str, tokens: int, top_k: int, local_experts: int, id_bytes: int = 8) -> Problem:
    """qm_cuda_problem of a node and a batch; dtype "f16" or "bf16" (or "f32", which plan() refuses)."""
    return Problem(node(native.library(), spec), TYPES[dtype], id_bytes, tokens, top_k, local_experts)


def linear_problem(spec: LinearSpec, dtype: str, rows: int) -> LinearProblem:
    """qm_cuda_linear_problem of a node and a batch."""
    return LinearProblem(node(native.library(), spec), TYPES[dtype], rows)


def plan(problem: Problem | LinearProblem, device: Device = H200) -> Plan:
    """qm_cuda_plan_moe or qm_cuda_plan_linear: pure, needs no GPU.

    Raises:
        ValueError: the library's sentence about what is not supported.
    """
    found = Plan()
    fill_plan(library(), problem, device, found)
    return found


def fill_plan(lib: ctypes.CDLL, problem: ctypes.Structure, device: Device, found: ctypes.Structure) -> None:
    checked(getattr(lib, problem.PLAN), *map(ctypes.byref, (problem, device, found)))


def refusal(spec: Spec) -> str:
    """Return why the kernels do not run nodes with these attributes, "" when they do.

    The plan of one token on an H200 says it. The library of the CPU kernels has this plan, too.
    """
    lib = native.library()
    if "CPU" in spec.OPERATOR.engines and "CUDA" not in spec.OPERATOR.engines:
        return f"no CUDA kernel runs {spec.OP}"
    try:
        if isinstance(spec, AttentionSpec):
            fill_plan(lib, attention_problem(spec, "bf16", 1, 1, 1, 1, positions=1), H200, AttentionPlan())
        elif isinstance(spec, MoESpec | LinearSpec):
            fill_plan(lib, _of_one_token(spec), H200, Plan())
        else:
            plan_node(spec, "bf16", 1, 1, lib=lib)
    except ValueError as error:
        return str(error)
    return ""


def _of_one_token(spec: MoESpec | LinearSpec) -> Problem | LinearProblem:
    if isinstance(spec, LinearSpec):
        return linear_problem(spec, _type_of(spec.w), 1)
    kind = _type_of(spec.w13 if spec.w13.format in FLOATS else spec.w2)
    return problem(spec, kind, 1, 1, spec.num_experts - spec.expert_offset)


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
        plan(_of_one_token(spec), device)
    except ValueError as error:
        return str(error)
    return ""


def query(ordinal: int = 0) -> Device:
    """Return the device as the plan sees it."""
    found = Device()
    checked(library().qm_cuda_query, ordinal, ctypes.byref(found))
    return found


def attention_problem(
    spec: AttentionSpec,
    dtype: str,
    batch: int,
    tokens: int,
    past_slots: int,
    slots: int,
    blocks: int = 0,
    positions: int = 0,
) -> AttentionProblem:
    """qm_cuda_attention_problem of a node and its shapes; dtype "f16" or "bf16" (or "f32", which is refused)."""
    own = node(native.library(), spec)
    return AttentionProblem(own, TYPES[dtype], batch, tokens, past_slots, slots, blocks, positions)


def plan_node(
    spec: Spec,
    dtype: str,
    batch: int,
    tokens: int,
    device: Device = H200,
    lib: ctypes.CDLL | None = None,
    **sizes: int,
) -> NodePlan:
    """Plan an operator that runs by its name. Pure, needs no GPU.

    Args:
        dtype: "f16" or "bf16" (or "f32", which most refuse).
        batch, tokens: the sizes B and S of op.def, and its "..". sizes: others by their letters.
        lib: the library that plans; None: the CUDA library.

    Raises:
        ValueError: the library's sentence about an attribute or a shape.
    """
    free = {"B": batch, "S": tokens, "..": [batch, tokens], **sizes}
    shapes = input_shapes(spec.OPERATOR, spec.attributes(), free)
    return plan_shapes(spec, dtype, shapes, device, lib)


def plan_shapes(
    spec: Spec,
    dtype: str,
    shapes: Sequence[Sequence[int]],
    device: Device = H200,
    lib: ctypes.CDLL | None = None,
) -> NodePlan:
    """Plan an operator as :func:`plan_node`, for inputs of these shapes."""
    inputs = (Tensor * len(shapes))(*(Tensor(None, TYPES[dtype], Shape.of(shape)) for shape in shapes))
    found, own = NodePlan(), ctypes.byref(node(native.library(), spec))
    plan_of = (lib or library()).qm_cuda_plan_node
    checked(plan_of, spec.OP.encode(), own, inputs, ctypes.byref(device), ctypes.byref(found))
    return found
