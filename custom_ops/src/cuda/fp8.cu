#include "cuda/instances.h"
#include "cuda/moe_gemm_fp8.cuh"

namespace quantmoe {

template <typename T>
GemmKernel Fp8Kernel(bool down, const qm_projection& w, const qm_cuda_gemm& g) {
  if (!TakesFp8(w) || g.n_tiles != 16 || g.panels != 16) return nullptr;
  if (w.group_size != -1 && w.block_n % 128 != 0) return down ? MoeGemmFp8<T, true, true> : MoeGemmFp8<T, false, true>;
  return down ? MoeGemmFp8<T, true, false> : MoeGemmFp8<T, false, false>;
}
template GemmKernel Fp8Kernel<__nv_bfloat16>(bool, const qm_projection&, const qm_cuda_gemm&);
template GemmKernel Fp8Kernel<__half>(bool, const qm_projection&, const qm_cuda_gemm&);

}  // namespace quantmoe
