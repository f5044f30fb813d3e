#include "cuda/select_linear.cuh"

namespace quantmoe {

template <typename T>
LinearKernel DenseKernelAny(const qm_projection& w, const qm_cuda_gemm& g) {
  switch (KindOf(w)) {
    case WeightKind::kInt4Zero:
      return SelectLinear<T, WeightKind::kInt4Zero>(g);
    case WeightKind::kInt8:
      return SelectLinear<T, WeightKind::kInt8>(g);
    case WeightKind::kInt8Zero:
      return SelectLinear<T, WeightKind::kInt8Zero>(g);
    case WeightKind::kMxfp4:
      return SelectLinear<T, WeightKind::kMxfp4>(g);
    case WeightKind::kNvfp4:
      return SelectLinear<T, WeightKind::kNvfp4>(g);
    case WeightKind::kFloat:
      return DenseFloatKernel<T>(g);
    case WeightKind::kInt4:
    case WeightKind::kFp8:
      break;
  }
  return nullptr;  // linear.cu
}
template LinearKernel DenseKernelAny<__nv_bfloat16>(const qm_projection&, const qm_cuda_gemm&);
template LinearKernel DenseKernelAny<__half>(const qm_projection&, const qm_cuda_gemm&);

template <typename T>
GemmKernel LinearDecodeKernelAny(const qm_projection& w, int per_block, const qm_cuda_gemm& g) {
  return ForFormat(w, per_block, [&](auto format) { return SelectLinearDecode<T>(format, g); });
}
template GemmKernel LinearDecodeKernelAny<__nv_bfloat16>(const qm_projection&, int, const qm_cuda_gemm&);
template GemmKernel LinearDecodeKernelAny<__half>(const qm_projection&, int, const qm_cuda_gemm&);

}  // namespace quantmoe
