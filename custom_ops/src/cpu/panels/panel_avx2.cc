// Panels times token tiles with AVX2.
//
// Eight weight rows fill a ymm: X, rows 0..3, and Y, rows 4..7. They are one panel of 4-bit codes, or a panel each of
// 8-bit codes. In a panel a row owns 8 consecutive bytes (two dwords) of each 32. Shuffling X with Y leaves one dword a
// row:
//   even: X0 X1 Y0 Y1 | X2 X3 Y2 Y3, columns k..k+3        odd: the same rows, columns k+4..k+7
// So a row is one lane, and the activations are a 4-byte broadcast. The store undoes the lane order.
//
// vpmaddubsw multiplies u8 nibbles with s8 activations and adds pairs in s16. A chunk of 32 columns is 8 such pairs a
// lane, at most 8 * 2 * 15 * 128 = 30720. So widening to s32 once a chunk is exact. 8-bit codes are two nibbles a byte.
// Two vectors of nibbles share each broadcast: two panels of 4-bit codes, or the low and high nibbles of 8 rows of
// 8-bit codes. Codes are offset by 8 or 128. Accumulators start at -offset * sum(x), which pack_tile has put into the
// tile.
#include "cpu/elementwise.h"
#include "cpu/tiles/avx2_lanes.h"
#include "cpu/tiles/code_panels.h"
#include "cpu/x86.h"

namespace quantmoe {
namespace {

struct Avx2Rows : Avx2Lanes {
  // Two s16 accumulators a row, two registers of codes, two of products: 16.
  static constexpr int kTileRows = tile_rows(6);
  static constexpr int kMost = 2;
  // On a Zen 3; int4 in groups of 32 is as fast by tiles.
  static constexpr int kFloatTokens = tile_rows(6), kManyTokens = 16;
  static constexpr int float_groups(int tokens) { return tokens == 1 ? 2 : 1; }
  static constexpr int code_tokens(int bits) { return bits == 8 ? 16 : 12; }  // on a Zen 3
  static constexpr int kLeastTokens = tile_rows(4);                           // 13 are 5, 4 and 4
  static constexpr int kLeastGroup = 16, kCodeVectors = 2;
  static constexpr bool kSigned = false, kStores = false;
  static constexpr int panels_of_group(int) { return 2; }
  template <int kBits>
  static constexpr int kVectors = kBits == 4 ? 2 : 1;
  using Group = Panels<2>;

  using Integers = __m256i;
  using Avx2Lanes::floats;
  static Floats floats(Integers v) { return _mm256_cvtepi32_ps(v); }
  static Floats as_floats(Integers v) { return _mm256_castsi256_ps(v); }
  static Integers as_integers(Floats v) { return _mm256_castps_si256(v); }
  static Floats subtract(Floats a, Floats b) { return _mm256_sub_ps(a, b); }
  static Integers integers(int32_t n) { return _mm256_set1_epi32(n); }
  static Integers starts(Integers pairs, int32_t n) { return _mm256_madd_epi16(pairs, integers(n)); }
  static Integers pairs(Integers zeros) {
    return _mm256_mullo_epi16(_mm256_or_si256(zeros, _mm256_slli_epi32(zeros, 16)),
                              integers(static_cast<int32_t>(0xff80ffffu)));
  }
  template <int kBits>
  static Integers corrected(Integers dot, Integers sums, int32_t z) {
    return _mm256_add_epi32(kBits == 4 ? _mm256_slli_epi32(dot, 4) : dot, _mm256_mullo_epi32(sums, integers(z)));
  }

  // From lane order to the order of rows: the permutation is its own inverse.
  static Floats rows(Floats v) { return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(v), 0xd8)); }

  // One dword of each row of vector v.
  template <int kBits>
  static Integers load_dwords(const Group& panels, int v, int64_t offset, bool odd) {
    const uint8_t* const at = panels.panel[v] + offset;
    const Floats x = as_floats(load(at)), y = as_floats(load(kBits == 4 ? at + 32 : panels.panel[1] + offset));
    return as_integers(odd ? _mm256_shuffle_ps(x, y, 0xdd) : _mm256_shuffle_ps(x, y, 0x88));
  }

