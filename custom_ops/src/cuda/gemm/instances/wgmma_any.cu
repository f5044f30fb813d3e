#include "cuda/gemm/select_wgmma.cuh"

namespace quantmoe {

template <typename T>
GemmKernel wgmma_kernel_any(Product product, const qm_projection& w, const PlanStep& g) {
  return for_levels<false>(w, [&](auto format) { return select_wgmma<T>(format, product, g); });
}
template GemmKernel wgmma_kernel_any<__nv_bfloat16>(Product, const qm_projection&, const PlanStep&);
template GemmKernel wgmma_kernel_any<__half>(Product, const qm_projection&, const PlanStep&);

}  // namespace quantmoe
