// The panels of FORMAT.md 2.7 and 2.8 with AVX2: zero points, groups of 16, codes that are floats. For
// panel_avx2.cc, whose lanes, groups of panels and stores these tiles share.
#pragma once
#include "cpu/avx2.h"

namespace quantmoe {
namespace {

struct Avx2Int4 {
  static constexpr int kBits = 4;
  static constexpr bool kMultiplied = false;
  static __m256i low(__m256i v) {  // codes 0..15
    return _mm256_and_si256(_mm256_xor_si256(v, _mm256_set1_epi8(static_cast<char>(0x88))), _mm256_set1_epi8(15));
  }
};
struct Avx2E2m1 {
  static constexpr int kBits = 4;
  static constexpr bool kMultiplied = true;
  static __m256i low(__m256i v) {  // doubled values + 12
    const __m256i table =
        _mm256_broadcastsi128_si256(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
    return _mm256_shuffle_epi8(table, _mm256_and_si256(v, _mm256_set1_epi8(15)));
  }
};
struct Avx2Int8 {
  static constexpr int kBits = 8;
  static constexpr bool kMultiplied = false;
};

// Eight bytes, one a row of vector v, in row order.
template <int kBits>
inline __m128i load_rows8(const Avx2Group& g, int v, int64_t offset) {
  if constexpr (kBits == 4) return load_quarter(g.panel[v] + offset);
  return _mm_unpacklo_epi32(_mm_loadu_si32(g.panel[0] + offset), _mm_loadu_si32(g.panel[1] + offset));
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

template <class C>
inline __m256 load_group_scales(const PanelMatrix& p, const Avx2Group& g, int v, int64_t offset) {
  if (p.scale_type == k_scale_type_e4m3) return swap_lanes(e4m3_to_float(load_rows8<C::kBits>(g, v, offset)));
  if (p.scale_type == k_scale_type_e8m0) return swap_lanes(e8m0_to_float(load_rows8<C::kBits>(g, v, offset)));
  return load_scales<C::kBits>(g, v, offset, p.scale_type);
}

// -zero and -128 * zero of each row: the factors of pack_tile_offset's pairs.
template <class C>
inline __m256i load_zero_pairs(const Avx2Group& g, int v, int64_t offset) {
  const __m256i rows = _mm256_permute4x64_epi64(_mm256_cvtepu8_epi32(load_rows8<C::kBits>(g, v, offset)), 0xd8);
  return _mm256_mullo_epi16(_mm256_or_si256(rows, _mm256_slli_epi32(rows, 16)),
                            _mm256_set1_epi32(static_cast<int32_t>(0xff80ffffu)));
}

// One tile row and all its vectors at a time keeps 16 registers enough for any code; sums widen every 16 columns, where
// 8 pairs of at most 2 * 24 * 128 stay below 2^15 (e2m1), and 2 * 15 * 128 (integers, a nibble at a time).
template <int M, class C>
void scaled_tile(const PanelMatrix& matrix, const Avx2Group& panels, const uint8_t* tile, const Avx2Store& store,
                 int64_t row_stride) {
  constexpr int V = vectors(C::kBits);
  const __m256i one = _mm256_set1_epi16(1), sixteen = _mm256_set1_epi16(16), nibble = _mm256_set1_epi8(15);
  const __m256i flip = _mm256_set1_epi8(static_cast<char>(0x80));
  const uint8_t* x = tile;
  const int32_t* start = reinterpret_cast<const int32_t*>(tile + matrix.kp * M);
  const int scale_bytes = matrix.nr * scale_size(matrix.scale_type);
  __m256 acc[M][V];
  QM_EACH_ROW QM_EACH_VECTOR acc[i][v] = _mm256_setzero_ps();
  for (int64_t b = 0; b < matrix.blocks; ++b, x += matrix.block * M) {
    const int64_t base = b * matrix.block_bytes;
    for (int part = 0; part < matrix.parts; ++part, start += M) {
      __m256i dot[M][V];
      QM_EACH_VECTOR {
        const __m256i zero = matrix.zero_points
                                 ? load_zero_pairs<C>(panels, v, base + matrix.zeros() + part * matrix.nr)
                                 : _mm256_setzero_si256();
        QM_EACH_ROW dot[i][v] =
            matrix.zero_points ? _mm256_madd_epi16(zero, _mm256_set1_epi32(start[i])) : _mm256_set1_epi32(start[i]);
      }
      for (int64_t c = 16 * part; c < matrix.block;
           c += matrix.parts == 2 ? 32 : 16) {  // 16 columns: c / 16 % 2 is the nibble
        const int high = static_cast<int>(c / 16 % 2);
        const int64_t offset = base + c / 32 * 128 + (C::kBits == 8 ? 64 * high : 0);
        __m256i sum[M][2];
        QM_EACH_ROW sum[i][0] = sum[i][1] = _mm256_setzero_si256();
        for (int d = 0; d < 4; ++d) {  // 4 columns
          const int64_t from = offset + d / 2 * (C::kBits == 4 ? 64 : 32);
          __m256i w0, w1;
          if constexpr (C::kBits == 4) {
            __m256i a = load_dwords<4>(panels, 0, from, d % 2), e = load_dwords<4>(panels, 1, from, d % 2);
            if (high) {
              a = _mm256_srli_epi32(a, 4);
              e = _mm256_srli_epi32(e, 4);
            }
            w0 = C::low(a);
            w1 = C::low(e);
          } else {
            const __m256i a = _mm256_xor_si256(load_dwords<8>(panels, 0, from, d % 2), flip);
            w0 = _mm256_and_si256(a, nibble);
            w1 = _mm256_and_si256(_mm256_srli_epi32(a, 4), nibble);
          }
          multiply4(w0, w1, x + (c + 4 * d) * M, sum);
        }
        QM_EACH_ROW {
          dot[i][0] = _mm256_add_epi32(dot[i][0], _mm256_madd_epi16(sum[i][0], one));
          dot[i][V - 1] = _mm256_add_epi32(dot[i][V - 1], _mm256_madd_epi16(sum[i][1], C::kBits == 4 ? one : sixteen));
        }
      }
      QM_EACH_VECTOR {
        const __m256 scale = load_group_scales<C>(matrix, panels, v, base + matrix.codes_bytes + part * scale_bytes);
        const float* steps = reinterpret_cast<const float*>(start + matrix.groups() * M);
        if (matrix.stepped)
          QM_EACH_ROW acc[i][v] = _mm256_fmadd_ps(_mm256_mul_ps(_mm256_cvtepi32_ps(dot[i][v]), scale),
                                                  _mm256_broadcast_ss(steps + i), acc[i][v]);
        else
          QM_EACH_ROW acc[i][v] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot[i][v]), scale, acc[i][v]);
      }
    }
  }
  const float* steps = reinterpret_cast<const float*>(start);
  const int32_t* zero_points = start + M;
  QM_EACH_VECTOR {
    const __m256 sums = load_rows_ps<C::kBits>(panels, v, matrix.tail());
    const __m256 multiplier = load_rows_ps<C::kBits>(panels, v, matrix.tail() + 4 * matrix.nr);
    const __m256 bias = load_rows_ps<C::kBits>(panels, v, matrix.biases());
    QM_EACH_ROW {
      if (matrix.stepped) {
        store_rows<C::kBits>(store, v, i * row_stride,
                             _mm256_add_ps(_mm256_mul_ps(swap_lanes(acc[i][v]), multiplier), bias));
        continue;
      }
      const __m256 z = _mm256_set1_ps(static_cast<float>(-zero_points[i]));
      __m256 y = _mm256_fmadd_ps(sums, z, swap_lanes(acc[i][v]));
      if (C::kMultiplied) y = _mm256_mul_ps(y, multiplier);
      store_rows<C::kBits>(store, v, i * row_stride, _mm256_add_ps(_mm256_mul_ps(y, _mm256_set1_ps(steps[i])), bias));
    }
  }
}

template <int M, class C>
void scaled_float_tile(const PanelMatrix& matrix, const Avx2Group& panels, const uint8_t* tile, const Avx2Store& store,
                       int64_t row_stride) {
  constexpr int V = vectors(C::kBits);
  const float* x = reinterpret_cast<const float*>(tile);
  const int scale_bytes = matrix.nr * scale_size(matrix.scale_type);
  const __m256 magnitudes = _mm256_setr_ps(0, 1, 2, 3, 4, 6, 8, 12);
  __m256 acc[M][V];
  QM_EACH_ROW QM_EACH_VECTOR acc[i][v] = _mm256_setzero_ps();
  for (int64_t b = 0; b < matrix.blocks; ++b) {
    const int64_t base = b * matrix.block_bytes;
    for (int part = 0; part < matrix.parts; ++part) {
      __m256 partial[M][V], zero[V];
      QM_EACH_ROW QM_EACH_VECTOR partial[i][v] = _mm256_setzero_ps();
      QM_EACH_VECTOR zero[v] = matrix.zero_points
                                   ? swap_lanes(_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(
                                         load_rows8<C::kBits>(panels, v, base + matrix.zeros() + part * matrix.nr))))
                                   : _mm256_set1_ps(C::kBits == 4 ? 8.0f : 128.0f);
      const int64_t columns = matrix.parts == 2 ? 16 : matrix.block;
      for (int64_t c = 16 * part; c < 16 * part + columns; c += 4) {
        const int64_t offset = base + (C::kBits == 4 ? c / 32 * 128 + c / 8 % 2 * 64 : c / 8 * 32);
        __m256i w[V];
        QM_EACH_VECTOR {
          w[v] = load_dwords<C::kBits>(panels, v, offset, c / 4 % 2);
          if (C::kBits == 8) w[v] = _mm256_xor_si256(w[v], _mm256_set1_epi8(static_cast<char>(0x80)));
          if (C::kBits == 4 && !C::kMultiplied)
            w[v] = _mm256_xor_si256(w[v], _mm256_set1_epi8(static_cast<char>(0x88)));
          if (C::kBits == 4 && c / 16 % 2) w[v] = _mm256_srli_epi32(w[v], 4);
        }
        for (int byte = 0; byte < 4; ++byte, x += M) {
          __m256 value[V];
          QM_EACH_VECTOR {
            const __m256i code = _mm256_and_si256(w[v], _mm256_set1_epi32(C::kBits == 4 ? 15 : 255));
            if constexpr (C::kMultiplied) {
              const __m256i sign = _mm256_slli_epi32(_mm256_and_si256(code, _mm256_set1_epi32(8)), 28);
              value[v] = _mm256_xor_ps(_mm256_permutevar8x32_ps(magnitudes, code), _mm256_castsi256_ps(sign));
            } else {
              value[v] = _mm256_sub_ps(_mm256_cvtepi32_ps(code), zero[v]);
            }
            w[v] = _mm256_srli_epi32(w[v], 8);
          }
          QM_EACH_ROW {
            const __m256 x1 = _mm256_broadcast_ss(x + i);
            QM_EACH_VECTOR partial[i][v] = _mm256_fmadd_ps(x1, value[v], partial[i][v]);
          }
        }
      }
      QM_EACH_VECTOR {
        const __m256 scale = load_group_scales<C>(matrix, panels, v, base + matrix.codes_bytes + part * scale_bytes);
        QM_EACH_ROW acc[i][v] = _mm256_fmadd_ps(partial[i][v], scale, acc[i][v]);
      }
    }
  }
  QM_EACH_VECTOR {
    const __m256 multiplier = load_rows_ps<C::kBits>(panels, v, matrix.tail() + 4 * matrix.nr);
    const __m256 bias = load_rows_ps<C::kBits>(panels, v, matrix.biases());
    QM_EACH_ROW {
      __m256 y = swap_lanes(acc[i][v]);
      if (C::kMultiplied) y = _mm256_mul_ps(y, multiplier);
      store_rows<C::kBits>(store, v, i * row_stride, _mm256_add_ps(y, bias));
    }
  }
}

}  // namespace
}  // namespace quantmoe
