// The layer's kernels on wgmma.
#pragma once
#include "cuda/gemm/moe_gemm_wgmma.cuh"
#include "cuda/gemm/select.cuh"

namespace quantmoe {

struct WgmmaFamily {
  using Pointer = GemmKernel;
  static constexpr bool has(const Instance& row) { return row.kernel == ProductKernel::kWgmma; }
  template <typename T, class F, size_t i>
  static Pointer of() {
    constexpr Instance row = kInstances<F>[i];
    return moe_gemm_wgmma<T, F, row.product, 8 * row.n_tiles>;
  }
};
template <typename T, class F>
GemmKernel select_wgmma(F, Product product, const PlanStep& step) {
  switch (product) {
    case Product::kGateUp:
      return select<WgmmaFamily, T, F, Product::kGateUp>(kPathWgmma, step);
    case Product::kUp:
      return select<WgmmaFamily, T, F, Product::kUp>(kPathWgmma, step);
    case Product::kDown:
      return select<WgmmaFamily, T, F, Product::kDown>(kPathWgmma, step);
    case Product::kLinear:
      break;
  }
  return nullptr;
}

}  // namespace quantmoe
