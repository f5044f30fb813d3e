#include "cuda/select_linear.cuh"

namespace quantmoe {

template <typename T>
GemmKernel FloatKernel(int path, const qm_cuda_gemm& g) {
  using F = Float;
  if (g.panels != 1) return nullptr;
  if (path == QM_CUDA_DECODE)
    return g.n_tiles == 1 && g.stages == StagesOf(1) ? MoeDownDecode<T, F, 1, 1, true> : nullptr;
  if (path != QM_CUDA_STREAM || g.stages != StagesOf(1)) return nullptr;
  return g.n_tiles == 1   ? MoeGemmMma<T, F, 1, 1, true, false>
         : g.n_tiles == 2 ? MoeGemmMma<T, F, 1, 2, true, false>
         : g.n_tiles == 4 ? MoeGemmMma<T, F, 1, 4, true, false>
                          : nullptr;
}
template GemmKernel FloatKernel<__nv_bfloat16>(int, const qm_cuda_gemm&);
template GemmKernel FloatKernel<__half>(int, const qm_cuda_gemm&);

template <typename T>
LinearKernel DenseFloatKernel(const qm_cuda_gemm& g) {
  return SelectLinear<T, Float>(g);
}
template LinearKernel DenseFloatKernel<__nv_bfloat16>(const qm_cuda_gemm&);
template LinearKernel DenseFloatKernel<__half>(const qm_cuda_gemm&);

}  // namespace quantmoe
