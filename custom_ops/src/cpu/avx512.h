// What the tiles of panel_avx512vnni.cc and avx512_scaled.h share: lanes, groups of panels and stores, as the former
// draws them. Everything is in an unnamed namespace, as in elementwise.h.
#pragma once
#include <immintrin.h>

#include <cstring>

#include "cpu/kernel.h"

namespace quantmoe {
namespace {

// For every row of the tile, written out so that arrays indexed by i live in registers.
#define QM_EACH _Pragma("GCC unroll 32") for (int i = 0; i < M; ++i)

// dot += u8 weights . s8 activations at x, broadcast: clang folds the load into vpdpbusd.
inline void dot4(__m512i& dot, __m512i weights, const uint8_t* x) {
  int32_t four;
  std::memcpy(&four, x, 4);
  dot = _mm512_dpbusd_epi32(dot, weights, _mm512_set1_epi32(four));
}

// Makes the compiler forget how x relates to other induction variables. Where M is 4, 8 or 16 it would address x by
// their index, and a vpdpbusd with an indexed operand splits in two at issue.
inline void opaque(const uint8_t*& x) { asm("" : "+r"(x)); }

inline __m512i even_dwords(__m512i x, __m512i y) {
  return _mm512_castps_si512(_mm512_shuffle_ps(_mm512_castsi512_ps(x), _mm512_castsi512_ps(y), 0x88));
}
inline __m512i odd_dwords(__m512i x, __m512i y) {
  return _mm512_castps_si512(_mm512_shuffle_ps(_mm512_castsi512_ps(x), _mm512_castsi512_ps(y), 0xdd));
}

// The panels of one 16-row group. Panels past the end repeat the last one; their results are not stored.
struct Avx512Group {
  const uint8_t* panel[4];
  // Bytes from a panel to the same panel of the next group, which the first tile fetches into L2 while it works on this
  // one: panels come cold from memory, in two to four streams that hardware prefetchers lose at every panel's end. 0
  // for later tiles.
  int64_t ahead;
};

// 4-bit panels are fetched into L1 some steps ahead as well: without it the product waits for L2 (5 to 12 % of its
// time; any distance from 256 to 2,048 bytes will do). 8-bit panels are four streams, and lose by it.
constexpr int64_t kNear = 512;

template <int kPanels, int kBytes>
inline void prefetch(const Avx512Group& g, int64_t offset) {
  if constexpr (kPanels == 2)
    _Pragma("GCC unroll 4") for (int i = 0; i < kPanels; ++i)
        _Pragma("GCC unroll 4") for (int at = 0; at < kBytes; at += 64)
            _mm_prefetch(reinterpret_cast<const char*>(g.panel[i] + kNear + offset + at), _MM_HINT_T0);
  if (!g.ahead) return;
  _Pragma("GCC unroll 4") for (int i = 0; i < kPanels; ++i)
      _Pragma("GCC unroll 4") for (int at = 0; at < kBytes; at += 64)
          _mm_prefetch(reinterpret_cast<const char*>(g.panel[i] + g.ahead + offset + at), _MM_HINT_T1);
}

template <int kBits>
inline __m512i load_half(const Avx512Group& g, int half, int64_t offset) {
  if constexpr (kBits == 4) return _mm512_loadu_si512(g.panel[half] + offset);
  const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(g.panel[2 * half] + offset));
  return _mm512_inserti64x4(_mm512_castsi256_si512(low),
                            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(g.panel[2 * half + 1] + offset)), 1);
}

// 8 dwords or 8 16-bit values of a half's rows.
template <int kBits>
inline __m256i load_rows32(const Avx512Group& g, int half, int64_t offset) {
  if constexpr (kBits == 4) return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(g.panel[half] + offset));
  return _mm256_loadu2_m128i(reinterpret_cast<const __m128i*>(g.panel[2 * half + 1] + offset),
                             reinterpret_cast<const __m128i*>(g.panel[2 * half] + offset));
}
template <int kBits>
inline __m128i load_rows16(const Avx512Group& g, int half, int64_t offset) {
  if constexpr (kBits == 4) return _mm_loadu_si128(reinterpret_cast<const __m128i*>(g.panel[half] + offset));
  return _mm_unpacklo_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(g.panel[2 * half] + offset)),
                            _mm_loadl_epi64(reinterpret_cast<const __m128i*>(g.panel[2 * half + 1] + offset)));
}

// 16 dwords in lane order.
template <int kBits>
inline __m512i load_lanes32(const Avx512Group& g, int64_t offset) {
  const __m512i order = _mm512_setr_epi32(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15);
  const __m512i both =
      _mm512_inserti64x4(_mm512_castsi256_si512(load_rows32<kBits>(g, 0, offset)), load_rows32<kBits>(g, 1, offset), 1);
  return _mm512_permutexvar_epi32(order, both);
}

template <int kBits>
inline __m512 load_scales(const Avx512Group& g, int64_t offset, int32_t scale_type) {
  if (scale_type == k_scale_type_f32) return _mm512_castsi512_ps(load_lanes32<kBits>(g, offset));
  const __m128i x = load_rows16<kBits>(g, 0, offset), y = load_rows16<kBits>(g, 1, offset);
  const __m256i lanes = _mm256_set_m128i(_mm_unpackhi_epi32(x, y), _mm_unpacklo_epi32(x, y));
  if (scale_type == k_scale_type_f16) return _mm512_cvtph_ps(lanes);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(lanes), 16));
}

// 16 lanes to their rows: 8 of X to the first panel's place, 8 of Y to the second's (nr = 4: two places each).
struct Avx512Store {
  float* to[4];
  int count;  // panels that exist
};
template <int kBits>
inline void store_lanes(const Avx512Store& s, int64_t row_offset, __m512 y) {
  const __m512i order = _mm512_setr_epi32(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
  const __m512 rows = _mm512_permutexvar_ps(order, y);
  if constexpr (kBits == 4) {
    _mm256_storeu_ps(s.to[0] + row_offset, _mm512_castps512_ps256(rows));
    if (s.count > 1) _mm256_storeu_ps(s.to[1] + row_offset, _mm512_extractf32x8_ps(rows, 1));
  } else {
    _mm_storeu_ps(s.to[0] + row_offset, _mm512_castps512_ps128(rows));
    if (s.count > 1) _mm_storeu_ps(s.to[1] + row_offset, _mm512_extractf32x4_ps(rows, 1));
    if (s.count > 2) _mm_storeu_ps(s.to[2] + row_offset, _mm512_extractf32x4_ps(rows, 2));
    if (s.count > 3) _mm_storeu_ps(s.to[3] + row_offset, _mm512_extractf32x4_ps(rows, 3));
  }
}

}  // namespace
}  // namespace quantmoe
