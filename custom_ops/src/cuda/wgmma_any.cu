#include "cuda/select_wgmma.cuh"

namespace quantmoe {

template <typename T>
GemmKernel WgmmaKernelAny(bool down, const qm_projection& w, int per_block, const qm_cuda_gemm& g) {
  return ForFormat(w, per_block, [&](auto format) { return SelectWgmma<T>(format, down, g); });
}
template GemmKernel WgmmaKernelAny<__nv_bfloat16>(bool, const qm_projection&, int, const qm_cuda_gemm&);
template GemmKernel WgmmaKernelAny<__half>(bool, const qm_projection&, int, const qm_cuda_gemm&);

}  // namespace quantmoe
