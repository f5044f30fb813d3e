#include "cuda/select_wgmma.cuh"

namespace quantmoe {

template <typename T>
GemmKernel WgmmaKernel(bool down, const qm_projection& w, int per_block, int tokens) {
  if (KindOf(w) != WeightKind::kInt4) return WgmmaKernelAny<T>(down, w, per_block, tokens);
  return ForInt4(w, per_block, [&](auto format) { return SelectWgmma<T>(format, down, tokens); });
}
template GemmKernel WgmmaKernel<__nv_bfloat16>(bool, const qm_projection&, int, int);
template GemmKernel WgmmaKernel<__half>(bool, const qm_projection&, int, int);

}  // namespace quantmoe
