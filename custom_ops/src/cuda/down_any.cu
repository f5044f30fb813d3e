#include "cuda/select_mma.cuh"

namespace quantmoe {

template <typename T>
GemmKernel DownKernelAny(int path, const qm_projection& w, const qm_cuda_step& g) {
  return ForFormat(w, [&](auto format) { return SelectMma<T, Product::kDown>(format, path, g); });
}
template GemmKernel DownKernelAny<__nv_bfloat16>(int, const qm_projection&, const qm_cuda_step&);
template GemmKernel DownKernelAny<__half>(int, const qm_projection&, const qm_cuda_step&);

}  // namespace quantmoe
