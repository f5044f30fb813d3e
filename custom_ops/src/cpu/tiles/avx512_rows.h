// Sixteen rows of panels in the lanes of AVX512-VNNI, as row_tile.h and code_panels.h take them.
//
// They fill a zmm: two halves X and Y of 8 rows. A half is one panel of 4-bit codes, or two panels of 8-bit codes. In a
// panel a row owns 8 consecutive bytes (two dwords) of each 64. Shuffling X with Y leaves one dword a row:
//   even: X0 X1 Y0 Y1 | X2 X3 Y2 Y3 | ...  columns k..k+3        odd: the same rows, columns k+4..k+7
// So a row is one lane. No pair of lanes is added afterwards, and the activations are a 4-byte broadcast that vpdpbusd
// takes from memory. Scales, row sums and biases have this lane order, too. The store undoes it once.
//
// vpdpbusd multiplies u8 weights (code, offset by 8 or 128) with s8 activations. Accumulators start at -offset *
// sum(x), which pack_tile has put into the tile. All of it is exact in int32.
#pragma once
#include "cpu/tiles/avx512_lanes.h"
#include "cpu/tiles/row_tile.h"

namespace quantmoe {
namespace {

struct Avx512Rows : Avx512Lanes {
  // Two accumulators a row: beyond 14 rows some of the 32 registers spill, which is still faster than two tiles of 8.
  static constexpr int kTileRows = tile_rows(16);
  static constexpr int kMost = 4;
  // On a Xeon beside an H100; nvfp4 takes 1.2 times with 16.
  static constexpr int kFloatTokens = tile_rows(12), kManyTokens = 32;
  static constexpr int float_groups(int tokens) { return tokens == 1 ? 4 : tokens <= 4 ? 2 : 1; }
  static constexpr int panels_of_group(int nr) { return 16 / nr; }
  template <int kBits>
  static constexpr int kVectors = 1;
  using Group = Panels<4>;

  using Integers = __m512i;
  static Floats as_floats(Integers v) { return _mm512_castsi512_ps(v); }
  static Integers as_integers(Floats v) { return _mm512_castps_si512(v); }
  static Floats subtract(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
  static Integers integers(int32_t n) { return _mm512_set1_epi32(n); }
  static Integers starts(Integers pairs, int32_t n) {
    return _mm512_dpwssd_epi32(_mm512_setzero_si512(), pairs, integers(n));
  }
  static Integers pairs(Integers zeros) {
    return _mm512_mullo_epi16(_mm512_or_si512(zeros, _mm512_slli_epi32(zeros, 16)),
                              integers(static_cast<int32_t>(0xff80ffffu)));
  }
  template <int kBits>
  static Integers corrected(Integers dot, Integers sums, int32_t z) {
    return _mm512_add_epi32(kBits == 4 ? _mm512_slli_epi32(dot, 4) : dot, _mm512_mullo_epi32(sums, integers(z)));
  }

  static Integers even_dwords(Integers x, Integers y) {
    return as_integers(_mm512_shuffle_ps(as_floats(x), as_floats(y), 0x88));
  }
  static Integers odd_dwords(Integers x, Integers y) {
    return as_integers(_mm512_shuffle_ps(as_floats(x), as_floats(y), 0xdd));
  }
  template <int kBits>
  static Integers load_half(const Group& panels, int half, int64_t offset) {
    if constexpr (kBits == 4) return load(panels.panel[half] + offset);
    const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(panels.panel[2 * half] + offset));
    return _mm512_inserti64x4(_mm512_castsi256_si512(low),
                              _mm256_loadu_si256(reinterpret_cast<const __m256i*>(panels.panel[2 * half + 1] + offset)),
                              1);
  }

