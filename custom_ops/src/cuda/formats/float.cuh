// 16-bit floats of the activations' type.
#pragma once
#include "cuda/formats/format.h"

namespace quantmoe {

struct FloatFacts : FormatFacts {
  static constexpr int kBits = 16;
  static constexpr int scale_bytes(int) { return 0; }
  static constexpr bool is(const qm_projection& w) { return w.format == k_format_bf16 || w.format == k_format_f16; }
  static constexpr bool takes_scales(int32_t) { return false; }
};

}  // namespace quantmoe

#ifdef __CUDACC__
#include "cuda/formats/trait.cuh"

namespace quantmoe {

struct Float : FloatFacts, Trait {
  static constexpr int kGroups = 1;
  template <typename T>
  static constexpr float kSumFactor = 1.f;
  template <typename T>
  static constexpr float kProductFactor = 1.f;
};

}  // namespace quantmoe
#endif
