// Which instance of the wgmma kernels a plan means.
#pragma once
#include "cuda/instances.h"
#include "cuda/moe_gemm_wgmma.cuh"

namespace quantmoe {

template <typename T, class F>
GemmKernel SelectWgmma(F, bool down, int tokens) {
  if constexpr (BitsOf(F::kKind) == 4)
    if (tokens == 24) return down ? MoeGemmWgmma<T, F, true, 24> : MoeGemmWgmma<T, F, false, 24>;
  if (tokens == 48) return down ? MoeGemmWgmma<T, F, true, 48> : MoeGemmWgmma<T, F, false, 48>;
  return down ? MoeGemmWgmma<T, F, true, 144> : MoeGemmWgmma<T, F, false, 144>;
}

}  // namespace quantmoe
