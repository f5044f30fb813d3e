#include "cuda/linear/select_linear.cuh"

namespace quantmoe {

template <typename T>
LinearKernel dense_float_kernel(const PlanStep& g) {
  return select_dense<T, Float>(g);
}
template LinearKernel dense_float_kernel<__nv_bfloat16>(const PlanStep&);
template LinearKernel dense_float_kernel<__half>(const PlanStep&);

}  // namespace quantmoe
