"""Kernels of quant_moe_cuda.h on torch tensors, without an engine. Tests and benchmarks launch them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np

from quantmoe.custom_ops import native
from quantmoe.custom_ops.c_calls import checked
from quantmoe.custom_ops.cuda import (  # noqa: F401 - for those who import this
    H200,
    INT32,
    INT64,
    TYPES,
    Device,
    NodeCall,
    NodePlan,
    library,
    plan_call,
    plan_node,
    plan_shapes,
    query,
    refusal,
    tensors,
)
from quantmoe.custom_ops.op import (
    AttentionSpec,
    LinearSpec,
    MoESpec,
    NormSpec,
    RowsSpec,
    Spec,
)
from quantmoe.custom_ops.op_def import nodes
from quantmoe.custom_ops.op_def.structs import Shape, Tensor, node
from quantmoe.custom_ops.op_def.tensor_shapes import output_shapes

if TYPE_CHECKING:
    import torch

_I32, _I64, _U64, _PTR = ctypes.c_int32, ctypes.c_int64, ctypes.c_uint64, ctypes.c_void_p


PATHS = ("decode", "stream", "wgmma", "fp8", "dense")


#: StepKind of src/cuda/moe/layer_plan.h
STEPS = (
    *("round", "gather", "route", "quantize", "gate_up", "round_hidden", "quantize_hidden", "down", "combine"),
    *("linear", "resolve", "fill", "add_host"),
)


class PlanStep(ctypes.Structure):
    """PlanStep."""

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


class _OwnPlan(ctypes.Structure):
    _fields_ = [(n, _U64) for n in ("workspace_bytes", "slot_bytes", "state_bytes")]

    @classmethod
    def new(cls) -> Self:
        """Return it in the memory of a qm_cuda_node_plan."""
        return cls.from_buffer(bytearray(ctypes.sizeof(NodePlan)))


class Plan(_OwnPlan):
    """A qm_cuda_node_plan with a LayerPlan."""

    _fields_ = [
        ("path", _I32),
        ("step_count", _I32),
        ("all_steps", PlanStep * 10),
        ("max_tiles", _I32),
        ("down_max_tiles", _I32),
        *((n, _U64) for n in ("tiles", "down_tiles", "sorted_pairs", "positions", "where", "copies", "kept")),
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


class AttentionPlan(_OwnPlan):
    """A qm_cuda_node_plan with an AttentionPlan of src/cuda/attention/attention_call.h."""

    _fields_ = [
        *((n, _I32) for n in ("tile_rows", "splits", "cluster", "stages", "wgmma", "few_tokens", "many_rows", "ring")),
        *((n, _U64) for n in ("queries", "sums", "partial", "entries")),
    ]


class Experts(ctypes.Structure):
    """qm_cuda_experts."""

    _fields_ = [
        *((n, _I32) for n in ("slots", "staging", "host_share", "host_layer")),
        *((n, _PTR) for n in ("slot_memory", "staging_memory", "cache_state", "rows", "host")),
    ]


def host_words(hidden_size: int) -> int:
    """Return the 32-bit words of a qm_cuda_host, and of x and y after it."""
    return 288 + 16 * hidden_size


def host_arrays(words: np.ndarray, hidden_size: int) -> dict[str, np.ndarray]:
    """Return the arrays in it: the request, weights, ids, x, y. words: int32 [host_words]."""
    request, weights, ids, x, y = np.split(words, [32, 160, 288, 288 + 8 * hidden_size])
    floats = {name: array.view(np.float32) for name, array in {"weights": weights, "x": x, "y": y}.items()}
    return {"request": request, "ids": ids} | floats


class Launched(ctypes.Structure):
    """What fake_gpu.cc keeps of a launch of QuantMoE."""

    _fields_ = [("w13", _PTR), ("w2", _PTR), ("experts", Experts)]


@dataclass
class Problem:
    """A call of QuantMoE without data."""

    spec: MoESpec
    dtype: str
    tokens: int
    top_k: int
    local_experts: int
    id_bytes: int
    moe: ctypes.Structure
    slots: int = 0
    staging: int = 0
    host_share: int = 0
    host_layer: int = 0

    @property
    def own(self) -> ctypes.Structure:
        return self.moe

    def inputs(self) -> ctypes.Array[Tensor]:
        ids, width = (self.tokens, self.top_k), {4: INT32, 8: INT64}.get(self.id_bytes, 0)
        shapes = [(self.tokens, self.spec.hidden_size), ids, ids, (), ()]
        return tensors(self.spec, self.dtype, shapes, self.local_experts, width)

    def experts(self) -> Experts:
        return Experts(self.slots, self.staging, self.host_share, self.host_layer)


@dataclass
class LinearProblem:
    """A call of QuantLinear without data."""

    spec: LinearSpec
    dtype: str
    rows: int
    own: ctypes.Structure

    def inputs(self) -> ctypes.Array[Tensor]:
        return tensors(self.spec, self.dtype, [(self.rows, self.spec.in_features), ()])

    def experts(self) -> None:
        return None


@dataclass
class AttentionProblem:
    """A call of CachedAttention without data: B, S, P and max(P, L); with a block_size R, S and twice M * block_size,
    and N and K. lists: G and E of ``selected``."""

    spec: AttentionSpec
    dtype: str
    batch: int
    tokens: int
    past_slots: int
    slots: int
    blocks: int
    positions: int
    own: ctypes.Structure
    lists: tuple[int, ...] = ()

    def inputs(self) -> ctypes.Array[Tensor]:
        spec, (key, value) = self.spec, self.spec.cache_widths
        b, s, groups, turns = self.batch, self.tokens, self.spec.kv_num_heads, self.spec.rotary_size // 2
        caches = [(b, groups, self.past_slots, width) for width in (key, value)]
        angles: tuple[int, ...] = (b, s, turns)
        if spec.block_size:
            caches = [(self.blocks, spec.block_size, groups, width) for width in (key, value)]
            angles = (self.positions, turns)
        shapes = [(1 if spec.block_size else b, s, 0), *caches, (b, 3), (b, self.slots), angles, angles, (0,), (0,)]
        table = (b, self.slots // spec.block_size) if spec.block_size else (0, 0)
        selected = (b, s, *self.lists) if self.lists else None
        return tensors(spec, self.dtype, [*shapes, (spec.num_heads,), (0,), (0,), table, selected])

    def experts(self) -> None:
        return None


def problem(spec: MoESpec, dtype: str, tokens: int, top_k: int, local_experts: int, id_bytes: int = 8) -> Problem:
    """Return a call of a node; dtype "f16" or "bf16" (or "f32", which plan() refuses)."""
    return Problem(spec, dtype, tokens, top_k, local_experts, id_bytes, node(native.library(), spec))


def linear_problem(spec: LinearSpec, dtype: str, rows: int) -> LinearProblem:
    """Return a call of a node."""
    return LinearProblem(spec, dtype, rows, node(native.library(), spec))


def attention_problem(
    spec: AttentionSpec,
    dtype: str,
    batch: int,
    tokens: int,
    past_slots: int,
    slots: int,
    blocks: int = 0,
    positions: int = 0,
    lists: tuple[int, ...] = (),
) -> AttentionProblem:
    """Return a call of a node; dtype "f16" or "bf16" (or "f32", which is refused)."""
    own = node(native.library(), spec)
    return AttentionProblem(spec, dtype, batch, tokens, past_slots, slots, blocks, positions, own, lists)


def plan(problem: Problem | LinearProblem, device: Device = H200) -> Plan:
    """Plan a call: pure, needs no GPU.

    Raises:
        ValueError: the library's sentence about what is not supported.
    """
    found = Plan.new()
    _fill(problem, device, found)
    return found


def _fill(problem: Problem | LinearProblem | AttentionProblem, device: Device, found: _OwnPlan) -> None:
    given, experts = problem.inputs(), problem.experts()
    call = NodeCall(given, experts=None if experts is None else ctypes.addressof(experts))
    plan_call(library(), problem.spec.OP, problem.own, call=call, device=device, found=found)


#: QM_CUDA_PEERS
PEERS = 8


class Peers(ctypes.Structure):
    """qm_cuda_peers."""

    _fields_ = [("rank", _I32), ("world", _I32), ("blocks", _I32), ("boxes", _PTR * PEERS)]


#: kCallers
CALLERS = 2**64 - 1


def _check(problem: Problem | LinearProblem, plan: Plan, given: ctypes.Array[Tensor]) -> None:
    lib, op = library(), problem.spec.OP.encode()
    checked(lib.qm_cuda_check_node, op, *map(ctypes.byref, (problem.own, plan, NodeCall(given))))


def check_plan(problem: Problem | LinearProblem, plan: Plan) -> None:
    """qm_cuda_check_node without weights: pure, needs no GPU.

    Raises:
        ValueError: the plan names a kernel that the library does not have.
    """
    _check(problem, plan, problem.inputs())


def check_order(problem: Problem | LinearProblem, rows: torch.Tensor) -> None:
    """qm_cuda_check_node: the act-orders in w13, or in a linear's w (CUDA tensors).

    Raises:
        ValueError: one does not have each feature once.
    """
    given = problem.inputs()
    given[3 if isinstance(problem, Problem) else 1].data = rows.data_ptr()
    _check(problem, plan(problem, query(rows.device.index or 0)), given)


def launch(
    problem: Problem | LinearProblem | AttentionProblem,
    plan: _OwnPlan,
    inputs: Sequence[int | None],
    outputs: Sequence[int | None],
    workspace: int | None,
    stream: int | None,
    experts: Experts | None = None,
) -> None:
    """qm_cuda_launch_node with addresses of inputs and outputs.

    Raises:
        ValueError: the library's sentence.
    """
    given, made = problem.inputs(), (Tensor * len(outputs))(*(Tensor(at) for at in outputs))
    for tensor, at in zip(given, inputs, strict=False):
        tensor.data = at
    call = NodeCall(given, made, workspace, stream, None if experts is None else ctypes.addressof(experts))
    own = problem.spec.OP.encode(), ctypes.byref(problem.own)
    checked(library().qm_cuda_launch_node, *own, ctypes.byref(plan), ctypes.byref(call))


def _pointer(tensor: torch.Tensor) -> int | None:
    """Return the address of a tensor; None: it has no elements."""
    return tensor.data_ptr() if tensor.numel() else None


def _stream() -> int | None:
    import torch

    return torch.cuda.current_stream().cuda_stream


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
        for name, rows in (("w13", self.w13), ("w2", self.w2)):
            want = native.row_of(*self.spec.matrices(name)).bytes
            if rows.shape[1] != want:
                raise ValueError(f"{name} has rows of {rows.shape[1]} bytes, the attributes say {want}")
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
        p, chosen = prepared
        experts = p.experts()
        if self.cache:
            experts.slot_memory, experts.staging_memory, experts.cache_state = (x.data_ptr() for x in self.cache)
        experts.rows = None if self.rows is None else self.rows.data_ptr()
        self.place(experts)
        given = [x.data_ptr() for x in (hidden, topk_ids, topk_weights, self.w13, self.w2)]
        launch(p, chosen, given, [output.data_ptr()], workspace.data_ptr(), _stream(), experts)

    def place(self, experts: Experts) -> None:
        """Add where the host that multiplies is asked."""

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
        problem_of_one = problem(spec, "bf16", 1, 1, len(w13))
        problem_of_one.slots, problem_of_one.staging = slots, staging
        planned = plan(problem_of_one, self.device)
        self.slot_bytes = planned.slot_bytes
        memory = [torch.full((n, self.slot_bytes), 0xFF, dtype=torch.uint8, device="cuda") for n in (slots, staging)]
        state = torch.zeros(planned.state_bytes, dtype=torch.uint8, device="cuda")
        self.cache = (*memory, state)

    def prepare(self, hidden: torch.Tensor, topk_ids: torch.Tensor) -> tuple[Problem, Plan]:
        """Problem and plan of a batch."""
        p, _ = super().prepare(hidden, topk_ids)
        p.slots, p.staging = self.slots, self.staging
        return p, plan(p, self.device)

    @property
    def counts(self) -> dict[str, int]:
        """CacheCounts of src/cuda/common/experts_memory.h."""
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
        want = native.row_of(self.spec.w, self.spec.out_features, self.spec.in_features, 1).bytes
        if self.w.shape[1] != want:
            raise ValueError(f"w has a row of {self.w.shape[1]} bytes, the attributes say {want}")
        chosen = plan(p, self.device)
        y = torch.full((len(x), self.spec.out_features), float("nan"), dtype=x.dtype, device=x.device)
        workspace = torch.full((max(1, chosen.workspace_bytes),), 0xFF, dtype=torch.uint8, device=x.device)
        self.launch(p, chosen, x, y, workspace)
        return y

    def launch(self, p: LinearProblem, chosen: Plan, x: torch.Tensor, y: torch.Tensor, workspace: torch.Tensor) -> None:
        """Enqueue on torch's current stream. All tensors contiguous; workspace uint8 of plan.workspace_bytes."""
        launch(p, chosen, [_pointer(x), self.w.data_ptr()], [_pointer(y)], workspace.data_ptr(), _stream())


