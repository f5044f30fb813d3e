"""One MoE layer by vLLM's Marlin kernels (PyPI vllm), as vLLM runs it: lists, GEMM, SwiGLU, GEMM, weighted sum.

The calls, sizes and layouts are those of vLLM 0.33's fused_marlin_moe, marlin_utils and moe_align_block_size. Only the
two libraries with these ops are loaded, which any torch from 2.11 takes; vLLM itself is not imported.
"""

from __future__ import annotations

from importlib.metadata import distribution, version
from typing import Any

import torch
from benchmarks.cuda.int4_weights import GROUP, ceil, matrices
from support.cuda import cuda_kernels as cuda

NAME = f"vllm {version('vllm')} Marlin"
UINT4B8 = 4 << 8 | 8 << 17 | 1 << 50  # vLLM's ScalarType.id of 4 bits, value = code - 8
LOCKS_PER_MULTIPROCESSOR = 4

for _library in ("_C_stable_libtorch.abi3.so", "_moe_C_stable_libtorch.abi3.so"):
    torch.ops.load_library(str(distribution("vllm").locate_file(f"vllm/{_library}")))


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Return codes uint8 [N, K] -> int32 [K / 16, 2 N]: tiles of 16 x 64, a lane's 8 codes of a fragment pair in a
    word."""
    n, k = codes.shape
    # N as (64s, fragment pairs, fragments, lane / 4), K as (16s, registers, lane % 4, halves)
    tiles = codes.view(n // 64, 4, 2, 8, k // 16, 2, 4, 2).permute(4, 0, 3, 6, 1, 7, 2, 5)
    pairs = tiles.reshape(k // 16, n * 8, 2)
    return (pairs[..., 0] | pairs[..., 1] << 4).view(torch.int32)


def pack_scales(scales: torch.Tensor) -> torch.Tensor:
    """[N, groups] -> [groups, N], the columns of each 64 transposed as 8 x 8."""
    n, groups = scales.shape
    return scales.T.reshape(groups, n // 64, 8, 8).transpose(2, 3).reshape(groups, n)


class MarlinMoE:
    """The weights of `layer` (int4, groups of 128, bf16 scales) in Marlin's layout."""

    def __init__(self, layer: cuda.CudaMoE, top_k: int, tokens: list[int]) -> None:
        spec, self.top_k, self.experts = layer.spec, top_k, layer.spec.num_experts
        # As vLLM pads gpt-oss for Marlin (mxfp4_round_up_hidden_size_and_intermediate_size).
        self.hidden, self.intermediate = ceil(spec.hidden_size, 256), ceil(spec.intermediate_size, GROUP)
        self.weights: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        for projection, rows, sizes in (
            ("w13", layer.w13, (self.intermediate, self.hidden)),
            ("w2", layer.w2, (self.hidden, self.intermediate)),
        ):
            packed = []
            for row in rows.split(1):
                codes, scales = matrices(spec, projection, row, *sizes)
                packed.append((pack(codes[0]), pack_scales(scales[0])))
            words, scales = zip(*packed, strict=True)
            self.weights[projection] = torch.stack(words), torch.stack(scales)
        multiprocessors = torch.cuda.get_device_properties().multi_processor_count
        self.locks = torch.zeros(multiprocessors * LOCKS_PER_MULTIPROCESSOR, dtype=torch.int32, device="cuda")

    def block(self, tokens: int) -> int:
        """vLLM's choice of the tokens in a block."""
        return next((b for b in (8, 16, 32, 48) if tokens * self.top_k / self.experts / b < 0.9), 64)

    def tiles(self, tokens: int) -> Any:
        return self.block(tokens)

    def prepare(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Padded input, lists and scratch of a batch; `output` has the result."""
        pairs, block = len(x) * self.top_k, self.block(len(x))
        places = pairs + self.experts * (block - 1)
        if pairs < self.experts:
            places = min(pairs * block, places)

        def empty(*shape: int, dtype: torch.dtype = x.dtype) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device="cuda")

        output = torch.full((len(x), self.hidden), float("nan"), dtype=x.dtype, device="cuda")
        return {
            "x": torch.nn.functional.pad(x, (0, self.hidden - x.shape[1])),
            "sorted_pairs": empty(places, dtype=torch.int32),
            "expert_ids": empty(-(-places // block), dtype=torch.int32),
            "padded": empty(1, dtype=torch.int32),
            "gate_up": empty(pairs, 2 * self.intermediate),
            "activated": empty(pairs, self.intermediate),
            "down": empty(pairs, self.hidden),
            "all_columns": output,
            "output": output[:, : x.shape[1]],
        }

    def launch(
        self, batch: dict[str, torch.Tensor], ids: torch.Tensor, weights: torch.Tensor, lists: bool = True
    ) -> None:
        """Enqueue on torch's current stream; ids int32 and weights f32 [T, k]."""
        tokens = len(ids)
        if lists:
            places = (batch["sorted_pairs"], batch["expert_ids"], batch["padded"])
            torch.ops._moe_C.moe_align_block_size(ids, self.experts, self.block(tokens), *places, None, None)
        self._gemm("w13", batch["x"], batch["gate_up"], tokens, self.top_k, batch, weights)
        torch.ops._C.silu_and_mul(batch["activated"], batch["gate_up"])
        self._gemm("w2", batch["activated"], batch["down"], tokens * self.top_k, 1, batch, weights)
        torch.ops._moe_C.moe_sum(batch["down"].view(tokens, self.top_k, -1), batch["all_columns"], None, None)

    def _gemm(
        self,
        projection: str,
        x: torch.Tensor,
        y: torch.Tensor,
        rows: int,
        top_k: int,
        batch: dict[str, torch.Tensor],
        weights: torch.Tensor,
    ) -> None:
        words, scales = self.weights[projection]
        torch.ops._moe_C.moe_wna16_marlin_gemm(
            x,
            y,
            words,
            None,  # bias
            scales,
            None,  # scales of x
            None,  # global scale
            None,  # zero points
            self.locks,
            batch["sorted_pairs"],
            batch["expert_ids"],
            batch["padded"],
            weights,
            self.block(len(weights)),
            top_k,
            projection == "w2",  # multiplies by the routing weights
            UINT4B8,
            rows,
            y.shape[1],
            x.shape[1],
            False,  # atomic additions
            True,  # reduction in f32
            False,  # zero points as floating point
            -1,  # threads along K and N, blocks a multiprocessor: its own choice
            -1,
            -1,
        )
