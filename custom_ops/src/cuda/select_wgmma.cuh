// The layer's kernels on wgmma.
#pragma once
#include "cuda/moe_gemm_wgmma.cuh"
#include "cuda/select.cuh"

namespace quantmoe {

struct WgmmaFamily {
  using Pointer = GemmKernel;
  static constexpr bool has(const Instance& row) { return row.kernel == ProductKernel::kWgmma; }
  template <typename T, class F, size_t i>
  static Pointer of() {
    constexpr Instance row = kInstances<F>[i];
    return moe_gemm_wgmma<T, F, row.product == Product::kDown, 8 * row.n_tiles>;
  }
};
template <typename T, class F>
GemmKernel select_wgmma(F, Product product, const qm_cuda_step& step) {
  return product == Product::kDown ? select<WgmmaFamily, T, F, Product::kDown>(QM_CUDA_WGMMA, step)
                                   : select<WgmmaFamily, T, F, Product::kGateUp>(QM_CUDA_WGMMA, step);
}

}  // namespace quantmoe
