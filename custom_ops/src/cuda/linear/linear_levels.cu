#include "cuda/linear/select_linear.cuh"

namespace quantmoe {

template <typename T>
LinearKernel dense_kernel_levels(const qm_projection& w, const PlanStep& g) {
#define QM_CUDA_FORMAT(F)      \
  if constexpr (F::kTwoLevels) \
    if (kind_of(w) == WeightKind::k##F) return select_dense<T, F>(g);
#include "cuda/formats/formats.inc"
  return nullptr;
}
template LinearKernel dense_kernel_levels<__nv_bfloat16>(const qm_projection&, const PlanStep&);
template LinearKernel dense_kernel_levels<__half>(const qm_projection&, const PlanStep&);

}  // namespace quantmoe
