// fp8_e4m3, times kBitsFactor: bit patterns moved to where the exponent of T ends. The codes that are not numbers count
// as 480, as on the CPU.
#pragma once
#include "cuda/formats/format.h"

namespace quantmoe {

struct Fp8Facts : FormatFacts {
  static constexpr int kBits = 8, kPackedUnitBytes = 80;
  static constexpr bool is(const qm_projection& w) { return w.format == k_format_fp8_e4m3; }
  static constexpr bool takes_scales(int32_t type) { return is_float_scale(type) || type == k_scale_type_e8m0; }
};

}  // namespace quantmoe

#ifdef __CUDACC__
#include "cuda/formats/trait.cuh"

namespace quantmoe {

struct Fp8 : Fp8Facts, Trait {
  template <typename T>
  static constexpr float kBitsFactor = kBf16<T> ? 0x1p-120f : 0x1p-8f;
  template <typename T>
  static constexpr float kSumFactor = kBf16<T> ? 1.f : 1 / kBitsFactor<T>;
  // kShift as for int4: of as many instructions, less of them for the integer pipe or shorter chains.
  template <typename T, bool kShift>
  __device__ static void widen(uint32_t low, uint32_t high, uint32_t (&a)[4]) {
    constexpr uint32_t mask = kBf16<T> ? 0x07f007f0 : 0x3f803f80;
    constexpr int left = kBf16<T> ? 4 : 7, right = kBf16<T> ? 4 : 1;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t q = i ? high : low;
      uint32_t even, odd;  // bytes 0 and 2, bytes 1 and 3, their signs above them
      asm("prmt.b32 %0, %1, 0, 0xa280;" : "=r"(even) : "r"(q));
      a[i] = (even << left) & (mask | 0x80008000);
      if constexpr (kShift) {
        a[i + 2] = mask_or<mask>(q >> right, q & 0x80008000);
      } else {
        asm("prmt.b32 %0, %1, 0, 0xb391;" : "=r"(odd) : "r"(q));
        a[i + 2] = (odd << left) & (mask | 0x80008000);
      }
    }
  }
  template <typename T, bool kShift, bool kCentered>
  __device__ static void dequant(uint32_t q, uint32_t q8, uint32_t, uint32_t, uint32_t (&a)[4]) {
    widen<T, true>(q, q8, a);
    if constexpr (kBf16<T>) times<T>(a, 0x7b807b80, 0x7b807b80);  // 2^120
  }

  template <typename T>
  static constexpr float kProductFactor = kBf16<T> ? 0x1p56f : 1.f;
  static constexpr bool kPlainScales = false;
  template <typename T>
  __device__ static uint32_t factor(uint32_t twice) {
    return twice;
  }
  template <typename T>
  __device__ static float factor(float s) {
    return s * (1 / (kProductFactor<T> * kBitsFactor<T>));
  }
  template <typename T>
  __device__ static void dequant_scaled(uint32_t q, uint32_t q8, const uint32_t (&scale)[2], uint32_t, uint32_t,
                                        uint32_t (&a)[4]) {
    widen<T, false>(q, q8, a);
    times<T>(a, scale[0], scale[1]);
  }
};
// Times e4m3 codes of activations, as moe_round packs them.
struct PackedE4m3 : Fp8 {
  static constexpr bool kPacked = true;
};

}  // namespace quantmoe
#endif
