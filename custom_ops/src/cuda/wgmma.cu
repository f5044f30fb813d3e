#include <type_traits>

#include "cuda/instances.h"
#include "cuda/moe_gemm_wgmma.cuh"

namespace quantmoe {
namespace {

template <typename T, typename Scale, int GS>
GemmKernel Select(bool down) {
  return down ? MoeGemmWgmma<T, Scale, GS, true> : MoeGemmWgmma<T, Scale, GS, false>;
}

}  // namespace

template <typename T>
GemmKernel WgmmaKernel(bool down, const qm_projection& w, int per_block) {
  if (w.scale_type == 2) return per_block == 2 ? Select<T, __nv_bfloat16, 2>(down) : Select<T, __nv_bfloat16, 1>(down);
  return per_block == 2 ? Select<T, __half, 2>(down) : Select<T, __half, 1>(down);
}
template GemmKernel WgmmaKernel<__nv_bfloat16>(bool, const qm_projection&, int);
template GemmKernel WgmmaKernel<__half>(bool, const qm_projection&, int);

}  // namespace quantmoe
