#include "cuda/select_mma.cuh"

namespace quantmoe {

template <typename T>
GemmKernel GateUpKernelAny(int path, const qm_projection& w, int per_block, const qm_cuda_gemm& g) {
  return ForFormat(w, per_block, [&](auto format) { return SelectMma<T, false>(format, path, g); });
}
template GemmKernel GateUpKernelAny<__nv_bfloat16>(int, const qm_projection&, int, const qm_cuda_gemm&);
template GemmKernel GateUpKernelAny<__half>(int, const qm_projection&, int, const qm_cuda_gemm&);

}  // namespace quantmoe
