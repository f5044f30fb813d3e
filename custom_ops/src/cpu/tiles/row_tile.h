// The panels of int4, int8 and e2m1 codes on x86 (FORMAT.md 2.5, 2.7 and 2.8). A weight row is a lane of 32 bits, as
// panel_avx2.cc and avx512_rows.h draw it. NEON has its own tiles (neon.h): sdot and smmla multiply 8 columns of two
// rows with one or two tokens, so lanes and loops differ.
//
// V is what column_tile.h says, and has
//   kTileRows                      most tokens of a tile
//   kMost, panels_of_group(nr)     panels side by side: at most, and of nr rows each
//   kVectors<bits>                 vectors that their rows fill
//   Int4, E2m1, Int8               codes: kBits, and kMultiplied where the tail has multipliers
//   Integers, integers(n)          an int32 of each lane; n in all of them
//   pairs(zeros), starts(pairs, n) what a group with zero points starts from, n being pack_tile_offset's pair
//   corrected<bits>(dot, sums, z)  the product of a row: dot, times 16 where codes have 4 bits, plus sums * z
//   load_tail<bits>, rows, store_rows<bits>
//                                  numbers of the tail, and sums, in the order that store_rows takes
//   load_scales<bits>, load_group_scales<C>, load_zeros<bits>
//                                  in lane order; the first of f32, f16 and bf16 alone
//   kStep<bits>, dot_step<M, C>    columns that a step of a plain tile adds to dot
//   dot_chunk<M, C>, dot_part<M, C>
//                                  adds 32 columns of a scaled tile, or 16 of them
//   float_groups(M)                groups of panels at once: the sums of few tokens alone would wait for each other
//   signed_columns<bits, groups>(panels, offset, column)
//                                  column(values) for each column of 128 bytes of 4-bit codes, or of 32 of 8-bit ones;
//                                  values [groups][kVectors]
//   columns<C, groups>(panels, offset, column, next)
//                                  of unsigned codes and e2m1, of 32 columns; next() between the first and the last 16
//   prefetch_group<bits, bytes>    what comes after so many bytes of each panel, 128 of a step; the scales after a
//                                  block's codes have a call of their own, as a line left out waits for memory
//   kFloatTokens, kManyTokens      float_panels.h's
//   opaque(x)                      where the compiler should not know how x relates to other induction variables
// Everything is in an unnamed namespace, as in elementwise.h.
#pragma once
#include <utility>

#include "cpu/tiles/float_panels.h"

