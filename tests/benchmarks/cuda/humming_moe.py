"""One MoE layer by Humming (PyPI humming-kernels), as vLLM runs it: lists, GEMM, SwiGLU, GEMM, weighted sum.

Humming has the GEMMs and the activation. The lists of pairs by expert and the sum over the experts are vLLM's, outside
Humming's wheel; those here are Triton kernels of this file, and `launch(..., lists=False)` leaves the first out.
"""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import torch
import triton
import triton.language as tl
from benchmarks.cuda.int4_weights import GROUP, ceil, matrices
from humming.config import LayerConfig
from humming.forward import humming_forward
from humming.ops import process_input
from humming.schema import HummingWeightSchema
from humming.transform import prepare_and_transform_humming_tensors
from humming.tune import get_heuristics_config
from support.cuda import cuda_kernels as cuda

from quantmoe.custom_ops.op import MoESpec

NAME = f"humming-kernels {version('humming-kernels')}"
SILU = {"activation_type": "binary_split", "activation_impl": "a / (1.f + expf(-a)) * b"}
COMPUTE = {"gemm_type": "indexed", "use_f16_accum": False, "use_batch_invariant": False}
SMALL = 64  # pairs that one block sorts by comparing them all


@triton.jit
def _store_lists(counts, experts, sorted_pairs, expert_ids, padded, pairs, BLOCK_M):
    """Padding, the expert of each block, the length; returns each expert's first place."""
    blocks = (counts + BLOCK_M - 1) // BLOCK_M
    first = tl.cumsum(blocks, 0) - blocks
    for j in range(BLOCK_M):
        place = counts + j
        tl.store(sorted_pairs + first * BLOCK_M + place, pairs, mask=place < blocks * BLOCK_M)
    for j in range(tl.max(blocks, 0)):
        tl.store(expert_ids + first + j, experts, mask=j < blocks)
    tl.store(padded, tl.sum(blocks, 0) * BLOCK_M)
    return first * BLOCK_M


@triton.jit
def _lists_small(ids, sorted_pairs, expert_ids, padded, pairs, BLOCK_M, N: tl.constexpr, E: tl.constexpr):
    i = tl.arange(0, N)
    experts = tl.arange(0, E)
    id = tl.load(ids + i, mask=i < pairs, other=E)
    mine = id[:, None] == experts[None, :]
    counts = tl.sum(mine.to(tl.int32), 0)
    start = _store_lists(counts, experts, sorted_pairs, expert_ids, padded, pairs, BLOCK_M)
    before = (id[:, None] == id[None, :]) & (i[None, :] < i[:, None])
    place = tl.sum(tl.where(mine, start[None, :], 0), 1) + tl.sum(before.to(tl.int32), 1)
    tl.store(sorted_pairs + place, i, mask=i < pairs)


