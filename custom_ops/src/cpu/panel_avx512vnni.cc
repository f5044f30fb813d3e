// Panels times token tiles with AVX512-VNNI.
//
// Sixteen weight rows fill a zmm: two halves X and Y of 8 rows, a panel each for 4-bit codes, two panels each for 8-bit
// codes. In a panel a row owns 8 consecutive bytes (two dwords) of each 64; shuffling X with Y leaves one dword a row,
//   even: X0 X1 Y0 Y1 | X2 X3 Y2 Y3 | ...  columns k..k+3        odd: the same rows, columns k+4..k+7
// so that a row is one lane: no pair of lanes to add afterwards, and the activations are a 4-byte broadcast that
// vpdpbusd takes from memory. That lane order holds for scales, row sums and biases too and is undone once, at the
// store.
//
// vpdpbusd multiplies u8 weights (code, offset by 8 or 128) with s8 activations; accumulators start at -offset *
// sum(x), which pack_tile has put into the tile. All of it is exact in int32.
#include <utility>

#include "cpu/avx512_lanes.h"
#include "cpu/avx512_scaled.h"
#include "cpu/elementwise.h"
#include "cpu/x86.h"

namespace quantmoe {
namespace {

// Two accumulators a row: beyond 14 rows some of the 32 registers spill, which is still faster than two tiles of 8.
#ifndef QM_TILE_ROWS
#define QM_TILE_ROWS 16
#endif
constexpr int kTileRows = QM_TILE_ROWS;

template <int M, int kBits>
void quantized_tile(const PanelMatrix& matrix, const Avx512Group& panels, const uint8_t* tile, const Avx512Store& store,
                    int64_t row_stride) {
  const uint8_t* x = tile;
  const int32_t* start = reinterpret_cast<const int32_t*>(tile + matrix.kp * M);
  __m512 acc[M];
  QM_EACH acc[i] = _mm512_setzero_ps();
  for (int64_t b = 0; b < matrix.blocks; ++b, start += M) {
    int64_t offset = b * matrix.block_bytes;
    __m512i dot[M];  // of this block only: live across blocks, compilers keep it in memory
    QM_EACH dot[i] = _mm512_set1_epi32(start[i]);
    if constexpr (kBits == 4) {
      const uint8_t* const end = x + matrix.block * M;
      do {  // a block is never empty; saying so keeps the accumulators out of memory
        prefetch<2, 128>(panels, offset);
        dot_chunk<M, Avx512Int4>(panels, offset, x, dot);
        x += 32 * M;
        opaque(x);
        offset += 128;
      } while (x != end);
    } else {
      const __m512i flip = _mm512_set1_epi8(static_cast<char>(0x80));
      const uint8_t* const end = x + matrix.block * M;
      do {
        if (offset & 32) prefetch<4, 64>(panels, offset);  // a line is two steps
        const __m512i a = load_half<8>(panels, 0, offset), c = load_half<8>(panels, 1, offset);
        const __m512i w0 = _mm512_xor_si512(even_dwords(a, c), flip);
        QM_EACH dot4(dot[i], w0, x + 4 * i);
        const __m512i w1 = _mm512_xor_si512(odd_dwords(a, c), flip);
        QM_EACH dot4(dot[i], w1, x + 4 * M + 4 * i);
        x += 8 * M;
        opaque(x);
        offset += 32;
      } while (x != end);
    }
    if (matrix.grouped) {
      const __m512 scale = load_scales<kBits>(panels, b * matrix.block_bytes + matrix.codes_bytes, matrix.scale_type);
      QM_EACH acc[i] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot[i]), scale, acc[i]);
    } else {
      QM_EACH acc[i] = _mm512_castsi512_ps(dot[i]);
    }
  }
  const float* steps = reinterpret_cast<const float*>(start);
  const int32_t* zero_points = start + M;
  const __m512i sums = load_lanes32<kBits>(panels, matrix.tail());
  const __m512 bias =
      _mm512_castsi512_ps(load_lanes32<kBits>(panels, matrix.tail() + (matrix.grouped ? 4 : 8) * matrix.nr));
  const __m512 scale = _mm512_castsi512_ps(load_lanes32<kBits>(panels, matrix.tail() + 4 * matrix.nr));  // channelwise
  QM_EACH {
    const __m512 step = _mm512_set1_ps(steps[i]);
    __m512 y;
    if (matrix.grouped) {
      y = _mm512_mul_ps(
          _mm512_fmadd_ps(_mm512_castsi512_ps(sums), _mm512_set1_ps(static_cast<float>(-zero_points[i])), acc[i]),
          step);
    } else {
      const __m512i dot = _mm512_castps_si512(acc[i]), product = kBits == 4 ? _mm512_slli_epi32(dot, 4) : dot;
      const __m512i corrected = _mm512_add_epi32(product, _mm512_mullo_epi32(sums, _mm512_set1_epi32(-zero_points[i])));
      y = _mm512_mul_ps(_mm512_cvtepi32_ps(corrected), _mm512_mul_ps(scale, step));
    }
    store_lanes<kBits>(store, i * row_stride, _mm512_add_ps(y, bias));
  }
}