def token_rows(
    spec: RowsSpec, mask: torch.Tensor, new: int, past: int, most: int | None = None
) -> tuple[torch.Tensor, ...]:
    """TokenRows on the current CUDA device: mask int64 [B, L], S, P and num_logits -> op.def's outputs."""
    cache = mask.new_empty((len(mask), 1, past, 1)).half()
    number = () if most is None else (mask.new_tensor([most], device="cpu"),)
    return run_node(spec, cache, mask.new_empty((len(mask), new)), mask, *number)


def plan_attention(problem: AttentionProblem, device: Device = H200) -> AttentionPlan:
    """Plan a call: pure, needs no GPU.

    Raises:
        ValueError: the library's sentence about an attribute or a shape.
    """
    found = AttentionPlan.new()
    _fill(problem, device, found)
    return found


def launch_attention(
    problem: AttentionProblem, plan: AttentionPlan, *tensors: torch.Tensor, selected: torch.Tensor | None = None
) -> None:
    """Enqueue on torch's current stream.

    Args:
        tensors: qkv, past_key, past_value, rows, cos, sin, q_norm, k_norm, sinks, block_table (or rows, without a
            block_size), output, present_key, present_value, workspace (uint8 of plan.workspace_bytes), contiguous.
        selected: of a problem with lists.

    Raises:
        ValueError: present is past's memory, but has more slots.
    """
    pointers = [_pointer(tensor) for tensor in tensors]
    inputs = [*pointers[:4], None, *pointers[4:9], None, None, pointers[9]]
    inputs += [] if selected is None else [_pointer(selected)]
    launch(problem, plan, inputs, pointers[10:13], pointers[13], _stream())


