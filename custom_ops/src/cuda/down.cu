#include "cuda/select_mma.cuh"

namespace quantmoe {

template <typename T>
GemmKernel DownKernel(int path, const qm_projection& w, int per_block, const qm_cuda_gemm& g) {
  if (path == QM_CUDA_WGMMA) return WgmmaKernel<T>(true, w, per_block, g);
  if (KindOf(w) != WeightKind::kInt4) return DownKernelAny<T>(path, w, per_block, g);
  return ForInt4(w, per_block, [&](auto format) { return SelectMma<T, true>(format, path, g); });
}
template GemmKernel DownKernel<__nv_bfloat16>(int, const qm_projection&, int, const qm_cuda_gemm&);
template GemmKernel DownKernel<__half>(int, const qm_projection&, int, const qm_cuda_gemm&);

}  // namespace quantmoe
