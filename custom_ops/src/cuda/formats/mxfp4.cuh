// mxfp4: e2m1 with e8m0 scales of 32 columns.
#pragma once
#include "cuda/formats/format.h"

namespace quantmoe {

struct Mxfp4Facts : FormatFacts {
  static constexpr int kBits = 4;
  static constexpr int kSpanPanels = 4;
  static constexpr int scale_bytes(int) { return 4; }
  static constexpr int group_size(int32_t) { return 32; }
  static constexpr bool is(const qm_projection& w) { return w.format == k_format_mxfp4; }
  static constexpr bool takes_scales(int32_t type) { return type == k_scale_type_e8m0; }
};

}  // namespace quantmoe

#ifdef __CUDACC__
#include "cuda/formats/e2m1.cuh"

namespace quantmoe {

struct Mxfp4 : Mxfp4Facts, E2m1Trait {
  static constexpr int kScaleType = k_scale_type_e8m0;
  // A scale as a factor on e2m1 bits, whose product, value * scale * kResult, is exact for scales of 2^-70 to 2^63;
  // f16, 2^-21 to 2^3.
  template <typename T>
  static constexpr float kResult = kBf16<T> ? 0x1p-62f : 0x1p-2f;
  template <typename T>
  __device__ static uint32_t scale_factor(uint32_t scales, uint32_t selector) {
    const uint32_t twice = __byte_perm(scales, 0, selector);
    if constexpr (kBf16<T>) return twice * 128 + 0x20002000;                     // exponent + 64
    const int exponent = min(max(static_cast<int>(twice & 0xff) - 100, 0), 30);  // + 12
    return exponent * 0x04000400;
  }

  template <typename T>
  static constexpr bool kScaledWeights = kBf16<T>;
  template <typename T>
  static constexpr float kSumFactor = kBf16<T> ? 1 / kResult<T> : 1 / kE2m1Bits<T>;
  template <typename T>
  __device__ static uint2 pair_of(const uint32_t* scales, uint32_t, uint32_t, int half, int) {
    if constexpr (kScaledWeights<T>)
      return make_uint2(scale_factor<T>(scales[0], byte_pair(2 * half)),
                        scale_factor<T>(scales[0], byte_pair(2 * half + 1)));
    return make_uint2(0, 0);
  }
  template <typename T, bool kShift, bool kCentered>
  __device__ static void dequant(uint32_t q, uint32_t, uint32_t low, uint32_t high, uint32_t (&a)[4]) {
    dequant_e2m1<T>(q, a);
    if constexpr (kScaledWeights<T>) times<T>(a, low, high);
  }

  template <typename T>
  static constexpr float kProductFactor = 1 / kResult<T>;
  // Of group `group` of a unit and row g or g + 8; columns: the lane's of 32.
  template <typename T>
  __device__ static uint32_t group_factor(const uint32_t* scales, int group, int row) {
    return scale_factor<T>(scales[0], byte_pair(2 * group + row));
  }
  template <typename T>
  __device__ static uint32_t half_factor(const uint32_t* scales, int half, int row, int) {
    return group_factor<T>(scales, half, row);
  }
};

}  // namespace quantmoe
#endif
