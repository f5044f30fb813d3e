// The panels of FORMAT.md 2.10, for every instruction set: 16 rows. They are ggml's types with minima or scales of two
// levels, and integers in planes. V has kRows rows in its lanes. pack_k_tile packs their tiles. Everything is in an
// unnamed namespace, as in elementwise.h.
//
//   a block of a panel                                                of each row and token
//     codes of 32 columns [four 0 .. 7][row 0 .. 15][4 columns]         s = the int8 products of a group, an integer
//     ... for each 32 columns of the block
//     scales and minima   [group][row 0 .. 15]                          sum += scale * s * step - minimum * the
//                                                                              group's sum of x
//
// With a step for all of a token's columns, both are multiplied by it at the end.
//
// Codes of 8 bits, and places in a table, are multiplied by floats only: k_float_tile.
//
// V says what Bytes (4 columns of each row), Floats (a number of each row) and Sums (an integer of each row) are:
//   load(at)                         kRows * 4 bytes
//   nibbles<high>(bytes)             the low or the high nibble of each
//   bits<from, count>(bytes)         bits [from, from + count) of each
//   with_bits<from, count, to>(n, bytes)
//                                    n, and these bits in the place of its bits from `to` on, which are 0
//   start(n)                         sums of n
//   dot(sums, codes, x)              adds codes < 2^bits times the 4 int8 at x
//   kDots<bits>, settle(sums)        after how many of 4 columns a sum has to be settled: 16-bit sums
//   floats(sums), halves(at), bf16s(at), int8s(at), column<i>(bytes): as Floats, f16, bf16, int8 and byte i of each row
//   halves_of_bytes<high>(at)        as Floats, the low or the high 4 bits of a byte of each row
//   Table, table(at), entry<i>(table, bytes): 16 floats, and the ones in the places that byte i of each row says
//   fma(a, b, c), fma_less, negative_fma a * b + c, a * b - c, c - a * b, rounded once: where there is no such
//                                    instruction, scalar.h's for each row
//   multiply, add, broadcast(x), load_floats(at), store(to, v): of floats; broadcast takes a float or a pointer to one
//   prefetch(at)                     asks for the line at `at`
//   kPairTokens                      most tokens of 6-bit codes, whose sums of pairs of groups take registers, too
//   kBothTokens                      for so many tokens at most, Both<V> multiplies all 16 rows at once
#pragma once
#include <algorithm>
#include <type_traits>
#include <utility>

#include "core/minifloat.h"
#include "cpu/elementwise.h"

