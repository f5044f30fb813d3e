#include "cuda/select_linear.cuh"
#include "cuda/select_mma.cuh"

namespace quantmoe {

template <typename T>
GemmKernel FloatKernel(int path, const qm_cuda_step& g) {
  return SelectMma<T, Product::kLinear>(Float{}, path, g);
}
template GemmKernel FloatKernel<__nv_bfloat16>(int, const qm_cuda_step&);
template GemmKernel FloatKernel<__half>(int, const qm_cuda_step&);

template <typename T>
LinearKernel DenseFloatKernel(const qm_cuda_step& g) {
  return SelectDense<T, Float>(g);
}
template LinearKernel DenseFloatKernel<__nv_bfloat16>(const qm_cuda_step&);
template LinearKernel DenseFloatKernel<__half>(const qm_cuda_step&);

}  // namespace quantmoe
