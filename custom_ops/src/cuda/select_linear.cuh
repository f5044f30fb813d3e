// Which instance of a linear's kernels a plan means, null where there is none.
#pragma once
#include "cuda/instances.h"
#include "cuda/linear_wgmma.cuh"
#include "cuda/moe_gemm_mma.cuh"

namespace quantmoe {

template <typename T, class F, int kTokens>
LinearKernel OfTile(const qm_cuda_gemm& g) {
  using Tile = LinearTile<F, kTokens>;
  const bool there = g.panels == Tile::kPanels && 8 * g.n_tiles >= kLinearLeast<kTokens> && 8 * g.n_tiles <= kTokens &&
                     g.n_tiles % 2 == 0 && g.shared_bytes == Tile::kSizes.shared_bytes;
  return there ? LinearWgmma<T, F, kTokens> : nullptr;
}
template <typename T, class F>
LinearKernel SelectLinear(const qm_cuda_gemm& g) {
  for (LinearKernel kernel : {OfTile<T, F, 64>(g), OfTile<T, F, 128>(g), OfTile<T, F, 256>(g)})
    if (kernel) return kernel;
  return nullptr;
}

template <typename T, class F>
GemmKernel SelectLinearDecode(F, const qm_cuda_gemm& g) {
  constexpr int kUnits = F::kPairsUnits && F::kGroups == 1 ? 2 : 1;
  if (g.n_tiles != 1) return nullptr;
  if constexpr (F::kBits == 8)
    if (g.panels == 1 && g.stages == 4) return MoeDownDecode<T, F, 1, 1, true, 4>;
  if (g.panels == 1 && g.stages == 6) return MoeDownDecode<T, F, 1, 1, true, 6>;
  if (g.panels == 2 && g.stages == 5) return MoeDownDecode<T, F, 2, 1, true, 5>;
  if constexpr (F::kBits == 4)
    if (g.panels == 4 && g.stages == 3) return MoeDownDecode<T, F, 4, kUnits, true, 3>;
  return nullptr;
}

}  // namespace quantmoe