namespace quantmoe {
namespace {

// Written out so that arrays indexed by v live in registers.
#define QM_EACH_VECTOR _Pragma("GCC unroll 2") for (int v = 0; v < kVectors; ++v)
#define QM_EACH_SUM QM_EACH_TOKEN QM_EACH_VECTOR

template <class V, int kBits, int kGroups, int kBytes = 128>
[[gnu::always_inline]] inline void prefetch_groups(const Panels<V::kMost>* panels, int64_t offset) {
  QM_EACH_GROUP V::template prefetch_group<kBits, kBytes>(panels[group], offset);
}

// The results of a tile's tokens from sum(i, v), and from what the tile has after its sums of x.
template <class V, class C, Steps kSteps, class Sum>
[[gnu::always_inline]] inline void store_plain(const PanelMatrix& matrix, const Panels<V::kMost>& panels,
                                               const int32_t* tail, int tokens, int64_t row_stride, const Sum& sum) {
  constexpr int kBits = C::kBits, kVectors = V::template kVectors<kBits>;
  const float* steps = reinterpret_cast<const float*>(tail);
  const int32_t* zero_points = tail + tokens;
  QM_EACH_VECTOR {
    const auto sums = V::template load_tail<kBits>(panels, v, matrix.tail());
    const auto bias = V::as_floats(V::template load_tail<kBits>(panels, v, matrix.biases()));
    const auto scale =
        V::as_floats(V::template load_tail<kBits>(panels, v, matrix.tail() + 4 * matrix.nr));  // channelwise
    _Pragma("GCC unroll 32") for (int i = 0; i < tokens; ++i) {
      const auto all = V::rows(sum(i, v));
      typename V::Floats y;
      if constexpr (kSteps != kRowStep)
        y = matrix.grouped ? all : V::multiply(all, kBits == 4 ? V::multiply(scale, V::broadcast(16.0f)) : scale);
      else if (const auto step = V::broadcast(steps[i]); matrix.grouped)
        y = V::multiply(V::fma(V::as_floats(sums), V::broadcast(static_cast<float>(-zero_points[i])), all), step);
      else
        y = V::multiply(V::floats(V::template corrected<kBits>(V::as_integers(all), sums, -zero_points[i])),
                        V::multiply(scale, step));
      V::template store_rows<kBits>(panels, v, i * row_stride, V::add(y, bias));
    }
  }
}
template <class V, class C, Steps kSteps, class Sum>
[[gnu::always_inline]] inline void store_scaled(const PanelMatrix& matrix, const Panels<V::kMost>& panels,
                                                const int32_t* tail, int tokens, int64_t row_stride, const Sum& sum) {
  constexpr int kBits = C::kBits, kVectors = V::template kVectors<kBits>;
  const float* steps = reinterpret_cast<const float*>(tail);
  const int32_t* zero_points = tail + tokens;
  QM_EACH_VECTOR {
    const auto sums = V::as_floats(V::template load_tail<kBits>(panels, v, matrix.tail()));
    const auto multiplier = V::as_floats(V::template load_tail<kBits>(panels, v, matrix.tail() + 4 * matrix.nr));
    const auto bias = V::as_floats(V::template load_tail<kBits>(panels, v, matrix.biases()));
    _Pragma("GCC unroll 32") for (int i = 0; i < tokens; ++i) {
      typename V::Floats y = V::rows(sum(i, v));
      if constexpr (kSteps == kRowStep) y = V::fma(sums, V::broadcast(static_cast<float>(-zero_points[i])), y);
      if constexpr (C::kMultiplied) y = V::multiply(y, multiplier);
      if constexpr (kSteps == kRowStep) y = V::multiply(y, V::broadcast(steps[i]));
      V::template store_rows<kBits>(panels, v, i * row_stride, V::add(y, bias));
    }
  }
}

// A group's panels times a tile of M tokens, where scales are of rows or of blocks.
template <class V, int M, class C, Steps kSteps>
void quantized_tile(const PanelMatrix& matrix, const Panels<V::kMost>& panels, const uint8_t* tile,
                    int64_t row_stride) {
  constexpr int kBits = C::kBits, kVectors = V::template kVectors<kBits>, kStep = V::template kStep<kBits>;
  const uint8_t* x = tile;
  const int32_t* start = reinterpret_cast<const int32_t*>(tile + matrix.kp * M);
  [[maybe_unused]] const float* steps = reinterpret_cast<const float*>(start + matrix.spans() * M);
  typename V::Floats acc[M][kVectors];
  QM_EACH_SUM acc[i][v] = V::broadcast(0.0f);
  for (int64_t block = 0; block < matrix.blocks; ++block) {
    int64_t offset = block * matrix.block_bytes;
    const uint8_t* const end_of_block = x + matrix.block * M;
    [[maybe_unused]] typename V::Floats scales[kVectors];
    if constexpr (kSteps != kRowStep) QM_EACH_VECTOR if (matrix.grouped) {
        scales[v] = V::template load_scales<kBits>(panels, v, offset + matrix.codes_bytes, matrix.scale_type);
      }
    do {
      typename V::Integers dot[M][kVectors];  // of this span only: live across spans, compilers keep it in memory
      QM_EACH_SUM dot[i][v] = V::integers(start[i]);
      const uint8_t* const end = kSteps == kRowStep ? end_of_block : x + matrix.span * M;
      do {  // a span is never empty; saying so keeps the accumulators out of memory
        V::template dot_step<M, C>(panels, offset, x, dot);
        x += kStep * M;
        V::opaque(x);
        offset += 4 * kStep;
      } while (x != end);
      start += M;
      if constexpr (kSteps != kRowStep) {
        if (matrix.grouped)
          QM_EACH_SUM acc[i][v] =
              V::fma(V::multiply(V::floats(dot[i][v]), scales[v]), V::broadcast(steps + i), acc[i][v]);
        else
          QM_EACH_SUM acc[i][v] = V::fma(V::floats(dot[i][v]), V::broadcast(steps + i), acc[i][v]);
        steps += M;
      } else {
        QM_EACH_VECTOR if (matrix.grouped) {
          const auto scale = V::template load_scales<kBits>(panels, v, block * matrix.block_bytes + matrix.codes_bytes,
                                                            matrix.scale_type);
          QM_EACH_TOKEN acc[i][v] = V::fma(V::floats(dot[i][v]), scale, acc[i][v]);
        }
        else {
          QM_EACH_TOKEN acc[i][v] = V::as_floats(dot[i][v]);
        }
      }
    } while (kSteps != kRowStep && x != end_of_block);
    if (kBits == 4 && matrix.grouped) V::template prefetch_group<kBits, 64>(panels, offset);
  }
  store_plain<V, C, kSteps>(
      matrix, panels, start, M, row_stride, [&](int i, int v) __attribute__((always_inline)) { return acc[i][v]; });
}

// Of float activations, for few tokens: float_panels.h takes many. kGroups: of panels.
#define QM_EACH_ROWS _Pragma("GCC unroll 4") for (int v = 0; v < kGroups * kVectors; ++v)
#define QM_EACH_FLOAT QM_EACH_TOKEN QM_EACH_ROWS
template <class V, int M, class C, int kGroups>
void float_tile(const PanelMatrix& matrix, const Panels<V::kMost>* panels, const uint8_t* tile, int64_t row_stride) {
  constexpr int kBits = C::kBits, kVectors = V::template kVectors<kBits>;
  using Floats = typename V::Floats;
  const float* x = reinterpret_cast<const float*>(tile);
  Floats acc[M][kGroups * kVectors], partial[M][kGroups * kVectors];
  QM_EACH_FLOAT acc[i][v] = V::broadcast(0.0f);
  const auto column = [&](const Floats(&w)[kGroups * kVectors]) __attribute__((always_inline)) {
    QM_EACH_TOKEN {
      const Floats number = V::broadcast(x + i);
      QM_EACH_ROWS partial[i][v] = V::fma(number, w[v], partial[i][v]);
    }
    x += M;
  };
  for (int64_t block = 0; block < matrix.blocks; ++block) {
    int64_t offset = block * matrix.block_bytes;
    QM_EACH_FLOAT partial[i][v] = V::broadcast(0.0f);
    const float* const end = x + matrix.block * M;
    do {
      if constexpr (kBits == 4) prefetch_groups<V, kBits, kGroups>(panels, offset);
      V::template signed_columns<kBits, kGroups>(panels, offset, column);
      offset += kBits == 4 ? 128 : 32;
    } while (x != end);
    if (kBits == 4 && matrix.grouped) prefetch_groups<V, kBits, kGroups, 64>(panels, offset);
    QM_EACH_ROWS if (matrix.grouped) {
      const Floats scale = V::template load_scales<kBits>(
          panels[v / kVectors], v % kVectors, block * matrix.block_bytes + matrix.codes_bytes, matrix.scale_type);
      QM_EACH_TOKEN acc[i][v] = V::fma(partial[i][v], scale, acc[i][v]);
    }
  }
  QM_EACH_ROWS {
    const auto& of = panels[v / kVectors];
    const Floats bias = V::as_floats(V::template load_tail<kBits>(of, v % kVectors, matrix.biases()));
    Floats scale = V::as_floats(V::template load_tail<kBits>(of, v % kVectors, matrix.tail() + 4 * matrix.nr));
    if (kBits == 4) scale = V::multiply(scale, V::broadcast(16.0f));  // channelwise
    QM_EACH_TOKEN {
      const Floats y = matrix.grouped ? V::rows(acc[i][v]) : V::multiply(V::rows(partial[i][v]), scale);
      V::template store_rows<kBits>(of, v % kVectors, i * row_stride, V::add(y, bias));
    }
  }
}

// kParts: groups of a block.
template <class V, int M, class C, bool kZero, int kParts, Steps kSteps>
void scaled_tile(const PanelMatrix& matrix, const Panels<V::kMost>& panels, const uint8_t* tile, int64_t row_stride) {
  constexpr int kBits = C::kBits, kVectors = V::template kVectors<kBits>;
  const uint8_t* x = tile;
  const int32_t* start = reinterpret_cast<const int32_t*>(tile + matrix.kp * M);
  [[maybe_unused]] const float* steps = reinterpret_cast<const float*>(start + matrix.spans() * M);
  const int scale_bytes = matrix.nr * scale_size(matrix.scale_type);
  typename V::Floats acc[M][kVectors];
  [[maybe_unused]] typename V::Floats of_pair[M][kVectors];
  QM_EACH_SUM acc[i][v] = V::broadcast(0.0f);
  for (int64_t block = 0; block < matrix.blocks; ++block) {
    const int64_t base = block * matrix.block_bytes;
    const uint8_t* const end_of_block = x + matrix.block * M;
    _Pragma("GCC unroll 2") for (int part = 0; part < kParts; ++part) {
      [[maybe_unused]] typename V::Integers pairs[kVectors];
      if constexpr (kZero)
        QM_EACH_VECTOR pairs[v] =
            V::pairs(V::template load_zeros<kBits>(panels, v, base + matrix.zeros() + part * matrix.nr));
      [[maybe_unused]] int64_t offset = base;
      do {  // the spans of a group
        typename V::Integers dot[M][kVectors];
        QM_EACH_SUM dot[i][v] = kZero ? V::starts(pairs[v], start[i]) : V::integers(start[i]);
        start += M;
        if constexpr (kParts == 2) {
          if (part == 0) V::template prefetch_group<kBits>(panels, base);
          V::template dot_part<M, C>(panels, base, part, x, dot);
        } else {
          const uint8_t* const end = kSteps == kRowStep ? end_of_block : x + matrix.span * M;
          do {
            V::template prefetch_group<kBits>(panels, offset);
            V::template dot_chunk<M, C>(panels, offset, x, dot);
            x += 32 * M;
            V::opaque(x);
            offset += 128;
          } while (x != end);
        }
        QM_EACH_VECTOR {
          const auto scale =
              V::template load_group_scales<C>(matrix, panels, v, base + matrix.codes_bytes + part * scale_bytes);
          QM_EACH_TOKEN {
            const auto sum = V::floats(dot[i][v]);
            if constexpr (kSteps == kRowStep)
              acc[i][v] = V::fma(sum, scale, acc[i][v]);
            else if constexpr (kSteps == kSpanStep)
              acc[i][v] = V::fma(V::multiply(sum, scale), V::broadcast(steps + i), acc[i][v]);
            else if (part == 0)
              of_pair[i][v] = V::multiply(sum, scale);
            else
              acc[i][v] = V::fma(V::fma(sum, scale, of_pair[i][v]), V::broadcast(steps + i), acc[i][v]);
          }
        }
        if (kSteps == kSpanStep || (kSteps == kPairStep && part == 1)) steps += M;
      } while (kParts == 1 && kSteps != kRowStep && x != end_of_block);
    }
    V::template prefetch_group<kBits, 64>(panels, base + matrix.codes_bytes);
    if constexpr (kParts == 2) {
      x += 32 * M;
      V::opaque(x);
    }
  }
  store_scaled<V, C, kSteps>(
      matrix, panels, start, M, row_stride, [&](int i, int v) __attribute__((always_inline)) { return acc[i][v]; });
}

template <class V, int M, class C, int kParts, int kGroups>
void scaled_float_tile(const PanelMatrix& matrix, const Panels<V::kMost>* panels, const uint8_t* tile,
                       int64_t row_stride) {
  constexpr int kBits = C::kBits, kVectors = V::template kVectors<kBits>;
  using Floats = typename V::Floats;
  const float* x = reinterpret_cast<const float*>(tile);
  const int scale_bytes = matrix.nr * scale_size(matrix.scale_type);
  Floats acc[M][kGroups * kVectors], partial[M][kGroups * kVectors], zero[kGroups * kVectors];
  QM_EACH_FLOAT acc[i][v] = V::broadcast(0.0f);
  for (int64_t block = 0; block < matrix.blocks; ++block) {
    const int64_t base = block * matrix.block_bytes;
    int part = 0;
    const auto begin = [&]() __attribute__((always_inline)) {
      QM_EACH_FLOAT partial[i][v] = V::broadcast(0.0f);
      QM_EACH_ROWS zero[v] = matrix.zero_points
                                 ? V::floats(V::template load_zeros<kBits>(panels[v / kVectors], v % kVectors,
                                                                           base + matrix.zeros() + part * matrix.nr))
                                 : V::broadcast(kBits == 4 ? 8.0f : 128.0f);
    };
    const auto finish = [&]() __attribute__((always_inline)) {
      QM_EACH_ROWS {
        const Floats scale = V::template load_group_scales<C>(matrix, panels[v / kVectors], v % kVectors,
                                                              base + matrix.codes_bytes + part * scale_bytes);
        QM_EACH_TOKEN acc[i][v] = V::fma(partial[i][v], scale, acc[i][v]);
      }
      ++part;
    };
    const auto next = [&]() __attribute__((always_inline)) {
      if constexpr (kParts == 2) {
        finish();
        begin();
      }
    };
    const auto column = [&](Floats(&weights)[kGroups * kVectors]) __attribute__((always_inline)) {
      if constexpr (!C::kMultiplied) QM_EACH_ROWS weights[v] = V::subtract(weights[v], zero[v]);
      QM_EACH_TOKEN {
        const Floats number = V::broadcast(x + i);
        QM_EACH_ROWS partial[i][v] = V::fma(number, weights[v], partial[i][v]);
      }
      x += M;
    };
    begin();
    for (int64_t offset = base; offset < base + matrix.codes_bytes; offset += 128) {
      prefetch_groups<V, kBits, kGroups>(panels, offset);
      V::template columns<C, kGroups>(panels, offset, column, next);
    }
    prefetch_groups<V, kBits, kGroups, 64>(panels, base + matrix.codes_bytes);
    finish();
  }
  QM_EACH_ROWS {
    const auto& of = panels[v / kVectors];
    const Floats multiplier =
        V::as_floats(V::template load_tail<kBits>(of, v % kVectors, matrix.tail() + 4 * matrix.nr));
    const Floats bias = V::as_floats(V::template load_tail<kBits>(of, v % kVectors, matrix.biases()));
    QM_EACH_TOKEN {
      Floats y = V::rows(acc[i][v]);
      if (C::kMultiplied) y = V::multiply(y, multiplier);
      V::template store_rows<kBits>(of, v % kVectors, i * row_stride, V::add(y, bias));
    }
  }
}
#undef QM_EACH_ROWS
#undef QM_EACH_FLOAT

template <class V>
using RowTile = void (*)(const PanelMatrix&, const Panels<V::kMost>&, const uint8_t*, int64_t);
template <class V>
using FloatTile = void (*)(const PanelMatrix&, const Panels<V::kMost>*, const uint8_t*, int64_t);

// The tiles of one code: [groups of 16][m - 1].
template <class V>
struct ScaledTiles {
  RowTile<V> of[2][V::kTileRows];
};
template <class V, class C, bool kZero, Steps kSteps, int... M>
constexpr ScaledTiles<V> scaled_tiles(std::integer_sequence<int, M...>) {
  constexpr Steps kOfPairs = kSteps == kSpanStep ? kPairStep : kSteps;
  if constexpr (kZero || C::kMultiplied)
    return {{{scaled_tile<V, M + 1, C, kZero, 1, kSteps>...}, {scaled_tile<V, M + 1, C, kZero, 2, kOfPairs>...}}};
  else  // plain
    return {{{quantized_tile<V, M + 1, C, kSteps>...}, {scaled_tile<V, M + 1, C, kZero, 2, kOfPairs>...}}};
}
template <class V>
struct RowTiles {
  ScaledTiles<V> of[5];  // e2m1; int4 and int8 with middles, with zero points
};
template <class V, Steps kSteps, class Tokens>
constexpr RowTiles<V> row_tiles(Tokens tokens) {
  using Int4 = typename V::Int4;
  using Int8 = typename V::Int8;
  return {{scaled_tiles<V, typename V::E2m1, false, kSteps>(tokens), scaled_tiles<V, Int4, false, kSteps>(tokens),
           scaled_tiles<V, Int8, false, kSteps>(tokens), scaled_tiles<V, Int4, true, kSteps>(tokens),
           scaled_tiles<V, Int8, true, kSteps>(tokens)}};
}
// nvfp4 times nvfp4.
template <class V, int... M>
constexpr RowTile<V> nvfp4_tile(std::integer_sequence<int, M...>, int tokens) {
  constexpr RowTile<V> kTiles[] = {scaled_tile<V, M + 1, typename V::E2m1, false, 2, kSpanStep>...};
  return kTiles[tokens - 1];
}
template <class V>
struct FloatTiles {
  FloatTile<V> plain[2][V::kTileRows];      // [8 bits][m - 1]
  FloatTile<V> scaled[3][2][V::kTileRows];  // [e2m1, int4, int8][groups of 16][m - 1]; zero points or middles
};
// Of kMost groups of panels, or fewer where tokens are many.
template <class V, int kMost, int... M>
constexpr FloatTiles<V> float_tiles(std::integer_sequence<int, M...>) {
  using Int4 = typename V::Int4;
  using Int8 = typename V::Int8;
  using E2m1 = typename V::E2m1;
  constexpr auto groups = [](int m) { return std::min(kMost, V::float_groups(m + 1)); };
  return {
      {{float_tile<V, M + 1, Int4, groups(M)>...}, {float_tile<V, M + 1, Int8, groups(M)>...}},
      {{{scaled_float_tile<V, M + 1, E2m1, 1, groups(M)>...}, {scaled_float_tile<V, M + 1, E2m1, 2, groups(M)>...}},
       {{scaled_float_tile<V, M + 1, Int4, 1, groups(M)>...}, {scaled_float_tile<V, M + 1, Int4, 2, groups(M)>...}},
       {{scaled_float_tile<V, M + 1, Int8, 1, groups(M)>...}, {scaled_float_tile<V, M + 1, Int8, 2, groups(M)>...}}}};
}

inline int code_kind(const PanelMatrix& matrix) { return is_e2m1(matrix.format) ? 0 : matrix.bits == 4 ? 1 : 2; }

template <class V>
RowTile<V> row_tile(const PanelMatrix& matrix, int tokens) {
  constexpr auto kTokens = std::make_integer_sequence<int, V::kTileRows>();
  static constexpr RowTiles<V> kTiles = row_tiles<V, kRowStep>(kTokens), kStepped = row_tiles<V, kSpanStep>(kTokens);
  if (matrix.stepped && matrix.span == 16 && matrix.step_spans == 1) return nvfp4_tile<V>(kTokens, tokens);
  const int kind = code_kind(matrix);
  const ScaledTiles<V>& tiles = (matrix.stepped ? kStepped : kTiles).of[matrix.zero_points ? kind + 2 : kind];
  return tiles.of[matrix.parts - 1][tokens - 1];
}
template <class V>
FloatTile<V> float_tile_of(const PanelMatrix& matrix, int tokens, int groups) {
  constexpr auto tokens_of_tile = std::make_integer_sequence<int, V::kTileRows>();
  static constexpr FloatTiles<V> kOne = float_tiles<V, 1>(tokens_of_tile), kTwo = float_tiles<V, 2>(tokens_of_tile),
                                 kFour = float_tiles<V, 4>(tokens_of_tile);
  const FloatTiles<V>& tiles = groups == 4 ? kFour : groups == 2 ? kTwo : kOne;
  if (matrix.plain()) return tiles.plain[matrix.bits == 8][tokens - 1];
  return tiles.scaled[code_kind(matrix)][matrix.parts - 1][tokens - 1];
}

template <class V>
void multiply_float_tiles(const PanelProduct& product) {
  const PanelMatrix& matrix = *product.matrix;
  const int width = V::panels_of_group(matrix.nr),
            most = product.tile_count > 1 ? 1 : V::float_groups(product.tiles->m);
  for (int64_t panel = 0; panel < product.panel_count;) {
    const int64_t left = ceil_div(product.panel_count - panel, width);
    const int groups = std::min(most, left > 2 ? 4 : left > 1 ? 2 : 1);
    Panels<V::kMost> panels[4];
    for (int i = 0; i < groups; ++i, panel += width) panels[i] = {product, panel, width};
    // What comes after the last ones is another lane's.
    for (int i = 0; i < groups; ++i) panels[i].ahead = panel < product.panel_count ? groups * panels[i].ahead : 0;
    for (int64_t tile_index = 0; tile_index < product.tile_count; ++tile_index) {
      const TokenTile& tile = product.tiles[tile_index];
      float_tile_of<V>(matrix, tile.m, groups)(matrix, panels, tile.data, product.row_stride);
      panels[0].advance(tile.m * product.row_stride);
      panels[0].ahead = 0;
    }
  }
}

// All panels of an instruction set of x86.
template <class V>
void multiply_panels(const PanelProduct& product) {
  const PanelMatrix& matrix = *product.matrix;
  if (is_k(matrix.format)) return multiply_k<V, V::kTileRows, true>(product);
  if (matrix.columns) return multiply_columns<V, V::kTileRows, true>(product);
  if (!product.quantized)
    return has_many_tokens<V>(product) ? multiply_float_panels<V>(product) : multiply_float_tiles<V>(product);
  const int width = V::panels_of_group(matrix.nr);
  for (int64_t panel = 0; panel < product.panel_count; panel += width) {
    Panels<V::kMost> panels(product, panel, width);
    for (int64_t tile_index = 0; tile_index < product.tile_count; ++tile_index, panels.ahead = 0) {
      const TokenTile& tile = product.tiles[tile_index];
      row_tile<V>(matrix, tile.m)(matrix, panels, tile.data, product.row_stride);
      panels.advance(tile.m * product.row_stride);
    }
  }
}

template <auto kPlace = interleave>
void pack_rows(const PanelMatrix& matrix, bool quantized, const ActivationRow* rows, int tokens, uint8_t* out) {
  (is_k(matrix.format) ? pack_k_tile<kPlace> : pack_tile_offset<kPlace>)(matrix, quantized, rows, tokens, out);
}

}  // namespace
}  // namespace quantmoe
