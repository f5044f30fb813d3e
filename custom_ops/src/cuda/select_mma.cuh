// Which instance of the mma.sync kernels a plan means: one selection for gate_up*.cu and down*.cu.
#pragma once
#include "cuda/instances.h"
#include "cuda/moe_gemm_mma.cuh"

namespace quantmoe {

// A warp's 8-bit stages are as large with two panels as 4-bit ones with four, which they have no instances of. Four
// panels of symmetric int4 take two units of K a stage, which share their scale.
template <typename T, bool down, class F>
GemmKernel SelectMma(F, int path, const qm_cuda_gemm& g) {
  constexpr int kMost = BitsOf(F::kKind) == 4 ? 4 : 2;
  constexpr int kUnits = F::kKind == WeightKind::kInt4 && F::kGroups == 1 ? 2 : 1;
  const bool most = g.panels == kMost;
  if (path == QM_CUDA_DECODE) {
    if constexpr (down)
      return most ? MoeDownDecode<T, F, kMost, kUnits> : MoeDownDecode<T, F, 2>;
    else if (most && g.stages == StagesOf(2))
      return MoeGemmMma<T, F, kMost, 1, false, true, kUnits>;
    else
      return most ? MoeGemmMma<T, F, kMost, 1, false, true> : MoeGemmMma<T, F, 2, 1, false, true>;
  }
  if (g.n_tiles > 1) return g.n_tiles == 2 ? MoeGemmMma<T, F, 2, 2, down, false> : MoeGemmMma<T, F, 2, 4, down, false>;
  if constexpr (down && kUnits == 2)
    if (most && g.warps_k == 1) return MoeGemmMma<T, F, kMost, 1, down, false, kUnits, false>;
  return most ? MoeGemmMma<T, F, kMost, 1, down, false, kUnits> : MoeGemmMma<T, F, 2, 1, down, false>;
}

}  // namespace quantmoe
