// Panels times token tiles with AVX2.
//
// Eight weight rows fill a ymm: X, rows 0..3, and Y, rows 4..7, of a panel for 4-bit codes, a panel each for 8-bit
// codes. In a panel a row owns 8 consecutive bytes (two dwords) of each 32; shuffling X with Y leaves one dword a row,
//   even: X0 X1 Y0 Y1 | X2 X3 Y2 Y3, columns k..k+3        odd: the same rows, columns k+4..k+7
// so that a row is one lane and the activations are a 4-byte broadcast. The lane order is undone at the store.
//
// vpmaddubsw multiplies u8 nibbles with s8 activations and adds pairs in s16. A chunk of 32 columns is 8 such pairs a
// lane, at most 8 * 2 * 15 * 128 = 30720, so that widening to s32 once a chunk is exact. 8-bit codes are two nibbles a
// byte. Two vectors of nibbles share each broadcast: two panels of 4-bit codes, or the low and high nibbles of 8 rows
// of 8-bit codes. Codes are offset by 8 or 128; accumulators start at -offset * sum(x), which pack_tile has put into
// the tile.
#include <utility>

#include "cpu/avx2_lanes.h"
#include "cpu/avx2_scaled.h"
#include "cpu/elementwise.h"
#include "cpu/x86.h"

namespace quantmoe {
namespace {

constexpr int kTileRows = 5;  // two s16 accumulators a row and six registers for codes, nibbles and products: 16

template <int M, int kBits>
void quantized_tile(const PanelMatrix& matrix, const Avx2Group& panels, const uint8_t* tile, const Avx2Store& store,
                    int64_t row_stride) {
  constexpr int V = vectors(kBits);
  const __m256i nibble = _mm256_set1_epi8(15), flip = _mm256_set1_epi8(static_cast<char>(kBits == 4 ? 0x88 : 0x80));
  const __m256i one = _mm256_set1_epi16(1), sixteen = _mm256_set1_epi16(16);
  const auto low = [&](__m256i w) { return _mm256_and_si256(w, nibble); };
  const auto high = [&](__m256i w) { return _mm256_and_si256(_mm256_srli_epi32(w, 4), nibble); };
  const uint8_t* x = tile;
  const int32_t* start = reinterpret_cast<const int32_t*>(tile + matrix.kp * M);
  __m256 acc[M][V];
  QM_EACH_ROW QM_EACH_VECTOR acc[i][v] = _mm256_setzero_ps();
  for (int64_t b = 0; b < matrix.blocks; ++b, start += M) {
    int64_t offset = b * matrix.block_bytes;
    __m256i dot[M][V];
    QM_EACH_ROW QM_EACH_VECTOR dot[i][v] = _mm256_set1_epi32(start[i]);
    const uint8_t* const end = x + matrix.block * M;
    do {  // chunks of 32 columns
      __m256i sum[M][2];
      QM_EACH_ROW sum[i][0] = sum[i][1] = _mm256_setzero_si256();
      prefetch(panels, offset);
      if constexpr (kBits == 4) {
#pragma GCC unroll 4
        for (int c = 0; c < 4; ++c) {
          const int64_t from = offset + c / 2 * 64;
          const __m256i a = _mm256_xor_si256(load_dwords<4>(panels, 0, from, c % 2), flip);
          const __m256i d = _mm256_xor_si256(load_dwords<4>(panels, 1, from, c % 2), flip);
          multiply4(low(a), low(d), x + 4 * c * M, sum);
          multiply4(high(a), high(d), x + (4 * c + 16) * M, sum);
        }
      } else {
#pragma GCC unroll 8
        for (int c = 0; c < 8; ++c) {
          const __m256i a = _mm256_xor_si256(load_dwords<8>(panels, 0, offset + c / 2 * 32, c % 2), flip);
          multiply4(low(a), high(a), x + 4 * c * M, sum);
        }
      }
      QM_EACH_ROW {
        dot[i][0] = _mm256_add_epi32(dot[i][0], _mm256_madd_epi16(sum[i][0], one));
        dot[i][V - 1] = _mm256_add_epi32(dot[i][V - 1], _mm256_madd_epi16(sum[i][1], kBits == 4 ? one : sixteen));
      }
      x += 32 * M;
      offset += 128;
    } while (x != end);
    QM_EACH_VECTOR {
      if (matrix.grouped) {
        const __m256 scale =
            load_scales<kBits>(panels, v, b * matrix.block_bytes + matrix.codes_bytes, matrix.scale_type);
        QM_EACH_ROW acc[i][v] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot[i][v]), scale, acc[i][v]);
      } else {
        QM_EACH_ROW acc[i][v] = _mm256_castsi256_ps(dot[i][v]);
      }
    }
  }
  const float* steps = reinterpret_cast<const float*>(start);
  const int32_t* zero_points = start + M;
  QM_EACH_VECTOR {
    const __m256i sums = load_rows<kBits>(panels, v, matrix.tail());
    const __m256 scale = load_rows_ps<kBits>(panels, v, matrix.tail() + 4 * matrix.nr);  // channelwise
    const __m256 bias = load_rows_ps<kBits>(panels, v, matrix.tail() + (matrix.grouped ? 4 : 8) * matrix.nr);
    QM_EACH_ROW {
      const __m256 rows = swap_lanes(acc[i][v]), step = _mm256_set1_ps(steps[i]);
      __m256 y;
      if (matrix.grouped) {
        const __m256 z = _mm256_set1_ps(static_cast<float>(-zero_points[i]));
        y = _mm256_mul_ps(_mm256_fmadd_ps(_mm256_castsi256_ps(sums), z, rows), step);
      } else {
        const __m256i product =
            kBits == 4 ? _mm256_slli_epi32(_mm256_castps_si256(rows), 4) : _mm256_castps_si256(rows);
        const __m256i corrected =
            _mm256_add_epi32(product, _mm256_mullo_epi32(sums, _mm256_set1_epi32(-zero_points[i])));
        y = _mm256_mul_ps(_mm256_cvtepi32_ps(corrected), _mm256_mul_ps(scale, step));
      }
      store_rows<kBits>(store, v, i * row_stride, _mm256_add_ps(y, bias));
    }
  }
}

