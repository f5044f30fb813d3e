// Prompts with int8 activations: the panels of row_tile.h and k_tile.h times many tokens. Codes are unpacked once for
// all tokens, some columns at a time. These stay in L1 while the tokens' tiles pass:
//
//   codes [four columns][kCodeVectors]  x  tile [four columns][token]  ->  sums [token][vectors of rows]
//
// Two vectors have 16 rows or, with 8-bit codes, the low and the high nibbles of 8 rows. One vector has 16 rows.
// Activations are loaded once for both, codes once for all tokens of a tile. The order of operations is as in
// quantized_tile, scaled_tile and k_tile, which take fewer tokens. V is what row_tile.h says, and has
//   code_tokens(bits)              from how many tokens on this pays; fewer wait for memory, which tiles fetch better
//   kLeastTokens                   fewest of a tile
//   kLeastGroup                    fewest columns of a group: 16, or 32 where more of the work would be scales
//   kCodeVectors                   vectors of codes of four columns
//   unpack<C, kOffset>(panels, offset, codes)
//                                  32 columns to bytes, as products take them; kOffset: unsigned, as sums start
//   kSigned                        codes are signed where nothing but their offset starts sums; those of 4 bits lose
//   zero
//                                  points as they are unpacked, too: centre(codes, load_zeros's)
//   kFours<bits of a code>         most fours of columns that add_products sums up at a time
//   add_products<M, kBits, kFours>(codes, x, from, dot)
//                                  dot[i][v] = from(i, v) + codes . x of so many fours of M tokens; kBits: of
//                                  row_tile.h's kVectors, other codes' 4
// or instead of the last two, with tiles of its own,
//   kStores                        true: products are in memory, where those of a span are made before the ones of the
//                                  span before it are read
//   products<M, kUnsigned, kSpan>(codes, x, span, columns, odd, dot)
//                                  dot[i] = codes . x of so many columns of M tokens, of a span of kSpan; 0: of any.
//                                  odd: its place among the spans
// Everything is in an unnamed namespace, as in elementwise.h.
#pragma once
#include <algorithm>
#include <utility>

#include "cpu/tiles/row_tile.h"

namespace quantmoe {
namespace {

// What a loop over a tile depends on. Units: of fours, in a group.
struct Codes {
  int bits;   // 8: two vectors of nibbles are one of rows
  int fours;  // of a unit
  int units;  // of a group; 0: any number
  bool zero;
  Steps steps;
  bool minima;
  bool offset;  // codes are unsigned, and sums start with what that adds
};

template <class V>
struct CodePanels {
  using Floats = typename V::Floats;
  using Integers = typename V::Integers;
  using Group = Panels<V::kMost>;
  using Fours = Integers[V::kCodeVectors];
  using Rows = Floats[V::kCodeVectors];
  static constexpr int kColumns = 512, kTokens = 96;  // at a time; of tokens what a layer's task has

  // Columns whose codes are unpacked at a time: whole spans, or a part of one.
  struct Piece {
    int64_t column, span;  // the first ones
    int spans, columns;    // columns of a span
    bool begins, ends;     // whether spans do here
  };

  const PanelMatrix& matrix;
  alignas(64) Fours codes[kColumns / 4];
  alignas(64) Rows scales[kColumns / 16], minima[kColumns / 16];
  alignas(64) Fours zeros[kColumns / 16];
  alignas(64) Rows sums[kTokens];
  alignas(64) Fours partial[kTokens];  // of a group that ends in a later piece

  explicit CodePanels(const PanelMatrix& whole) : matrix(whole) {}

