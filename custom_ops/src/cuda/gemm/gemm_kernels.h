// The compiled products. Each file is one process of the compiler. gate_up.cu, down.cu, linear.cu and wgmma.cu have the
// products of symmetric int4, *_any.cu of other formats. Of formats with scales of two levels *_levels.cu have those on
// wgmma.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/common/kernels.cuh"
#include "cuda/formats/formats.h"
#include "cuda/gemm/instances.h"

namespace quantmoe {

using GemmKernel = void (*)(GemmParams);
using LinearKernel = void (*)(LinearParams);

// Formats whose instances have files of their own: Int4 those without _any, Float float.cu and linear_float.cu.
template <class F>
constexpr bool kOwnFiles = std::is_same_v<F, Int4> || std::is_same_v<F, Float>;

// body(trait) of a format, of Int4 and Int4Zero of what its weights are.
template <class F, class Body>
GemmKernel for_trait(const qm_projection& w, const Body& body) {
  constexpr int kF16 = k_scale_type_f16, kBf16 = k_scale_type_bf16;
  [[maybe_unused]] const bool two = groups_in_block(w) == 2;
  if constexpr (std::is_same_v<F, Int4>) {
    if (w.scale_type == kBf16) return two ? body(Int4::Of<kBf16, 2>{}) : body(Int4::Of<kBf16, 1>{});
    return two ? body(Int4::Of<kF16, 2>{}) : body(Int4::Of<kF16, 1>{});
  } else if constexpr (std::is_same_v<F, Int4Zero>) {
    return two ? body(Int4Zero::Of<2>{}) : body(Int4Zero::Of<1>{});
  } else {
    return body(F{});
  }
}
template <class Body>
GemmKernel for_int4(const qm_projection& w, const Body& body) {
  return for_trait<Int4>(w, body);
}
// The same of the format that the weights are of, null of those with files of their own.
template <class Body>
GemmKernel for_format(const qm_projection& w, const Body& body) {
#define QM_CUDA_FORMAT(F)      \
  if constexpr (!kOwnFiles<F>) \
    if (kind_of(w) == WeightKind::k##F) return for_trait<F>(w, body);
#include "cuda/formats/formats.inc"
  return nullptr;
}
// The same of a format whose scales are, or are not, of two levels; null of the others.
template <bool two_levels, class Body>
GemmKernel for_levels(const qm_projection& w, const Body& body) {
  return for_format(w, [&](auto format) {
    if constexpr (decltype(format)::kTwoLevels == two_levels) return body(format);
    return GemmKernel{};
  });
}

// The kernel of a plan, null where none is compiled that is what it says; T is the type of the activations. Of
// kPathDecode and kPathStream where nothing is packed:
template <typename T>
GemmKernel gate_up_kernel(int path, const qm_projection& w, const PlanStep& shape);
template <typename T>
GemmKernel down_kernel(int path, const qm_projection& w, const PlanStep& shape);
template <typename T>
GemmKernel gate_up_kernel_any(int path, const qm_projection& w, const PlanStep& shape);
template <typename T>
GemmKernel down_kernel_any(int path, const qm_projection& w, const PlanStep& shape);
// Where tokens are: of nvfp4, and of e4m3.
template <typename T>
GemmKernel packed_kernel(Product product, int path, const qm_projection& w, const PlanStep& shape);
template <typename T>
GemmKernel packed_e4m3_kernel(Product product, int path, const PlanStep& shape);
// kPathWgmma.
template <typename T>
GemmKernel wgmma_kernel(Product product, const qm_projection& w, const PlanStep& shape);
template <typename T>
GemmKernel wgmma_kernel_any(Product product, const qm_projection& w, const PlanStep& shape);
template <typename T>
GemmKernel wgmma_kernel_levels(Product product, const qm_projection& w, const PlanStep& shape);
// kPathFp8.
template <typename T>
GemmKernel fp8_kernel(Product product, const qm_projection& w, const PlanStep& shape);
// A linear's own: kPathDecode where nothing is packed, and kPathDense.
template <typename T>
GemmKernel linear_decode_kernel(const qm_projection& w, const PlanStep& shape);
template <typename T>
GemmKernel linear_decode_kernel_any(const qm_projection& w, const PlanStep& shape);
template <typename T>
LinearKernel dense_kernel(const qm_projection& w, const PlanStep& shape);
template <typename T>
LinearKernel dense_kernel_any(const qm_projection& w, const PlanStep& shape);
template <typename T>
LinearKernel dense_kernel_levels(const qm_projection& w, const PlanStep& shape);
// Of floats: kPathDecode and kPathStream, a linear's and a layer's; and a linear's kPathDense.
template <typename T>
GemmKernel float_kernel(Product product, int path, const PlanStep& shape);
template <typename T>
LinearKernel dense_float_kernel(const PlanStep& shape);

}  // namespace quantmoe
