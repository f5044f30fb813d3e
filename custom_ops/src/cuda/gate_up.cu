#include "cuda/select_mma.cuh"

namespace quantmoe {

template <typename T>
GemmKernel GateUpKernel(int path, const qm_projection& w, int per_block, const qm_cuda_gemm& g) {
  if (path == QM_CUDA_WGMMA) return WgmmaKernel<T>(false, w, per_block, g);
  if (KindOf(w) != WeightKind::kInt4) return GateUpKernelAny<T>(path, w, per_block, g);
  return ForInt4(w, per_block, [&](auto format) { return SelectMma<T, false>(format, path, g); });
}
template GemmKernel GateUpKernel<__nv_bfloat16>(int, const qm_projection&, int, const qm_cuda_gemm&);
template GemmKernel GateUpKernel<__half>(int, const qm_projection&, int, const qm_cuda_gemm&);

}  // namespace quantmoe
