// Prompts with float activations: the panels of row_tile.h times many tokens. Codes become floats once for all tokens,
// some rows and columns at a time. These stay in L1 while the tokens' tiles pass:
//
//   weights [pair][column][2 vectors of rows]  x  tile [column][token]  ->  sums [pair][token][2 vectors]
//
// A pair of vectors times some tokens fills the registers: weights are loaded once for all of these tokens, activations
// once for both vectors. The order of operations is as in float_tile and scaled_float_tile, which take fewer tokens.
// V is what row_tile.h says, and has
//   kFloatTokens                   most tokens in registers
//   kManyTokens                    from how many on this pays
// Everything is in an unnamed namespace, as in elementwise.h.
#pragma once
#include <algorithm>
#include <utility>

#include "cpu/tiles/column_tile.h"

namespace quantmoe {
namespace {

#define QM_EACH_GROUP _Pragma("GCC unroll 4") for (int group = 0; group < kGroups; ++group)

template <class V>
struct FloatPanels {
  using Floats = typename V::Floats;
  using Group = Panels<V::kMost>;
  using Pair = Floats[2];
  static constexpr int kRows = 64, kColumns = 64, kTokens = 96;  // at a time; of tokens what a layer's task has
  static constexpr int kPairs = kRows / (2 * V::kRows);

  // Columns that are floats at a time: a block's or some blocks' groups, or a part of a group.
  struct Piece {
    int64_t block, from;  // the block of the first column, and its place in the block
    int blocks, groups;   // in all
    int columns;          // of a group
    bool begins, ends;    // whether groups do here
  };

  const PanelMatrix& matrix;
  alignas(64) Pair weights[kPairs][kColumns], scales[kPairs][kColumns / 16];
  // Of all groups so far, and of one that ends in a later piece.
  alignas(64) Pair sums[kPairs][kTokens], partial[kPairs][kTokens];

  explicit FloatPanels(const PanelMatrix& whole) : matrix(whole) {}

  // The piece's weights and scales to vectors `first` and up of a pair.
  template <class C, bool kPlain>
  void load(const Group& panels, const Piece& piece, int pair, int first) {
    constexpr int kBits = C::kBits, kVectors = V::template kVectors<kBits>;
    const int64_t scale_bytes = matrix.nr * scale_size(matrix.scale_type),
                  columns = piece.groups / piece.blocks * piece.columns;
    Pair *pairs = weights[pair], *scale = scales[pair];
    const auto store = [&](const Floats(&w)[kVectors]) __attribute__((always_inline)) {
      for (int v = 0; v < kVectors; ++v) (*pairs)[first + v] = w[v];
      ++pairs;
    };
    for (int64_t block = piece.block; block < piece.block + piece.blocks; ++block) {
      const int64_t base = block * matrix.block_bytes;
      int64_t offset = base + 4 * piece.from;  // of nr * bits / 8 = 4 or, for 8 bits, as many bytes a column
      const int64_t end = offset + 4 * columns;
      if constexpr (kPlain) {
        for (; offset < end; offset += kBits == 4 ? 128 : 32) {
          V::template prefetch_group<kBits>(panels, offset);
          V::template signed_columns<kBits, 1>(&panels, offset, store);
        }
      } else {
        Floats zero[kVectors];
        const auto begin = [&](int part) __attribute__((always_inline)) {
          for (int v = 0; v < kVectors; ++v)
            zero[v] =
                matrix.zero_points
                    ? V::floats(V::template load_zeros<kBits>(panels, v, base + matrix.zeros() + part * matrix.nr))
                    : V::broadcast(kBits == 4 ? 8.0f : 128.0f);
        };
        const auto column = [&](Floats(&w)[kVectors]) __attribute__((always_inline)) {
          if constexpr (!C::kMultiplied)
            for (int v = 0; v < kVectors; ++v) w[v] = V::subtract(w[v], zero[v]);
          store(w);
        };
        begin(0);
        for (; offset < end; offset += 128) {
          V::template prefetch_group<kBits>(panels, offset);
          V::template columns<C, 1>(
              &panels, offset, column, [&]() __attribute__((always_inline)) {
                if (matrix.parts == 2) begin(1);
              });
        }
      }
      if (!piece.ends) continue;
      for (int64_t at_scales = base + matrix.codes_bytes, part = 0; part < matrix.parts;
           ++part, at_scales += scale_bytes, ++scale)
        for (int v = 0; v < kVectors; ++v)
          (*scale)[first + v] = kPlain ? V::template load_scales<kBits>(panels, v, at_scales, matrix.scale_type)
                                       : V::template load_group_scales<C>(matrix, panels, v, at_scales);
    }
  }