  // Whether unpacked codes are less than zero points, which then start no sums.
  template <class C>
  static constexpr bool kCentred = V::kSigned && C::kBits == 4 && !C::kMultiplied;
  template <class C, bool kOffset>
  void load(const Group& panels, const Piece& piece) {
    constexpr int kBits = C::kBits, kVectors = V::template kVectors<kBits>;
    const int64_t block = matrix.block, tail = matrix.block_bytes - matrix.codes_bytes;
    int64_t in_block = piece.column % block, offset = piece.column / block * matrix.block_bytes + in_block * 4;
    Fours* const end = codes + piece.spans * piece.columns / 4;
    for (Fours* to = codes; to < end; to += 8, offset += 128) {
      if (in_block == block) in_block = 0, offset += tail;
      V::template unpack<C, kOffset>(panels, offset, to);
      if constexpr (kCentred<C>)
        if (matrix.zero_points)
          V::centre(to, V::template load_zeros<kBits>(panels, 0, offset - in_block * 4 + matrix.zeros()));
      in_block += 32;
    }
    if (!matrix.grouped) return;
    for (int i = 0; i < piece.spans; ++i) {
      const int64_t group = (piece.span + i) * matrix.span / matrix.group(),
                    base = group / matrix.parts * matrix.block_bytes, part = group % matrix.parts;
      const int64_t at = base + matrix.codes_bytes + part * matrix.nr * scale_size(matrix.scale_type);
      for (int v = 0; v < kVectors; ++v) {
        scales[i][v] = V::template load_group_scales<C>(matrix, panels, v, at);
        if (matrix.zero_points && !kCentred<C>)
          zeros[i][v] = V::pairs(V::template load_zeros<kBits>(panels, v, base + matrix.zeros() + part * matrix.nr));
      }
    }
  }
  template <KKind kKind>
  void load_k(const uint8_t* panel, const Piece& piece) {
    int64_t in_block = piece.column % matrix.block;
    const uint8_t* chunk =
        panel + piece.column / matrix.block * matrix.block_bytes + in_block / 32 * KCodes<kKind>::kChunk;
    Fours* const end = codes + piece.spans * piece.columns / 4;
    for (Fours* to = codes; to < end; to += 8, chunk += KCodes<kKind>::kChunk, in_block += 32) {
      if (in_block == matrix.block) in_block = 0, chunk += matrix.block_bytes - matrix.codes_bytes;
      for_fours([&](auto four) __attribute__((always_inline)) {
        constexpr int j = decltype(four)::value;
        for (int v = 0; v < V::kCodeVectors; ++v)
          to[j][v] = load_codes<V, KCodes<kKind>::kBits, j>(chunk + 4 * V::kRows * v);
      });
    }
    for (int v = 0; v < V::kCodeVectors; ++v)
      for (int i = 0; i < piece.spans; ++i) {
        const int64_t group = piece.span + i;
        const LevelsAt<V, kKind> levels(matrix, panel + group / matrix.parts * matrix.block_bytes + matrix.codes_bytes,
                                        V::kRows * v);
        scales[i][v] = levels.scale(group % matrix.parts);
        if constexpr (KCodes<kKind>::kMinima) minima[i][v] = levels.minimum(group % matrix.parts);
      }
  }

