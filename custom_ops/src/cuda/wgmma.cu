#include "cuda/select_wgmma.cuh"

namespace quantmoe {

template <typename T>
GemmKernel WgmmaKernel(bool down, const qm_projection& w, int per_block, const qm_cuda_gemm& g) {
  if (KindOf(w) != WeightKind::kInt4) return WgmmaKernelAny<T>(down, w, per_block, g);
  return ForInt4(w, per_block, [&](auto format) { return SelectWgmma<T>(format, down, g); });
}
template GemmKernel WgmmaKernel<__nv_bfloat16>(bool, const qm_projection&, int, const qm_cuda_gemm&);
template GemmKernel WgmmaKernel<__half>(bool, const qm_projection&, int, const qm_cuda_gemm&);

}  // namespace quantmoe
