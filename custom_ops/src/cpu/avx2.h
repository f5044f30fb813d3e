// What the tiles of panel_avx2.cc and avx2_scaled.h share: lanes, groups of panels and stores, as the former draws
// them. Everything is in an unnamed namespace, as in elementwise.h.
#pragma once
#include <immintrin.h>

#include <cstring>

#include "cpu/kernel.h"

namespace quantmoe {
namespace {

// Two panels. A panel past the end repeats the last one; its results are not stored.
struct Avx2Group {
  const uint8_t* panel[2];
};
// Vectors of 8 rows in a group.
constexpr int vectors(int bits) { return bits == 4 ? 2 : 1; }

// Written out so that arrays indexed by i and v live in registers.
#define QM_EACH_ROW _Pragma("GCC unroll 16") for (int i = 0; i < M; ++i)
#define QM_EACH_VECTOR _Pragma("GCC unroll 16") for (int v = 0; v < V; ++v)

inline __m256i load(const uint8_t* at) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)); }
inline __m128i load_half(const uint8_t* at) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(at)); }
inline __m128i load_quarter(const uint8_t* at) { return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(at)); }
inline __m256i broadcast(const uint8_t* x) {
  int32_t four;
  std::memcpy(&four, x, 4);
  return _mm256_set1_epi32(four);
}

// Rows in lane order and back: the permutation is its own inverse.
inline __m256 swap_lanes(__m256 v) { return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(v), 0xd8)); }

// One dword of each row of vector v.
template <int kBits>
inline __m256i load_dwords(const Avx2Group& g, int v, int64_t offset, bool odd) {
  const uint8_t* const at = g.panel[v] + offset;
  const __m256 x = _mm256_castsi256_ps(load(at)),
               y = _mm256_castsi256_ps(load(kBits == 4 ? at + 32 : g.panel[1] + offset));
  return _mm256_castps_si256(odd ? _mm256_shuffle_ps(x, y, 0xdd) : _mm256_shuffle_ps(x, y, 0x88));
}

// 8 dwords of vector v in row order.
template <int kBits>
inline __m256i load_rows(const Avx2Group& g, int v, int64_t offset) {
  if constexpr (kBits == 4) return load(g.panel[v] + offset);
  return _mm256_set_m128i(load_half(g.panel[1] + offset), load_half(g.panel[0] + offset));
}
template <int kBits>
inline __m256 load_rows_ps(const Avx2Group& g, int v, int64_t offset) {
  return _mm256_castsi256_ps(load_rows<kBits>(g, v, offset));
}

// The scales of vector v in lane order.
template <int kBits>
inline __m256 load_scales(const Avx2Group& g, int v, int64_t offset, int32_t scale_type) {
  if (scale_type == k_scale_type_f32) return swap_lanes(load_rows_ps<kBits>(g, v, offset));
  const __m128i bits = kBits == 4
                           ? load_half(g.panel[v] + offset)
                           : _mm_unpacklo_epi64(load_quarter(g.panel[0] + offset), load_quarter(g.panel[1] + offset));
  if (scale_type == k_scale_type_f16) return swap_lanes(_mm256_cvtph_ps(bits));
  return swap_lanes(_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16)));
}

// 128 bytes of each panel that come later: hardware prefetchers stop at the end of a page. One row of int4 from memory
// takes 0.83 times as long with them, one of bf16 0.79 times.
constexpr int64_t kNear = 4096;
inline void prefetch(const Avx2Group& g, int64_t offset) {
  for (const uint8_t* panel : g.panel) {
    _mm_prefetch(reinterpret_cast<const char*>(panel + offset + kNear), _MM_HINT_T0);
    _mm_prefetch(reinterpret_cast<const char*>(panel + offset + kNear + 64), _MM_HINT_T0);
  }
}

struct Avx2Store {
  float* to[2];
  int count;  // panels that exist
};
// y: vector v in row order.
template <int kBits>
inline void store_rows(const Avx2Store& s, int v, int64_t row_offset, __m256 y) {
  if constexpr (kBits == 4) {
    if (v < s.count) _mm256_storeu_ps(s.to[v] + row_offset, y);
  } else {
    _mm_storeu_ps(s.to[0] + row_offset, _mm256_castps256_ps128(y));
    if (s.count > 1) _mm_storeu_ps(s.to[1] + row_offset, _mm256_extractf128_ps(y, 1));
  }
}

// sum[i] += nibbles w0 and w1 . the activations of 4 columns, in s16.
template <int M>
inline void multiply4(__m256i w0, __m256i w1, const uint8_t* x, __m256i (&sum)[M][2]) {
  QM_EACH_ROW {
    const __m256i x4 = broadcast(x + 4 * i);
    sum[i][0] = _mm256_add_epi16(sum[i][0], _mm256_maddubs_epi16(w0, x4));
    sum[i][1] = _mm256_add_epi16(sum[i][1], _mm256_maddubs_epi16(w1, x4));
    asm("" : "+x"(sum[i][0]), "+x"(sum[i][1]));  // keeps the order: gcc would regroup the sums of a chunk and spill
  }
}

}  // namespace
}  // namespace quantmoe
