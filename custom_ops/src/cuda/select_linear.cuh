// A linear's kernel on wgmma.
#pragma once
#include "cuda/linear_wgmma.cuh"
#include "cuda/select.cuh"

namespace quantmoe {

struct DenseFamily {
  using Pointer = LinearKernel;
  static constexpr bool Has(const Instance& row) { return row.kernel == ProductKernel::kDense; }
  template <typename T, class F, size_t i>
  static Pointer Of() {
    return LinearWgmma<T, F, 8 * kInstances<F>[i].n_tiles>;
  }
};
template <typename T, class F>
LinearKernel SelectDense(const qm_cuda_step& g) {
  return Select<DenseFamily, T, F, Product::kLinear>(QM_CUDA_DENSE, g);
}

}  // namespace quantmoe
