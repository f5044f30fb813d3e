#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/instances.h"
#include "cuda/moe_gemm_mma.cuh"

namespace quantmoe {
namespace {

// A warp's 8-bit stages are as large with two panels as 4-bit ones with four.
template <typename T, WeightKind kind, int GS = 2>
GemmKernel Select(int path, const qm_cuda_gemm& g) {
  using F = Format<kind, GS>;
  if (path == QM_CUDA_DECODE) {
    if constexpr (BitsOf(kind) == 4)
      if (g.panels == 4) return MoeGemmMma<T, F, 4, 1, false, true>;
    return MoeGemmMma<T, F, 2, 1, false, true>;
  }
  if (g.n_tiles == 1) {
    if constexpr (BitsOf(kind) == 4)
      if (g.panels == 4) return MoeGemmMma<T, F, 4, 1, false, false>;
    return MoeGemmMma<T, F, 2, 1, false, false>;
  }
  return g.n_tiles == 2 ? MoeGemmMma<T, F, 2, 2, false, false> : MoeGemmMma<T, F, 2, 4, false, false>;
}

}  // namespace

template <typename T>
GemmKernel GateUpKernelAny(int path, const qm_projection& w, int per_block, const qm_cuda_gemm& g) {
  switch (KindOf(w)) {
    case WeightKind::kInt4Zero:
      return per_block == 2 ? Select<T, WeightKind::kInt4Zero, 2>(path, g) : Select<T, WeightKind::kInt4Zero, 1>(path, g);
    case WeightKind::kInt8:
      return Select<T, WeightKind::kInt8>(path, g);
    case WeightKind::kFp8:
      return Select<T, WeightKind::kFp8>(path, g);
    case WeightKind::kMxfp4:
      return Select<T, WeightKind::kMxfp4>(path, g);
    default:
      return Select<T, WeightKind::kNvfp4>(path, g);
  }
}
template GemmKernel GateUpKernelAny<__nv_bfloat16>(int, const qm_projection&, int, const qm_cuda_gemm&);
template GemmKernel GateUpKernelAny<__half>(int, const qm_projection&, int, const qm_cuda_gemm&);

}  // namespace quantmoe
