// One word of codes (FORMAT.md 3.2) to the A operand of mma.m16n8k16, without scales:
// a[0] = row g, columns c(0) c(1); a[1] = row g + 8, the same; a[2], a[3] = columns c(2) c(3).
#pragma once
#include <type_traits>

#include "cuda/ptx.cuh"

namespace quantmoe {

// (q & mask) | bits in one instruction.
template <uint32_t mask>
__device__ inline uint32_t MaskOr(uint32_t q, uint32_t bits) {
  uint32_t r;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(r) : "r"(q), "n"(mask), "r"(bits));
  return r;
}

// int4. The codes become the low mantissa bits of a power of two, base + code; with `centered` base + 8 is subtracted:
// exact.
template <typename T, bool centered>
__device__ inline void DequantInt4(uint32_t q, uint32_t (&a)[4]) {
  constexpr uint32_t mask = 0x000f000f, base = Half<T>::kInt4Or, zero = Half<T>::kInt4Zero;
  a[0] = MaskOr<mask>(q, base);
  a[2] = MaskOr<mask>(q >> 4, base);
  a[1] = MaskOr<mask>(q >> 8, base);
  a[3] = MaskOr<mask>(q >> 12, base);
  if constexpr (centered) {
#pragma unroll
    for (uint32_t& x : a) x = Half<T>::Sub(x, zero);
  }
}

// int4 weights times a group's scale, rounded once, for wgmma: `scale` is what Int4Scale made of the scales of rows g
// and g + 8, and the values come out times kInt4Result.
//
// bf16: a nibble in bits 0..3 or 4..7 of a zero word is a bf16 of exponent 0 or 1, that is code * 2^-133 or * 2^-129:
// one fma with the scale, times a power of two that keeps everything in range, gives (code - 8) * scale. Scales from
// 2^-60 to 2^63 are exact. f16 has not the range for that: subtract, then multiply.
template <typename T>
constexpr float kInt4Result = 1.f;
template <>
constexpr float kInt4Result<__nv_bfloat16> = 0x1p-69f;

template <typename T>
__device__ inline uint32_t Int4Scale(uint32_t twice) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) return Half<T>::Mul(twice, 0x5f805f80);  // 2^64
  return twice;
}

template <typename T>
__device__ inline void DequantInt4Scaled(uint32_t q, const uint32_t (&scale)[2], uint32_t (&a)[4]) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    const uint32_t q8 = q >> 8;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t high = Half<T>::Mul(scale[i], 0x3d803d80);  // 2^-4
      const uint32_t zero = Half<T>::Mul(scale[i], 0x80088008);  // minus code 8
      a[i] = Half<T>::Fma((i ? q8 : q) & 0x000f000f, scale[i], zero);
      a[i + 2] = Half<T>::Fma((i ? q8 : q) & 0x00f000f0, high, zero);
    }
  } else {
    DequantInt4<T, true>(q, a);
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = Half<T>::Mul(a[i], scale[i % 2]);
  }
}

}  // namespace quantmoe
