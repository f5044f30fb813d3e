// smmla on registers: [2, 8] times [8, 2].
#include <arm_neon.h>

#include "cpu/kernel.h"

namespace quantmoe {

int64_t int8_peak_neon_i8mm(int64_t rounds) {
  constexpr int kSums = 16;
  int32x4_t sums[kSums];
  int8x16_t a = vdupq_n_s8(1), b = a;
  for (int32x4_t& sum : sums) sum = vdupq_n_s32(0);
  for (int64_t r = 0; r < rounds; ++r)
#pragma GCC unroll 16
    for (int32x4_t& sum : sums) asm volatile("smmla %0.4s, %1.16b, %2.16b" : "+w"(sum) : "w"(a), "w"(b));
  return rounds * kSums * 32;
}

}  // namespace quantmoe
