// Panels times token tiles with AVX2.
//
// Eight weight rows fill a ymm: X, rows 0..3, and Y, rows 4..7, of a panel for 4-bit codes, a panel each for 8-bit codes. In a panel a
// row owns 8 consecutive bytes (two dwords) of each 32; shuffling X with Y leaves one dword a row,
//   even: X0 X1 Y0 Y1 | X2 X3 Y2 Y3, columns k..k+3        odd: the same rows, columns k+4..k+7
// so that a row is one lane and the activations are a 4-byte broadcast. The lane order is undone at the store.
//
// vpmaddubsw multiplies u8 nibbles with s8 activations and adds pairs in s16. A chunk of 32 columns is 8 such pairs a lane, at most
// 8 * 2 * 15 * 128 = 30720, so that widening to s32 once a chunk is exact. 8-bit codes are two nibbles a byte. Two vectors of nibbles
// share each broadcast: two panels of 4-bit codes, or the low and high nibbles of 8 rows of 8-bit codes. Codes are offset by 8 or 128;
// accumulators start at -offset * sum(x), which pack_tile has put into the tile.
#include <cpuid.h>
#include <immintrin.h>

#include <utility>

#include "cpu/elementwise.h"

namespace quantmoe {
namespace {

constexpr int kTileRows = 6;  // two s16 accumulators a row and four registers: 16

// Two panels. A panel past the end repeats the last one; its results are not stored.
struct Group {
  const uint8_t* panel[2];
};
// Vectors of 8 rows in a group.
constexpr int vectors(int bits) { return bits == 4 ? 2 : 1; }

// f(0), ..., f(N - 1) with constants: arrays indexed by them stay in registers, which gcc does not manage for loops it unrolls itself.
template <typename F, int... I>
[[gnu::always_inline]] inline void unroll(const F& f, std::integer_sequence<int, I...>) {
  (f(std::integral_constant<int, I>()), ...);
}
template <int N, typename F>
[[gnu::always_inline]] inline void unroll(const F& f) {
  unroll(f, std::make_integer_sequence<int, N>());
}
#define QM_INLINE __attribute__((always_inline))

inline __m256i load(const uint8_t* at) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)); }
inline __m128i load_half(const uint8_t* at) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(at)); }
inline __m128i load_quarter(const uint8_t* at) { return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(at)); }
inline __m256i broadcast(const uint8_t* x) {
  int32_t four;
  std::memcpy(&four, x, 4);
  return _mm256_set1_epi32(four);
}

// Rows in lane order and back: the permutation is its own inverse.
inline __m256 swap_lanes(__m256 v) { return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(v), 0xd8)); }

// One dword of each row of vector v; x its rows 0..3 and y its rows 4..7, 8 bytes a row.
template <int kOdd>
inline __m256i dwords(__m256i x, __m256i y) {
  return _mm256_castps_si256(_mm256_shuffle_ps(_mm256_castsi256_ps(x), _mm256_castsi256_ps(y), kOdd ? 0xdd : 0x88));
}
template <int kBits, int kOdd>
inline __m256i load_dwords(const Group& g, int v, int64_t offset) {
  const uint8_t *x = g.panel[v] + offset, *y = kBits == 4 ? x + 32 : g.panel[1] + offset;
  return dwords<kOdd>(load(x), load(y));
}

// 8 dwords of vector v in row order.
template <int kBits>
inline __m256i load_rows(const Group& g, int v, int64_t offset) {
  if constexpr (kBits == 4) return load(g.panel[v] + offset);
  return _mm256_set_m128i(load_half(g.panel[1] + offset), load_half(g.panel[0] + offset));
}
template <int kBits>
inline __m256 load_rows_ps(const Group& g, int v, int64_t offset) {
  return _mm256_castsi256_ps(load_rows<kBits>(g, v, offset));
}

// The scales of vector v in lane order.
template <int kBits>
inline __m256 load_scales(const Group& g, int v, int64_t offset, int32_t scale_type) {
  if (scale_type == k_scale_type_f32) return swap_lanes(load_rows_ps<kBits>(g, v, offset));
  const __m128i bits = kBits == 4 ? load_half(g.panel[v] + offset)
                                  : _mm_unpacklo_epi64(load_quarter(g.panel[0] + offset), load_quarter(g.panel[1] + offset));
  if (scale_type == k_scale_type_f16) return swap_lanes(_mm256_cvtph_ps(bits));
  return swap_lanes(_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16)));
}

