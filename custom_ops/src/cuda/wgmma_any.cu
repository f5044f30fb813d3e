#include "cuda/select_wgmma.cuh"

namespace quantmoe {

template <typename T>
GemmKernel WgmmaKernelAny(Product product, const qm_projection& w, const qm_cuda_step& g) {
  return ForFormat(w, [&](auto format) { return SelectWgmma<T>(format, product, g); });
}
template GemmKernel WgmmaKernelAny<__nv_bfloat16>(Product, const qm_projection&, const qm_cuda_step&);
template GemmKernel WgmmaKernelAny<__half>(Product, const qm_projection&, const qm_cuda_step&);

}  // namespace quantmoe