  // M tokens, whose columns are `stride` floats apart from x on.
  template <int M>
  static void multiply(const Piece& piece, const float* x, int64_t stride, const Pair* weights, const Pair* scale,
                       Pair* sum, Pair* part) {
#define QM_EACH_SUM QM_EACH_TOKEN _Pragma("GCC unroll 2") for (int v = 0; v < 2; ++v)
    for (int group = 0; group < piece.groups; ++group, ++scale) {
      Floats now[M][2];
      QM_EACH_SUM now[i][v] = V::broadcast(0.0f);
      if (!piece.begins) QM_EACH_SUM now[i][v] = part[i][v];
      const Pair* const end = weights + piece.columns;
      do {
        _Pragma("GCC unroll 4") for (int c = 0; c < 4; ++c, ++weights, x += stride) {
          QM_EACH_TOKEN {
            const Floats number = V::broadcast(x + i);
            _Pragma("GCC unroll 2") for (int v = 0; v < 2; ++v) now[i][v] = V::fma(number, (*weights)[v], now[i][v]);
          }
        }
      } while (weights != end);
      const Floats factor[2] = {(*scale)[0],
                                (*scale)[1]};  // sums might be anywhere: the compiler would read it for each
      if (piece.ends)
        QM_EACH_SUM sum[i][v] = V::fma(now[i][v], factor[v], sum[i][v]);
      else
        QM_EACH_SUM part[i][v] = now[i][v];
    }
#undef QM_EACH_SUM
  }
  template <int... M>
  static constexpr auto products(std::integer_sequence<int, M...>) {
    struct Products {
      decltype(&multiply<1>) of[sizeof...(M)];  // [tokens - 1]
    };
    return Products{{multiply<M + 1>...}};
  }

  void multiply_tiles(const Piece& piece, const TokenTile* tiles, int64_t count, int pairs) {
    static constexpr auto kProducts = products(std::make_integer_sequence<int, V::kFloatTokens>());
    int row = 0;
    for (const TokenTile* tile = tiles; tile != tiles + count; ++tile) {
      const float* x = reinterpret_cast<const float*>(tile->data) + (piece.block * matrix.block + piece.from) * tile->m;
      int left = tile->m;
      if (tile + 1 != tiles + count) {  // the next one's columns: no prefetcher knows where they begin
        const int64_t tokens = tile[1].m;
        const uint8_t* const next = tile[1].data + 4 * tokens * (piece.block * matrix.block + piece.from);
        for (int64_t i = 0; i < 4 * tokens * piece.groups * piece.columns; i += 64) __builtin_prefetch(next + i);
      }
      for (int passes = static_cast<int>(ceil_div(left, V::kFloatTokens)); passes > 0; --passes) {  // even ones
        const int tokens = static_cast<int>(ceil_div(left, passes));
        for (int i = 0; i < pairs; ++i)
          kProducts.of[tokens - 1](piece, x, tile->m, weights[i], scales[i], sums[i] + row, partial[i] + row);
        x += tokens;
        row += tokens;
        left -= tokens;
      }
    }
  }

