// The panels of FORMAT.md 2.8, codes that are floats, for every instruction set: 16 rows column by column. V has kRows
// of them in its lanes. V is what k_tile.h says, and has
//   bf16s(at), e4m3s(at), e8m0s(at)  kRows numbers as Floats; e4m3 times 2^-8
//   kColumns                         2 where e4m3_columns(at, first, second) loads two columns with fewer instructions
//   kColumnBytes                     of a panel that a step of the loop takes: 64 or 128
//   number(at)                       what fma takes for a float times Floats
//   panels_of(tokens)                panels at once: few tokens alone would wait for each other's sums. Most for one
//
//   panel     column 0  [row 0 .. row 15]         V: kRows of them              sums, M tokens x rows:
//             column 1  [row 0 .. row 15]    x    number(x[token][column])  ->  sum += numbers * x, column by column
//             ...                                 in all lanes
// Everything is in an unnamed namespace, as in elementwise.h.
#pragma once
#include <utility>

#include "cpu/tiles/k_tile.h"

namespace quantmoe {
namespace {

// `width` panels side by side, from `first` on, and where their results go. Those past the end repeat the last one;
// they are not stored.
template <int kMost>
struct Panels {
  const uint8_t* panel[kMost];
  float* to[kMost];
  int count;      // that exist
  int64_t ahead;  // bytes to the next ones, which the first tile fetches; 0 for later tiles