def attention(
    spec: AttentionSpec,
    qkv: torch.Tensor,
    past_key: torch.Tensor,
    past_value: torch.Tensor,
    rows: torch.Tensor,
    length: int,
    *tables: torch.Tensor,
    block_table: torch.Tensor | None = None,
    selected: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """CachedAttention on the current CUDA device: op.def's inputs, attention_mask as its length.

    Args:
        tables: cos, sin, q_norm, k_norm, sinks. block_table: where the spec has a block_size. selected: lists of slots.

    Returns:
        output, present_key and present_value: past's memory where that has the slots, else new memory.

    Raises:
        ValueError: the library's sentence about an attribute or a shape.
    """
    import torch

    batch, tokens, _ = qkv.shape
    if block_table is None:
        before, slots = past_key.shape[2], max(past_key.shape[2], length)
        lists = () if selected is None else tuple(selected.shape[2:])
        p = attention_problem(spec, _dtype(qkv), batch, tokens, before, slots, lists=lists)
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
    given = (qkv, past_key, past_value, rows, *tables, table)
    launch_attention(p, chosen, *given, output, *present, workspace, selected=selected)
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
        inputs, outputs: op.def's, contiguous; one without elements is NULL, one with a QM_HOST_SIZE line on the host.
            Last inputs may be left out. workspace: uint8 of plan.workspace_bytes.
    """
    missing = len(spec.OPERATOR.inputs) + len(spec.OPERATOR.optional_inputs) - len(inputs)
    call = _call_of([*inputs, *[None] * missing], outputs, workspace.data_ptr())
    own = ctypes.byref(node(library(), spec))
    checked(library().qm_cuda_launch_node, spec.OP.encode(), own, *map(ctypes.byref, (plan, call)))


def _call_of(inputs: Sequence[torch.Tensor | None], outputs: Sequence[torch.Tensor], workspace: int | None) -> NodeCall:
    import torch

    def described(t: torch.Tensor | None) -> Tensor:
        if t is None:
            return Tensor(None, 0, Shape.of(None))
        return Tensor(t.data_ptr() if t.numel() else None, TYPES[_dtype(t)], Shape.of(t.shape))

    tensors = [(Tensor * len(given))(*map(described, given)) for given in (inputs, outputs)]
    return NodeCall(*tensors, workspace, torch.cuda.current_stream().cuda_stream if torch.cuda.is_available() else None)


def run_node(
    spec: Spec, *inputs: torch.Tensor, in_place: bool = False, device: Device | None = None
) -> tuple[torch.Tensor, ...]:
    """Run an operator that has a QM_CUDA line on the current CUDA device: op.def's inputs and outputs.

    Args:
        in_place: the state that the call makes, its last output present_X, is in the memory of past_X.
        device: what the plan is for; None: the current one.

    Raises:
        ValueError: the library's sentence about an attribute or a shape.
    """
    import torch

    op, x = spec.OPERATOR, inputs[0]
    named = zip((name for name, _ in (*op.inputs, *op.optional_inputs)), inputs, strict=False)
    numbers = {name: int(tensor) for name, tensor in named if name in op.host_sizes}
    sizes = output_shapes(op, spec.attributes(), [tensor.shape for tensor in inputs], host_sizes=numbers)
    types = {"T": x.dtype, "C": x.dtype, "float": torch.float32, "int32": torch.int32, "int64": torch.int64}
    outputs = [
        torch.full(tuple(size), -9 if type_.startswith("int") else float("nan"), dtype=types[type_], device=x.device)
        for size, (_, type_) in zip(sizes, op.outputs, strict=True)
    ]
    if in_place:
        past = op.outputs[-1][0].replace("present", "past")
        outputs[-1] = inputs[[name for name, _ in op.inputs].index(past)]
    plan = plan_shapes(spec, _dtype(x), [t.shape for t in inputs], device=device or query(x.device.index or 0))
    workspace = torch.full((max(1, plan.workspace_bytes),), 0xFF, dtype=torch.uint8, device=x.device)
    launch_node(spec, plan, inputs, outputs, workspace)
    return tuple(outputs)


class Box:
    """What a rank of ``world`` has in its memory for sums, on the current CUDA device."""

    def __init__(self, world: int) -> None:
        box = _PTR()
        checked(library().qm_cuda_allocate_box, world, ctypes.byref(box))
        self.address = box.value

    def __del__(self) -> None:
        if hasattr(self, "address"):
            checked(library().qm_cuda_free, _PTR(self.address))


def launch_sum(peers: Peers, x: torch.Tensor, y: torch.Tensor) -> None:
    """Enqueue a rank's part of a sum, y = all ranks' x, on torch's current stream: it waits there for the others'.

    Args:
        peers: of the rank; ``boxes`` are all ranks' boxes' addresses. x, y: contiguous, f16 or bf16.

    Raises:
        ValueError: the library's sentence about the ranks or the type.
    """
    _launch_of_ranks(peers, nodes.AllReduce(rank=0, world=2, export_id=0), [x], [y])


def launch_sum_norm(peers: Peers, spec: NormSpec, *tensors: torch.Tensor) -> None:
    """The same of AddRMSNorm of the ranks' sum.

    Args:
        tensors: x, residual, weight, y, sum, contiguous.
    """
    own = nodes.AllReduceAddRMSNorm(rank=0, world=2, export_id=0, norm_epsilon=spec.norm_epsilon)
    _launch_of_ranks(peers, own, tensors[:3], tensors[3:])


def launch_gather(peers: Peers, x: torch.Tensor, y: torch.Tensor) -> None:
    """The same of x [rows, columns] -> y [rows, world, columns]."""
    _launch_of_ranks(peers, nodes.AllGather(rank=0, world=2, export_id=0, axis=-1), [x], [y])


def _launch_of_ranks(peers: Peers, spec: Spec, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
    call = _call_of(inputs, outputs, None)
    call.peers = ctypes.addressof(peers)
    own, none = node(native.library(), spec), NodePlan()
    checked(library().qm_cuda_launch_node, spec.OP.encode(), *map(ctypes.byref, (own, none, call)))
