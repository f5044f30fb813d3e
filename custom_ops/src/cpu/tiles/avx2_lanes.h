// The lanes of k_tile.h and column_tile.h with AVX2: 8 rows. Products are added up in 16 bits as long as they fit. That
// is 8 fours of columns with codes of up to 4 bits (2 * 15 * 128 each), 4 with 5 bits, 2 with 6 bits.
#pragma once
#include <immintrin.h>

#include <cstring>

#include "cpu/tiles/column_tile.h"

namespace quantmoe {
namespace {

inline __m256i load(const uint8_t* at) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)); }
inline __m128i load_half(const uint8_t* at) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(at)); }
inline __m128i load_quarter(const uint8_t* at) { return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(at)); }
inline __m256i broadcast(const uint8_t* x) {
  int32_t four;
  std::memcpy(&four, x, 4);
  return _mm256_set1_epi32(four);
}

// Eight e4m3 codes: 2^-8 times their values, through f16. A conversion, unlike a multiplication, is as fast for
// subnormal numbers.
inline __m256 e4m3_to_float(__m128i codes) {
  const __m128i half =
      _mm_and_si128(_mm_slli_epi16(_mm_cvtepi8_epi16(codes), 7), _mm_set1_epi16(static_cast<int16_t>(0xbfff)));
  return _mm256_cvtph_ps(half);
}
inline __m256 e8m0_to_float(__m128i codes) {
  return _mm256_castsi256_ps(
      _mm256_max_epu32(_mm256_slli_epi32(_mm256_cvtepu8_epi32(codes), 23), _mm256_set1_epi32(0x00400000)));
}

struct Avx2Lanes {
  static constexpr int kRows = 8, kBothTokens = 2, kPairTokens = kMaxTileRows;
  template <int kBits>
  static constexpr int kDots = kBits > 4 ? 8 >> (kBits - 4) : 8;
  using Bytes = __m256i;
  using Floats = __m256;
  struct Sums {
    __m256i narrow, wide;
  };
  static Bytes load(const uint8_t* at) { return quantmoe::load(at); }
  template <bool high>
  static Bytes nibbles(Bytes v) {
    return _mm256_and_si256(high ? _mm256_srli_epi32(v, 4) : v, _mm256_set1_epi8(15));
  }
  // Bits from `from` on, from `to` on.
  template <int from, int to>
  static Bytes moved(Bytes v) {
    if constexpr (from == to) return v;
    return from < to ? _mm256_slli_epi32(v, from < to ? to - from : 0)
                     : _mm256_srli_epi32(v, from < to ? 0 : from - to);
  }
  template <int from, int count>
  static Bytes bits(Bytes v) {
    return _mm256_and_si256(moved<from, 0>(v), _mm256_set1_epi8((1 << count) - 1));
  }
  template <int from, int count, int to>
  static Bytes with_bits(Bytes n, Bytes v) {
    return _mm256_or_si256(n, _mm256_and_si256(moved<from, to>(v), _mm256_set1_epi8(((1 << count) - 1) << to)));
  }
  static Sums start(int32_t n) { return {_mm256_setzero_si256(), _mm256_set1_epi32(n)}; }
  static void dot(Sums& sums, Bytes codes, const uint8_t* x) {
    sums.narrow = _mm256_add_epi16(sums.narrow, _mm256_maddubs_epi16(codes, quantmoe::broadcast(x)));
  }
  static void settle(Sums& sums) {
    sums.wide = _mm256_add_epi32(sums.wide, _mm256_madd_epi16(sums.narrow, _mm256_set1_epi16(1)));
    sums.narrow = _mm256_setzero_si256();
  }
  static Floats floats(const Sums& sums) { return _mm256_cvtepi32_ps(sums.wide); }
  static Floats halves(const uint8_t* at) { return _mm256_cvtph_ps(load_half(at)); }
  static Floats int8s(const uint8_t* at) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(load_quarter(at))); }
  template <bool high>
  static Floats halves_of_bytes(const uint8_t* at) {
    const __m256i bytes = _mm256_cvtepu8_epi32(load_quarter(at));
    return _mm256_cvtepi32_ps(high ? _mm256_srli_epi32(bytes, 4) : _mm256_and_si256(bytes, _mm256_set1_epi32(15)));
  }
  static Floats bf16s(const uint8_t* at) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_half(at)), 16));
  }
  static Floats e4m3s(const uint8_t* at) { return e4m3_to_float(load_quarter(at)); }
  static Floats e8m0s(const uint8_t* at) { return e8m0_to_float(load_quarter(at)); }
  static Floats number(const float* x) { return broadcast(x); }
  static constexpr int kColumns = 1, kColumnBytes = 128;
  static constexpr int panels_of(int) { return 1; }
  template <int i>
  static Floats column(Bytes v) {
    return _mm256_cvtepi32_ps(_mm256_and_si256(i ? _mm256_srli_epi32(v, 8 * i) : v, _mm256_set1_epi32(255)));
  }
  struct Table {
    __m256 low, high;
  };
  static Table table(const float* at) { return {_mm256_loadu_ps(at), _mm256_loadu_ps(at + 8)}; }
  template <int i>
  static Floats entry(const Table& table, Bytes v) {
    const __m256i place = i ? _mm256_srli_epi32(v, 8 * i) : v, fourth = _mm256_slli_epi32(v, 28 - 8 * i);
    return _mm256_blendv_ps(_mm256_permutevar8x32_ps(table.low, place), _mm256_permutevar8x32_ps(table.high, place),
                            _mm256_castsi256_ps(fourth));
  }
  static Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
  static Floats fma_less(Floats a, Floats b, Floats c) { return _mm256_fmsub_ps(a, b, c); }
  static Floats negative_fma(Floats a, Floats b, Floats c) { return _mm256_fnmadd_ps(a, b, c); }
  static Floats multiply(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
  static Floats add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
  static Floats broadcast(float x) { return _mm256_set1_ps(x); }
  static Floats broadcast(const float* x) { return _mm256_broadcast_ss(x); }
  static Floats load_floats(const uint8_t* at) { return _mm256_loadu_ps(reinterpret_cast<const float*>(at)); }
  static void store(float* to, Floats v) { _mm256_storeu_ps(to, v); }
  static void prefetch(const uint8_t* at) { _mm_prefetch(reinterpret_cast<const char*>(at), _MM_HINT_T0); }
};

}  // namespace
}  // namespace quantmoe
