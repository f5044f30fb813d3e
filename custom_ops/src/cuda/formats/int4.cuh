// int4: symmetric, with f16 or bf16 scales known at compile time, and with zero points, where they are an argument.
#pragma once
#include "cuda/formats/format.h"

namespace quantmoe {

struct Int4Facts : FormatFacts {
  static constexpr int kBits = 4;
  static constexpr int scale_bytes(int per_block) { return 4 * per_block; }
  static constexpr bool kRoundsScaled = true, kPairsUnits = true;
  static constexpr bool is(const qm_projection& w) { return w.format == k_format_int4 && !w.zero_points; }
  static constexpr bool takes_scales(int32_t type) { return type == k_scale_type_f16 || type == k_scale_type_bf16; }
};
struct Int4ZeroFacts : FormatFacts {
  static constexpr int kBits = 4, kZeroBytes = 4;
  static constexpr int scale_bytes(int per_block) { return 4 * per_block; }
  static constexpr bool is(const qm_projection& w) { return w.format == k_format_int4 && w.zero_points; }
  static constexpr bool takes_scales(int32_t type) { return Int4Facts::takes_scales(type); }
};

}  // namespace quantmoe

#ifdef __CUDACC__
#include "cuda/formats/trait.cuh"

namespace quantmoe {

// The codes become the low mantissa bits of a power of two: 1024 + code, in bf16 32 + code / 4. Nibbles that lie four
// bits too high cost an fma, because the integer pipe binds. (In bf16 they are a number of exponent 0 or 1, code *
// 2^-129.) If latency binds, kShift is faster.
template <typename T>
constexpr float kInt4Bits = kBf16<T> ? 0.25f : 1.f;

template <typename T, bool kShift = false>
__device__ inline void dequant_int4(uint32_t q, uint32_t (&a)[4]) {
  constexpr uint32_t low = 0x000f000f, high = 0x00f000f0, base = Half<T>::kInt4Or;
  const uint32_t q8 = q >> 8;
  a[0] = mask_or<low>(q, base), a[1] = mask_or<low>(q8, base);
  if constexpr (kShift) {
    a[2] = mask_or<low>(q >> 4, base), a[3] = mask_or<low>(q >> 12, base);
  } else if constexpr (kBf16<T>) {
    a[2] = Half<T>::fma(q & high, 0x7f007f00, base), a[3] = Half<T>::fma(q8 & high, 0x7f007f00, base);  // 2^127
  } else {  // (1024 + 16 code) / 16 + 960
    a[2] = Half<T>::fma(mask_or<high>(q, base), 0x2c002c00, 0x63806380);
    a[3] = Half<T>::fma(mask_or<high>(q8, base), 0x2c002c00, 0x63806380);
  }
}

// What both have.
struct Int4Trait : Trait {
  static constexpr bool kZerosLater = true;
  template <typename T>
  static constexpr float kSumFactor = 1 / kInt4Bits<T>;
  template <typename T, bool kShift, bool kCentered>
  __device__ static void dequant(uint32_t q, uint32_t, uint32_t low, uint32_t high, uint32_t (&a)[4]) {
    dequant_int4<T, kShift>(q, a);
    if constexpr (kCentered) center<T>(a, low, high);
  }
};

// Of: the type of its scales, and groups in a unit, 2 for groups of 32, else 1.
struct Int4 : Int4Facts, Int4Trait {
  template <int scale_type, int groups>
  struct Of;
  template <typename T>
  __device__ static uint2 pair_of(const uint32_t*, uint32_t, uint32_t, int, int) {
    return make_uint2(Half<T>::kInt4Zero, Half<T>::kInt4Zero);
  }
  template <typename T>
  __device__ static float2 zeros(uint32_t, uint32_t) {
    return make_float2(Half<T>::kInt4ZeroValue, Half<T>::kInt4ZeroValue);
  }

  // On wgmma, times a group's scale, rounded once. `scale` is factor's result for the scales of rows g and g + 8. The
  // values come out times kResult.
  //
  // In bf16 a nibble in bits 0..3 or 4..7 of a zero word has exponent 0 or 1. So it is code * 2^-133 or code * 2^-129.
  // One fma gives (code - 8) * scale. Its factor is the scale times a power of two that keeps everything in range.
  // Scales from 2^-60 to 2^63 are exact. f16 lacks this range: subtract, then multiply.
  template <typename T>
  static constexpr float kResult = kBf16<T> ? 0x1p-69f : 1.f;
  template <typename T>
  static constexpr float kProductFactor = 1 / kResult<T>;
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
  __device__ static void dequant_scaled(uint32_t q, uint32_t, const uint32_t (&scale)[2], uint32_t, uint32_t,
                                        uint32_t (&a)[4]) {
    if constexpr (kBf16<T>) {
      const uint32_t q8 = q >> 8;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t high = Half<T>::mul(scale[i], 0x3d803d80);  // 2^-4
        const uint32_t zero = Half<T>::mul(scale[i], 0x80088008);  // minus code 8
        a[i] = Half<T>::fma((i ? q8 : q) & 0x000f000f, scale[i], zero);
        a[i + 2] = Half<T>::fma((i ? q8 : q) & 0x00f000f0, high, zero);
      }
    } else {
      dequant_int4<T>(q, a);
      center<T>(a, Half<T>::kInt4Zero, Half<T>::kInt4Zero);
      times<T>(a, scale[0], scale[1]);
    }
  }
};
template <int scale_type, int groups>
struct Int4::Of : Int4 {
  static constexpr int kScaleType = scale_type, kGroups = groups;
};

struct Int4Zero : Int4ZeroFacts, Int4Trait {
  template <int groups>
  struct Of;
  // Zero points of rows g and g + 8.
  template <typename T>
  __device__ static uint2 pair_of(const uint32_t*, uint32_t zeros, uint32_t selector, int, int) {
    return make_uint2(zero_point<T, false>(zeros, selector), zero_point<T, false>(zeros, selector + 0x0101));
  }
  template <typename T>
  __device__ static float2 zeros(uint32_t zeros, uint32_t selector) {
    return make_float2(Half<T>::low(zero_point<T, false>(zeros, selector)),
                       Half<T>::low(zero_point<T, false>(zeros, selector + 0x0101)));
  }

  // On wgmma the zero points are zero_point<T, true>'s.
  template <typename T>
  static constexpr float kResult = kBf16<T> ? 0x1p-6f : 1.f;
  template <typename T>
  static constexpr float kProductFactor = 1 / kResult<T>;
  template <typename T>
  __device__ static void dequant_scaled(uint32_t q, uint32_t, const uint32_t (&scale)[2], uint32_t zero_low,
                                        uint32_t zero_high, uint32_t (&a)[4]) {
    if constexpr (kBf16<T>) {
      const uint32_t q8 = q >> 8;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        a[i] = Half<T>::fma((i ? q8 : q) & 0x000f000f, 0x7f007f00, i ? zero_high : zero_low);
        a[i + 2] = Half<T>::fma((i ? q8 : q) & 0x00f000f0, 0x7d007d00, i ? zero_high : zero_low);  // 2^123
      }
    } else {
      dequant_int4<T>(q, a);
      center<T>(a, zero_low, zero_high);
    }
    times<T>(a, scale[0], scale[1]);
  }
};
template <int groups>
struct Int4Zero::Of : Int4Zero {
  static constexpr int kGroups = groups;
};

}  // namespace quantmoe
#endif
