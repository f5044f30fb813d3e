// nvfp4: e2m1 with e4m3 scales of 16 columns, and a factor of the whole matrix, which multiplies sums.
#pragma once
#include "cuda/formats/format.h"

namespace quantmoe {

struct Nvfp4Facts : FormatFacts {
  static constexpr int kBits = 4, kGlobalBytes = 8, kPackedUnitBytes = 64, kUnitGroups = 4;
  static constexpr int group_size(int32_t) { return 16; }
  static constexpr bool is(const qm_projection& w) { return w.format == k_format_nvfp4; }
  static constexpr bool takes_scales(int32_t type) { return type == k_scale_type_e4m3; }
};

}  // namespace quantmoe

#ifdef __CUDACC__
#include "cuda/formats/e2m1.cuh"

namespace quantmoe {

struct Nvfp4 : Nvfp4Facts, E2m1Trait {
  static constexpr int kScaleType = k_scale_type_e4m3;
  // A scale (not negative) as a factor on e2m1 bits: the product, value * scale * kResult, is always exact.
  template <typename T>
  static constexpr float kResult = kBf16<T> ? 0x1p-62f : 0x1p-8f;
  template <typename T>
  __device__ static uint32_t scale_factor(uint32_t scales, uint32_t selector) {
    const uint32_t twice = __byte_perm(scales, 0, selector);
    if constexpr (kBf16<T>) return Half<T>::mul(Half<T>::mul(twice << 4, 0x7b807b80), 0x5f805f80);  // 2^120, 2^64
    return Half<T>::mul(twice << 7, 0x74007400);                                                    // 2^14
  }

  template <typename T>
  static constexpr bool kScaledWeights = true;
  template <typename T>
  static constexpr float kSumFactor = 1 / kResult<T>;
  template <typename T>
  static constexpr float kProductFactor = 1 / kResult<T>;
  template <typename T>
  __device__ static uint2 pair_of(const uint32_t* scales, uint32_t, uint32_t, int half, int t) {
    return make_uint2(scale_factor<T>(scales[half], byte_pair(t & 2)),
                      scale_factor<T>(scales[half], byte_pair((t & 2) + 1)));
  }
  template <typename T, bool kShift, bool kCentered>
  __device__ static void dequant(uint32_t q, uint32_t, uint32_t low, uint32_t high, uint32_t (&a)[4]) {
    dequant_e2m1<T>(q, a);
    times<T>(a, low, high);
  }

  template <typename T>
  __device__ static uint32_t group_factor(const uint32_t* scales, int group, int row) {
    return scale_factor<T>(scales[group / 2], byte_pair(group % 2 * 2 + row));
  }
  template <typename T>
  __device__ static uint32_t half_factor(const uint32_t* scales, int half, int row, int lane) {
    return scale_factor<T>(scales[half], byte_pair((lane & 2) + row));
  }
};
// Times nvfp4 codes of activations, as moe_round packs them.
struct PackedNvfp4 : Nvfp4 {
  static constexpr bool kPacked = true;
};

}  // namespace quantmoe
#endif