  Panels() = default;
  Panels(const PanelProduct& product, int64_t first, int width) : count(0), ahead(width * product.matrix->stride) {
    for (int i = 0; i < width; ++i) {
      const bool exists = first + i < product.panel_count;
      const int64_t index = exists ? first + i : product.panel_count - 1;
      panel[i] = product.panels + index * product.matrix->stride;
      to[i] = product.out + index % product.halves * product.half_stride + index / product.halves * product.matrix->nr;
      count += exists;
    }
  }
  // To the next tile's results.
  void advance(int64_t floats) {
    for (int i = 0; i < count; ++i) to[i] += floats;
  }
};
template <class V>
using ColumnPanels = Panels<V::panels_of(1)>;

template <class V, int32_t kFormat>
[[gnu::always_inline]] inline typename V::Floats load_numbers(const uint8_t* at) {
  if constexpr (kFormat == k_format_fp8_e4m3) return V::e4m3s(at);
  if constexpr (kFormat == k_format_f16) return V::halves(at);
  if constexpr (kFormat == k_format_bf16) return V::bf16s(at);
}
template <class V>
inline typename V::Floats load_column_scales(int32_t type, const uint8_t* at, int row) {
  if (type == k_scale_type_f32) return V::load_floats(at + 4 * row);
  if (type == k_scale_type_f16) return V::halves(at + 2 * row);
  if (type == k_scale_type_bf16) return V::bf16s(at + 2 * row);
  return V::e8m0s(at + row);
}

// Tokens [first, first + M) of a tile of `tokens`, M of M where kWhole; x f32 [kp][tokens].
template <class V, int M, int32_t kFormat, bool kWhole>
void column_tile(const PanelMatrix& matrix, const ColumnPanels<V>& panels, const uint8_t* tile, int tokens, int first,
                 int64_t row_stride) {
  using Floats = typename V::Floats;
  constexpr int P = V::panels_of(M), S = 16 / V::kRows;  // panels; vectors of a column
  constexpr int kBytes = code_bits(kFormat) / 8, kColumns = V::kColumnBytes / 16 / kBytes;  // of a step
  constexpr int kStep = kFormat == k_format_fp8_e4m3 ? V::kColumns : 1;
  constexpr int64_t kAhead = P == 1 ? kSoon : 2048;  // bytes, in each panel of 2-byte numbers
  const int tile_tokens = kWhole ? M : tokens;
#define QM_EACH_COLUMN \
  _Pragma("GCC unroll 4") for (int v = 0; v < P; ++v) _Pragma("GCC unroll 4") for (int s = 0; s < S; ++s)
  for (int panel = 0; panel < panels.count; panel += P) {
    const float* x = reinterpret_cast<const float*>(tile) + first;
    Floats acc[M][P][S], partial[M][P][S];
    QM_EACH_TOKEN QM_EACH_COLUMN acc[i][v][s] = V::broadcast(0.0f);
    for (int64_t block = 0; block < matrix.blocks; ++block) {
      QM_EACH_TOKEN QM_EACH_COLUMN partial[i][v][s] = V::broadcast(0.0f);
      int64_t offset = block * matrix.block_bytes;
      const int64_t end = offset + matrix.codes_bytes;
      do {
        if (kBytes == 1 && panels.ahead)  // the next panels, one after the other
          prefetch_lines<V>(panels.panel[panel] + P * (matrix.stride + offset), P * V::kColumnBytes / 64);
        _Pragma("GCC unroll 4") for (int v = 0; v < P; ++v) {
          const uint8_t* const at = panels.panel[panel + v] + offset;
          if (kBytes == 2 && panels.ahead) prefetch_lines<V>(at + kAhead, V::kColumnBytes / 64);
          _Pragma("GCC unroll 8") for (int column = 0; column < kColumns; column += kStep) {
            Floats weights[kStep][S];
            if constexpr (kStep == 2)
              V::e4m3_columns(at + 16 * column, weights[0][0], weights[1][0]);
            else
              _Pragma("GCC unroll 4") for (int s = 0; s < S; ++s) weights[0][s] =
                  load_numbers<V, kFormat>(at + (16 * column + s * V::kRows) * kBytes);
            _Pragma("GCC unroll 2") for (int j = 0; j < kStep; ++j) QM_EACH_TOKEN {
              const auto number = V::number(x + (column + j) * tile_tokens + i);
              _Pragma("GCC unroll 4") for (int s = 0; s < S; ++s) partial[i][v][s] =
                  V::fma(number, weights[j][s], partial[i][v][s]);
            }
          }
        }
        x += kColumns * tile_tokens;
        offset += V::kColumnBytes;
      } while (offset != end);
      QM_EACH_COLUMN {
        const Floats scale = load_column_scales<V>(matrix.scale_type, panels.panel[panel + v] + offset, s * V::kRows);
        QM_EACH_TOKEN acc[i][v][s] = V::fma(partial[i][v][s], scale, acc[i][v][s]);
      }
    }
    QM_EACH_COLUMN if (panel + v < panels.count) {
      const uint8_t* const at = panels.panel[panel + v] + 4 * s * V::kRows;
      const Floats multiplier = V::load_floats(at + matrix.tail() + 64), bias = V::load_floats(at + matrix.biases());
      float* const to = panels.to[panel + v] + first * row_stride + s * V::kRows;
      QM_EACH_TOKEN V::store(to + i * row_stride, V::add(V::multiply(acc[i][v][s], multiplier), bias));
    }
  }
#undef QM_EACH_COLUMN
}

template <class V>
using ColumnTile = void (*)(const PanelMatrix&, const ColumnPanels<V>&, const uint8_t*, int, int, int64_t);
template <class V, bool kWhole, int... M>
constexpr auto column_tiles(std::integer_sequence<int, M...>) {
  struct ColumnTiles {
    ColumnTile<V> of[3][sizeof...(M)];  // [fp8_e4m3, bf16, f16][tokens - 1]
  };
  return ColumnTiles{{{column_tile<V, M + 1, k_format_fp8_e4m3, kWhole>...},
                      {column_tile<V, M + 1, k_format_bf16, kWhole>...},
                      {column_tile<V, M + 1, k_format_f16, kWhole>...}}};
}

// kMost: tokens at a time. Tiles have as many at most where kWhole.
template <class V, int kMost, bool kWhole>
void multiply_columns(const PanelProduct& product) {
  static constexpr auto kTiles = column_tiles<V, kWhole>(std::make_integer_sequence<int, kMost>());
  const PanelMatrix& matrix = *product.matrix;
  const auto* const tiles = kTiles.of[matrix.format == k_format_fp8_e4m3 ? 0 : matrix.format == k_format_bf16 ? 1 : 2];
  constexpr int kWidth = V::panels_of(1);
  for (int64_t panel = 0; panel < product.panel_count; panel += kWidth) {
    ColumnPanels<V> panels(product, panel, kWidth);
    for (int64_t tile_index = 0; tile_index < product.tile_count; ++tile_index, panels.ahead = 0) {
      const TokenTile& tile = product.tiles[tile_index];
      for (int first = 0, passes = static_cast<int>(ceil_div(tile.m, kMost)); passes > 0; --passes) {  // even ones
        const int count = static_cast<int>(ceil_div(tile.m - first, passes));
        tiles[count - 1](matrix, panels, tile.data, tile.m, first, product.row_stride);
        first += count;
      }
      panels.advance(tile.m * product.row_stride);
    }
  }
}

}  // namespace
}  // namespace quantmoe