struct Store {
  float* to[2];
  int count;  // panels that exist
};
// y: vector v in row order.
template <int kBits>
inline void store_rows(const Store& s, int v, int64_t row_offset, __m256 y) {
  if constexpr (kBits == 4) {
    if (v < s.count) _mm256_storeu_ps(s.to[v] + row_offset, y);
  } else {
    _mm_storeu_ps(s.to[0] + row_offset, _mm256_castps256_ps128(y));
    if (s.count > 1) _mm_storeu_ps(s.to[1] + row_offset, _mm256_extractf128_ps(y, 1));
  }
}

// sum[i][j] = nibbles j . activations i over the 32-column chunk at offset, in s16.
template <int M, int kBits>
[[gnu::always_inline]] inline void multiply_chunk(const Group& g, int64_t offset, const uint8_t* x, __m256i (&sum)[M][2]) {
  const __m256i nibble = _mm256_set1_epi8(15), flip = _mm256_set1_epi8(static_cast<char>(kBits == 4 ? 0x88 : 0x80));
  const auto step = [&](__m256i w0, __m256i w1, auto column) QM_INLINE {
    unroll<M>([&](auto i) QM_INLINE {
      const __m256i x4 = broadcast(x + column * M + 4 * i);
      const __m256i y0 = _mm256_maddubs_epi16(w0, x4), y1 = _mm256_maddubs_epi16(w1, x4);
      sum[i][0] = column == 0 ? y0 : _mm256_add_epi16(sum[i][0], y0);
      sum[i][1] = column == 0 ? y1 : _mm256_add_epi16(sum[i][1], y1);
      asm("" : "+x"(sum[i][0]), "+x"(sum[i][1]));  // keeps the order: gcc would regroup the sums of a chunk and spill
    });
  };
  const auto low = [&](__m256i w) QM_INLINE { return _mm256_and_si256(w, nibble); };
  const auto high = [&](__m256i w) QM_INLINE { return _mm256_and_si256(_mm256_srli_epi32(w, 4), nibble); };
  unroll<4>([&](auto c) QM_INLINE {
    unroll<2>([&](auto odd) QM_INLINE {
      if constexpr (kBits == 4) {
        if constexpr (c < 2) {
          constexpr int column = 8 * c + 4 * odd;
          const __m256i a = _mm256_xor_si256(load_dwords<4, odd>(g, 0, offset + 64 * c), flip);
          const __m256i b = _mm256_xor_si256(load_dwords<4, odd>(g, 1, offset + 64 * c), flip);
          step(low(a), low(b), std::integral_constant<int, column>());
          step(high(a), high(b), std::integral_constant<int, column + 16>());
        }
      } else {
        const __m256i a = _mm256_xor_si256(load_dwords<8, odd>(g, 0, offset + 32 * c), flip);
        step(low(a), high(a), std::integral_constant<int, 8 * c + 4 * odd>());
      }
    });
  });
}

