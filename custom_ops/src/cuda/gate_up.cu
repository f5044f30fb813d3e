#include "cuda/select_mma.cuh"

namespace quantmoe {

template <typename T>
GemmKernel GateUpKernel(int path, const qm_projection& w, const qm_cuda_step& g) {
  if (KindOf(w) != WeightKind::kInt4) return GateUpKernelAny<T>(path, w, g);
  return ForInt4(w, [&](auto format) { return SelectMma<T, Product::kGateUp>(format, path, g); });
}
template GemmKernel GateUpKernel<__nv_bfloat16>(int, const qm_projection&, const qm_cuda_step&);
template GemmKernel GateUpKernel<__half>(int, const qm_projection&, const qm_cuda_step&);

}  // namespace quantmoe