// Float activations: a code is the sign extension of its bits, one column at a time.
template <int M, int kBits>
void float_tile(const PanelMatrix& matrix, const Avx2Group& panels, const uint8_t* tile, const Avx2Store& store,
                int64_t row_stride) {
  constexpr int V = vectors(kBits);
  const float* x = reinterpret_cast<const float*>(tile);
  __m256 acc[M][V];
  QM_EACH_ROW QM_EACH_VECTOR acc[i][v] = _mm256_setzero_ps();
  for (int64_t b = 0; b < matrix.blocks; ++b) {
    int64_t offset = b * matrix.block_bytes;
    __m256 partial[M][V];
    QM_EACH_ROW QM_EACH_VECTOR partial[i][v] = _mm256_setzero_ps();
    const float* const end = x + matrix.block * M;
    do {  // 8-bit: 8 columns; 4-bit: 16 of a chunk's 32, in the low or in the high nibbles
      const int nibbles = kBits == 4 ? 2 : 1;
#pragma GCC unroll 2
      for (int shift = 28; shift > 28 - 4 * nibbles; shift -= 4)
#pragma GCC unroll 4
        for (int c = 0; c < 2 * nibbles; ++c) {
          __m256i w[V];
          QM_EACH_VECTOR w[v] = load_dwords<kBits>(panels, v, offset + c / 2 * 64, c % 2);
#pragma GCC unroll 4
          for (int byte = 0; byte < 4; ++byte, x += M) {
            __m256 value[V];
            QM_EACH_VECTOR value[v] = _mm256_cvtepi32_ps(
                _mm256_srai_epi32(_mm256_slli_epi32(w[v], (kBits == 4 ? shift : 24) - 8 * byte), 32 - kBits));
            QM_EACH_ROW {
              const __m256 x1 = _mm256_broadcast_ss(x + i);
              QM_EACH_VECTOR partial[i][v] = _mm256_fmadd_ps(x1, value[v], partial[i][v]);
            }
          }
        }
      offset += kBits == 4 ? 128 : 32;
    } while (x != end);
    QM_EACH_VECTOR {
      if (matrix.grouped) {
        const __m256 scale =
            load_scales<kBits>(panels, v, b * matrix.block_bytes + matrix.codes_bytes, matrix.scale_type);
        QM_EACH_ROW acc[i][v] = _mm256_fmadd_ps(partial[i][v], scale, acc[i][v]);
      } else {
        QM_EACH_ROW acc[i][v] = partial[i][v];
      }
    }
  }
  QM_EACH_VECTOR {
    const __m256 bias = load_rows_ps<kBits>(panels, v, matrix.tail() + (matrix.grouped ? 4 : 8) * matrix.nr);
    __m256 scale = load_rows_ps<kBits>(panels, v, matrix.tail() + 4 * matrix.nr);  // channelwise
    if (kBits == 4) scale = _mm256_mul_ps(scale, _mm256_set1_ps(16.0f));
    QM_EACH_ROW {
      const __m256 rows = swap_lanes(acc[i][v]);
      store_rows<kBits>(store, v, i * row_stride,
                        _mm256_add_ps(matrix.grouped ? rows : _mm256_mul_ps(rows, scale), bias));
    }
  }
}

