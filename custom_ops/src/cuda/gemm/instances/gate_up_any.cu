#include "cuda/gemm/select_mma.cuh"

namespace quantmoe {

template <typename T>
GemmKernel gate_up_kernel_any(int path, const qm_projection& w, const PlanStep& g) {
  return for_format(w, [&](auto format) { return select_mma<T, Product::kGateUp>(format, path, g); });
}
template GemmKernel gate_up_kernel_any<__nv_bfloat16>(int, const qm_projection&, const PlanStep&);
template GemmKernel gate_up_kernel_any<__half>(int, const qm_projection&, const PlanStep&);

}  // namespace quantmoe