// Float activations: values come out of a 16-entry table (4 bits) or a sign extension (8 bits), one column at a time.
template <int M, int kBits>
void float_tile(const PanelMatrix& matrix, const Avx512Group& panels, const uint8_t* tile, const Avx512Store& store,
                int64_t row_stride) {
  const float* x = reinterpret_cast<const float*>(tile);
  const __m512 values = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1);
  __m512 acc[M], partial[M];
  QM_EACH acc[i] = _mm512_setzero_ps();
  for (int64_t b = 0; b < matrix.blocks; ++b) {
    int64_t offset = b * matrix.block_bytes;
    QM_EACH partial[i] = _mm512_setzero_ps();
    const auto column = [&](__m512 w) {
      QM_EACH partial[i] = _mm512_fmadd_ps(_mm512_set1_ps(x[i]), w, partial[i]);
      x += M;
    };
    if constexpr (kBits == 4) {
      for (int64_t c = 0; c < matrix.block; c += 32, offset += 128) {
        __m512i dwords[4];  // columns 0..3, 4..7, 8..11, 12..15 in the low nibbles, 16 more in the high ones
        for (int s = 0; s < 2; ++s) {
          const __m512i a = load_half<4>(panels, 0, offset + 64 * s), d = load_half<4>(panels, 1, offset + 64 * s);
          dwords[2 * s] = even_dwords(a, d);
          dwords[2 * s + 1] = odd_dwords(a, d);
        }
        for (int nibble = 0; nibble < 2; ++nibble)
          for (__m512i& dword : dwords)
            for (int byte = 0; byte < 4; ++byte)
              column(_mm512_permutexvar_ps(_mm512_srli_epi32(dword, 8 * byte + 4 * nibble), values));
      }
    } else {
      for (int64_t c = 0; c < matrix.block; c += 8, offset += 32) {
        const __m512i a = load_half<8>(panels, 0, offset), d = load_half<8>(panels, 1, offset);
        for (__m512i dword : {even_dwords(a, d), odd_dwords(a, d)})
          for (int byte = 3; byte >= 0; --byte)
            column(_mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(dword, 8 * byte), 24)));
      }
    }
    if (matrix.grouped) {
      const __m512 scale = load_scales<kBits>(panels, b * matrix.block_bytes + matrix.codes_bytes, matrix.scale_type);
      QM_EACH acc[i] = _mm512_fmadd_ps(partial[i], scale, acc[i]);
    }
  }
  const __m512 bias =
      _mm512_castsi512_ps(load_lanes32<kBits>(panels, matrix.tail() + (matrix.grouped ? 4 : 8) * matrix.nr));
  __m512 scale = _mm512_castsi512_ps(load_lanes32<kBits>(panels, matrix.tail() + 4 * matrix.nr));  // channelwise
  if (kBits == 4) scale = _mm512_mul_ps(scale, _mm512_set1_ps(16.0f));
  QM_EACH {
    store_lanes<kBits>(store, i * row_stride,
                       _mm512_add_ps(matrix.grouped ? acc[i] : _mm512_mul_ps(partial[i], scale), bias));
  }
}

using Avx512TileFunction = void (*)(const PanelMatrix&, const Avx512Group&, const uint8_t*, const Avx512Store&,
                                    int64_t);
template <int... M>
constexpr auto tile_table(std::integer_sequence<int, M...>) {
  struct Avx512PlainTiles {
    Avx512TileFunction of[2][2][sizeof...(M)];  // [quantized][8 bits][m - 1]
  };
  return Avx512PlainTiles{{{{float_tile<M + 1, 4>...}, {float_tile<M + 1, 8>...}},
                           {{quantized_tile<M + 1, 4>...}, {quantized_tile<M + 1, 8>...}}}};
}
constexpr auto kTiles = tile_table(std::make_integer_sequence<int, kTileRows>());

