// e2m1, times kE2m1Bits: bit patterns moved to where the exponent of T ends.
#pragma once
#include "cuda/formats/trait.cuh"

namespace quantmoe {

template <typename T>
constexpr float kE2m1Bits = kBf16<T> ? 0x1p-126f : 0x1p-14f;

template <typename T>
__device__ inline void dequant_e2m1(uint32_t q, uint32_t (&a)[4]) {
  if constexpr (kBf16<T>) {
    // Two shifted copies that do not meet, in one multiplication: the sign to bit 15, the rest to bits 6..8.
    a[0] = ((q & 0x000f000f) * 0x1040) & 0x81c081c0;
    a[2] = ((q & 0x00f000f0) * 0x0104) & 0x81c081c0;
    a[1] = mask_or<0x01c001c0>(q >> 2, (q << 4) & 0x80008000);
    a[3] = mask_or<0x01c001c0>(q >> 6, q & 0x80008000);
  } else {
    // Only the high byte of an f16 is not zero. So four codes are made at once, with other bits among theirs until the
    // end. 113 - 14 code has a code's last three bits in bits 1..3. It has its sign in bit 7, except for -0's. Bit 0 is
    // for the borrow of the byte below.
    const uint32_t odd = select<0x80808080>(q, q >> 3), even = 0x71717171 - (q & 0x0f0f0f0f) * 14;
    a[0] = (even << 8) & 0x8e008e00, a[1] = even & 0x8e008e00;
    a[2] = (odd << 8) & 0x8e008e00, a[3] = odd & 0x8e008e00;
  }
}

struct E2m1Trait : Trait {
  static constexpr bool kScaleFactors = true;
  template <typename T>
  __device__ static void dequant_scaled(uint32_t q, uint32_t, const uint32_t (&scale)[2], uint32_t, uint32_t,
                                        uint32_t (&a)[4]) {
    dequant_e2m1<T>(q, a);
    times<T>(a, scale[0], scale[1]);
  }
};

}  // namespace quantmoe
