#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/instances.h"
#include "cuda/moe_gemm_mma.cuh"

namespace quantmoe {
namespace {

template <typename T, typename Scale, int GS>
GemmKernel Select(int path, const qm_cuda_gemm& g) {
  if (path == QM_CUDA_DECODE)
    return g.panels == 2 ? MoeGemmMma<T, Scale, 2, 1, GS, false, true> : MoeGemmMma<T, Scale, 4, 1, GS, false, true>;
  if (g.n_tiles == 1)
    return g.panels == 2 ? MoeGemmMma<T, Scale, 2, 1, GS, false, false> : MoeGemmMma<T, Scale, 4, 1, GS, false, false>;
  return g.n_tiles == 2 ? MoeGemmMma<T, Scale, 2, 2, GS, false, false> : MoeGemmMma<T, Scale, 2, 4, GS, false, false>;
}

}  // namespace

template <typename T>
GemmKernel GateUpKernel(int path, const qm_projection& w, int per_block, const qm_cuda_gemm& g) {
  if (path == QM_CUDA_WGMMA) return WgmmaKernel<T>(false, w, per_block, 8 * g.n_tiles);
  if (w.scale_type == 2)
    return per_block == 2 ? Select<T, __nv_bfloat16, 2>(path, g) : Select<T, __nv_bfloat16, 1>(path, g);
  return per_block == 2 ? Select<T, __half, 2>(path, g) : Select<T, __half, 1>(path, g);
}
template GemmKernel GateUpKernel<__nv_bfloat16>(int, const qm_projection&, int, const qm_cuda_gemm&);
template GemmKernel GateUpKernel<__half>(int, const qm_projection&, int, const qm_cuda_gemm&);

}  // namespace quantmoe