template <int M, int kBits>
void quantized_tile(const PanelMatrix& p, const Group& g, const uint8_t* tile, const Store& store, int64_t row_stride) {
  constexpr int V = vectors(kBits);
  const __m256i one = _mm256_set1_epi16(1), sixteen = _mm256_set1_epi16(16);
  const uint8_t* x = tile;
  const int32_t* start = reinterpret_cast<const int32_t*>(tile + p.kp * M);
  __m256 acc[M][V];
  __m256i dot[M][V];
  unroll<M * V>([&](auto j) QM_INLINE {
    acc[j / V][j % V] = _mm256_setzero_ps();
    dot[j / V][j % V] = _mm256_setzero_si256();
  });
  for (int64_t b = 0; b < p.blocks; ++b, start += M) {
    int64_t offset = b * p.block_bytes;
    unroll<M * V>([&](auto j) QM_INLINE { dot[j / V][j % V] = _mm256_set1_epi32(start[j / V]); });
    const uint8_t* const end = x + p.block * M;
    do {
      __m256i sum[M][2];
      multiply_chunk<M, kBits>(g, offset, x, sum);
      unroll<M>([&](auto i) QM_INLINE {
        dot[i][0] = _mm256_add_epi32(dot[i][0], _mm256_madd_epi16(sum[i][0], one));
        dot[i][V - 1] = _mm256_add_epi32(dot[i][V - 1], _mm256_madd_epi16(sum[i][1], kBits == 4 ? one : sixteen));
      });
      x += 32 * M;
      offset += p.nr * 4 * kBits;
    } while (x != end);
    if (p.grouped) {
      unroll<V>([&](auto v) QM_INLINE {
        const __m256 scale = load_scales<kBits>(g, v, b * p.block_bytes + p.codes_bytes, p.scale_type);
        unroll<M>([&](auto i) QM_INLINE { acc[i][v] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot[i][v]), scale, acc[i][v]); });
      });
    }
  }
  const float* steps = reinterpret_cast<const float*>(start);
  const int32_t* zero_points = start + M;
  unroll<V>([&](auto v) QM_INLINE {
    const __m256i sums = load_rows<kBits>(g, v, p.tail());
    const __m256 scale = load_rows_ps<kBits>(g, v, p.tail() + 4 * p.nr);  // channelwise
    const __m256 bias = load_rows_ps<kBits>(g, v, p.tail() + (p.grouped ? 4 : 8) * p.nr);
    unroll<M>([&](auto i) QM_INLINE {
      const __m256 step = _mm256_set1_ps(steps[i]);
      __m256 y;
      if (p.grouped) {
        const __m256 z = _mm256_set1_ps(static_cast<float>(-zero_points[i]));
        y = _mm256_mul_ps(_mm256_fmadd_ps(_mm256_castsi256_ps(sums), z, swap_lanes(acc[i][v])), step);
      } else {
        const __m256i rows = _mm256_castps_si256(swap_lanes(_mm256_castsi256_ps(dot[i][v])));
        const __m256i product = kBits == 4 ? _mm256_slli_epi32(rows, 4) : rows;
        const __m256i corrected = _mm256_add_epi32(product, _mm256_mullo_epi32(sums, _mm256_set1_epi32(-zero_points[i])));
        y = _mm256_mul_ps(_mm256_cvtepi32_ps(corrected), _mm256_mul_ps(scale, step));
      }
      store_rows<kBits>(store, v, i * row_stride, _mm256_add_ps(y, bias));
    });
  });
}

