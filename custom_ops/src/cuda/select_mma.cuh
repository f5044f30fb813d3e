// Which instance of the mma.sync kernels a plan means, null where there is none: one selection for gate_up*.cu and
// down*.cu.
#pragma once
#include "cuda/instances.h"
#include "cuda/moe_gemm_span.cuh"

namespace quantmoe {

// A warp's 8-bit stages are as large with two panels as 4-bit ones with four, which they have no instances of. Four
// panels of symmetric int4 take two units of K a stage, which share their scale.
template <typename T, bool down, class F>
GemmKernel SelectMma(F, int path, const qm_cuda_gemm& g) {
  if (g.warps_k == 0) {
    if constexpr (F::kSpanPanels > 0 && !F::kPacked) {
      if (g.panels != F::kSpanPanels || g.n_tiles != 1 || g.stages != kSpanStages) return nullptr;
      if (path == QM_CUDA_STREAM) return MoeGemmSpan<T, F, F::kSpanPanels, down, false>;
      if (path == QM_CUDA_DECODE) return MoeGemmSpan<T, F, F::kSpanPanels, down, true>;
    }
    return nullptr;
  }
  constexpr int kMost = F::kBits == 4 ? 4 : 2;
  constexpr int kUnits = F::kPairsUnits && F::kGroups == 1 ? 2 : 1;
  const bool one_unit = g.stages == StagesOf(1), two = g.panels == 2 && one_unit;
  const bool most = g.panels == kMost && g.stages == StagesOf(kUnits);
  if (path == QM_CUDA_DECODE && g.n_tiles == 1) {
    if constexpr (down) {
      return most ? MoeDownDecode<T, F, kMost, kUnits> : two ? MoeDownDecode<T, F, 2> : nullptr;
    } else {
      if (most) return MoeGemmMma<T, F, kMost, 1, false, true, kUnits>;
      if (g.panels == kMost && one_unit) return MoeGemmMma<T, F, kMost, 1, false, true>;
      return two ? MoeGemmMma<T, F, 2, 1, false, true> : nullptr;
    }
  }
  if (path != QM_CUDA_STREAM) return nullptr;
  if (g.n_tiles == 4) return two ? MoeGemmMma<T, F, 2, 4, down, false> : nullptr;
  if (g.n_tiles == 2) return two ? MoeGemmMma<T, F, 2, 2, down, false> : nullptr;
  if (g.n_tiles != 1) return nullptr;
  if constexpr (down && kUnits == 2)
    if (most && g.warps_k == 1) return MoeGemmMma<T, F, kMost, 1, down, false, kUnits, false>;
  return most ? MoeGemmMma<T, F, kMost, 1, down, false, kUnits> : two ? MoeGemmMma<T, F, 2, 1, down, false> : nullptr;
}

}  // namespace quantmoe
