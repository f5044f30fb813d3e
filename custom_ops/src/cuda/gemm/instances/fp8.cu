#include "cuda/gemm/moe_gemm_fp8.cuh"
#include "cuda/gemm/select.cuh"

namespace quantmoe {
namespace {

// by_row: blocks of scales have other rows than 128.
template <bool by_row>
struct Fp8Family {
  using Pointer = GemmKernel;
  static constexpr bool has(const Instance& row) { return row.kernel == ProductKernel::kFp8; }
  template <typename T, class F, size_t i>
  static Pointer of() {
    return moe_gemm_fp8<T, kInstances<F>[i].product == Product::kDown, by_row>;
  }
};
template <typename T, Product product>
GemmKernel select_fp8(const qm_projection& w, const PlanStep& step) {
  return w.group_size != -1 && w.block_n % 128 != 0 ? select<Fp8Family<true>, T, PackedE4m3, product>(kPathFp8, step)
                                                    : select<Fp8Family<false>, T, PackedE4m3, product>(kPathFp8, step);
}

}  // namespace

template <typename T>
GemmKernel fp8_kernel(Product product, const qm_projection& w, const PlanStep& step) {
  if (!takes_fp8(w)) return nullptr;
  return product == Product::kDown ? select_fp8<T, Product::kDown>(w, step) : select_fp8<T, Product::kGateUp>(w, step);
}
template GemmKernel fp8_kernel<__nv_bfloat16>(Product, const qm_projection&, const PlanStep&);
template GemmKernel fp8_kernel<__half>(Product, const qm_projection&, const PlanStep&);

}  // namespace quantmoe
