#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/instances.h"
#include "cuda/moe_gemm_mma.cuh"

namespace quantmoe {
namespace {

template <typename T, typename F>
GemmKernel Select(int path, const qm_cuda_gemm& g) {
  if (path == QM_CUDA_DECODE) return g.panels == 2 ? MoeDownDecode<T, F, 2> : MoeDownDecode<T, F, 4>;
  if (g.n_tiles == 1)
    return g.panels == 2 ? MoeGemmMma<T, F, 2, 1, true, false> : MoeGemmMma<T, F, 4, 1, true, false>;
  return g.n_tiles == 2 ? MoeGemmMma<T, F, 2, 2, true, false> : MoeGemmMma<T, F, 2, 4, true, false>;
}

}  // namespace

template <typename T>
GemmKernel DownKernel(int path, const qm_projection& w, int per_block, const qm_cuda_gemm& g) {
  if (path == QM_CUDA_WGMMA) return WgmmaKernel<T>(true, w, per_block, 8 * g.n_tiles);
  if (KindOf(w) != WeightKind::kInt4) return DownKernelAny<T>(path, w, per_block, g);
  if (w.scale_type == 2)
    return per_block == 2 ? Select<T, Int4<__nv_bfloat16, 2>>(path, g) : Select<T, Int4<__nv_bfloat16, 1>>(path, g);
  return per_block == 2 ? Select<T, Int4<__half, 2>>(path, g) : Select<T, Int4<__half, 1>>(path, g);
}
template GemmKernel DownKernel<__nv_bfloat16>(int, const qm_projection&, int, const qm_cuda_gemm&);
template GemmKernel DownKernel<__half>(int, const qm_projection&, int, const qm_cuda_gemm&);

}  // namespace quantmoe
