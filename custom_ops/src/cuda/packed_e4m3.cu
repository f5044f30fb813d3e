// e4m3 weights times e4m3 activations on mma.sync, also compiled for sm_89 (CMakeLists.txt).
#include "cuda/select_mma.cuh"

namespace quantmoe {

template <typename T>
GemmKernel PackedE4m3Kernel(Product product, int path, const qm_cuda_step& g) {
  return product == Product::kDown ? SelectMma<T, Product::kDown>(PackedE4m3{}, path, g)
                                   : SelectMma<T, Product::kGateUp>(PackedE4m3{}, path, g);
}
template GemmKernel PackedE4m3Kernel<__nv_bfloat16>(Product, int, const qm_cuda_step&);
template GemmKernel PackedE4m3Kernel<__half>(Product, int, const qm_cuda_step&);

}  // namespace quantmoe
