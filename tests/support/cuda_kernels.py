"""Kernels of quant_moe_cuda.h on torch tensors, without an engine. Tests and benchmarks launch them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING

from quantmoe.custom_ops import native
from quantmoe.custom_ops.c_calls import checked
from quantmoe.custom_ops.cuda import (  # noqa: F401 - for those who import this
    H200,
    STEPS,
    TYPES,
    AttentionPlan,
    AttentionProblem,
    Device,
    LinearProblem,
    NodePlan,
    Plan,
    PlanStep,
    Problem,
    attention_problem,
    fill_plan,
    library,
    linear_problem,
    plan,
    plan_node,
    plan_shapes,
    problem,
    query,
    refusal,
)
from quantmoe.custom_ops.op import (
    AttentionSpec,
    LinearSpec,
    MoESpec,
    NormSpec,
    RowsSpec,
    Spec,
)
from quantmoe.custom_ops.structs import Shape, Tensor, node
from quantmoe.custom_ops.tensor_shapes import output_shapes

if TYPE_CHECKING:
    import torch

_I32, _I64, _U64, _PTR = ctypes.c_int32, ctypes.c_int64, ctypes.c_uint64, ctypes.c_void_p


PATHS = ("decode", "stream", "wgmma", "fp8", "dense")


class NodeCall(ctypes.Structure):
    """qm_cuda_call."""

    _fields_ = [
        ("inputs", ctypes.POINTER(Tensor)),
        ("outputs", ctypes.POINTER(Tensor)),
        ("workspace", _PTR),
        ("stream", _PTR),
    ]


#: QM_CUDA_PEERS
PEERS = 8


class Peers(ctypes.Structure):
    """qm_cuda_peers."""

    _fields_ = [("rank", _I32), ("world", _I32), ("blocks", _I32), ("boxes", _PTR * PEERS)]


class Sum(ctypes.Structure):
    """qm_cuda_sum."""

    _fields_ = [("type", _I32), ("count", _I64), ("x", _PTR), ("y", _PTR)]


class Gather(ctypes.Structure):
    """qm_cuda_gather."""

    _fields_ = [("type", _I32), ("rows", _I64), ("columns", _I64), ("x", _PTR), ("y", _PTR)]


#: QM_CUDA_CALLERS
CALLERS = 2**64 - 1


class Tensors(ctypes.Structure):
    _fields_ = [
        (n, _PTR)
        for n in (
            *("hidden_states", "topk_ids", "topk_weights", "w13", "w2", "output", "workspace"),
            *("slots", "staging", "cache_state", "rows"),
            *("host_request", "host_x", "host_weights", "host_ids", "host_y"),
        )
    ]


def _launch(name: str, structs: Sequence[ctypes.Structure], tensors: Sequence[torch.Tensor], count: int) -> None:
    """Enqueue qm_cuda_launch_<name> on torch's current stream.

    Args:
        tensors: ``count`` of them; one without elements is NULL.
    """
    import torch

    pointers = (_PTR * count)(*(t.data_ptr() if t.numel() else None for t in tensors))
    stream = _PTR(torch.cuda.current_stream().cuda_stream)
    checked(getattr(library(), f"qm_cuda_launch_{name}"), *map(ctypes.byref, structs), pointers, stream)


def check_plan(problem: Problem | LinearProblem, plan: Plan) -> None:
    """qm_cuda_check_plan and its like: pure, needs no GPU.

    Raises:
        ValueError: the plan names a kernel that the library does not have.
    """
    lib = library()
    check = lib.qm_cuda_check_plan if isinstance(problem, Problem) else lib.qm_cuda_check_plan_linear
    checked(check, ctypes.byref(problem), ctypes.byref(plan))


def check_order(problem: Problem | LinearProblem, rows: torch.Tensor) -> None:
    """qm_cuda_check_moe and its like: the act-orders in w13, or in a linear's w (CUDA tensors).

    Raises:
        ValueError: one does not have each feature once.
    """
    check = library().qm_cuda_check_moe if isinstance(problem, Problem) else library().qm_cuda_check_linear
    checked(check, ctypes.byref(problem), _PTR(rows.data_ptr()), None)


def _dtype(x: torch.Tensor) -> str:
    return {"torch.float16": "f16", "torch.bfloat16": "bf16"}.get(str(x.dtype), "f32")


class CudaMoE:
    """One layer on the current CUDA device.

    Args:
        spec: the node's attributes, layout marlin.
        w13, w2: uint8 CUDA tensors [local experts, row bytes].
    """

    #: slots, staging and state of a cache (CachedMoE)
    cache: tuple[torch.Tensor, ...] = ()
    #: of a cache: page-locked int64 [2, local experts], addresses of the experts' rows in place of w13's and w2's
    rows: torch.Tensor | None = None

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
        """Enqueue on torch's current stream. All tensors contiguous; workspace uint8 of plan.workspace_bytes."""
        import torch

        pointers = (hidden, topk_ids, topk_weights, self.w13, self.w2, output, workspace, *self.cache)
        tensors = Tensors(*(x.data_ptr() for x in pointers))
        tensors.rows = None if self.rows is None else self.rows.data_ptr()
        self.place(tensors)
        stream = _PTR(torch.cuda.current_stream().cuda_stream)
        checked(library().qm_cuda_launch, *map(ctypes.byref, (*prepared, tensors)), stream)

    def place(self, tensors: Tensors) -> None:
        """Add what a launch takes of a host that multiplies, qm_cuda_host."""

    def __call__(self, hidden: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
        """hidden f16 or bf16 [T, H], topk_ids int32 or int64 [T, k], topk_weights f32 [T, k] -> [T, H]."""
        import torch

        prepared = self.prepare(hidden, topk_ids)
        # NaN everywhere: a result that was not written, or scratch that was read before it was, shows.
        output = torch.full_like(hidden, float("nan"))
        workspace = torch.full((max(1, prepared[1].workspace_bytes),), 0xFF, dtype=torch.uint8, device=hidden.device)
        self.launch(prepared, hidden, topk_ids, topk_weights, output, workspace)
        return output


class CachedMoE(CudaMoE):
    """A layer whose experts are in host memory, with a cache of some on the current CUDA device.

    Args:
        spec: the node's attributes, layout marlin.
        w13, w2: uint8 tensors [local experts, row bytes] in page-locked host memory.
        slots: experts that the cache keeps.
        staging: experts that a call copies for itself when it asks for more.
    """

    def __init__(self, spec: MoESpec, w13: torch.Tensor, w2: torch.Tensor, slots: int, staging: int) -> None:
        import torch

        super().__init__(spec, w13, w2)
        self.slots, self.staging = slots, staging
        lib, moe = library(), node(native.library(), spec)
        self.slot_bytes = lib.qm_cuda_slot_bytes(ctypes.byref(moe))
        memory = [torch.full((n, self.slot_bytes), 0xFF, dtype=torch.uint8, device="cuda") for n in (slots, staging)]
        state = torch.zeros(lib.qm_cuda_cache_state_bytes(_I64(len(w13)), slots), dtype=torch.uint8, device="cuda")
        self.cache = (*memory, state)

    def prepare(self, hidden: torch.Tensor, topk_ids: torch.Tensor) -> tuple[Problem, Plan]:
        """Problem and plan of a batch."""
        p, _ = super().prepare(hidden, topk_ids)
        p.slots, p.staging = self.slots, self.staging
        return p, plan(p, self.device)

    @property
    def counts(self) -> dict[str, int]:
        """qm_cuda_cache_counts."""
        counts = self.cache[2][:40].cpu().numpy().view("<u8")
        return dict(zip(("hits", "misses", "staged", "not_copied", "computed"), map(int, counts), strict=True))

    @property
    def experts(self) -> list[int]:
        """Return the local expert of each slot, -1 for none."""
        words = self.cache[2][48:].cpu().numpy().view("<i4")
        return [int(expert) - 1 for expert in words[len(self.w13) : len(self.w13) + self.slots]]


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
        """Enqueue on torch's current stream. All tensors contiguous; workspace uint8 of plan.workspace_bytes."""
        _launch("linear", (p, chosen), (x, self.w, y, workspace), 4)


def token_rows(spec: RowsSpec, mask: torch.Tensor, new: int, past: int) -> tuple[torch.Tensor, ...]:
    """TokenRows on the current CUDA device: mask int64 [B, L], S and P -> op.def's outputs."""
    cache = mask.new_empty((len(mask), 1, past, 1)).half()
    return run_node(spec, cache, mask.new_empty((len(mask), new)), mask)


def plan_attention(problem: AttentionProblem, device: Device = H200) -> AttentionPlan:
    """qm_cuda_plan_attention: pure, needs no GPU.

    Raises:
        ValueError: the library's sentence about an attribute or a shape.
    """
    found = AttentionPlan()
    fill_plan(library(), problem, device, found)
    return found


def launch_attention(problem: AttentionProblem, plan: AttentionPlan, *tensors: torch.Tensor) -> None:
    """Enqueue on torch's current stream.

    Args:
        tensors: qkv, past_key, past_value, rows, cos, sin, q_norm, k_norm, sinks, block_table (or rows, without a
            block_size), output, present_key, present_value, workspace (uint8 of plan.workspace_bytes), contiguous.

    Raises:
        ValueError: present is past's memory, but has more slots.
    """
    _launch("attention", (problem, plan), tensors, 14)


def attention(
    spec: AttentionSpec,
    qkv: torch.Tensor,
    past_key: torch.Tensor,
    past_value: torch.Tensor,
    rows: torch.Tensor,
    length: int,
    *tables: torch.Tensor,
    block_table: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """CachedAttention on the current CUDA device: op.def's inputs, attention_mask as its length.

    Args:
        tables: cos, sin, q_norm, k_norm, sinks. block_table: where the spec has a block_size.

    Returns:
        output, present_key and present_value: past's memory where that has the slots, else new memory.

    Raises:
        ValueError: the library's sentence about an attribute or a shape.
    """
    import torch

    batch, tokens, _ = qkv.shape
    if block_table is None:
        before, slots = past_key.shape[2], max(past_key.shape[2], length)
        p = attention_problem(spec, _dtype(qkv), batch, tokens, before, slots)
    else:
        before = slots = block_table.shape[1] * spec.block_size
        sizes = (before, slots, len(past_key), len(tables[0]))
        p = attention_problem(spec, _dtype(qkv), len(block_table), tokens, *sizes)
    chosen = plan_attention(p, query(qkv.device.index or 0))
    output = qkv.new_full((batch, tokens, spec.num_heads * spec.v_head_size), float("nan"))
    present = [past_key, past_value]
    if slots > before:
        other = float("nan") if spec.cache_format == "none" else 0x7F
        present = [past.new_full((*past.shape[:2], slots, past.shape[3]), other) for past in present]
    workspace = torch.full((max(1, chosen.workspace_bytes),), 0xFF, dtype=torch.uint8, device=qkv.device)
    table = rows if block_table is None else block_table
    launch_attention(p, chosen, qkv, past_key, past_value, rows, *tables, table, output, *present, workspace)
    return output, present[0], present[1]


def launch_node(
    spec: Spec,
    plan: NodePlan,
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    workspace: torch.Tensor,
) -> None:
    """Enqueue an operator that runs by its name on torch's current stream.

    Args:
        inputs, outputs: op.def's, contiguous; one without elements is NULL. workspace: uint8 of plan.workspace_bytes.
    """
    call = _call_of(inputs, outputs, workspace.data_ptr())
    own = ctypes.byref(node(library(), spec))
    checked(library().qm_cuda_launch_node, spec.OP.encode(), own, *map(ctypes.byref, (plan, call)))


def _call_of(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], workspace: int | None) -> NodeCall:
    import torch

    tensors = [
        (Tensor * len(given))(
            *(Tensor(t.data_ptr() if t.numel() else None, TYPES[_dtype(t)], Shape.of(t.shape)) for t in given)
        )
        for given in (inputs, outputs)
    ]
    return NodeCall(*tensors, workspace, torch.cuda.current_stream().cuda_stream if torch.cuda.is_available() else None)


def run_node(
    spec: Spec, *inputs: torch.Tensor, in_place: bool = False, device: Device | None = None
) -> tuple[torch.Tensor, ...]:
    """Run an operator that has a QM_CUDA line on the current CUDA device: op.def's inputs and outputs.

    Args:
        in_place: the state that the call makes, its last output, is in the memory of the one before.
        device: what the plan is for; None: the current one.

    Raises:
        ValueError: the library's sentence about an attribute or a shape.
    """
    import torch

    op, x = spec.OPERATOR, inputs[0]
    sizes = output_shapes(op, spec.attributes(), [tensor.shape for tensor in inputs])
    types = {"T": x.dtype, "float": torch.float32, "int32": torch.int32, "int64": torch.int64}
    outputs = [
        torch.full(tuple(size), -9 if type_.startswith("int") else float("nan"), dtype=types[type_], device=x.device)
        for size, (_, type_) in zip(sizes, op.outputs, strict=True)
    ]
    if in_place:
        outputs[-1] = inputs[-2]
    plan = plan_shapes(spec, _dtype(x), [t.shape for t in inputs], device or query(x.device.index or 0))
    workspace = torch.full((max(1, plan.workspace_bytes),), 0xFF, dtype=torch.uint8, device=x.device)
    launch_node(spec, plan, inputs, outputs, workspace)
    return tuple(outputs)


def new_box(world: int) -> torch.Tensor:
    """Return what a rank of ``world`` has in its memory for sums, on the current CUDA device, ready when this
    returns."""
    import torch

    box = torch.empty(library().qm_cuda_box_bytes(world), dtype=torch.uint8, device="cuda")
    checked(library().qm_cuda_clear_box, world, _PTR(box.data_ptr()), _PTR(torch.cuda.current_stream().cuda_stream))
    torch.cuda.synchronize()
    return box


def launch_sum(peers: Peers, x: torch.Tensor, y: torch.Tensor) -> None:
    """Enqueue a rank's part of a sum, y = all ranks' x, on torch's current stream: it waits there for the others'.

    Args:
        peers: of the rank; ``boxes`` are all ranks' boxes' addresses. x, y: contiguous, f16 or bf16.

    Raises:
        ValueError: the library's sentence about the ranks or the type.
    """
    _launch_of_ranks("sum", peers, Sum(TYPES[_dtype(x)], x.numel(), x.data_ptr(), y.data_ptr()))


def launch_sum_norm(peers: Peers, spec: NormSpec, *tensors: torch.Tensor) -> None:
    """The same of AddRMSNorm of the ranks' sum.

    Args:
        tensors: x, residual, weight, y, sum, contiguous.
    """
    call = _call_of(tensors[:3], tensors[3:], None)
    own = node(native.library(), spec)
    checked(library().qm_cuda_launch_sum_norm, *map(ctypes.byref, (peers, own, call)))


def launch_gather(peers: Peers, x: torch.Tensor, y: torch.Tensor) -> None:
    """The same of x [rows, columns] -> y [rows, world, columns]."""
    _launch_of_ranks("gather", peers, Gather(TYPES[_dtype(x)], *x.shape, x.data_ptr(), y.data_ptr()))


def _launch_of_ranks(name: str, peers: Peers, *call: ctypes.Structure | ctypes.Array[ctypes.c_void_p]) -> None:
    import torch

    stream = _PTR(torch.cuda.current_stream().cuda_stream if torch.cuda.is_available() else None)
    pointers = map(ctypes.byref, (peers, *call))
    checked(getattr(library(), f"qm_cuda_launch_{name}"), *pointers, stream)
