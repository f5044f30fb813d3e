// The panels of FORMAT.md 2.7 and 2.8 with AVX512-VNNI: zero points, groups of 16, codes that are floats. For
// panel_avx512vnni.cc, whose lanes, groups of panels and stores these tiles share.
//
// A struct for each weight code says what its nibbles or bytes are to vpdpbusd, as u8, and to an f32 product.
#pragma once
#include "cpu/avx512.h"

namespace quantmoe {
namespace {

struct Avx512Int4 {
  static constexpr int kBits = 4;
  static constexpr bool kMultiplied = false;
  static __m512i low(__m512i v) {  // codes 0..15
    return _mm512_ternarylogic_epi32(v, _mm512_set1_epi8(static_cast<char>(0x88)), _mm512_set1_epi8(15), 0x28);
  }
  static __m512 values() { return _mm512_setr_ps(8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7); }
};
struct Avx512E2m1 {
  static constexpr int kBits = 4;
  static constexpr bool kMultiplied = true;
  static __m512i low(__m512i v) {  // doubled values + 12
    const __m512i table =
        _mm512_broadcast_i32x4(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
    return _mm512_shuffle_epi8(table, _mm512_and_si512(v, _mm512_set1_epi8(15)));
  }
  static __m512 values() { return _mm512_setr_ps(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12); }
};
struct Avx512Int8 {
  static constexpr int kBits = 8;
  static constexpr bool kMultiplied = false;
};

// Sixteen bytes, one a row, in lane order.
template <int kBits>
inline __m128i load_lanes8(const Avx512Group& g, int64_t offset) {
  const auto rows = [&](int half) {
    if constexpr (kBits == 4) return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(g.panel[half] + offset));
    return _mm_unpacklo_epi32(_mm_loadu_si32(g.panel[2 * half] + offset),
                              _mm_loadu_si32(g.panel[2 * half + 1] + offset));
  };
  return _mm_unpacklo_epi16(rows(0), rows(1));
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

template <class C>
inline __m512 load_group_scales(const PanelMatrix& p, const Avx512Group& g, int64_t offset) {
  if (p.scale_type == k_scale_type_e4m3) return _mm512_cvtph_ps(e4m3_to_half(load_lanes8<C::kBits>(g, offset)));
  if (p.scale_type == k_scale_type_e8m0) return e8m0_to_float(load_lanes8<C::kBits>(g, offset));
  return load_scales<C::kBits>(g, offset, p.scale_type);
}

// -zero and -128 * zero of each row: the factors of pack_tile_offset's pairs.
template <class C>
inline __m512i load_zero_pairs(const Avx512Group& g, int64_t offset) {
  const __m512i zero = _mm512_cvtepu8_epi32(load_lanes8<C::kBits>(g, offset));
  return _mm512_mullo_epi16(_mm512_or_si512(zero, _mm512_slli_epi32(zero, 16)),
                            _mm512_set1_epi32(static_cast<int32_t>(0xff80ffffu)));
}

// dot += the 32 columns of 128 bytes of 4-bit codes.
template <int M, class C>
[[gnu::always_inline]] inline void dot_chunk(const Avx512Group& g, int64_t offset, const uint8_t* x,
                                             __m512i (&dot)[M]) {
#pragma GCC unroll 2
  for (int s = 0; s < 2; ++s) {
    const __m512i a = load_half<4>(g, 0, offset + 64 * s), c = load_half<4>(g, 1, offset + 64 * s);
    const __m512i even = even_dwords(a, c), odd = odd_dwords(a, c);
    const uint8_t* at = x + 8 * s * M;
    const __m512i w0 = C::low(even);
    QM_EACH dot4(dot[i], w0, at + 4 * i);
    const __m512i w1 = C::low(odd);
    QM_EACH dot4(dot[i], w1, at + 4 * M + 4 * i);
    const __m512i w2 = C::low(_mm512_srli_epi32(even, 4));
    QM_EACH dot4(dot[i], w2, at + 16 * M + 4 * i);
    const __m512i w3 = C::low(_mm512_srli_epi32(odd, 4));
    QM_EACH dot4(dot[i], w3, at + 20 * M + 4 * i);
  }
}

// dot += the 16 columns of one nibble (part) of 128 bytes, or 16 columns of 64 bytes of 8-bit codes. Inlined, or the
// sums are in memory: clang 22 would not for many rows, and nvfp4 took 2.3 times as long.
template <int M, class C>
[[gnu::always_inline]] inline void dot_part(const Avx512Group& g, int64_t offset, int part, const uint8_t* x,
                                            __m512i (&dot)[M]) {
  x += 16 * part * M;
#pragma GCC unroll 2
  for (int s = 0; s < 2; ++s, x += 8 * M) {
    if constexpr (C::kBits == 4) {
      __m512i a = load_half<4>(g, 0, offset + 64 * s), c = load_half<4>(g, 1, offset + 64 * s);
      __m512i even = even_dwords(a, c), odd = odd_dwords(a, c);
      if (part) {
        even = _mm512_srli_epi32(even, 4);
        odd = _mm512_srli_epi32(odd, 4);
      }
      const __m512i w0 = C::low(even);
      QM_EACH dot4(dot[i], w0, x + 4 * i);
      const __m512i w1 = C::low(odd);
      QM_EACH dot4(dot[i], w1, x + 4 * M + 4 * i);
    } else {
      const __m512i flip = _mm512_set1_epi8(static_cast<char>(0x80));
      const int64_t at = offset + 64 * part + 32 * s;
      const __m512i a = load_half<8>(g, 0, at), c = load_half<8>(g, 1, at);
      const __m512i w0 = _mm512_xor_si512(even_dwords(a, c), flip);
      QM_EACH dot4(dot[i], w0, x + 4 * i);
      const __m512i w1 = _mm512_xor_si512(odd_dwords(a, c), flip);
      QM_EACH dot4(dot[i], w1, x + 4 * M + 4 * i);
    }
  }
}

// kParts: groups of a block. kStepped: activations have a step for each group.
template <int M, class C, bool kZero, int kParts, bool kStepped = false>
void scaled_tile(const PanelMatrix& matrix, const Avx512Group& panels, const uint8_t* tile, const Avx512Store& store,
                 int64_t row_stride) {
  const uint8_t* x = tile;
  const int32_t* start = reinterpret_cast<const int32_t*>(tile + matrix.kp * M);
  const int scale_bytes = matrix.nr * scale_size(matrix.scale_type);
  __m512 acc[M];
  QM_EACH acc[i] = _mm512_setzero_ps();
  for (int64_t b = 0; b < matrix.blocks; ++b) {
    const int64_t base = b * matrix.block_bytes;
    const uint8_t* const end = x + matrix.block * M;
    _Pragma("GCC unroll 2") for (int part = 0; part < kParts; ++part, start += M) {
      __m512i dot[M];
      if constexpr (kZero) {
        const __m512i zero = load_zero_pairs<C>(panels, base + matrix.zeros() + part * matrix.nr);
        QM_EACH dot[i] = _mm512_dpwssd_epi32(_mm512_setzero_si512(), zero, _mm512_set1_epi32(start[i]));
      } else {
        QM_EACH dot[i] = _mm512_set1_epi32(start[i]);
      }
      if constexpr (kParts == 2) {
        if (part == 0) prefetch<C::kBits == 4 ? 2 : 4, 128>(panels, base);
        dot_part<M, C>(panels, base, part, x, dot);
      } else {
        int64_t offset = base;
        do {
          prefetch<C::kBits == 4 ? 2 : 4, 128>(panels, offset);
          if constexpr (C::kBits == 4) {
            dot_chunk<M, C>(panels, offset, x, dot);
          } else {
            dot_part<M, C>(panels, offset, 0, x, dot);
            dot_part<M, C>(panels, offset, 1, x, dot);
          }
          x += 32 * M;
          opaque(x);
          offset += 128;
        } while (x != end);
      }
      const __m512 scale = load_group_scales<C>(matrix, panels, base + matrix.codes_bytes + part * scale_bytes);
      if constexpr (kStepped) {
        const float* steps = reinterpret_cast<const float*>(start + matrix.groups() * M);
        QM_EACH acc[i] =
            _mm512_fmadd_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(dot[i]), scale), _mm512_set1_ps(steps[i]), acc[i]);
      } else {
        QM_EACH acc[i] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot[i]), scale, acc[i]);
      }
    }
    if constexpr (kParts == 2) {
      x += 32 * M;
      opaque(x);
    }
  }
  const float* steps = reinterpret_cast<const float*>(start);
  const int32_t* zero_points = start + M;
  const __m512 sums = _mm512_castsi512_ps(load_lanes32<C::kBits>(panels, matrix.tail()));
  const __m512 multiplier = _mm512_castsi512_ps(load_lanes32<C::kBits>(panels, matrix.tail() + 4 * matrix.nr));
  const __m512 bias = _mm512_castsi512_ps(load_lanes32<C::kBits>(panels, matrix.biases()));
  QM_EACH if constexpr (kStepped) {
    store_lanes<C::kBits>(store, i * row_stride, _mm512_add_ps(_mm512_mul_ps(acc[i], multiplier), bias));
  }
  else {
    __m512 y = _mm512_fmadd_ps(sums, _mm512_set1_ps(static_cast<float>(-zero_points[i])), acc[i]);
    if (C::kMultiplied) y = _mm512_mul_ps(y, multiplier);
    store_lanes<C::kBits>(store, i * row_stride, _mm512_add_ps(_mm512_mul_ps(y, _mm512_set1_ps(steps[i])), bias));
  }
}