  // The tile of M tokens.
  template <int M, Codes kCodes>
  static void multiply(const CodePanels& of, const Piece& piece, const uint8_t* tile, Rows* sum, Fours* part) {
    constexpr int kVectors = V::template kVectors<kCodes.bits>;
    const uint8_t* x = tile + piece.column * M;
    const int32_t* start = reinterpret_cast<const int32_t*>(tile + of.matrix.kp * M);
    [[maybe_unused]] const float* steps = reinterpret_cast<const float*>(start + of.matrix.spans() * M) +
                                          piece.span / (kCodes.steps == kPairStep ? 2 : 1) * M;
    start += piece.span * M;
    const Fours* codes = of.codes;
    const int columns = piece.columns, last = piece.spans;
    const int64_t width = of.matrix.span;
    // Of two spans in work, and sums while they are in registers.
    alignas(64) [[maybe_unused]] Integers made[2][V::kStores ? M : 1];
    [[maybe_unused]] Rows kept[V::kStores ? M : 1];
    [[maybe_unused]] Floats of_pair[M][kVectors];
    [[maybe_unused]] const auto make = [&](int next) __attribute__((always_inline)) {
      if constexpr (V::kStores)
        V::template products<M, kCodes.bits == 8 && kCodes.offset, 4 * kCodes.fours * kCodes.units>(
            codes, x, width, columns, next % 2, made[next % 2]);
      codes += columns / 4;
      x += columns * M;
    };
    if constexpr (V::kStores) {
      QM_EACH_SUM kept[i][v] = sum[i][v];
      make(0);
    }
    for (int span = 0; span < last; ++span, start += M) {
      Integers dot[M][kVectors];
      const auto first = [&](int i, int v) __attribute__((always_inline)) {
        if constexpr (kCodes.units == 0)
          if (!piece.begins) return part[i][v];
        if constexpr (kCodes.zero) return V::starts(of.zeros[span][v], start[i]);
        return V::integers(kCodes.offset ? start[i] : 0);
      };
      if constexpr (V::kStores) {
        if (span + 1 < last) make(span + 1);
        QM_EACH_TOKEN dot[i][0] = V::add(first(i, 0), made[span % 2][i]);
      } else {
        const auto so_far = [&](int i, int v) __attribute__((always_inline)) { return dot[i][v]; };
        const auto unit = [&](const auto& from) __attribute__((always_inline)) {
          V::template add_products<M, kCodes.bits, kCodes.fours>(codes, x, from, dot);
          codes += kCodes.fours;
          x += 4 * kCodes.fours * M;
        };
        unit(first);
        _Pragma("GCC unroll 4") for (int i = 1; i < kCodes.units; ++i) unit(so_far);
        if constexpr (kCodes.units == 0)
          for (int done = 4 * kCodes.fours; done < columns; done += 4 * kCodes.fours) unit(so_far);
      }
      if constexpr (kCodes.units == 0)
        if (!piece.ends) {
          QM_EACH_SUM part[i][v] = dot[i][v];
          continue;
        }
      // Once: sums might be anywhere, and the compiler would read these for each.
      Floats scale[kVectors], minimum[kVectors];
      for (int v = 0; v < kVectors; ++v) scale[v] = of.scales[span][v], minimum[v] = of.minima[span][v];
      const float* factors = reinterpret_cast<const float*>(start);  // of minima
      if constexpr (kCodes.steps == kPairStep)
        if (span % 2 == 0) {
          QM_EACH_SUM {
            of_pair[i][v] = V::multiply(V::floats(dot[i][v]), scale[v]);
            if constexpr (kCodes.minima) sum[i][v] = V::negative_fma(V::broadcast(factors + i), minimum[v], sum[i][v]);
          }
          continue;
        }
      const bool rows_have_scales = kCodes.steps == kSpanStep && !kCodes.minima && !of.matrix.grouped;
      if (rows_have_scales) {
        QM_EACH_SUM {
          Floats& so_far = V::kStores ? kept[V::kStores ? i : 0][v] : sum[i][v];
          so_far = V::fma(V::floats(dot[i][v]), V::broadcast(steps + i), so_far);
        }
      } else {
        QM_EACH_SUM {
          Floats all = V::floats(dot[i][v]);
          Floats& so_far = V::kStores ? kept[V::kStores ? i : 0][v] : sum[i][v];
          if constexpr (kCodes.steps == kRowStep) {
            all = V::fma(all, scale[v], so_far);
          } else {
            all = kCodes.steps == kPairStep ? V::fma(all, scale[v], of_pair[i][v]) : V::multiply(all, scale[v]);
            all = V::fma(all, V::broadcast(steps + i), so_far);
          }
          if constexpr (kCodes.minima) all = V::negative_fma(V::broadcast(factors + i), minimum[v], all);
          so_far = all;
        }
      }
      if constexpr (kCodes.steps != kRowStep) steps += M;
    }
    if constexpr (V::kStores) QM_EACH_SUM sum[i][v] = kept[i][v];
  }
  template <Codes kCodes, int... M>
  static constexpr auto products(std::integer_sequence<int, M...>) {
    struct Products {
      decltype(&multiply<1, kCodes>) of[sizeof...(M)];  // [tokens - kLeastTokens]
    };
    return Products{{multiply<M + V::kLeastTokens, kCodes>...}};
  }

