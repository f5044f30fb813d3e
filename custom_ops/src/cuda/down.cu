#include "cuda/select_mma.cuh"

namespace quantmoe {

template <typename T>
GemmKernel DownKernel(int path, const qm_projection& w, const qm_cuda_step& g) {
  if (KindOf(w) != WeightKind::kInt4) return DownKernelAny<T>(path, w, g);
  return ForInt4(w, [&](auto format) { return SelectMma<T, Product::kDown>(format, path, g); });
}
template GemmKernel DownKernel<__nv_bfloat16>(int, const qm_projection&, const qm_cuda_step&);
template GemmKernel DownKernel<__half>(int, const qm_projection&, const qm_cuda_step&);

}  // namespace quantmoe
