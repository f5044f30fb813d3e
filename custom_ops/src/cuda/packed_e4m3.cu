// e4m3 weights times e4m3 activations on mma.sync, also compiled for sm_89 (CMakeLists.txt): see select_mma.cuh.
#include "cuda/instances.h"
#include "cuda/select_mma.cuh"

namespace quantmoe {

template <typename T>
GemmKernel PackedE4m3Kernel(bool down, int path, const qm_cuda_gemm& shape) {
  return down ? SelectMma<T, true>(PackedE4m3{}, path, shape) : SelectMma<T, false>(PackedE4m3{}, path, shape);
}
template GemmKernel PackedE4m3Kernel<__nv_bfloat16>(bool, int, const qm_cuda_gemm&);
template GemmKernel PackedE4m3Kernel<__half>(bool, int, const qm_cuda_gemm&);

}  // namespace quantmoe