  template <class C, bool kPlain>
  void store(const Group& panels, int pair, int first, int rows, int64_t row_stride) const {
    constexpr int kBits = C::kBits, kVectors = V::template kVectors<kBits>;
    for (int v = 0; v < kVectors; ++v) {
      const Floats bias = V::as_floats(V::template load_tail<kBits>(panels, v, matrix.biases()));
      Floats factor = V::as_floats(V::template load_tail<kBits>(panels, v, matrix.tail() + 4 * matrix.nr));
      if (kPlain && kBits == 4) factor = V::multiply(factor, V::broadcast(16.0f));  // channelwise
      const Pair* const sum = (matrix.grouped ? sums : partial)[pair];
      for (int i = 0; i < rows; ++i) {
        Floats y = V::rows(sum[i][first + v]);
        if (kPlain ? !matrix.grouped : C::kMultiplied) y = V::multiply(y, factor);
        V::template store_rows<kBits>(panels, v, i * row_stride, V::add(y, bias));
      }
    }
  }

  // kPlain: PanelMatrix::plain().
  template <class C, bool kPlain>
  static void run(const PanelProduct& product) {
    constexpr int kVectors = V::template kVectors<C::kBits>, kGroups = 2 / kVectors;  // of panels, in a pair
    FloatPanels panels(*product.matrix);
    const PanelMatrix& matrix = panels.matrix;
    const int width = V::panels_of_group(matrix.nr);
    const int64_t blocks = std::max<int64_t>(kColumns / matrix.block, 1),
                  part = std::min<int64_t>(kColumns, matrix.block);
    for (int64_t panel = 0; panel < product.panel_count; panel += kPairs * kGroups * width) {
      const int pairs =
          static_cast<int>(std::min<int64_t>(kPairs, ceil_div(product.panel_count - panel, kGroups * width)));
      Group groups[kPairs * kGroups];
      for (int i = 0; i < pairs * kGroups; ++i) {
        groups[i] = Group(product, panel + i * width, width);
        groups[i].ahead *= kPairs * kGroups;
      }
      for (int64_t first = 0, count; first < product.tile_count; first += count) {
        int rows = 0;
        for (count = 0; first + count < product.tile_count && rows + product.tiles[first + count].m <= kTokens; ++count)
          rows += product.tiles[first + count].m;
        for (int pair = 0; pair < pairs; ++pair)
          for (int i = 0; i < rows; ++i)
            for (Floats& sum : panels.sums[pair][i]) sum = V::broadcast(0.0f);
        for (int64_t block = 0; block < matrix.blocks; block += blocks)
          for (int64_t from = 0; from < matrix.block; from += part) {
            const int here = static_cast<int>(std::min(blocks, matrix.blocks - block));
            const int columns = static_cast<int>(std::min(part, matrix.block - from) / matrix.parts);
            const Piece piece{block,
                              from,
                              here,
                              here * matrix.parts,
                              columns,
                              from == 0,
                              matrix.grouped && from + part >= matrix.block};
            for (int i = 0; i < pairs * kGroups; ++i)
              panels.load<C, kPlain>(groups[i], piece, i / kGroups, i % kGroups * kVectors);
            panels.multiply_tiles(piece, product.tiles + first, count, pairs);
          }
        for (int i = 0; i < pairs * kGroups; ++i) {
          if (groups[i].count)
            panels.store<C, kPlain>(groups[i], i / kGroups, i % kGroups * kVectors, rows, product.row_stride);
          groups[i].advance(rows * product.row_stride);
          groups[i].ahead = 0;
        }
      }
    }
  }
};

template <class V>
bool has_many_tokens(const PanelProduct& product) {
  int64_t tokens = 0;
  for (int64_t t = 0; t < product.tile_count; ++t) tokens += product.tiles[t].m;
  return tokens >= V::kManyTokens;
}

template <class V>
void multiply_float_panels(const PanelProduct& product) {
  using Of = FloatPanels<V>;
  const PanelMatrix& matrix = *product.matrix;
  if (is_e2m1(matrix.format)) return Of::template run<typename V::E2m1, false>(product);
  if (matrix.bits == 8)
    return matrix.plain() ? Of::template run<typename V::Int8, true>(product)
                          : Of::template run<typename V::Int8, false>(product);
  return matrix.plain() ? Of::template run<typename V::Int4, true>(product)
                        : Of::template run<typename V::Int4, false>(product);
}

}  // namespace
}  // namespace quantmoe
