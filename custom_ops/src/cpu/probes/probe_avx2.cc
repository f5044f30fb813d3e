// vpmaddubsw summed by vpaddw and widened to 32 bits every eighth time: the dot product of panel_avx2.cc for 4-bit
// codes.
#include <immintrin.h>

#include "cpu/kernel.h"

namespace quantmoe {

int64_t int8_peak_avx2(int64_t rounds) {
  constexpr int kSums = 6, kSteps = 8;
  __m256i dots[kSums], a = _mm256_set1_epi8(1), b = a;
  const __m256i ones = _mm256_set1_epi16(1);
  for (__m256i& dot : dots) dot = _mm256_setzero_si256();
  for (int64_t r = 0; r < rounds; ++r) {
    __m256i sums[kSums];
    for (__m256i& sum : sums) sum = _mm256_setzero_si256();
#pragma GCC unroll 8
    for (int step = 0; step < kSteps; ++step)
#pragma GCC unroll 6
      for (__m256i& sum : sums) {
        sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(a, b));
        asm volatile("" : "+x"(a), "+x"(sum));  // a new product each time
      }
#pragma GCC unroll 6
    for (int i = 0; i < kSums; ++i) dots[i] = _mm256_add_epi32(dots[i], _mm256_madd_epi16(sums[i], ones));
  }
  for (__m256i& dot : dots) asm volatile("" : : "x"(dot));
  return rounds * kSums * kSteps * 32;
}

}  // namespace quantmoe
