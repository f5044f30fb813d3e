// nvfp4 weights times nvfp4 activations.
#include "cuda/select_mma.cuh"

namespace quantmoe {

template <typename T>
GemmKernel PackedKernel(Product product, int path, const qm_projection& w, const qm_cuda_step& g) {
  if (TakesFp8(w)) return PackedE4m3Kernel<T>(product, path, g);
  if (!TakesNvfp4(w)) return nullptr;
  return product == Product::kDown ? SelectMma<T, Product::kDown>(PackedNvfp4{}, path, g)
                                   : SelectMma<T, Product::kGateUp>(PackedNvfp4{}, path, g);
}
template GemmKernel PackedKernel<__nv_bfloat16>(Product, int, const qm_projection&, const qm_cuda_step&);
template GemmKernel PackedKernel<__half>(Product, int, const qm_projection&, const qm_cuda_step&);

}  // namespace quantmoe
