#include "cuda/select_linear.cuh"

namespace quantmoe {

template <typename T>
LinearKernel DenseKernel(const qm_projection& w, const qm_cuda_gemm& g) {
  if (KindOf(w) == WeightKind::kInt4) return SelectLinear<T, Int4>(g);
  if (KindOf(w) == WeightKind::kFp8) return SelectLinear<T, Fp8>(g);
  return DenseKernelAny<T>(w, g);
}
template LinearKernel DenseKernel<__nv_bfloat16>(const qm_projection&, const qm_cuda_gemm&);
template LinearKernel DenseKernel<__half>(const qm_projection&, const qm_cuda_gemm&);

template <typename T>
GemmKernel LinearDecodeKernel(const qm_projection& w, int per_block, const qm_cuda_gemm& g) {
  if (KindOf(w) != WeightKind::kInt4) return LinearDecodeKernelAny<T>(w, per_block, g);
  return ForInt4(w, per_block, [&](auto format) { return SelectLinearDecode<T>(format, g); });
}
template GemmKernel LinearDecodeKernel<__nv_bfloat16>(const qm_projection&, int, const qm_cuda_gemm&);
template GemmKernel LinearDecodeKernel<__half>(const qm_projection&, int, const qm_cuda_gemm&);

}  // namespace quantmoe
