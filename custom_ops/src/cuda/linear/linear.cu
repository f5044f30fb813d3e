#include "cuda/gemm/select_mma.cuh"
#include "cuda/linear/select_linear.cuh"

namespace quantmoe {

template <typename T>
LinearKernel dense_kernel(const qm_projection& w, const PlanStep& step) {
  if (kind_of(w) == WeightKind::kInt4) return select_dense<T, Int4>(step);
  if (kind_of(w) == WeightKind::kFp8) return select_dense<T, Fp8>(step);
  return dense_kernel_any<T>(w, step);
}
template LinearKernel dense_kernel<__nv_bfloat16>(const qm_projection&, const PlanStep&);
template LinearKernel dense_kernel<__half>(const qm_projection&, const PlanStep&);

template <typename T>
GemmKernel linear_decode_kernel(const qm_projection& w, const PlanStep& step) {
  if (kind_of(w) != WeightKind::kInt4) return linear_decode_kernel_any<T>(w, step);
  return for_int4(w, [&](auto format) { return select_mma<T, Product::kLinear>(format, kPathDecode, step); });
}
template GemmKernel linear_decode_kernel<__nv_bfloat16>(const qm_projection&, const PlanStep&);
template GemmKernel linear_decode_kernel<__half>(const qm_projection&, const PlanStep&);

}  // namespace quantmoe
