// The exact u8 x s8 dot product of AVX2, what vpdpbusd is one instruction for: vpmaddubsw, vpmaddwd with ones, vpaddd.
#include <immintrin.h>

#include "cpu/kernel.h"

namespace quantmoe {

int64_t int8_peak_avx2(int64_t rounds) {
  constexpr int kSums = 12;
  __m256i sums[kSums], a = _mm256_set1_epi8(1), b = a;
  const __m256i ones = _mm256_set1_epi16(1);
  for (__m256i& sum : sums) sum = _mm256_setzero_si256();
  for (int64_t r = 0; r < rounds; ++r)
#pragma GCC unroll 12
    for (__m256i& sum : sums) {
      asm volatile("" : "+x"(a));  // a new product each time
      sum = _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(a, b), ones));
    }
  for (__m256i& sum : sums) asm volatile("" : : "x"(sum));
  return rounds * kSums * 32;
}

}  // namespace quantmoe
