#include "cuda/instances.h"
#include "cuda/moe_gemm_wgmma.cuh"

namespace quantmoe {
namespace {

template <typename T, typename F>
GemmKernel Select(bool down, int tokens) {
  if (tokens == 48) return down ? MoeGemmWgmma<T, F, true, 48> : MoeGemmWgmma<T, F, false, 48>;
  return down ? MoeGemmWgmma<T, F, true, 128> : MoeGemmWgmma<T, F, false, 128>;
}

}  // namespace

template <typename T>
GemmKernel WgmmaKernel(bool down, const qm_projection& w, int per_block, int tokens) {
  if (KindOf(w) != WeightKind::kInt4) return WgmmaKernelAny<T>(down, w, per_block, tokens);
  if (w.scale_type == 2)
    return per_block == 2 ? Select<T, Int4<__nv_bfloat16, 2>>(down, tokens)
                          : Select<T, Int4<__nv_bfloat16, 1>>(down, tokens);
  return per_block == 2 ? Select<T, Int4<__half, 2>>(down, tokens) : Select<T, Int4<__half, 1>>(down, tokens);
}
template GemmKernel WgmmaKernel<__nv_bfloat16>(bool, const qm_projection&, int, int);
template GemmKernel WgmmaKernel<__half>(bool, const qm_projection&, int, int);

}  // namespace quantmoe
