// One word of codes (FORMAT.md 3.2) to the A operand of mma.m16n8k16, without scales:
// a[0] = row g, columns c(0) c(1); a[1] = row g + 8, the same; a[2], a[3] = columns c(2) c(3).
#pragma once
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

}  // namespace quantmoe
