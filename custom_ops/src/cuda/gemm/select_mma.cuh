// The mma.sync kernels.
#pragma once
#include "cuda/gemm/moe_gemm_span.cuh"
#include "cuda/gemm/select.cuh"
#include "cuda/linear/linear_decode.cuh"

namespace quantmoe {

struct MmaFamily {
  using Pointer = GemmKernel;
  static constexpr bool has(const Instance& row) { return row.path == kPathDecode || row.path == kPathStream; }
  template <typename T, class F, size_t i>
  static Pointer of() {
    constexpr Instance row = kInstances<F>[i];
    constexpr bool down = row.product != Product::kGateUp, decode = row.path == kPathDecode;
    if constexpr (row.kernel == ProductKernel::kSpan) {
      return moe_gemm_span<T, F, row.panels, down, decode>;
    } else if constexpr (row.kernel == ProductKernel::kLinearDecode) {
      return linear_decode<T, F, row.panels, row.units, row.stages>;
    } else if constexpr (decode && down) {
      return moe_down_decode<T, F, row.panels, row.units, row.stages>;
    } else {
      return moe_gemm_mma<T, F, row.panels, row.n_tiles, down, decode, row.units,
                          row.kernel != ProductKernel::kMmaWhole>;
    }
  }
};
template <typename T, Product product, class F>
GemmKernel select_mma(F, int path, const PlanStep& step) {
  return select<MmaFamily, T, F, product>(path, step);
}

}  // namespace quantmoe