// Tiles of FORMAT.md 2.7 and 2.8.
template <int... M>
constexpr auto scaled_table(std::integer_sequence<int, M...>) {
  struct Avx512Tiles {
    // [e2m1, int4 and int8 with middles, with zero points: 5][groups of 16][m - 1]
    Avx512TileFunction quantized[5][2][sizeof...(M)], floats[3][2][sizeof...(M)], stepped[sizeof...(M)];
  };
  return Avx512Tiles{{{{scaled_tile<M + 1, Avx512E2m1, false, 1>...}, {scaled_tile<M + 1, Avx512E2m1, false, 2>...}},
                      {{nullptr}, {scaled_tile<M + 1, Avx512Int4, false, 2>...}},
                      {{nullptr}, {scaled_tile<M + 1, Avx512Int8, false, 2>...}},
                      {{scaled_tile<M + 1, Avx512Int4, true, 1>...}, {scaled_tile<M + 1, Avx512Int4, true, 2>...}},
                      {{scaled_tile<M + 1, Avx512Int8, true, 1>...}, {scaled_tile<M + 1, Avx512Int8, true, 2>...}}},
                     {{{scaled_float_tile<M + 1, Avx512E2m1, 1>...}, {scaled_float_tile<M + 1, Avx512E2m1, 2>...}},
                      {{scaled_float_tile<M + 1, Avx512Int4, 1>...}, {scaled_float_tile<M + 1, Avx512Int4, 2>...}},
                      {{scaled_float_tile<M + 1, Avx512Int8, 1>...}, {scaled_float_tile<M + 1, Avx512Int8, 2>...}}},
                     {scaled_tile<M + 1, Avx512E2m1, false, 2, true>...}};
}
constexpr auto kScaledTiles = scaled_table(std::make_integer_sequence<int, kTileRows>());

Avx512TileFunction tile_function(const PanelMatrix& p, bool quantized, int m) {
  if (p.plain()) return kTiles.of[quantized][p.bits == 8][m - 1];
  if (quantized && p.stepped) return kScaledTiles.stepped[m - 1];
  const int kind = is_e2m1(p.format) ? 0 : p.bits == 4 ? 1 : 2;
  if (!quantized) return kScaledTiles.floats[kind][p.parts - 1][m - 1];
  return kScaledTiles.quantized[p.zero_points ? kind + 2 : kind][p.parts - 1][m - 1];
}

void multiply(const PanelProduct& product) {
  const PanelMatrix& p = *product.matrix;
  if (is_k(p.format)) return multiply_k<Avx512Lanes, kTileRows, true>(product);
  if (p.columns) return multiply_columns<Avx512Lanes, kTileRows, true>(product);
  const int panels_per_group = 16 / p.nr;
  for (int64_t panel = 0; panel < product.panel_count; panel += panels_per_group) {
    Avx512Group g;
    Avx512Store store;
    store.count = 0;
    for (int i = 0; i < panels_per_group; ++i) {
      const bool exists = panel + i < product.panel_count;
      const int64_t index = exists ? panel + i : product.panel_count - 1;
      g.panel[i] = product.panels + index * p.stride;
      store.to[i] = product.out + index % product.halves * product.half_stride + index / product.halves * p.nr;
      store.count += exists;
    }
    for (int64_t t = 0; t < product.tile_count; ++t) {
      const TokenTile& tile = product.tiles[t];
      g.ahead = t == 0 ? panels_per_group * p.stride : 0;
      tile_function(p, product.quantized, tile.m)(p, g, tile.data, store, product.row_stride);
      for (int i = 0; i < store.count; ++i) store.to[i] += tile.m * product.row_stride;
    }
  }
}

void pack_rows(const PanelMatrix& p, bool quantized, const Row* rows, int m, uint8_t* out) {
  (is_k(p.format) ? pack_k_tile : pack_tile_offset)(p, quantized, rows, m, out);
}

bool usable() {
  return x86_has(kSavesZmm, bit_AVX | bit_FMA | bit_F16C, bit_AVX512F | bit_AVX512BW | bit_AVX512VL | bit_AVX512DQ,
                 bit_AVX512VNNI);
}

}  // namespace

const CpuKernel panel_avx512vnni = {"panel_avx512vnni",
                                    usable,
                                    kTileRows,
                                    QM_ELEMENTWISE(pack_rows),
                                    multiply,
                                    int8_peak_avx512vnni,
                                    &attention_avx512vnni,
                                    &linear_attention_avx512vnni};

}  // namespace quantmoe