// Float activations: a code is the sign extension of its bits, one column at a time.
template <int M, int kBits>
void float_tile(const PanelMatrix& p, const Group& g, const uint8_t* tile, const Store& store, int64_t row_stride) {
  constexpr int V = vectors(kBits);
  const float* x = reinterpret_cast<const float*>(tile);
  __m256 acc[M][V], partial[M][V];
  unroll<M * V>([&](auto j) QM_INLINE { acc[j / V][j % V] = partial[j / V][j % V] = _mm256_setzero_ps(); });
  for (int64_t b = 0; b < p.blocks; ++b) {
    int64_t offset = b * p.block_bytes;
    unroll<M * V>([&](auto j) QM_INLINE { partial[j / V][j % V] = _mm256_setzero_ps(); });
    // The columns of four codes at bit, 8 + bit, 16 + bit and 24 + bit of the dwords at `from`.
    const auto columns = [&](int64_t from, auto odd, auto bit) QM_INLINE {
      __m256i w[V];
      unroll<V>([&](auto v) QM_INLINE { w[v] = load_dwords<kBits, odd>(g, v, from); });
      unroll<4>([&](auto byte) QM_INLINE {
        __m256 value[V];
        unroll<V>([&](auto v) QM_INLINE {
          value[v] = _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(w[v], 32 - kBits - bit - 8 * byte), 32 - kBits));
        });
        unroll<M>([&](auto i) QM_INLINE {
          const __m256 x1 = _mm256_broadcast_ss(x + byte * M + i);
          unroll<V>([&](auto v) QM_INLINE { partial[i][v] = _mm256_fmadd_ps(x1, value[v], partial[i][v]); });
        });
      });
      x += 4 * M;
    };
    const float* const end = x + p.block * M;
    do {
      const std::integral_constant<int, 0> zero;
      const std::integral_constant<int, 1> one;
      const std::integral_constant<int, 4> four;
      if constexpr (kBits == 4) {
        columns(offset, zero, zero);
        columns(offset, one, zero);
        columns(offset + 64, zero, zero);
        columns(offset + 64, one, zero);
        columns(offset, zero, four);
        columns(offset, one, four);
        columns(offset + 64, zero, four);
        columns(offset + 64, one, four);
        offset += 128;
      } else {
        columns(offset, zero, zero);
        columns(offset, one, zero);
        offset += 32;
      }
    } while (x != end);
    if (p.grouped) {
      unroll<V>([&](auto v) QM_INLINE {
        const __m256 scale = load_scales<kBits>(g, v, b * p.block_bytes + p.codes_bytes, p.scale_type);
        unroll<M>([&](auto i) QM_INLINE { acc[i][v] = _mm256_fmadd_ps(partial[i][v], scale, acc[i][v]); });
      });
    }
  }
  unroll<V>([&](auto v) QM_INLINE {
    const __m256 bias = load_rows_ps<kBits>(g, v, p.tail() + (p.grouped ? 4 : 8) * p.nr);
    __m256 scale = load_rows_ps<kBits>(g, v, p.tail() + 4 * p.nr);  // channelwise
    if (kBits == 4) scale = _mm256_mul_ps(scale, _mm256_set1_ps(16.0f));
    unroll<M>([&](auto i) QM_INLINE {
      const __m256 rows = swap_lanes(p.grouped ? acc[i][v] : partial[i][v]);
      store_rows<kBits>(store, v, i * row_stride, _mm256_add_ps(p.grouped ? rows : _mm256_mul_ps(rows, scale), bias));
    });
  });
}

using TileFunction = void (*)(const PanelMatrix&, const Group&, const uint8_t*, const Store&, int64_t);
template <int... M>
constexpr auto tile_table(std::integer_sequence<int, M...>) {
  struct Table {
    TileFunction of[2][2][sizeof...(M)];  // [quantized][8 bits][m - 1]
  };
  return Table{{{{float_tile<M + 1, 4>...}, {float_tile<M + 1, 8>...}}, {{quantized_tile<M + 1, 4>...}, {quantized_tile<M + 1, 8>...}}}};
}
constexpr auto kTiles = tile_table(std::make_integer_sequence<int, kTileRows>());

void multiply(const Product& product) {
  const PanelMatrix& p = *product.matrix;
  for (int64_t panel = 0; panel < product.panel_count; panel += 2) {
    Group g;
    Store store;
    store.count = 0;
    for (int i = 0; i < 2; ++i) {
      const bool exists = panel + i < product.panel_count;
      const int64_t index = exists ? panel + i : panel;
      g.panel[i] = product.panels + index * p.stride;
      store.to[i] = product.out + index % product.halves * product.half_stride + index / product.halves * p.nr;
      store.count += exists;
    }
    for (int64_t t = 0; t < product.tile_count; ++t) {
      const Tile& tile = product.tiles[t];
      kTiles.of[product.quantized][p.bits == 8][tile.m - 1](p, g, tile.data, store, product.row_stride);
      for (float*& to : store.to) to += tile.m * product.row_stride;
    }
  }
}

void pack_tile_offset(const PanelMatrix& p, bool quantized, const Row* rows, int m, uint8_t* out) {
  pack_tile(p, quantized, rows, m, out);
  if (!quantized) return;
  int32_t* sums = reinterpret_cast<int32_t*>(out + p.kp * m);
  const int32_t offset = p.bits == 4 ? 8 : 128;
  for (int64_t i = 0; i < p.blocks * m; ++i) sums[i] *= -offset;
}

bool usable() {
  __builtin_cpu_init();
  unsigned a, b, c, d;  // clang has no name for f16c
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}

}  // namespace

const CpuKernel panel_avx2 = {"panel_avx2", usable,        kTileRows, QM_ELEMENTWISE(pack_tile_offset),
                              multiply,     int8_peak_avx2};

}  // namespace quantmoe
