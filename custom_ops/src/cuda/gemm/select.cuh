// Which of the kernels that a file compiles a plan means, null where there is none.
#pragma once
#include "cuda/gemm/gemm_kernels.h"
#include "cuda/gemm/instances.h"

namespace quantmoe {

template <class F>
constexpr auto kInstances = instances_of(sizes_of<F>(F::kGroups, F::kPacked));

// Family: which rows are its own (has), and the kernel of row i (of).
template <class Family, typename T, class F, Product product, size_t i = 0>
auto select(int path, const PlanStep& step) {
  if constexpr (i == kInstances<F>.size()) {
    return typename Family::Pointer{};
  } else {
    constexpr Instance row = kInstances<F>[i];
    if constexpr (row.there && row.product == product && Family::has(row))
      if (path == row.path && means(step, row)) return Family::template of<T, F, i>();
    return select<Family, T, F, product, i + 1>(path, step);
  }
}

}  // namespace quantmoe
