// Which instance of the wgmma kernels a plan means, null where there is none.
#pragma once
#include "cuda/instances.h"
#include "cuda/moe_gemm_wgmma.cuh"

namespace quantmoe {

template <typename T, class F>
GemmKernel SelectWgmma(F, bool down, const qm_cuda_gemm& g) {
  if constexpr (F::kBits == 4)
    if (g.n_tiles == 3 && g.panels == 32) return down ? MoeGemmWgmma<T, F, true, 24> : MoeGemmWgmma<T, F, false, 24>;
  if (g.panels != 16) return nullptr;
  if (g.n_tiles == 6) return down ? MoeGemmWgmma<T, F, true, 48> : MoeGemmWgmma<T, F, false, 48>;
  if (g.n_tiles == 18) return down ? MoeGemmWgmma<T, F, true, 144> : MoeGemmWgmma<T, F, false, 144>;
  return nullptr;
}

}  // namespace quantmoe
