// Which instance of a linear's kernels a plan means, null where there is none.
#pragma once
#include "cuda/instances.h"
#include "cuda/linear_wgmma.cuh"
#include "cuda/moe_gemm_mma.cuh"

namespace quantmoe {

template <typename T, WeightKind kind, int kTokens>
LinearKernel OfTile(const qm_cuda_gemm& g) {
  using Tile = LinearTile<kind, kTokens>;
  const bool there = g.panels == Tile::kPanels && 8 * g.n_tiles >= kLinearLeast<kTokens> && 8 * g.n_tiles <= kTokens &&
                     g.n_tiles % 2 == 0 && g.shared_bytes == Tile::kSizes.shared_bytes;
  return there ? LinearWgmma<T, kind, kTokens> : nullptr;
}
template <typename T, WeightKind kind>
LinearKernel SelectLinear(const qm_cuda_gemm& g) {
  for (LinearKernel kernel : {OfTile<T, kind, 64>(g), OfTile<T, kind, 128>(g), OfTile<T, kind, 256>(g)})
    if (kernel) return kernel;
  return nullptr;
}

template <typename T, class F>
GemmKernel SelectLinearDecode(F, const qm_cuda_gemm& g) {
  constexpr int kUnits = F::kKind == WeightKind::kInt4 && F::kGroups == 1 ? 2 : 1;
  if (g.n_tiles != 1) return nullptr;
  if (g.panels == 1 && g.stages == 6) return MoeDownDecode<T, F, 1, 1, true, 6>;
  if (g.panels == 2 && g.stages == 5) return MoeDownDecode<T, F, 2, 1, true, 5>;
  if constexpr (BitsOf(F::kKind) == 4)
    if (g.panels == 4 && g.stages == 3) return MoeDownDecode<T, F, 4, kUnits, true, 3>;
  return nullptr;
}

}  // namespace quantmoe
