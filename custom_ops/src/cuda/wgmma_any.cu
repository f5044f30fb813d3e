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
GemmKernel WgmmaKernelAny(bool down, const qm_projection& w, int per_block, int tokens) {
  switch (KindOf(w)) {
    case WeightKind::kInt4Zero:
      return per_block == 2 ? Select<T, Format<WeightKind::kInt4Zero, 2>>(down, tokens)
                            : Select<T, Format<WeightKind::kInt4Zero, 1>>(down, tokens);
    case WeightKind::kInt8:
      return Select<T, Format<WeightKind::kInt8>>(down, tokens);
    case WeightKind::kFp8:
      return Select<T, Format<WeightKind::kFp8>>(down, tokens);
    case WeightKind::kMxfp4:
      return Select<T, Format<WeightKind::kMxfp4>>(down, tokens);
    default:
      return Select<T, Format<WeightKind::kNvfp4>>(down, tokens);
  }
}
template GemmKernel WgmmaKernelAny<__nv_bfloat16>(bool, const qm_projection&, int, int);
template GemmKernel WgmmaKernelAny<__half>(bool, const qm_projection&, int, int);

}  // namespace quantmoe