  // The tiles of a panel, or of some panels side by side: load(piece) unpacks, store(tile, row) stores. The bytes
  // `ahead` are fetched into L2, a few with each tile. All at once would fill the buffers that all loads wait for.
  template <Codes kCodes, class Load, class Store>
  void run(const TokenTile* tiles, int64_t count, int tokens, const uint8_t* ahead, int64_t bytes, const Load& load,
           const Store& store) {
    static constexpr auto kProducts =
        products<kCodes>(std::make_integer_sequence<int, V::kTileRows - V::kLeastTokens + 1>());
    const int64_t span = matrix.span, spans = span <= kColumns ? kColumns / span : 1,
                  part = std::min<int64_t>(span, kColumns);
    const int64_t pieces = ceil_div(matrix.spans(), spans) * ceil_div(span, part),
                  fetched = align_up(ceil_div(bytes, pieces * count), 64);
    for (Rows* sum = sums; sum != sums + tokens; ++sum)
      for (Floats& of_rows : *sum) of_rows = V::broadcast(0.0f);
    for (int64_t first = 0; first < matrix.spans(); first += spans)
      for (int64_t from = 0; from < span; from += part) {
        const Piece piece{first * span + from,
                          first,
                          static_cast<int>(std::min(spans, matrix.spans() - first)),
                          static_cast<int>(std::min(part, span - from)),
                          from == 0,
                          from + part >= span && (matrix.grouped || matrix.stepped)};
        load(piece);
        int row = 0;
        for (const TokenTile* tile = tiles; tile != tiles + count; row += tile++->m) {
          if (ahead)
            for (const uint8_t* const end = ahead + fetched; ahead != end; ahead += 64) __builtin_prefetch(ahead, 0, 2);
          kProducts.of[tile->m - V::kLeastTokens](*this, piece, tile->data, sums + row, partial + row);
        }
      }
    int row = 0;
    for (const TokenTile* tile = tiles; tile != tiles + count; row += tile++->m) store(*tile, row);
  }
};  // namespace quantmoe

// Whether CodePanels take the matrix.
template <class V>
bool has_codes(const PanelMatrix& matrix, bool quantized) {
  return quantized && !matrix.columns && matrix.group() >= V::kLeastGroup &&
         !(is_e2m1(matrix.format) && matrix.group() > 32);
}
// Whether the product is one for CodePanels.
template <class V>
bool has_many_codes(const PanelProduct& product) {
  const PanelMatrix& matrix = *product.matrix;
  if (!has_codes<V>(matrix, product.quantized)) return false;
  int64_t tokens = 0;
  for (int64_t t = 0; t < product.tile_count; ++t) {
    if (product.tiles[t].m < V::kLeastTokens) return false;
    tokens += product.tiles[t].m;
  }
  return tokens >= V::code_tokens(matrix.bits);
}

// product.tiles some at a time, as many as CodePanels takes: body(first, count, tokens).
template <class V, class Body>
void for_tiles(const PanelProduct& product, const Body& body) {
  for (int64_t first = 0, count; first < product.tile_count; first += count) {
    int tokens = 0;
    for (count = 0;
         first + count < product.tile_count && tokens + product.tiles[first + count].m <= CodePanels<V>::kTokens;
         ++count)
      tokens += product.tiles[first + count].m;
    body(product.tiles + first, count, tokens);
  }
}

template <class V, class C, Codes kCodes>
void multiply_row_codes(const PanelProduct& product) {
  const PanelMatrix& matrix = *product.matrix;
  CodePanels<V> of(matrix);
  const int width = V::panels_of_group(matrix.nr);
  for (int64_t panel = 0; panel < product.panel_count; panel += width) {
    Panels<V::kMost> panels(product, panel, width);
    for_tiles<V>(product, [&](const TokenTile* tiles, int64_t count, int tokens) {
      of.template run<kCodes>(
          tiles, count, tokens, panels.ahead ? panels.panel[0] + panels.ahead : nullptr, panels.ahead,
          [&](const auto& piece) { of.template load<C, kCodes.offset>(panels, piece); },
          [&](const TokenTile& tile, int first) {
            const int32_t* tail =
                reinterpret_cast<const int32_t*>(tile.data + matrix.kp * tile.m) + matrix.spans() * tile.m;
            const auto sum = [&](int i, int v) __attribute__((always_inline)) {
              return matrix.grouped || matrix.stepped ? of.sums[first + i][v] : V::as_floats(of.partial[first + i][v]);
            };
            if (matrix.plain())
              store_plain<V, C, kCodes.steps>(matrix, panels, tail, tile.m, product.row_stride, sum);
            else
              store_scaled<V, C, kCodes.steps>(matrix, panels, tail, tile.m, product.row_stride, sum);
            panels.advance(tile.m * product.row_stride);
          });
      panels.ahead = 0;
    });
  }
}

template <class V, class C, bool kZero>
void multiply_integer_codes(const PanelProduct& product) {
  constexpr int kFours = V::template kFours<C::kBits>;
  constexpr bool kOffset = kZero || !V::kSigned;
  const PanelMatrix& matrix = *product.matrix;
  if constexpr (V::kLeastGroup == 16)
    if (matrix.group() == 16)
      return matrix.stepped ? multiply_row_codes<V, C, Codes{C::kBits, 4, 1, kZero, kPairStep, false, kOffset}>(product)
                            : multiply_row_codes<V, C, Codes{C::kBits, 4, 1, kZero, kRowStep, false, kOffset}>(product);
  if (matrix.stepped)
    return matrix.span == 64
               ? multiply_row_codes<V, C, Codes{C::kBits, kFours, 16 / kFours, kZero, kSpanStep, false, kOffset}>(
                     product)
               : multiply_row_codes<V, C, Codes{C::kBits, kFours, 8 / kFours, kZero, kSpanStep, false, kOffset}>(
                     product);
  if (!kZero && matrix.grouped && matrix.group() == 32)
    return multiply_row_codes<V, C, Codes{C::kBits, kFours, 8 / kFours, kZero, kRowStep, false, kOffset}>(product);
  multiply_row_codes<V, C, Codes{C::kBits, kFours, 0, kZero, kRowStep, false, kOffset}>(product);
}

template <class V, KKind kKind, Steps kSteps>
void multiply_k_codes(const PanelProduct& product) {
  using Of = KCodes<kKind>;
  constexpr int kFours = std::min(Of::kWidth, V::template kFours<Of::kBits>);
  const PanelMatrix& matrix = *product.matrix;
  CodePanels<V> of(matrix);
  for (int64_t index = 0; index < product.panel_count; ++index) {
    const uint8_t* const panel = product.panels + index * matrix.stride;
    float* out = product.out + index % product.halves * product.half_stride + index / product.halves * matrix.nr;
    const uint8_t* ahead = panel + matrix.stride;
    for_tiles<V>(product, [&](const TokenTile* tiles, int64_t count, int tokens) {
      of.template run<Codes{4, kFours, Of::kWidth / kFours, false, kSteps, Of::kMinima, !Of::kMinima}>(
          tiles, count, tokens, ahead, matrix.stride,
          [&](const auto& piece) { of.template load_k<kKind>(panel, piece); },
          [&](const TokenTile& tile, int first) {
            const uint8_t* const tail = tile.data + (matrix.kp + 4 * matrix.spans()) * tile.m;
            for (int v = 0; v < V::kCodeVectors; ++v)
              store_k<V, kSteps != kRowStep>(
                  matrix, panel, V::kRows * v, tail, tile.m, tile.m, out,
                  product.row_stride, [&](int i) __attribute__((always_inline)) { return of.sums[first + i][v]; });
            out += tile.m * product.row_stride;
          });
      ahead = nullptr;
    });
  }
}

// Steps: of a group, or of two with 16 columns.
template <class V, Steps kSteps>
void multiply_k_codes(const PanelProduct& product) {
  const KKind kind = k_kind(*product.matrix);
  constexpr Steps kOfPairs = kSteps == kRowStep ? kRowStep : kPairStep;
  if constexpr (V::kLeastGroup == 16) {
    if (kind == kQ2K) return multiply_k_codes<V, kQ2K, kOfPairs>(product);
    if (kind == kQ6K) return multiply_k_codes<V, kQ6K, kOfPairs>(product);
  }
  if (kind == kInt2) return multiply_k_codes<V, kInt2, kSteps>(product);
  if (kind == kInt3) return multiply_k_codes<V, kInt3, kSteps>(product);
  if (kind == kInt5) return multiply_k_codes<V, kInt5, kSteps>(product);
  if (kind == kInt6) return multiply_k_codes<V, kInt6, kSteps>(product);
  return kind == kBits4 ? multiply_k_codes<V, kBits4, kSteps>(product) : multiply_k_codes<V, kBits5, kSteps>(product);
}

template <class V, int kFours, int kUnits, Steps kSteps>
void multiply_e2m1_codes(const PanelProduct& product) {
  multiply_row_codes<V, typename V::E2m1, Codes{4, kFours, kUnits, false, kSteps, false, !V::kSigned}>(product);
}

template <class V>
void multiply_codes(const PanelProduct& product) {
  const PanelMatrix& matrix = *product.matrix;
  const bool stepped = matrix.stepped;
  if (is_k(matrix.format))
    return stepped ? multiply_k_codes<V, kSpanStep>(product) : multiply_k_codes<V, kRowStep>(product);
  if (is_e2m1(matrix.format)) {
    if constexpr (V::kLeastGroup == 16)
      if (matrix.parts == 2)
        return !stepped                 ? multiply_e2m1_codes<V, 4, 1, kRowStep>(product)
               : matrix.step_spans == 2 ? multiply_e2m1_codes<V, 4, 1, kPairStep>(product)
                                        : multiply_e2m1_codes<V, 4, 1, kSpanStep>(product);
    return stepped ? multiply_e2m1_codes<V, 4, 2, kSpanStep>(product) : multiply_e2m1_codes<V, 4, 2, kRowStep>(product);
  }
  const auto multiply = [&]<class C>(C) {
    if constexpr (!CodePanels<V>::template kCentred<C>)
      if (matrix.zero_points) return multiply_integer_codes<V, C, true>(product);
    multiply_integer_codes<V, C, false>(product);
  };
  matrix.bits == 8 ? multiply(typename V::Int8{}) : multiply(typename V::Int4{});
}

}  // namespace
}  // namespace quantmoe
