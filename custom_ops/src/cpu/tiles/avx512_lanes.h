// The lanes of k_tile.h and column_tile.h with AVX512-VNNI: 16 rows.
#pragma once
#include <immintrin.h>

#include <cstring>

#include "cpu/tiles/column_tile.h"

namespace quantmoe {
namespace {

// dot += u8 weights . s8 activations at x, broadcast: clang folds the load into vpdpbusd.
inline void dot4(__m512i& dot, __m512i weights, const uint8_t* x) {
  int32_t four;
  std::memcpy(&four, x, 4);
  dot = _mm512_dpbusd_epi32(dot, weights, _mm512_set1_epi32(four));
}

// e4m3 codes as f16: 2^-8 times their values. A conversion, unlike a multiplication, is as fast for subnormal numbers.
inline __m256i e4m3_to_half(__m128i codes) {
  return _mm256_and_si256(_mm256_slli_epi16(_mm256_cvtepi8_epi16(codes), 7),
                          _mm256_set1_epi16(static_cast<int16_t>(0xbfff)));
}
inline __m512 e8m0_to_float(__m128i codes) {
  return _mm512_castsi512_ps(
      _mm512_max_epu32(_mm512_slli_epi32(_mm512_cvtepu8_epi32(codes), 23), _mm512_set1_epi32(0x00400000)));
}

struct Avx512Lanes {
  static constexpr int kRows = 16, kBothTokens = 0, kPairTokens = 12;
  template <int>
  static constexpr int kDots = 8;
  using Bytes = __m512i;
  using Sums = __m512i;
  using Floats = __m512;
  static Bytes load(const uint8_t* at) { return _mm512_loadu_si512(at); }
  template <bool high>
  static Bytes nibbles(Bytes v) {
    return _mm512_and_si512(high ? _mm512_srli_epi32(v, 4) : v, _mm512_set1_epi8(15));
  }
  // Bits from `from` on, from `to` on.
  template <int from, int to>
  static Bytes moved(Bytes v) {
    if constexpr (from == to) return v;
    return from < to ? _mm512_slli_epi32(v, from < to ? to - from : 0)
                     : _mm512_srli_epi32(v, from < to ? 0 : from - to);
  }
  template <int from, int count>
  static Bytes bits(Bytes v) {
    return _mm512_and_si512(moved<from, 0>(v), _mm512_set1_epi8((1 << count) - 1));
  }
  template <int from, int count, int to>
  static Bytes with_bits(Bytes n, Bytes v) {
    const Bytes higher = moved<from, to>(v), mask = _mm512_set1_epi8(((1 << count) - 1) << to);
    return _mm512_ternarylogic_epi32(n, higher, mask, 0xf8);  // n | (higher & mask)
  }
  static Sums start(int32_t n) { return _mm512_set1_epi32(n); }
  static void dot(Sums& sums, Bytes codes, const uint8_t* x) { dot4(sums, codes, x); }
  static void settle(Sums&) {}
  static Floats floats(Sums sums) { return _mm512_cvtepi32_ps(sums); }
  static Floats halves(const uint8_t* at) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
  }
  static Floats int8s(const uint8_t* at) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at))));
  }
  template <bool high>
  static Floats halves_of_bytes(const uint8_t* at) {
    const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
    return _mm512_cvtepi32_ps(high ? _mm512_srli_epi32(bytes, 4) : _mm512_and_si512(bytes, _mm512_set1_epi32(15)));
  }
  static Floats bf16s(const uint8_t* at) {
    return _mm512_castsi512_ps(
        _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at))), 16));
  }
  static Floats e8m0s(const uint8_t* at) {
    return e8m0_to_float(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
  }
  static Floats number(const float* x) { return broadcast(x); }
  static constexpr int kColumns = 2, kColumnBytes = 64;
  static void e4m3_columns(const uint8_t* at, Floats& first, Floats& second) {
    const __m512i half = _mm512_and_si512(
        _mm512_slli_epi16(_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at))), 7),
        _mm512_set1_epi16(static_cast<int16_t>(0xbfff)));
    first = _mm512_cvtph_ps(_mm512_castsi512_si256(half));
    second = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(half, 1));
  }
  static constexpr int panels_of(int tokens) { return tokens <= 3 ? 4 : tokens <= 6 ? 2 : 1; }
  template <int i>
  static Floats column(Bytes v) {
    return _mm512_cvtepi32_ps(_mm512_and_si512(i ? _mm512_srli_epi32(v, 8 * i) : v, _mm512_set1_epi32(255)));
  }
  using Table = __m512;
  static Table table(const float* at) { return _mm512_loadu_ps(at); }
  template <int i>
  static Floats entry(Table table, Bytes v) {
    return _mm512_permutexvar_ps(i ? _mm512_srli_epi32(v, 8 * i) : v, table);
  }
  static Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
  static Floats fma_less(Floats a, Floats b, Floats c) { return _mm512_fmsub_ps(a, b, c); }
  static Floats negative_fma(Floats a, Floats b, Floats c) { return _mm512_fnmadd_ps(a, b, c); }
  static Floats multiply(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
  static Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
  static Floats broadcast(float x) { return _mm512_set1_ps(x); }
  static Floats broadcast(const float* x) { return _mm512_set1_ps(*x); }
  static Floats load_floats(const uint8_t* at) { return _mm512_loadu_ps(at); }
  static void store(float* to, Floats v) { _mm512_storeu_ps(to, v); }
  static void prefetch(const uint8_t* at) { _mm_prefetch(reinterpret_cast<const char*>(at), _MM_HINT_T0); }
};

}  // namespace
}  // namespace quantmoe
