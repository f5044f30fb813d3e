#include "cuda/select_mma.cuh"

namespace quantmoe {

template <typename T>
GemmKernel DownKernelAny(int path, const qm_projection& w, int per_block, const qm_cuda_gemm& g) {
  return ForFormat(w, per_block, [&](auto format) { return SelectMma<T, true>(format, path, g); });
}
template GemmKernel DownKernelAny<__nv_bfloat16>(int, const qm_projection&, int, const qm_cuda_gemm&);
template GemmKernel DownKernelAny<__half>(int, const qm_projection&, int, const qm_cuda_gemm&);

}  // namespace quantmoe