@triton.jit
def _count(ids, counts, pairs, N: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    tl.atomic_add(counts + tl.load(ids + i, mask=i < pairs, other=0), 1, mask=i < pairs, sem="relaxed")


@triton.jit
def _lists(counts, places, sorted_pairs, expert_ids, padded, pairs, BLOCK_M, E: tl.constexpr):
    experts = tl.arange(0, E)
    found = tl.load(counts + experts)
    tl.store(counts + experts, tl.zeros_like(found))  # for the next layer
    tl.store(places + experts, _store_lists(found, experts, sorted_pairs, expert_ids, padded, pairs, BLOCK_M))


@triton.jit
def _place(ids, places, sorted_pairs, pairs, N: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    id = tl.load(ids + i, mask=i < pairs, other=0)
    tl.store(sorted_pairs + tl.atomic_add(places + id, 1, mask=i < pairs, sem="relaxed"), i, mask=i < pairs)


@triton.jit
def _sum(rows, weights, out, H, K: tl.constexpr, N: tl.constexpr):
    token = tl.program_id(0)
    column = tl.program_id(1) * N + tl.arange(0, N)
    total = tl.zeros([N], tl.float32)
    for j in tl.static_range(K):
        row = tl.load(rows + (token * K + j) * H + column, mask=column < H, other=0)
        total += row.to(tl.float32) * tl.load(weights + token * K + j)
    tl.store(out + token * H + column, total.to(out.dtype.element_ty), mask=column < H)


class HummingMoE:
    """The weights of `layer` (int4, groups of 128, bf16 scales) in Humming's layout, and kernels for these batches."""

    def __init__(self, layer: cuda.CudaMoE, top_k: int, tokens: list[int]) -> None:
        spec, self.top_k = layer.spec, top_k
        self.hidden, self.experts = spec.hidden_size, spec.num_experts
        # What is no multiple of a group is padded with zeros here, before anything is timed.
        self.padded_hidden, self.intermediate = (ceil(n, GROUP) for n in (self.hidden, spec.intermediate_size))
        self.configs: dict[str, LayerConfig] = {}
        self.tensors: dict[str, dict[str, torch.Tensor]] = {}
        self.tables: dict[str, list[Any]] = {}  # [pairs above, pairs up to, tuning]
        for projection, rows in (("w13", layer.w13), ("w2", layer.w2)):
            experts = [self._expert(spec, projection, row) for row in rows.split(1)]
            configs, tensors = zip(*experts, strict=True)
            self.tensors[projection] = {name: torch.cat([t[name] for t in tensors]) for name in tensors[0]}
            config = replace(configs[0], num_experts=self.experts)
            table = get_heuristics_config(config, gemm_type=COMPUTE["gemm_type"])
            self.configs[projection] = config
            # Only what these batches need is compiled; the launcher also asks for one pair's.
            pairs = {1, *(t * top_k for t in tokens)}
            self.tables[projection] = [r for r in table if any(r[0] < n <= r[1] for n in pairs)]
        self.locks = torch.zeros(1 << 14, dtype=torch.int32, device="cuda")
        self.counts, self.places = torch.zeros((2, triton.next_power_of_2(self.experts)), dtype=torch.int32).cuda()

    def _expert(
        self, spec: MoESpec, projection: str, rows: torch.Tensor
    ) -> tuple[LayerConfig, dict[str, torch.Tensor]]:
        sizes = (self.intermediate, self.padded_hidden) if projection == "w13" else (self.hidden, self.intermediate)
        codes, scales = matrices(spec, projection, rows, *sizes)
        tensors = {"weight": (codes[..., ::2] | codes[..., 1::2] << 4).view(torch.int32), "weight_scale": scales}
        schema = HummingWeightSchema(b_dtype="uint4", weight_scale_group_size=GROUP)
        return prepare_and_transform_humming_tensors(
            tensors, *codes.shape[1:], schema, num_experts=1, pad_n_to_multiple=256, torch_dtype=torch.bfloat16
        )

    def tuning(self, projection: str, tokens: int) -> dict[str, Any]:
        """Humming's own choice for this batch."""
        pairs = tokens * self.top_k
        return next(c for low, high, c in self.tables[projection] if low < pairs <= high)

    def tiles(self, tokens: int) -> Any:
        """Instruction and tile of both GEMMs."""
        return [[self.tuning(p, tokens)[key] for key in ("mma_type", "block_shape")] for p in ("w13", "w2")]

    def prepare(self, x: torch.Tensor) -> dict[str, Any]:
        """Input as Humming takes it, lists and scratch of a batch; `output` has the result."""
        pairs = len(x) * self.top_k
        scratch: dict[int, list[torch.Tensor]] = {}
        for block in {self.tuning(p, len(x))["block_shape"][0] for p in ("w13", "w2")}:
            most = min(pairs, self.experts + pairs // block)
            sizes = (most * block, most, 1)
            scratch[block] = [torch.zeros(n, dtype=torch.int32, device="cuda") for n in sizes]

        def empty(columns: int) -> torch.Tensor:
            return torch.empty((pairs, columns), dtype=x.dtype, device="cuda")

        return {
            "x": torch.nn.functional.pad(x, (0, self.padded_hidden - self.hidden)),
            "lists": scratch,
            "gate_up": empty(2 * self.intermediate),
            "activated": empty(self.intermediate),
            "down": empty(self.hidden),
            "output": torch.full_like(x, float("nan")),
        }

    def _sort(self, ids: torch.Tensor, block: int, lists: list[torch.Tensor]) -> None:
        pairs, E = ids.numel(), len(self.counts)
        if pairs <= SMALL:
            _lists_small[(1,)](ids, *lists, pairs, block, N=SMALL, E=E)
            return
        grid = (triton.cdiv(pairs, 256),)
        _count[grid](ids, self.counts, pairs, N=256)
        _lists[(1,)](self.counts, self.places, *lists, pairs, block, E=E)
        _place[grid](ids, self.places, lists[0], pairs, N=256)

    def launch(self, batch: dict[str, Any], ids: torch.Tensor, weights: torch.Tensor, lists: bool = True) -> None:
        """Enqueue on torch's current stream; ids int32 and weights f32 [T, k]."""
        tokens = len(ids)
        for block, found in batch["lists"].items() if lists else ():
            self._sort(ids, block, found)
        self._gemm("w13", batch["x"], batch["gate_up"], self.top_k, tokens, batch)
        process_input(batch["gate_up"], outputs=batch["activated"], **SILU)
        self._gemm("w2", batch["activated"], batch["down"], 1, tokens, batch)
        grid = (tokens, triton.cdiv(self.hidden, 1024))
        _sum[grid](batch["down"], weights, batch["output"], self.hidden, K=self.top_k, N=1024)

    def _gemm(
        self, projection: str, x: torch.Tensor, y: torch.Tensor, top_k: int, tokens: int, batch: dict[str, Any]
    ) -> None:
        sorted_ids, expert_ids, padded = batch["lists"][self.tuning(projection, tokens)["block_shape"][0]]
        humming_forward(
            self.configs[projection],
            inputs=x,
            outputs=y,
            **self.tensors[projection],
            sorted_ids=sorted_ids,
            expert_ids=expert_ids,
            num_tokens_padded=padded,
            locks=self.locks,
            top_k=top_k,
            valid_shape_m=tokens * self.top_k,
            compute_config=json.dumps(COMPUTE),
            tuning_config=json.dumps(self.tables[projection]),
        )