  // 8 dwords or 8 16-bit values of a half's rows.
  template <int kBits>
  static __m256i load_rows32(const Group& panels, int half, int64_t offset) {
    if constexpr (kBits == 4) return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(panels.panel[half] + offset));
    return _mm256_loadu2_m128i(reinterpret_cast<const __m128i*>(panels.panel[2 * half + 1] + offset),
                               reinterpret_cast<const __m128i*>(panels.panel[2 * half] + offset));
  }
  template <int kBits>
  static __m128i load_rows16(const Group& panels, int half, int64_t offset) {
    if constexpr (kBits == 4) return _mm_loadu_si128(reinterpret_cast<const __m128i*>(panels.panel[half] + offset));
    return _mm_unpacklo_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(panels.panel[2 * half] + offset)),
                              _mm_loadl_epi64(reinterpret_cast<const __m128i*>(panels.panel[2 * half + 1] + offset)));
  }

  // 16 dwords in lane order, of the tail, too: sums stay in it until the store.
  template <int kBits>
  static Integers load_tail(const Group& panels, int, int64_t offset) {
    const Integers order = _mm512_setr_epi32(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15);
    const Integers both = _mm512_inserti64x4(_mm512_castsi256_si512(load_rows32<kBits>(panels, 0, offset)),
                                             load_rows32<kBits>(panels, 1, offset), 1);
    return _mm512_permutexvar_epi32(order, both);
  }
  static Floats rows(Floats v) { return v; }
  // Sixteen bytes, one a row, in lane order.
  template <int kBits>
  static __m128i load_lanes8(const Group& panels, int64_t offset) {
    const auto rows = [&](int half) {
      if constexpr (kBits == 4) return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(panels.panel[half] + offset));
      return _mm_unpacklo_epi32(_mm_loadu_si32(panels.panel[2 * half] + offset),
                                _mm_loadu_si32(panels.panel[2 * half + 1] + offset));
    };
    return _mm_unpacklo_epi16(rows(0), rows(1));
  }
  template <int kBits>
  static Integers load_zeros(const Group& panels, int, int64_t offset) {
    return _mm512_cvtepu8_epi32(load_lanes8<kBits>(panels, offset));
  }
  template <int kBits>
  static Floats load_scales(const Group& panels, int, int64_t offset, int32_t scale_type) {
    if (scale_type == k_scale_type_f32) return as_floats(load_tail<kBits>(panels, 0, offset));
    const __m128i x = load_rows16<kBits>(panels, 0, offset), y = load_rows16<kBits>(panels, 1, offset);
    const __m256i lanes = _mm256_set_m128i(_mm_unpackhi_epi32(x, y), _mm_unpacklo_epi32(x, y));
    if (scale_type == k_scale_type_f16) return _mm512_cvtph_ps(lanes);
    return as_floats(_mm512_slli_epi32(_mm512_cvtepu16_epi32(lanes), 16));
  }
  template <class C>
  static Floats load_group_scales(const PanelMatrix& matrix, const Group& panels, int, int64_t offset) {
    if (matrix.scale_type == k_scale_type_e4m3)
      return _mm512_cvtph_ps(e4m3_to_half(load_lanes8<C::kBits>(panels, offset)));
    if (matrix.scale_type == k_scale_type_e8m0) return e8m0_to_float(load_lanes8<C::kBits>(panels, offset));
    return load_scales<C::kBits>(panels, 0, offset, matrix.scale_type);
  }

  // 16 lanes to their rows: 8 of X to the first panel's place, 8 of Y to the second's (nr = 4: two places each).
  template <int kBits>
  static void store_rows(const Group& panels, int, int64_t offset, Floats y) {
    const Integers order = _mm512_setr_epi32(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
    const Floats rows = _mm512_permutexvar_ps(order, y);
    if constexpr (kBits == 4) {
      _mm256_storeu_ps(panels.to[0] + offset, _mm512_castps512_ps256(rows));
      if (panels.count > 1) _mm256_storeu_ps(panels.to[1] + offset, _mm512_extractf32x8_ps(rows, 1));
    } else {
      _mm_storeu_ps(panels.to[0] + offset, _mm512_castps512_ps128(rows));
      if (panels.count > 1) _mm_storeu_ps(panels.to[1] + offset, _mm512_extractf32x4_ps(rows, 1));
      if (panels.count > 2) _mm_storeu_ps(panels.to[2] + offset, _mm512_extractf32x4_ps(rows, 2));
      if (panels.count > 3) _mm_storeu_ps(panels.to[3] + offset, _mm512_extractf32x4_ps(rows, 3));
    }
  }

  // The first tile on these panels fetches as many bytes of the next ones into L1, one panel after the other
  // (k_tile.h's kSoon). Each of the streams some steps ahead takes 1.4 times as long.
  template <int kBits, int kBytes = 128>
  static void prefetch_group(const Group& panels, int64_t offset) {
    constexpr int kPanels = kBits == 4 ? 2 : 4;
    if (panels.ahead)
      prefetch_lines<Avx512Lanes>(panels.panel[0] + panels.ahead + kPanels * offset, kPanels * kBytes / 64);
  }

  // If a compiler knew that M is 4, 8 or 16, it would address x by another variable, as an index. A vpdpbusd with an
  // indexed operand splits in two at issue.
  static void opaque(const uint8_t*& x) { asm("" : "+r"(x)); }

  static Integers flip8(Integers v) { return _mm512_xor_si512(v, _mm512_set1_epi8(static_cast<char>(0x80))); }

  // A code: what its nibbles are to vpdpbusd, as u8, and to a product of floats.
  struct Int4 {
    static constexpr int kBits = 4;
    static constexpr bool kMultiplied = false;
    static Integers low(Integers v) {  // codes 0..15
      return _mm512_ternarylogic_epi32(v, _mm512_set1_epi8(static_cast<char>(0x88)), _mm512_set1_epi8(15), 0x28);
    }
    static Floats values() { return _mm512_setr_ps(8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7); }
  };
  struct E2m1 {
    static constexpr int kBits = 4;
    static constexpr bool kMultiplied = true;
    static Integers low(Integers v) {  // doubled values + 12
      const Integers table =
          _mm512_broadcast_i32x4(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
      return _mm512_shuffle_epi8(table, _mm512_and_si512(v, _mm512_set1_epi8(15)));
    }
    static Floats values() { return _mm512_setr_ps(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12); }
  };
  struct Int8 {
    static constexpr int kBits = 8;
    static constexpr bool kMultiplied = false;
  };

  template <int kBits>
  static constexpr int kStep = kBits == 4 ? 32 : 8;
  template <int M, class C>
  [[gnu::always_inline]] static void dot_step(const Group& panels, int64_t offset, const uint8_t* x,
                                              Integers (&dot)[M][1]) {
    if constexpr (C::kBits == 4) {
      prefetch_group<4>(panels, offset);
      dot_chunk<M, C>(panels, offset, x, dot);
    } else {
      prefetch_group<8, 64>(panels, offset);  // twice as much as a step has: scales between blocks shift lines
      dot_eight<M>(panels, offset, x, dot);
    }
  }

  // dot += 8 columns of 32 bytes of 8-bit codes.
  template <int M>
  [[gnu::always_inline]] static void dot_eight(const Group& panels, int64_t offset, const uint8_t* x,
                                               Integers (&dot)[M][1]) {
    const Integers first = load_half<8>(panels, 0, offset), second = load_half<8>(panels, 1, offset);
    const Integers w0 = flip8(even_dwords(first, second));
    QM_EACH_TOKEN dot4(dot[i][0], w0, x + 4 * i);
    const Integers w1 = flip8(odd_dwords(first, second));
    QM_EACH_TOKEN dot4(dot[i][0], w1, x + 4 * M + 4 * i);
  }

  // dot += the 32 columns of 128 bytes.
  template <int M, class C>
  [[gnu::always_inline]] static void dot_chunk(const Group& panels, int64_t offset, const uint8_t* x,
                                               Integers (&dot)[M][1]) {
    if constexpr (C::kBits == 8) {
      dot_part<M, C>(panels, offset, 0, x, dot);
      dot_part<M, C>(panels, offset, 1, x, dot);
    } else {
#pragma GCC unroll 2
      for (int line = 0; line < 2; ++line) {
        const Integers first = load_half<4>(panels, 0, offset + 64 * line),
                       second = load_half<4>(panels, 1, offset + 64 * line);
        const Integers even = even_dwords(first, second), odd = odd_dwords(first, second);
        const uint8_t* from = x + 8 * line * M;
        const Integers w0 = C::low(even);
        QM_EACH_TOKEN dot4(dot[i][0], w0, from + 4 * i);
        const Integers w1 = C::low(odd);
        QM_EACH_TOKEN dot4(dot[i][0], w1, from + 4 * M + 4 * i);
        const Integers w2 = C::low(_mm512_srli_epi32(even, 4));
        QM_EACH_TOKEN dot4(dot[i][0], w2, from + 16 * M + 4 * i);
        const Integers w3 = C::low(_mm512_srli_epi32(odd, 4));
        QM_EACH_TOKEN dot4(dot[i][0], w3, from + 20 * M + 4 * i);
      }
    }
  }

  // dot += the 16 columns of one nibble (part) of 128 bytes, or 16 columns of 64 bytes of 8-bit codes. Inlined, or the
  // sums are in memory: clang 22 would not for many rows, and nvfp4 took 2.3 times as long.
  template <int M, class C>
  [[gnu::always_inline]] static void dot_part(const Group& panels, int64_t offset, int part, const uint8_t* x,
                                              Integers (&dot)[M][1]) {
    x += 16 * part * M;
#pragma GCC unroll 2
    for (int line = 0; line < 2; ++line, x += 8 * M) {
      if constexpr (C::kBits == 4) {
        const Integers first = load_half<4>(panels, 0, offset + 64 * line),
                       second = load_half<4>(panels, 1, offset + 64 * line);
        Integers even = even_dwords(first, second), odd = odd_dwords(first, second);
        if (part) {
          even = _mm512_srli_epi32(even, 4);
          odd = _mm512_srli_epi32(odd, 4);
        }
        const Integers w0 = C::low(even);
        QM_EACH_TOKEN dot4(dot[i][0], w0, x + 4 * i);
        const Integers w1 = C::low(odd);
        QM_EACH_TOKEN dot4(dot[i][0], w1, x + 4 * M + 4 * i);
      } else {
        dot_eight<M>(panels, offset + 64 * part + 32 * line, x, dot);
      }
    }
  }

  // Values come from a table of 16 entries, or by sign extension (8 bits). With 4 bits these are the low nibbles of 128
  // bytes, next(), the high nibbles.
  template <int kGroups, class Column, class Next>
  [[gnu::always_inline]] static void columns4(const Group* panels, int64_t offset, Floats values, const Column& column,
                                              const Next& next) {
    // Columns 0..3, 4..7, 8..11, 12..15 in the low nibbles, 16 more in the high ones.
    Integers dwords[4][kGroups];
    QM_EACH_GROUP for (int line = 0; line < 2; ++line) {
      const Integers first = load_half<4>(panels[group], 0, offset + 64 * line),
                     second = load_half<4>(panels[group], 1, offset + 64 * line);
      dwords[2 * line][group] = even_dwords(first, second);
      dwords[2 * line + 1][group] = odd_dwords(first, second);
    }
    for (int nibble = 0; nibble < 2; ++nibble) {
      if (nibble == 1) next();
      for (Integers(&dword)[kGroups] : dwords)
        for (int byte = 0; byte < 4; ++byte) {
          Floats w[kGroups];
          QM_EACH_GROUP w[group] =
              _mm512_permutexvar_ps(_mm512_srli_epi32(dword[group], 8 * byte + 4 * nibble), values);
          column(w);
        }
    }
  }
  // from_dword(dwords of all groups, byte) for each of 8 columns of 8-bit codes.
  template <int kGroups, class FromDword>
  [[gnu::always_inline]] static void columns8(const Group* panels, int64_t offset, const FromDword& from_dword) {
    Integers even[kGroups], odd[kGroups];
    QM_EACH_GROUP {
      const Integers first = load_half<8>(panels[group], 0, offset), second = load_half<8>(panels[group], 1, offset);
      even[group] = even_dwords(first, second);
      odd[group] = odd_dwords(first, second);
    }
    for (int byte = 0; byte < 4; ++byte) from_dword(even, byte);
    for (int byte = 0; byte < 4; ++byte) from_dword(odd, byte);
  }
  template <int kBits, int kGroups, class Column>
  [[gnu::always_inline]] static void signed_columns(const Group* panels, int64_t offset, const Column& column) {
    if constexpr (kBits == 4) {
      columns4<kGroups>(panels, offset, _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1), column,
                        [] {});
    } else {
      columns8<kGroups>(
          panels, offset, [&](const Integers(&dwords)[kGroups], int byte) __attribute__((always_inline)) {
            Floats w[kGroups];
            QM_EACH_GROUP w[group] = floats(_mm512_srai_epi32(_mm512_slli_epi32(dwords[group], 24 - 8 * byte), 24));
            column(w);
          });
    }
  }
  template <class C, int kGroups, class Column, class Next>
  [[gnu::always_inline]] static void columns(const Group* panels, int64_t offset, const Column& column,
                                             const Next& next) {
    if constexpr (C::kBits == 4) {
      columns4<kGroups>(panels, offset, C::values(), column, next);
    } else {
      for (int line = 0; line < 4; ++line) {
        if (line == 2) next();
        columns8<kGroups>(
            panels, offset + 32 * line, [&](const Integers(&dwords)[kGroups], int byte) __attribute__((always_inline)) {
              Floats w[kGroups];
              QM_EACH_GROUP w[group] =
                  floats(_mm512_and_si512(_mm512_srli_epi32(flip8(dwords[group]), 8 * byte), integers(255)));
              column(w);
            });
      }
    }
  }
};

}  // namespace
}  // namespace quantmoe
