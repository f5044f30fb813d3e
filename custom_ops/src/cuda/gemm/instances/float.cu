#include "cuda/gemm/select_mma.cuh"

namespace quantmoe {

template <typename T>
GemmKernel float_kernel(Product product, int path, const PlanStep& g) {
  switch (product) {
    case Product::kGateUp:
      return select_mma<T, Product::kGateUp>(Float{}, path, g);
    case Product::kDown:
      return select_mma<T, Product::kDown>(Float{}, path, g);
    case Product::kLinear:
      return select_mma<T, Product::kLinear>(Float{}, path, g);
    case Product::kUp:
      break;
  }
  return nullptr;
}
template GemmKernel float_kernel<__nv_bfloat16>(Product, int, const PlanStep&);
template GemmKernel float_kernel<__half>(Product, int, const PlanStep&);

}  // namespace quantmoe
