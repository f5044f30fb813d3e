#include "cuda/gemm/select_wgmma.cuh"

namespace quantmoe {

template <typename T>
GemmKernel wgmma_kernel(Product product, const qm_projection& w, const PlanStep& step) {
  if (two_levels(kind_of(w))) return wgmma_kernel_levels<T>(product, w, step);
  if (kind_of(w) != WeightKind::kInt4) return wgmma_kernel_any<T>(product, w, step);
  return for_int4(w, [&](auto format) { return select_wgmma<T>(format, product, step); });
}
template GemmKernel wgmma_kernel<__nv_bfloat16>(Product, const qm_projection&, const PlanStep&);
template GemmKernel wgmma_kernel<__half>(Product, const qm_projection&, const PlanStep&);

}  // namespace quantmoe
