#include "cuda/linear/select_linear.cuh"

namespace quantmoe {

template <typename T>
LinearKernel dense_float_kernel(const qm_cuda_step& g) {
  return select_dense<T, Float>(g);
}
template LinearKernel dense_float_kernel<__nv_bfloat16>(const qm_cuda_step&);
template LinearKernel dense_float_kernel<__half>(const qm_cuda_step&);

}  // namespace quantmoe
