#include "cuda/select_wgmma.cuh"

namespace quantmoe {

template <typename T>
GemmKernel WgmmaKernel(Product product, const qm_projection& w, const qm_cuda_step& g) {
  if (KindOf(w) != WeightKind::kInt4) return WgmmaKernelAny<T>(product, w, g);
  return ForInt4(w, [&](auto format) { return SelectWgmma<T>(format, product, g); });
}
template GemmKernel WgmmaKernel<__nv_bfloat16>(Product, const qm_projection&, const qm_cuda_step&);
template GemmKernel WgmmaKernel<__half>(Product, const qm_projection&, const qm_cuda_step&);

}  // namespace quantmoe