template <int M, class C, int kParts>
void scaled_float_tile(const PanelMatrix& matrix, const Avx512Group& panels, const uint8_t* tile,
                       const Avx512Store& store, int64_t row_stride) {
  const float* x = reinterpret_cast<const float*>(tile);
  const int scale_bytes = matrix.nr * scale_size(matrix.scale_type);
  __m512 acc[M], partial[M];
  QM_EACH acc[i] = _mm512_setzero_ps();
  for (int64_t b = 0; b < matrix.blocks; ++b) {
    const int64_t base = b * matrix.block_bytes;
    int part = 0;
    __m512 zero;
    const auto begin = [&] {
      QM_EACH partial[i] = _mm512_setzero_ps();
      zero = matrix.zero_points ? _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(
                                      load_lanes8<C::kBits>(panels, base + matrix.zeros() + part * matrix.nr)))
                                : _mm512_set1_ps(C::kBits == 4 ? 8.0f : 128.0f);
    };
    const auto finish = [&] {
      const __m512 scale = load_group_scales<C>(matrix, panels, base + matrix.codes_bytes + part * scale_bytes);
      QM_EACH acc[i] = _mm512_fmadd_ps(partial[i], scale, acc[i]);
      ++part;
    };
    const auto column = [&](__m512 w) {
      if constexpr (!C::kMultiplied) w = _mm512_sub_ps(w, zero);
      QM_EACH partial[i] = _mm512_fmadd_ps(_mm512_set1_ps(x[i]), w, partial[i]);
      x += M;
    };
    begin();
    for (int64_t offset = base; offset < base + matrix.codes_bytes; offset += 128) {
      if constexpr (C::kBits == 4) {
        const __m512 values = C::values();
        __m512i dwords[4];
        for (int s = 0; s < 2; ++s) {
          const __m512i a = load_half<4>(panels, 0, offset + 64 * s), d = load_half<4>(panels, 1, offset + 64 * s);
          dwords[2 * s] = even_dwords(a, d);
          dwords[2 * s + 1] = odd_dwords(a, d);
        }
        for (int nibble = 0; nibble < 2; ++nibble) {
          if (kParts == 2 && nibble == 1) {
            finish();
            begin();
          }
          for (__m512i& dword : dwords)
            for (int byte = 0; byte < 4; ++byte)
              column(_mm512_permutexvar_ps(_mm512_srli_epi32(dword, 8 * byte + 4 * nibble), values));
        }
      } else {
        for (int c = 0; c < 4; ++c) {
          if (kParts == 2 && c == 2) {
            finish();
            begin();
          }
          const __m512i a = load_half<8>(panels, 0, offset + 32 * c), d = load_half<8>(panels, 1, offset + 32 * c);
          const __m512i flip = _mm512_set1_epi8(static_cast<char>(0x80)), byte_mask = _mm512_set1_epi32(255);
          for (__m512i dword : {even_dwords(a, d), odd_dwords(a, d)})
            for (int byte = 0; byte < 4; ++byte)
              column(_mm512_cvtepi32_ps(
                  _mm512_and_si512(_mm512_srli_epi32(_mm512_xor_si512(dword, flip), 8 * byte), byte_mask)));
        }
      }
    }
    finish();
  }
  const __m512 multiplier = _mm512_castsi512_ps(load_lanes32<C::kBits>(panels, matrix.tail() + 4 * matrix.nr));
  const __m512 bias = _mm512_castsi512_ps(load_lanes32<C::kBits>(panels, matrix.biases()));
  QM_EACH {
    const __m512 y = C::kMultiplied ? _mm512_mul_ps(acc[i], multiplier) : acc[i];
    store_lanes<C::kBits>(store, i * row_stride, _mm512_add_ps(y, bias));
  }
}

}  // namespace
}  // namespace quantmoe
