#include "cuda/select_linear.cuh"
#include "cuda/select_mma.cuh"

namespace quantmoe {

template <typename T>
LinearKernel DenseKernel(const qm_projection& w, const qm_cuda_step& g) {
  if (KindOf(w) == WeightKind::kInt4) return SelectDense<T, Int4>(g);
  if (KindOf(w) == WeightKind::kFp8) return SelectDense<T, Fp8>(g);
  return DenseKernelAny<T>(w, g);
}
template LinearKernel DenseKernel<__nv_bfloat16>(const qm_projection&, const qm_cuda_step&);
template LinearKernel DenseKernel<__half>(const qm_projection&, const qm_cuda_step&);

template <typename T>
GemmKernel LinearDecodeKernel(const qm_projection& w, const qm_cuda_step& g) {
  if (KindOf(w) != WeightKind::kInt4) return LinearDecodeKernelAny<T>(w, g);
  return ForInt4(w, [&](auto format) { return SelectMma<T, Product::kLinear>(format, QM_CUDA_DECODE, g); });
}
template GemmKernel LinearDecodeKernel<__nv_bfloat16>(const qm_projection&, const qm_cuda_step&);
template GemmKernel LinearDecodeKernel<__half>(const qm_projection&, const qm_cuda_step&);

}  // namespace quantmoe
