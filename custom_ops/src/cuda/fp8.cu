#include "cuda/instances.h"
#include "cuda/moe_gemm_fp8.cuh"

namespace quantmoe {

template <typename T>
GemmKernel Fp8Kernel(bool down, bool grouped) {
  if (grouped) return down ? MoeGemmFp8<T, true, true> : MoeGemmFp8<T, false, true>;
  return down ? MoeGemmFp8<T, true, false> : MoeGemmFp8<T, false, false>;
}
template GemmKernel Fp8Kernel<__nv_bfloat16>(bool, bool);
template GemmKernel Fp8Kernel<__half>(bool, bool);

}  // namespace quantmoe
