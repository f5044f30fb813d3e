#include "cuda/gemm/select_mma.cuh"

namespace quantmoe {

template <typename T>
GemmKernel gate_up_kernel(int path, const qm_projection& w, const PlanStep& step) {
  if (kind_of(w) != WeightKind::kInt4) return gate_up_kernel_any<T>(path, w, step);
  return for_int4(w, [&](auto format) { return select_mma<T, Product::kGateUp>(format, path, step); });
}
template GemmKernel gate_up_kernel<__nv_bfloat16>(int, const qm_projection&, const PlanStep&);
template GemmKernel gate_up_kernel<__half>(int, const qm_projection&, const PlanStep&);

}  // namespace quantmoe
