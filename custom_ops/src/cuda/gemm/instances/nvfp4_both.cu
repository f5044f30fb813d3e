// nvfp4 weights times nvfp4 activations.
#include "cuda/gemm/select_mma.cuh"

namespace quantmoe {

template <typename T>
GemmKernel packed_kernel(Product product, int path, const qm_projection& w, const PlanStep& g) {
  if (takes_fp8(w)) return packed_e4m3_kernel<T>(product, path, g);
  if (!takes_nvfp4(w)) return nullptr;
  return product == Product::kDown ? select_mma<T, Product::kDown>(PackedNvfp4{}, path, g)
                                   : select_mma<T, Product::kGateUp>(PackedNvfp4{}, path, g);
}
template GemmKernel packed_kernel<__nv_bfloat16>(Product, int, const qm_projection&, const PlanStep&);
template GemmKernel packed_kernel<__half>(Product, int, const qm_projection&, const PlanStep&);

}  // namespace quantmoe