using Avx2TileFunction = void (*)(const PanelMatrix&, const Avx2Group&, const uint8_t*, const Avx2Store&, int64_t);
template <int... M>
constexpr auto tile_table(std::integer_sequence<int, M...>) {
  struct Avx2PlainTiles {
    Avx2TileFunction of[2][2][sizeof...(M)];  // [quantized][8 bits][m - 1]
  };
  return Avx2PlainTiles{{{{float_tile<M + 1, 4>...}, {float_tile<M + 1, 8>...}},
                         {{quantized_tile<M + 1, 4>...}, {quantized_tile<M + 1, 8>...}}}};
}
constexpr auto kTiles = tile_table(std::make_integer_sequence<int, kTileRows>());

// Tiles of FORMAT.md 2.7 and 2.8.
template <int... M>
constexpr auto scaled_table(std::integer_sequence<int, M...>) {
  struct Avx2Tiles {
    Avx2TileFunction of[2][3][sizeof...(M)];  // [quantized][e2m1, 4 bits, 8 bits][m - 1]
  };
  return Avx2Tiles{
      {{{scaled_float_tile<M + 1, Avx2E2m1>...},
        {scaled_float_tile<M + 1, Avx2Int4>...},
        {scaled_float_tile<M + 1, Avx2Int8>...}},
       {{scaled_tile<M + 1, Avx2E2m1>...}, {scaled_tile<M + 1, Avx2Int4>...}, {scaled_tile<M + 1, Avx2Int8>...}}}};
}
constexpr auto kScaledTiles = scaled_table(std::make_integer_sequence<int, kTileRows>());

Avx2TileFunction tile_function(const PanelMatrix& p, bool quantized, int m) {
  if (p.plain()) return kTiles.of[quantized][p.bits == 8][m - 1];
  return kScaledTiles.of[quantized][is_e2m1(p.format) ? 0 : p.bits == 4 ? 1 : 2][m - 1];
}

void multiply(const PanelProduct& product) {
  const PanelMatrix& p = *product.matrix;
  if (is_k(p.format)) return multiply_k<Avx2Lanes, kTileRows, true>(product);
  if (p.columns) return multiply_columns<Avx2Lanes, kTileRows, true>(product);
  for (int64_t panel = 0; panel < product.panel_count; panel += 2) {
    Avx2Group g;
    Avx2Store store;
    store.count = 0;
    for (int i = 0; i < 2; ++i) {
      const bool exists = panel + i < product.panel_count;
      const int64_t index = exists ? panel + i : panel;
      g.panel[i] = product.panels + index * p.stride;
      store.to[i] = product.out + index % product.halves * product.half_stride + index / product.halves * p.nr;
      store.count += exists;
    }
    for (int64_t t = 0; t < product.tile_count; ++t) {
      const TokenTile& tile = product.tiles[t];
      tile_function(p, product.quantized, tile.m)(p, g, tile.data, store, product.row_stride);
      for (float*& to : store.to) to += tile.m * product.row_stride;
    }
  }
}

void pack_rows(const PanelMatrix& p, bool quantized, const Row* rows, int m, uint8_t* out) {
  (is_k(p.format) ? pack_k_tile : pack_tile_offset)(p, quantized, rows, m, out);
}

bool usable() { return x86_has(kSavesYmm, bit_AVX | bit_FMA | bit_F16C, bit_AVX2, 0); }

}  // namespace

const CpuKernel panel_avx2 = {"panel_avx2", usable,         kTileRows,       QM_ELEMENTWISE(pack_rows),
                              multiply,     int8_peak_avx2, &attention_avx2, &linear_attention_avx2};

}  // namespace quantmoe
