#include "cuda/gemm/select_mma.cuh"
#include "cuda/linear/select_linear.cuh"

namespace quantmoe {

template <typename T>
LinearKernel dense_kernel_any(const qm_projection& w, const PlanStep& g) {
  if (kind_of(w) == WeightKind::kFloat) return dense_float_kernel<T>(g);
  if (two_levels(kind_of(w))) return dense_kernel_levels<T>(w, g);
#define QM_CUDA_FORMAT(F)                                                   \
  if constexpr (!kOwnFiles<F> && !std::is_same_v<F, Fp8> && !F::kTwoLevels) \
    if (kind_of(w) == WeightKind::k##F) return select_dense<T, F>(g);
#include "cuda/formats/formats.inc"
  return nullptr;  // linear.cu
}
template LinearKernel dense_kernel_any<__nv_bfloat16>(const qm_projection&, const PlanStep&);
template LinearKernel dense_kernel_any<__half>(const qm_projection&, const PlanStep&);

template <typename T>
GemmKernel linear_decode_kernel_any(const qm_projection& w, const PlanStep& g) {
  return for_format(w, [&](auto format) { return select_mma<T, Product::kLinear>(format, kPathDecode, g); });
}
template GemmKernel linear_decode_kernel_any<__nv_bfloat16>(const qm_projection&, const PlanStep&);
template GemmKernel linear_decode_kernel_any<__half>(const qm_projection&, const PlanStep&);

}  // namespace quantmoe
