#include "cuda/select_wgmma.cuh"

namespace quantmoe {

template <typename T>
GemmKernel WgmmaKernelAny(bool down, const qm_projection& w, int per_block, int tokens) {
  return ForFormat(w, per_block, [&](auto format) { return SelectWgmma<T>(format, down, tokens); });
}
template GemmKernel WgmmaKernelAny<__nv_bfloat16>(bool, const qm_projection&, int, int);
template GemmKernel WgmmaKernelAny<__half>(bool, const qm_projection&, int, int);

}  // namespace quantmoe
