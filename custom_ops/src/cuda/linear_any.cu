#include "cuda/select_linear.cuh"
#include "cuda/select_mma.cuh"

namespace quantmoe {

template <typename T>
LinearKernel DenseKernelAny(const qm_projection& w, const qm_cuda_step& g) {
  if (KindOf(w) == WeightKind::kFloat) return DenseFloatKernel<T>(g);
#define QM_CUDA_FORMAT(F)                                 \
  if constexpr (!kOwnFiles<F> && !std::is_same_v<F, Fp8>) \
    if (KindOf(w) == WeightKind::k##F) return SelectDense<T, F>(g);
#include "cuda/formats/formats.inc"
  return nullptr;  // linear.cu
}
template LinearKernel DenseKernelAny<__nv_bfloat16>(const qm_projection&, const qm_cuda_step&);
template LinearKernel DenseKernelAny<__half>(const qm_projection&, const qm_cuda_step&);

template <typename T>
GemmKernel LinearDecodeKernelAny(const qm_projection& w, const qm_cuda_step& g) {
  return ForFormat(w, [&](auto format) { return SelectMma<T, Product::kLinear>(format, QM_CUDA_DECODE, g); });
}
template GemmKernel LinearDecodeKernelAny<__nv_bfloat16>(const qm_projection&, const qm_cuda_step&);
template GemmKernel LinearDecodeKernelAny<__half>(const qm_projection&, const qm_cuda_step&);

}  // namespace quantmoe