  // 8 dwords of vector v in row order, and 8 numbers of 16 or 8 bits.
  template <int kBits>
  static Integers load_tail(const Group& panels, int v, int64_t offset) {
    if constexpr (kBits == 4) return load(panels.panel[v] + offset);
    return _mm256_set_m128i(load_half(panels.panel[1] + offset), load_half(panels.panel[0] + offset));
  }
  template <int kBits>
  static __m128i load_rows16(const Group& panels, int v, int64_t offset) {
    if constexpr (kBits == 4) return load_half(panels.panel[v] + offset);
    return _mm_unpacklo_epi64(load_quarter(panels.panel[0] + offset), load_quarter(panels.panel[1] + offset));
  }
  template <int kBits>
  static __m128i load_rows8(const Group& panels, int v, int64_t offset) {
    if constexpr (kBits == 4) return load_quarter(panels.panel[v] + offset);
    return _mm_unpacklo_epi32(_mm_loadu_si32(panels.panel[0] + offset), _mm_loadu_si32(panels.panel[1] + offset));
  }

  // In lane order.
  template <int kBits>
  static Floats load_scales(const Group& panels, int v, int64_t offset, int32_t scale_type) {
    if (scale_type == k_scale_type_f32) return rows(as_floats(load_tail<kBits>(panels, v, offset)));
    const __m128i bits = load_rows16<kBits>(panels, v, offset);
    if (scale_type == k_scale_type_f16) return rows(_mm256_cvtph_ps(bits));
    return rows(as_floats(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16)));
  }
  template <class C>
  static Floats load_group_scales(const PanelMatrix& matrix, const Group& panels, int v, int64_t offset) {
    if (matrix.scale_type == k_scale_type_e4m3) return rows(e4m3_to_float(load_rows8<C::kBits>(panels, v, offset)));
    if (matrix.scale_type == k_scale_type_e8m0) return rows(e8m0_to_float(load_rows8<C::kBits>(panels, v, offset)));
    return load_scales<C::kBits>(panels, v, offset, matrix.scale_type);
  }
  template <int kBits>
  static Integers load_zeros(const Group& panels, int v, int64_t offset) {
    return _mm256_permute4x64_epi64(_mm256_cvtepu8_epi32(load_rows8<kBits>(panels, v, offset)), 0xd8);
  }

  // y: vector v in row order.
  template <int kBits>
  static void store_rows(const Group& panels, int v, int64_t offset, Floats y) {
    if constexpr (kBits == 4) {
      if (v < panels.count) _mm256_storeu_ps(panels.to[v] + offset, y);
    } else {
      _mm_storeu_ps(panels.to[0] + offset, _mm256_castps256_ps128(y));
      if (panels.count > 1) _mm_storeu_ps(panels.to[1] + offset, _mm256_extractf128_ps(y, 1));
    }
  }

  // The first tile on these panels fetches as many bytes of the next two panels into L2, one panel after the other.
  // Panels come cold from memory, in two streams, and hardware prefetchers lose a stream at every panel's end. Twice as
  // far is as good. Each stream a group ahead takes 1.05 to 1.1 times as long. 4,096 bytes ahead in each takes 1.15
  // to 1.3 times as long: there the first stream meets the second.
  template <int kBits, int kBytes = 128>
  static void prefetch_group(const Group& panels, int64_t offset) {
    if (!panels.ahead) return;
    const uint8_t* const next = panels.panel[0] + panels.ahead + 2 * offset;
    for (int at = 0; at < 2 * kBytes; at += 64) _mm_prefetch(reinterpret_cast<const char*>(next + at), _MM_HINT_T1);
  }

  static void opaque(const uint8_t*&) {}

  static Integers flip(Integers v) { return _mm256_xor_si256(v, _mm256_set1_epi8(static_cast<char>(0x88))); }
  static Integers flip8(Integers v) { return _mm256_xor_si256(v, _mm256_set1_epi8(static_cast<char>(0x80))); }
  static Integers low_nibbles(Integers v) { return _mm256_and_si256(v, _mm256_set1_epi8(15)); }
  static Integers high_nibbles(Integers v) { return low_nibbles(_mm256_srli_epi32(v, 4)); }

  // A code: what its nibbles are to vpmaddubsw, as u8, and to a product of floats a dword each.
  struct Int4 {
    static constexpr int kBits = 4;
    static constexpr bool kMultiplied = false;
    static Integers low(Integers v) { return low_nibbles(flip(v)); }  // codes 0..15
  };
  struct E2m1 {
    static constexpr int kBits = 4;
    static constexpr bool kMultiplied = true;
    static Integers low(Integers v) {  // doubled values + 12
      const Integers table =
          _mm256_broadcastsi128_si256(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
      return _mm256_shuffle_epi8(table, low_nibbles(v));
    }
  };
  struct Int8 {
    static constexpr int kBits = 8;
    static constexpr bool kMultiplied = false;
  };

  // sum[i] += nibbles w0 and w1 . the activations of 4 columns, in s16.
  template <int M>
  [[gnu::always_inline]] static void multiply4(Integers w0, Integers w1, const uint8_t* x, Integers (&sum)[M][2]) {
    QM_EACH_TOKEN {
      const Integers x4 = quantmoe::broadcast(x + 4 * i);
      sum[i][0] = _mm256_add_epi16(sum[i][0], _mm256_maddubs_epi16(w0, x4));
      sum[i][1] = _mm256_add_epi16(sum[i][1], _mm256_maddubs_epi16(w1, x4));
      asm("" : "+x"(sum[i][0]), "+x"(sum[i][1]));  // keeps the order: gcc would regroup the sums of a chunk and spill
    }
  }
  // dot += the sums of 16 bits: of two vectors of rows, or of the low and the high nibbles of one.
  template <int M, int kBits>
  [[gnu::always_inline]] static void widen(const Integers (&sum)[M][2], Integers (&dot)[M][kVectors<kBits>]) {
    const Integers one = _mm256_set1_epi16(1), second = _mm256_set1_epi16(kBits == 4 ? 1 : 16);
    QM_EACH_TOKEN {
      dot[i][0] = _mm256_add_epi32(dot[i][0], _mm256_madd_epi16(sum[i][0], one));
      dot[i][kVectors<kBits> - 1] = _mm256_add_epi32(dot[i][kVectors<kBits> - 1], _mm256_madd_epi16(sum[i][1], second));
    }
  }

  template <int kBits>
  static constexpr int kStep = 32;
  template <int M, class C>
  [[gnu::always_inline]] static void dot_step(const Group& panels, int64_t offset, const uint8_t* x,
                                              Integers (&dot)[M][kVectors<C::kBits>]) {
    Integers sum[M][2];
    QM_EACH_TOKEN sum[i][0] = sum[i][1] = _mm256_setzero_si256();
    prefetch_group<C::kBits>(panels, offset);
    if constexpr (C::kBits == 4) {
#pragma GCC unroll 4
      for (int c = 0; c < 4; ++c) {
        const int64_t from = offset + c / 2 * 64;
        const Integers a = flip(load_dwords<4>(panels, 0, from, c % 2)),
                       d = flip(load_dwords<4>(panels, 1, from, c % 2));
        multiply4(low_nibbles(a), low_nibbles(d), x + 4 * c * M, sum);
        multiply4(high_nibbles(a), high_nibbles(d), x + (4 * c + 16) * M, sum);
      }
    } else {
#pragma GCC unroll 8
      for (int c = 0; c < 8; ++c) {
        const Integers a = flip8(load_dwords<8>(panels, 0, offset + c / 2 * 32, c % 2));
        multiply4(low_nibbles(a), high_nibbles(a), x + 4 * c * M, sum);
      }
    }
    widen<M, C::kBits>(sum, dot);
  }

  // One token and all its vectors at a time need at most 16 registers for any code. Sums widen every 16 columns. There
  // 8 pairs stay below 2^15, at most 2 * 24 * 128 (e2m1) or 2 * 15 * 128 (integers, a nibble at a time) each.
  template <int M, class C>
  [[gnu::always_inline]] static void dot_part(const Group& panels, int64_t offset, int part, const uint8_t* x,
                                              Integers (&dot)[M][kVectors<C::kBits>]) {
    Integers sum[M][2];
    QM_EACH_TOKEN sum[i][0] = sum[i][1] = _mm256_setzero_si256();
    x += 16 * part * M;
    if (C::kBits == 8) offset += 64 * part;
    for (int dword = 0; dword < 4; ++dword) {  // 4 columns
      const int64_t from = offset + dword / 2 * (C::kBits == 4 ? 64 : 32);
      if constexpr (C::kBits == 4) {
        Integers first = load_dwords<4>(panels, 0, from, dword % 2),
                 second = load_dwords<4>(panels, 1, from, dword % 2);
        if (part) {
          first = _mm256_srli_epi32(first, 4);
          second = _mm256_srli_epi32(second, 4);
        }
        multiply4(C::low(first), C::low(second), x + 4 * dword * M, sum);
      } else {
        const Integers first = flip8(load_dwords<8>(panels, 0, from, dword % 2));
        multiply4(low_nibbles(first), high_nibbles(first), x + 4 * dword * M, sum);
      }
    }
    widen<M, C::kBits>(sum, dot);
  }
  template <int M, class C>
  [[gnu::always_inline]] static void dot_chunk(const Group& panels, int64_t offset, const uint8_t* x,
                                               Integers (&dot)[M][kVectors<C::kBits>]) {
    for (int part = 0; part < 2; ++part) dot_part<M, C>(panels, offset, part, x, dot);
  }

  // 32 columns for add_products: nibbles of 16 rows, or the low and the high ones of 8.
  template <class C, bool>
  [[gnu::always_inline]] static void unpack(const Group& panels, int64_t offset, Integers (*codes)[2]) {
    if constexpr (C::kBits == 4) {
      for (int c = 0; c < 4; ++c)
        for (int v = 0; v < 2; ++v) {
          const Integers both = load_dwords<4>(panels, v, offset + c / 2 * 64, c % 2);
          codes[c][v] = C::low(both);
          codes[c + 4][v] = C::low(_mm256_srli_epi32(both, 4));
        }
    } else {
      for (int c = 0; c < 8; ++c) {
        const Integers both = flip8(load_dwords<8>(panels, 0, offset + c / 2 * 32, c % 2));
        codes[c][0] = low_nibbles(both);
        codes[c][1] = high_nibbles(both);
      }
    }
  }
  // 16 bits hold 8 pairs of codes below 16 (2 * 15 * 128), 4 of e2m1's 24 and of 5 bits, 2 of 6 bits.
  template <int kBits>
  static constexpr int kFours = kBits == 5   ? 4
                                : kBits == 6 ? 2
                                             : 8;
  template <int M, int kBits, int kFours, class From>
  [[gnu::always_inline]] static void add_products(const Integers (*codes)[2], const uint8_t* x, const From& from,
                                                  Integers (&dot)[M][kVectors<kBits>]) {
    Integers sum[M][2];
#pragma GCC unroll 8
    for (int c = 0; c < kFours; ++c) {
      const Integers first = codes[c][0], second = codes[c][1];
      QM_EACH_TOKEN {
        const Integers x4 = quantmoe::broadcast(x + 4 * (c * M + i));
        const Integers products[2] = {_mm256_maddubs_epi16(first, x4), _mm256_maddubs_epi16(second, x4)};
        for (int v = 0; v < 2; ++v) sum[i][v] = c ? _mm256_add_epi16(sum[i][v], products[v]) : products[v];
        asm("" : "+x"(sum[i][0]), "+x"(sum[i][1]));  // as in multiply4
      }
    }
    const Integers one = _mm256_set1_epi16(1), second = _mm256_set1_epi16(kBits == 4 ? 1 : 16);
    QM_EACH_TOKEN {
      if constexpr (kBits == 4) {
        for (int v = 0; v < 2; ++v) dot[i][v] = _mm256_add_epi32(from(i, v), _mm256_madd_epi16(sum[i][v], one));
      } else {
        dot[i][0] = _mm256_add_epi32(_mm256_add_epi32(from(i, 0), _mm256_madd_epi16(sum[i][0], one)),
                                     _mm256_madd_epi16(sum[i][1], second));
      }
    }
  }

  // A code is the sign extension of its bits. 8-bit: 8 columns; 4-bit: a chunk's 32, the low nibbles first.
  template <int kBits, int kGroups, class Column>
  [[gnu::always_inline]] static void signed_columns(const Group* panels, int64_t offset, const Column& column) {
    constexpr int kNibbles = kBits == 4 ? 2 : 1, V = kVectors<kBits>, kAll = kGroups * V;
#pragma GCC unroll 2
    for (int shift = 28; shift > 28 - 4 * kNibbles; shift -= 4)
#pragma GCC unroll 4
      for (int dword = 0; dword < 2 * kNibbles; ++dword) {
        Integers dwords[kAll];
        for (int v = 0; v < kAll; ++v)
          dwords[v] = load_dwords<kBits>(panels[v / V], v % V, offset + dword / 2 * 64, dword % 2);
#pragma GCC unroll 4
        for (int byte = 0; byte < 4; ++byte) {
          Floats value[kAll];
          for (int v = 0; v < kAll; ++v)
            value[v] = floats(
                _mm256_srai_epi32(_mm256_slli_epi32(dwords[v], (kBits == 4 ? shift : 24) - 8 * byte), 32 - kBits));
          column(value);
        }
      }
  }
  template <class C, int kGroups, class Column, class Next>
  [[gnu::always_inline]] static void columns(const Group* panels, int64_t offset, const Column& column,
                                             const Next& next) {
    constexpr int V = kVectors<C::kBits>, kAll = kGroups * V;
    const Floats magnitudes = _mm256_setr_ps(0, 1, 2, 3, 4, 6, 8, 12);
#pragma GCC unroll 2
    for (int part = 0; part < 2; ++part) {  // unrolled, or the sums are in memory at next()
      if (part == 1) next();
      for (int first = 0; first < 16; first += 4) {
        const int64_t from = offset + (C::kBits == 4 ? first / 8 * 64 : (part * 2 + first / 8) * 32);
        Integers dwords[kAll];
        for (int v = 0; v < kAll; ++v) {
          dwords[v] = load_dwords<C::kBits>(panels[v / V], v % V, from, first / 4 % 2);
          if (C::kBits == 8) dwords[v] = flip8(dwords[v]);
          if (C::kBits == 4 && !C::kMultiplied) dwords[v] = flip(dwords[v]);
          if (C::kBits == 4 && part) dwords[v] = _mm256_srli_epi32(dwords[v], 4);
        }
        for (int byte = 0; byte < 4; ++byte) {
          Floats value[kAll];
          for (int v = 0; v < kAll; ++v) {
            const Integers code = _mm256_and_si256(dwords[v], integers(C::kBits == 4 ? 15 : 255));
            if constexpr (C::kMultiplied) {
              const Integers sign = _mm256_slli_epi32(_mm256_and_si256(code, integers(8)), 28);
              value[v] = _mm256_xor_ps(_mm256_permutevar8x32_ps(magnitudes, code), as_floats(sign));
            } else {
              value[v] = floats(code);
            }
            dwords[v] = _mm256_srli_epi32(dwords[v], 8);
          }
          column(value);
        }
      }
    }
  }
};

void multiply(const PanelProduct& product) {
  has_many_codes<Avx2Rows>(product) ? multiply_codes<Avx2Rows>(product) : multiply_panels<Avx2Rows>(product);
}

bool usable() { return x86_has(kSavesYmm, bit_AVX | bit_FMA | bit_F16C, bit_AVX2, 0); }

}  // namespace

const CpuKernel panel_avx2 = {"panel_avx2", usable,         Avx2Rows::kTileRows, QM_ELEMENTWISE(pack_rows),
                              multiply,     int8_peak_avx2, &attention_avx2,     &linear_attention_avx2};

}  // namespace quantmoe
