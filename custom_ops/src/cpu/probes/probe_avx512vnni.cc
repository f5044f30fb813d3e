// vpdpbusd on registers: more independent sums than its latency times its ports on any core that has it.
#include <immintrin.h>

#include "cpu/kernel.h"

namespace quantmoe {

int64_t int8_peak_avx512vnni(int64_t rounds) {
  constexpr int kSums = 16;
  __m512i sums[kSums], a = _mm512_set1_epi8(1), b = a;
  for (__m512i& sum : sums) sum = _mm512_setzero_si512();
  for (int64_t r = 0; r < rounds; ++r)
#pragma GCC unroll 16
    for (__m512i& sum : sums) asm volatile("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
  return rounds * kSums * 64;
}

}  // namespace quantmoe
