// CONTRIBUTING.md's CUDA format: 4 bits in two's complement, a scale for 32 columns, in layout marlin.
#pragma once
#include "cuda/formats/int4.cuh"

namespace quantmoe {
struct Acme4Facts : FormatFacts {  // of plans, too
  static constexpr int kBits = 4;
  static constexpr int group_size(int32_t) { return 32; }
  static constexpr bool is(const qm_projection& w) { return w.format == k_format_acme4; }
  static constexpr bool takes_scales(int32_t type) { return type == k_scale_type_f16 || type == k_scale_type_bf16; }
};
#ifdef __CUDACC__
struct Acme4 : Acme4Facts, PlainTrait<Acme4> {  // of kernels; formats/trait.cuh says what is what
  template <typename T>
  static constexpr float kSumFactor = Int4::kSumFactor<T>;  // values are code / 4 in bf16
  template <typename T, bool kShift, bool kCentered>
  __device__ static void dequant(uint32_t q, uint32_t, uint32_t, uint32_t, uint32_t (&a)[4]) {
    dequant_int4<T, kShift>(q ^ 0x88888888, a);
    center<T>(a, Half<T>::kInt4Zero, Half<T>::kInt4Zero);
  }
};
#endif
}  // namespace quantmoe
