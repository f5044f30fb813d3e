// int8, symmetric or with zero points.
#pragma once
#include "cuda/formats/format.h"

namespace quantmoe {

struct Int8Facts : FormatFacts {
  static constexpr int kBits = 8;
  static constexpr bool is(const qm_projection& w) { return w.format == k_format_int8 && !w.zero_points; }
  static constexpr bool takes_scales(int32_t type) { return is_float_scale(type); }
};
struct Int8ZeroFacts : FormatFacts {
  static constexpr int kBits = 8, kZeroBytes = 4;
  static constexpr bool is(const qm_projection& w) { return w.format == k_format_int8 && w.zero_points; }
  static constexpr bool takes_scales(int32_t type) { return is_float_scale(type); }
};

}  // namespace quantmoe

#ifdef __CUDACC__
#include "cuda/formats/trait.cuh"

namespace quantmoe {

// Times kInt8Result. A bf16 whose bits are a byte is the byte * 2^-133.
template <typename T>
constexpr float kInt8Result = kBf16<T> ? 0x1p-6f : 1.f;

// The zero points of rows g and g + 8 as zero_point<T, true> makes them; exact.
template <typename T>
__device__ inline void dequant_int8(uint32_t low, uint32_t high, uint32_t zero_low, uint32_t zero_high,
                                    uint32_t (&a)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t q = i % 2 ? high : low, zero = i % 2 ? zero_high : zero_low, bytes = i / 2 ? 0x4341 : 0x4240;
    if constexpr (kBf16<T>) {
      a[i] = Half<T>::fma(__byte_perm(q, 0, bytes), 0x7f007f00, zero);  // 2^127
    } else {
      a[i] = Half<T>::sub(__byte_perm(q, 0x64646464, bytes), zero);
    }
  }
}
// Symmetric: code 128 is zero.
template <typename T>
__device__ inline void dequant_int8(uint32_t low, uint32_t high, uint32_t (&a)[4]) {
  constexpr uint32_t kMiddle = kBf16<T> ? 0xc000c000 : 0x64806480;  // -128 * 2^-6; 1024 + 128
  dequant_int8<T>(low, high, kMiddle, kMiddle, a);
}

struct Int8 : Int8Facts, Trait {
  template <typename T>
  static constexpr float kSumFactor = 1 / kInt8Result<T>;
  template <typename T, bool kShift, bool kCentered>
  __device__ static void dequant(uint32_t q, uint32_t q8, uint32_t, uint32_t, uint32_t (&a)[4]) {
    dequant_int8<T>(q, q8, a);
  }

  // On wgmma as Int4.
  template <typename T>
  static constexpr float kProductFactor = kBf16<T> ? 0x1p69f : 1.f;
  template <typename T>
  __device__ static uint32_t factor(uint32_t twice) {
    if constexpr (kBf16<T>) return Half<T>::mul(twice, 0x5f805f80);  // 2^64
    return twice;
  }
  template <typename T>
  __device__ static float factor(float s) {
    return s;
  }
  template <typename T>
  __device__ static void dequant_scaled(uint32_t low, uint32_t high, const uint32_t (&scale)[2], uint32_t, uint32_t,
                                        uint32_t (&a)[4]) {
    if constexpr (kBf16<T>) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t zero = Half<T>::mul(scale[i % 2], 0x80808080);  // minus code 128
        a[i] = Half<T>::fma(__byte_perm(i % 2 ? high : low, 0, i / 2 ? 0x4341 : 0x4240), scale[i % 2], zero);
      }
    } else {
      dequant_int8<T>(low, high, a);
      times<T>(a, scale[0], scale[1]);
    }
  }
};

struct Int8Zero : Int8ZeroFacts, Trait {
  template <typename T>
  static constexpr float kSumFactor = 1 / kInt8Result<T>;
  template <typename T>
  static constexpr float kProductFactor = 1 / kInt8Result<T>;
  template <typename T>
  __device__ static uint2 pair_of(const uint32_t*, uint32_t zeros, uint32_t selector, int, int) {
    return make_uint2(zero_point<T, true>(zeros, selector), zero_point<T, true>(zeros, selector + 0x0101));
  }
  template <typename T, bool kShift, bool kCentered>
  __device__ static void dequant(uint32_t q, uint32_t q8, uint32_t low, uint32_t high, uint32_t (&a)[4]) {
    dequant_int8<T>(q, q8, low, high, a);
  }
  template <typename T>
  __device__ static void dequant_scaled(uint32_t q, uint32_t q8, const uint32_t (&scale)[2], uint32_t low,
                                        uint32_t high, uint32_t (&a)[4]) {
    dequant_int8<T>(q, q8, low, high, a);
    times<T>(a, scale[0], scale[1]);
  }
};

}  // namespace quantmoe
#endif
