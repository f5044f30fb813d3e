// e4m3 weights times e4m3 activations on mma.sync, also compiled for sm_89 (CMakeLists.txt).
#include "cuda/gemm/select_mma.cuh"

namespace quantmoe {

template <typename T>
GemmKernel packed_e4m3_kernel(Product product, int path, const PlanStep& g) {
  return product == Product::kDown ? select_mma<T, Product::kDown>(PackedE4m3{}, path, g)
                                   : select_mma<T, Product::kGateUp>(PackedE4m3{}, path, g);
}
template GemmKernel packed_e4m3_kernel<__nv_bfloat16>(Product, int, const PlanStep&);
template GemmKernel packed_e4m3_kernel<__half>(Product, int, const PlanStep&);

}  // namespace quantmoe
