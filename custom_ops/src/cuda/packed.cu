// nvfp4 weights times nvfp4 activations: see select_mma.cuh.
#include "cuda/instances.h"
#include "cuda/select_mma.cuh"

namespace quantmoe {

template <typename T>
GemmKernel PackedKernel(bool down, int path, const qm_projection& w, const qm_cuda_gemm& shape) {
  if (TakesFp8(w)) return PackedE4m3Kernel<T>(down, path, shape);
  if (!TakesNvfp4(w)) return nullptr;
  return down ? SelectMma<T, true>(PackedNvfp4{}, path, shape) : SelectMma<T, false>(PackedNvfp4{}, path, shape);
}
template GemmKernel PackedKernel<__nv_bfloat16>(bool, int, const qm_projection&, const qm_cuda_gemm&);
template GemmKernel PackedKernel<__half>(bool, int, const qm_projection&, const qm_cuda_gemm&);

}  // namespace quantmoe
