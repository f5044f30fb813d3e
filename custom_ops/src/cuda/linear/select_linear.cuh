// A linear's kernel on wgmma.
#pragma once
#include "cuda/gemm/select.cuh"
#include "cuda/linear/linear_wgmma.cuh"

namespace quantmoe {

struct DenseFamily {
  using Pointer = LinearKernel;
  static constexpr bool has(const Instance& row) { return row.kernel == ProductKernel::kDense; }
  template <typename T, class F, size_t i>
  static Pointer of() {
    return linear_wgmma<T, F, 8 * kInstances<F>[i].n_tiles>;
  }
};
template <typename T, class F>
LinearKernel select_dense(const PlanStep& step) {
  return select<DenseFamily, T, F, Product::kLinear>(kPathDense, step);
}

}  // namespace quantmoe
