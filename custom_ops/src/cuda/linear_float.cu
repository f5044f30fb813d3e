#include "cuda/select_linear.cuh"
#include "cuda/select_mma.cuh"

namespace quantmoe {

template <typename T>
GemmKernel float_kernel(int path, const qm_cuda_step& g) {
  return select_mma<T, Product::kLinear>(Float{}, path, g);
}
template GemmKernel float_kernel<__nv_bfloat16>(int, const qm_cuda_step&);
template GemmKernel float_kernel<__half>(int, const qm_cuda_step&);

template <typename T>
LinearKernel dense_float_kernel(const qm_cuda_step& g) {
  return select_dense<T, Float>(g);
}
template LinearKernel dense_float_kernel<__nv_bfloat16>(const qm_cuda_step&);
template LinearKernel dense_float_kernel<__half>(const qm_cuda_step&);

}  // namespace quantmoe
