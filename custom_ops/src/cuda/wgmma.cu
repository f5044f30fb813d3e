#include <type_traits>

#include "cuda/instances.h"
#include "cuda/moe_gemm_wgmma.cuh"

namespace quantmoe {
namespace {

template <typename T, typename Scale, int GS>
GemmKernel Select(bool down, int tokens) {
  if (tokens == 48) return down ? MoeGemmWgmma<T, Scale, GS, true, 48> : MoeGemmWgmma<T, Scale, GS, false, 48>;
  return down ? MoeGemmWgmma<T, Scale, GS, true, 128> : MoeGemmWgmma<T, Scale, GS, false, 128>;
}

}  // namespace

template <typename T>
GemmKernel WgmmaKernel(bool down, const qm_projection& w, int per_block, int tokens) {
  if (w.scale_type == 2)
    return per_block == 2 ? Select<T, __nv_bfloat16, 2>(down, tokens) : Select<T, __nv_bfloat16, 1>(down, tokens);
  return per_block == 2 ? Select<T, __half, 2>(down, tokens) : Select<T, __half, 1>(down, tokens);
}
template GemmKernel WgmmaKernel<__nv_bfloat16>(bool, const qm_projection&, int, int);
template GemmKernel WgmmaKernel<__half>(bool, const qm_projection&, int, int);

}  // namespace quantmoe