namespace quantmoe {
namespace {

// Few tokens wait for memory. It is fastest where all lines are asked for in ascending order, some KiB before they are
// read.
constexpr int64_t kSoon = 6144;

// Lines from `at` on.
template <class V>
[[gnu::always_inline]] inline void prefetch_lines(const uint8_t* at, int64_t lines) {
  for (int64_t i = 0; i < lines; ++i) V::prefetch(at + 64 * i);
}

#define QM_EACH_TOKEN _Pragma("GCC unroll 32") for (int i = 0; i < M; ++i)

template <int n>
using Number = std::integral_constant<int, n>;

// body(Number<0>) to body(Number<7>): the fours of columns of 32.
template <class F>
[[gnu::always_inline]] inline void for_fours(F body) {
  body(Number<0>{});
  body(Number<1>{});
  body(Number<2>{});
  body(Number<3>{});
  body(Number<4>{});
  body(Number<5>{});
  body(Number<6>{});
  body(Number<7>{});
}

// Formats that one template reads. kBits8 and kTable are multiplied by floats only.
enum KKind { kQ2K, kBits4, kBits5, kQ6K, kInt2, kInt3, kInt5, kInt6, kBits8, kTable };
constexpr int kIntegerKinds = kBits8;  // the others
inline KKind k_kind(const PanelMatrix& matrix) {
  switch (matrix.format) {
    case k_format_q2_k:
      return kQ2K;
    case k_format_q6_k:
      return kQ6K;
    case k_format_q8_min:
      return kBits8;
    case k_format_int2:
      return kInt2;
    case k_format_int3:
      return kInt3;
    case k_format_int5:
      return kInt5;
    case k_format_int6:
      return kInt6;
    default:
      return is_table(matrix.format) ? kTable : matrix.bits == 5 ? kBits5 : kBits4;
  }
}

template <KKind kKind>
struct KCodes {
  static constexpr int kBits = kKind == kQ2K || kKind == kInt2     ? 2
                               : kKind == kInt3                    ? 3
                               : kKind == kBits5 || kKind == kInt5 ? 5
                               : kKind == kQ6K || kKind == kInt6   ? 6
                               : kKind == kBits8                   ? 8
                                                                   : 4;
  static constexpr bool kInteger = kKind >= kInt2 && kKind <= kInt6;  // one scale a block, and a zero point
  static constexpr bool kMinima = kKind != kQ6K && kKind != kTable;
  static constexpr int kWidth = kKind == kQ2K || kKind == kQ6K ? 4 : 8;  // fours of columns of a group
  static constexpr int kChunk = 64 * kBits;                              // bytes of 32 columns
};

// Two V one after the other: all 16 rows of a panel, so that memory is read while each half is multiplied.
template <class V>
struct Both {
  static constexpr int kRows = 2 * V::kRows, kPairTokens = V::kPairTokens;
  template <int kBits>
  static constexpr int kDots = V::template kDots<kBits>;
  struct Bytes {
    typename V::Bytes v[2];
  };
  struct Sums {
    typename V::Sums v[2];
  };
  struct Floats {
    typename V::Floats v[2];
  };
  static Bytes load(const uint8_t* at) { return {{V::load(at), V::load(at + 4 * V::kRows)}}; }
  template <bool high>
  static Bytes nibbles(const Bytes& a) {
    return {{V::template nibbles<high>(a.v[0]), V::template nibbles<high>(a.v[1])}};
  }
  template <int from, int count>
  static Bytes bits(const Bytes& a) {
    return {{V::template bits<from, count>(a.v[0]), V::template bits<from, count>(a.v[1])}};
  }
  template <int from, int count, int to>
  static Bytes with_bits(const Bytes& n, const Bytes& a) {
    return {{V::template with_bits<from, count, to>(n.v[0], a.v[0]),
             V::template with_bits<from, count, to>(n.v[1], a.v[1])}};
  }
  static Sums start(int32_t n) { return {{V::start(n), V::start(n)}}; }
  static void dot(Sums& sums, const Bytes& codes, const uint8_t* x) {
    V::dot(sums.v[0], codes.v[0], x);
    V::dot(sums.v[1], codes.v[1], x);
  }
  static void settle(Sums& sums) {
    V::settle(sums.v[0]);
    V::settle(sums.v[1]);
  }
  static Floats floats(const Sums& sums) { return {{V::floats(sums.v[0]), V::floats(sums.v[1])}}; }
  static Floats halves(const uint8_t* at) { return {{V::halves(at), V::halves(at + 2 * V::kRows)}}; }
  static Floats bf16s(const uint8_t* at) { return {{V::bf16s(at), V::bf16s(at + 2 * V::kRows)}}; }
  static Floats int8s(const uint8_t* at) { return {{V::int8s(at), V::int8s(at + V::kRows)}}; }
  template <bool high>
  static Floats halves_of_bytes(const uint8_t* at) {
    return {{V::template halves_of_bytes<high>(at), V::template halves_of_bytes<high>(at + V::kRows)}};
  }
  template <int i>
  static Floats column(const Bytes& a) {
    return {{V::template column<i>(a.v[0]), V::template column<i>(a.v[1])}};
  }
  using Table = typename V::Table;
  static Table table(const float* at) { return V::table(at); }
  template <int i>
  static Floats entry(const Table& table, const Bytes& a) {
    return {{V::template entry<i>(table, a.v[0]), V::template entry<i>(table, a.v[1])}};
  }
  static Floats fma(const Floats& a, const Floats& b, const Floats& c) {
    return {{V::fma(a.v[0], b.v[0], c.v[0]), V::fma(a.v[1], b.v[1], c.v[1])}};
  }
  static Floats fma_less(const Floats& a, const Floats& b, const Floats& c) {
    return {{V::fma_less(a.v[0], b.v[0], c.v[0]), V::fma_less(a.v[1], b.v[1], c.v[1])}};
  }
  static Floats negative_fma(const Floats& a, const Floats& b, const Floats& c) {
    return {{V::negative_fma(a.v[0], b.v[0], c.v[0]), V::negative_fma(a.v[1], b.v[1], c.v[1])}};
  }
  static Floats multiply(const Floats& a, const Floats& b) {
    return {{V::multiply(a.v[0], b.v[0]), V::multiply(a.v[1], b.v[1])}};
  }
  static Floats add(const Floats& a, const Floats& b) { return {{V::add(a.v[0], b.v[0]), V::add(a.v[1], b.v[1])}}; }
  static Floats broadcast(float x) { return {{V::broadcast(x), V::broadcast(x)}}; }
  static Floats broadcast(const float* x) { return {{V::broadcast(x), V::broadcast(x)}}; }
  static Floats load_floats(const uint8_t* at) { return {{V::load_floats(at), V::load_floats(at + 4 * V::kRows)}}; }
  static void store(float* to, const Floats& a) {
    V::store(to, a.v[0]);
    V::store(to + V::kRows, a.v[1]);
  }
  static void prefetch(const uint8_t* at) { V::prefetch(at); }
};

// Codes of columns 4j to 4j + 3 of a chunk: 4, 2 and 1 of their bits in planes.
template <class V, int kBits, int j>
[[gnu::always_inline]] inline typename V::Bytes load_codes(const uint8_t* chunk) {
  constexpr int kLow = kBits & 4, kPair = kBits & 2;
  if constexpr (kBits == 8) {
    return V::load(chunk + 64 * j);
  } else {
    typename V::Bytes n;
    if constexpr (kLow) n = V::template nibbles<(j >= 4)>(V::load(chunk + 64 * (j % 4)));
    if constexpr (kPair) {
      const typename V::Bytes pairs = V::load(chunk + 64 * (kLow + j / 4));
      if constexpr (kLow)
        n = V::template with_bits<2 * (j % 4), 2, kLow>(n, pairs);
      else
        n = V::template bits<2 * (j % 4), 2>(pairs);
    }
    if constexpr (kBits & 1) n = V::template with_bits<j, 1, kLow + kPair>(n, V::load(chunk + 64 * (kLow + kPair)));
    return n;
  }
}

// The levels of a block whose scale and minimum have none, of 8 groups at most.
struct Ones {
  uint8_t of[16 * 8];
  constexpr Ones() : of() {
    for (uint8_t& one : of) one = 1;
  }
};
constexpr Ones kNoLevels;

// The scale of a block of integers in planes, and its minimum: the scale times the zero point.
template <class V, KKind kKind>
struct LevelsAt {
  typename V::Floats d, d_min;
  [[gnu::always_inline]] LevelsAt(const PanelMatrix& matrix, const uint8_t* scales, int row) {
    static_assert(KCodes<kKind>::kInteger);
    const int size = scale_size(matrix.scale_type);
    if (size == 4)
      d = V::load_floats(scales + 4 * row);
    else
      d = matrix.scale_type == k_scale_type_f16 ? V::halves(scales + 2 * row) : V::bf16s(scales + 2 * row);
    if (matrix.zero_points)
      d_min = V::multiply(d, V::int8s(scales + 16 * size + row));
    else
      d_min = V::multiply(d, V::broadcast(static_cast<float>(1 << (KCodes<kKind>::kBits - 1))));
  }
  [[gnu::always_inline]] typename V::Floats scale(int64_t) const { return d; }
  [[gnu::always_inline]] typename V::Floats minimum(int64_t) const { return d_min; }
};
// Where the scales of other blocks lie, from its row on.
template <class V, KKind kKind>
  requires(!KCodes<kKind>::kInteger)
struct LevelsAt<V, kKind> {
  const uint8_t *of_group, *of_minimum;
  typename V::Floats d, d_min;
  [[gnu::always_inline]] LevelsAt(const PanelMatrix& matrix, const uint8_t* scales, int row) {
    constexpr bool kMinima = KCodes<kKind>::kMinima, kTwoLevels = kKind == kQ2K || kKind == kQ6K;
    if (!kTwoLevels && factor_size(matrix.scale_type) == 4) {
      d = d_min = V::load_floats(scales + 4 * row);
      if constexpr (kMinima) d_min = V::load_floats(scales + 64 + 4 * row);
    } else {
      d = d_min = V::halves(scales + 2 * row);
      if constexpr (kMinima) d_min = V::halves(scales + 32 + 2 * row);
    }
    of_group = scales + (kMinima ? 64 : 32) + row;
    of_minimum = of_group + (kKind == kQ2K ? 0 : 16 * 8);
    if (!kTwoLevels && !has_levels(matrix.scale_type)) of_group = of_minimum = kNoLevels.of;
  }
  [[gnu::always_inline]] typename V::Floats scale(int64_t group) const {
    const uint8_t* const at = of_group + 16 * group;
    if constexpr (kKind == kQ2K) return V::multiply(d, V::template halves_of_bytes<false>(at));
    return V::multiply(d, V::int8s(at));
  }
  [[gnu::always_inline]] typename V::Floats minimum(int64_t group) const {
    const uint8_t* const at = of_minimum + 16 * group;
    if constexpr (kKind == kQ2K) return V::multiply(d_min, V::template halves_of_bytes<true>(at));
    return V::multiply(d_min, V::int8s(at));
  }
};

// The results of some of a tile's tokens from sum(i), and from what the tile has of the first one after its sums of x.
template <class V, bool kStepped, class Sum>
[[gnu::always_inline]] inline void store_k(const PanelMatrix& matrix, const uint8_t* panel, int row,
                                           const uint8_t* tail, int tile_tokens, int tokens, float* out,
                                           int64_t row_stride, const Sum& sum) {
  const float* steps = reinterpret_cast<const float*>(tail);
  const int32_t* zero_points = reinterpret_cast<const int32_t*>(tail + 4 * tile_tokens);
  const typename V::Floats row_sums = V::load_floats(panel + matrix.tail() + 4 * row);
  const typename V::Floats bias = V::load_floats(panel + matrix.biases() + 4 * row);
  _Pragma("GCC unroll 32") for (int i = 0; i < tokens; ++i) {
    typename V::Floats y = sum(i);
    if constexpr (!kStepped)
      y = V::multiply(V::fma(row_sums, V::broadcast(static_cast<float>(-zero_points[i])), y), V::broadcast(steps + i));
    V::store(out + i * row_stride + row, V::add(y, bias));
  }
}

// Rows [row, row + kRows) of a panel times tokens [first, first + M) of a tile of `tokens`, M of M where kWhole.
// fetches: this call asks for the lines kSoon bytes ahead; later calls on the panel do not.
template <class V, int M, KKind kKind, bool kWhole, bool kStepped>
void k_tile(const PanelMatrix& matrix, const uint8_t* panel, int row, bool fetches, const uint8_t* tile, int tokens,
            int first, float* out, int64_t row_stride) {
  if constexpr (kStepped && kKind == kQ6K && M > V::kPairTokens) {
    constexpr int kHalf = (M + 1) / 2;
    k_tile<V, kHalf, kKind, false, true>(matrix, panel, row, fetches, tile, tokens, first, out, row_stride);
    return k_tile<V, M - kHalf, kKind, false, true>(matrix, panel, row, false, tile, tokens, first + kHalf, out,
                                                    row_stride);
  }
  using Codes = KCodes<kKind>;
  constexpr int kWidth = Codes::kWidth;
  const int chunks = static_cast<int>(matrix.block / 32);
  const int tile_tokens = kWhole ? M : tokens;
  const int64_t lines = fetches ? ceil_div(matrix.block_bytes, 64 * chunks) : 0;
  const uint8_t* x = tile + 4 * first;
  const uint8_t* starts = tile + matrix.kp * tile_tokens + 4 * first;
  [[maybe_unused]] const uint8_t* steps = starts + 4 * matrix.spans() * tile_tokens;
  typename V::Floats acc[M];
  [[maybe_unused]] typename V::Floats of_pair[M];
  QM_EACH_TOKEN acc[i] = V::broadcast(0.0f);
  for (int64_t block = 0; block < matrix.blocks; ++block) {
    const uint8_t* chunk = panel + block * matrix.block_bytes + 4 * row;
    const LevelsAt<V, kKind> levels(matrix, panel + block * matrix.block_bytes + matrix.codes_bytes, row);
    const uint8_t* soon = panel + block * matrix.block_bytes + kSoon;
    for (int chunk_index = 0; chunk_index < chunks; ++chunk_index, chunk += Codes::kChunk, soon += 64 * lines) {
      prefetch_lines<V>(soon, lines);
      typename V::Sums sums[M];
      for_fours([&](auto four) __attribute__((always_inline)) {
        constexpr int j = decltype(four)::value;
        if constexpr (j % kWidth == 0) QM_EACH_TOKEN {
            if constexpr (Codes::kMinima)
              sums[i] = V::start(0);
            else
              sums[i] = V::start(reinterpret_cast<const int32_t*>(starts)[i]);
          }
        const typename V::Bytes codes = load_codes<V, Codes::kBits, j>(chunk);
        QM_EACH_TOKEN V::dot(sums[i], codes, x + 4 * i);
        x += 4 * tile_tokens;
        constexpr int kDots = std::min(kWidth, V::template kDots<Codes::kBits>);
        if constexpr ((j + 1) % kDots == 0) QM_EACH_TOKEN V::settle(sums[i]);
        if constexpr ((j + 1) % kWidth == 0) {
          const int64_t group = chunk_index * 8 / kWidth + j / kWidth;
          const typename V::Floats scale = levels.scale(group);
          constexpr bool kFirst = kStepped && kWidth == 4 && j == 3;  // of two groups that share a step
          QM_EACH_TOKEN if constexpr (!kStepped) { acc[i] = V::fma(V::floats(sums[i]), scale, acc[i]); }
          else if constexpr (kFirst) {
            of_pair[i] = V::multiply(V::floats(sums[i]), scale);
          }
          else {
            const typename V::Floats all =
                kWidth == 8 ? V::multiply(V::floats(sums[i]), scale) : V::fma(V::floats(sums[i]), scale, of_pair[i]);
            acc[i] = V::fma(all, V::broadcast(reinterpret_cast<const float*>(steps) + i), acc[i]);
          }
          if constexpr (kStepped && !kFirst) steps += 4 * tile_tokens;
          if constexpr (Codes::kMinima) {
            const typename V::Floats minimum = levels.minimum(group);
            QM_EACH_TOKEN acc[i] =
                V::negative_fma(V::broadcast(reinterpret_cast<const float*>(starts) + i), minimum, acc[i]);
          }
          starts += 4 * tile_tokens;
        }
      });
    }
  }
  store_k<V, kStepped>(
      matrix, panel, row, starts, tile_tokens, M, out + first * row_stride,
      row_stride, [&](int i) __attribute__((always_inline)) { return acc[i]; });
}

// The same of float activations, x f32 [kp][tokens].
template <class V, int M, KKind kKind, bool kWhole>
void k_float_tile(const PanelMatrix& matrix, const uint8_t* panel, int row, bool fetches, const uint8_t* tile,
                  int tokens, int first, float* out, int64_t row_stride) {
  using Codes = KCodes<kKind>;
  constexpr int kWidth = Codes::kWidth;
  const int chunks = static_cast<int>(matrix.block / 32);
  const int tile_tokens = kWhole ? M : tokens;
  const int64_t lines = fetches ? ceil_div(matrix.block_bytes, 64 * chunks) : 0;
  const float* x = reinterpret_cast<const float*>(tile) + first;
  [[maybe_unused]] const typename V::Table table = V::table(matrix.format == k_format_nf4 ? kNf4 : kBnbFp4);
  typename V::Floats acc[M];
  QM_EACH_TOKEN acc[i] = V::broadcast(0.0f);
  for (int64_t block = 0; block < matrix.blocks; ++block) {
    const uint8_t* chunk = panel + block * matrix.block_bytes + 4 * row;
    const LevelsAt<V, kKind> levels(matrix, panel + block * matrix.block_bytes + matrix.codes_bytes, row);
    const uint8_t* soon = panel + block * matrix.block_bytes + kSoon;
    for (int chunk_index = 0; chunk_index < chunks; ++chunk_index, chunk += Codes::kChunk, soon += 64 * lines) {
      prefetch_lines<V>(soon, lines);
      typename V::Floats part[M], scale, minimum;
      for_fours([&](auto four) __attribute__((always_inline)) {
        constexpr int j = decltype(four)::value;
        if constexpr (j % kWidth == 0) {
          const int64_t group = chunk_index * 8 / kWidth + j / kWidth;
          QM_EACH_TOKEN part[i] = V::broadcast(0.0f);
          scale = levels.scale(group);
          if constexpr (Codes::kMinima) minimum = levels.minimum(group);
        }
        const typename V::Bytes codes = load_codes<V, Codes::kBits, j>(chunk);
        const auto column = [&](auto byte) __attribute__((always_inline)) {
          typename V::Floats weight;
          if constexpr (kKind == kTable)
            weight = V::multiply(V::template entry<decltype(byte)::value>(table, codes), scale);
          else if constexpr (Codes::kMinima)
            weight = V::fma_less(V::template column<decltype(byte)::value>(codes), scale, minimum);
          else
            weight = V::multiply(V::add(V::template column<decltype(byte)::value>(codes), V::broadcast(-32.0f)), scale);
          QM_EACH_TOKEN part[i] = V::fma(V::broadcast(x + i), weight, part[i]);
          x += tile_tokens;
        };
        column(Number<0>{});
        column(Number<1>{});
        column(Number<2>{});
        column(Number<3>{});
        if constexpr ((j + 1) % kWidth == 0) QM_EACH_TOKEN acc[i] = V::add(acc[i], part[i]);
      });
    }
  }
  const typename V::Floats bias = V::load_floats(panel + matrix.biases() + 4 * row);
  QM_EACH_TOKEN V::store(out + (first + i) * row_stride + row, V::add(acc[i], bias));
}

using KTile = void (*)(const PanelMatrix&, const uint8_t*, int, bool, const uint8_t*, int, int, float*, int64_t);
template <class V, bool kWhole, int... M>
constexpr auto k_tiles(std::integer_sequence<int, M...>) {
  struct OfKind {
    KTile of[sizeof...(M)];  // [tokens - 1]
  };
  struct KTiles {
    OfKind floats[kTable + 1], codes[2][kIntegerKinds];  // [kind], [stepped][kind]
  } all{};
  const auto each = [&]<int... kind>(std::integer_sequence<int, kind...>, const auto& made) {
    (made(std::integral_constant<KKind, static_cast<KKind>(kind)>{}), ...);
  };
  each(std::make_integer_sequence<int, kTable + 1>{},
       [&](auto kind) { all.floats[kind] = {{k_float_tile<V, M + 1, decltype(kind)::value, kWhole>...}}; });
  each(std::make_integer_sequence<int, kIntegerKinds>{}, [&](auto kind) {
    all.codes[0][kind] = {{k_tile<V, M + 1, decltype(kind)::value, kWhole, false>...}};
    all.codes[1][kind] = {{k_tile<V, M + 1, decltype(kind)::value, kWhole, true>...}};
  });
  return all;
}

// The tiles of a product's format for 1 to kMost tokens.
template <class V, int kMost, bool kWhole>
const KTile* k_tiles_of(const PanelProduct& product) {
  static constexpr auto kTiles = k_tiles<V, kWhole>(std::make_integer_sequence<int, kMost>());
  const PanelMatrix& matrix = *product.matrix;
  const KKind kind = k_kind(matrix);
  return product.quantized ? kTiles.codes[matrix.stepped][kind].of : kTiles.floats[kind].of;
}

// kMost: tokens at a time. Tiles have as many at most where kWhole.
template <class V, int kMost, bool kWhole>
void multiply_k(const PanelProduct& product) {
  const PanelMatrix& matrix = *product.matrix;
  const KTile* const tiles = k_tiles_of<V, kMost, kWhole>(product);
  for (int64_t panel = 0; panel < product.panel_count; ++panel) {
    float* out = product.out + panel % product.halves * product.half_stride + panel / product.halves * matrix.nr;
    for (int64_t tile_index = 0; tile_index < product.tile_count; ++tile_index) {
      const TokenTile& tile = product.tiles[tile_index];
      const uint8_t* const rows = product.panels + panel * matrix.stride;
      if constexpr (V::kBothTokens > 0)
        if (tile.m <= V::kBothTokens) {
          k_tiles_of<Both<V>, V::kBothTokens, kWhole>(product)[tile.m - 1](matrix, rows, 0, tile_index == 0, tile.data,
                                                                           tile.m, 0, out, product.row_stride);
          out += tile.m * product.row_stride;
          continue;
        }
      for (int row = 0; row < matrix.nr; row += V::kRows)
        for (int first = 0; first < tile.m; first += kMost) {
          const int count = tile.m - first < kMost ? tile.m - first : kMost;
          tiles[count - 1](matrix, rows, row, tile_index == 0 && row == 0 && first == 0, tile.data, tile.m, first, out,
                           product.row_stride);
        }
      out += tile.m * product.row_stride;
    }
  }
}

// pack_tile's sums become the start of a tile. Codes of 6 bits are 32 more than their values. For other codes, minima
// take the sums as floats, times the step if groups have their own.
template <auto kPlace = interleave>
inline void pack_k_tile(const PanelMatrix& matrix, bool quantized, const ActivationRow* rows, int tokens,
                        uint8_t* out) {
  pack_tile<kPlace>(matrix, quantized, rows, tokens, out);
  if (!quantized) return;
  const int64_t count = matrix.spans() * tokens;
  int32_t* const sums = reinterpret_cast<int32_t*>(out + matrix.kp * tokens);
  const float* const steps = reinterpret_cast<const float*>(sums + count);
  if (matrix.format == k_format_q6_k) {
    for (int64_t i = 0; i < count; ++i) sums[i] *= -32;
    return;
  }
  for (int64_t span = 0, i = 0; span < matrix.spans(); ++span)
    for (int token = 0; token < tokens; ++token, ++i) {
      const float wide = static_cast<float>(sums[i]);
      sums[i] = bit_cast<int32_t>(matrix.stepped ? wide * steps[span / matrix.step_spans * tokens + token] : wide);
    }
}

}  // namespace
}  // namespace quantmoe
