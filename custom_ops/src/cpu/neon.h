// Panels times token tiles with NEON, on 8 weight rows at a time: one panel of 4-bit codes or two of 8-bit codes.
// Included by one file an instruction set; everything is in an unnamed namespace, as in elementwise.h.
//
// A quantized tile is q int8 [kp / 8][m][8] | -zero_point int32 [m] | step f32 [m]: with m = 1 and m = 4 these are
// KleidiAI's left-hand side bytes. Its rows are taken in units: two rows with i8mm, whose instruction multiplies 2 x 8
// by 8 x 2, one row with dotprod. A unit multiplies with 16 weight bytes, 8 columns of two rows, so that 8 weight rows
// are 4 accumulators a unit.
#pragma once
#include <arm_neon.h>
#include <sys/auxv.h>

#include "cpu/elementwise.h"

namespace quantmoe {
namespace {

#if defined(__ARM_FEATURE_MATMUL_INT8)
struct Unit {
  static constexpr int kRows = 2, kVectors = 4;
  // With an odd m the last unit's second row is the bytes that follow: always within the tile, and never stored.
  static int8x16_t load(const int8_t* x) { return vld1q_s8(x); }
  static int32x4_t dot(int32x4_t sum, int8x16_t x, int8x16_t w) { return vmmlaq_s32(sum, x, w); }
  // Vector j holds weight rows 2j and 2j + 1 for the first token row, then for the second.
  static void reduce(const int32x4_t dot[4], int32x4_t out[kVectors]) {
    for (int j = 0; j < 4; ++j) out[j] = dot[j];
  }
  static void spread(int32x4_t low, int32x4_t high, int32x4_t out[kVectors]) {
    const int64x2_t a = vreinterpretq_s64_s32(low), b = vreinterpretq_s64_s32(high);
    out[0] = vreinterpretq_s32_s64(vdupq_laneq_s64(a, 0));
    out[1] = vreinterpretq_s32_s64(vdupq_laneq_s64(a, 1));
    out[2] = vreinterpretq_s32_s64(vdupq_laneq_s64(b, 0));
    out[3] = vreinterpretq_s32_s64(vdupq_laneq_s64(b, 1));
  }
  static int32x4_t broadcast(const int32_t* row, bool second) {
    return vcombine_s32(vdup_n_s32(row[0]), vdup_n_s32(row[second]));
  }
  static void rows(const float32x4_t v[kVectors], float32x4_t out[kRows][2]) {
    for (int half = 0; half < 2; ++half) {
      const float64x2_t a = vreinterpretq_f64_f32(v[2 * half]), b = vreinterpretq_f64_f32(v[2 * half + 1]);
      out[0][half] = vreinterpretq_f32_f64(vtrn1q_f64(a, b));
      out[1][half] = vreinterpretq_f32_f64(vtrn2q_f64(a, b));
    }
  }
};
#else
struct Unit {
  static constexpr int kRows = 1, kVectors = 2;
  static int8x16_t load(const int8_t* x) {
    return vreinterpretq_s8_s64(vld1q_dup_s64(reinterpret_cast<const int64_t*>(x)));
  }
  static int32x4_t dot(int32x4_t sum, int8x16_t x, int8x16_t w) { return vdotq_s32(sum, w, x); }
  static void reduce(const int32x4_t dot[4], int32x4_t out[kVectors]) {
    out[0] = vpaddq_s32(dot[0], dot[1]);
    out[1] = vpaddq_s32(dot[2], dot[3]);
  }
  static void spread(int32x4_t low, int32x4_t high, int32x4_t out[kVectors]) {
    out[0] = low;
    out[1] = high;
  }
  static int32x4_t broadcast(const int32_t* row, bool) { return vdupq_n_s32(row[0]); }
  static void rows(const float32x4_t v[kVectors], float32x4_t out[kRows][2]) {
    out[0][0] = v[0];
    out[0][1] = v[1];
  }
};
#endif

// Where 8 weight rows come from and go to: with 8-bit codes a panel is 4 of them. A missing second panel repeats the
// first and is not stored.
struct Group {
  const uint8_t* panel[2];
  float* to[2];
  bool both;
};

// The eight 4-byte values, one a row, at a panel offset.
template <int kBits>
inline void load_rows(const Group& g, int64_t offset, int32x4_t out[2]) {
  const int64_t second = kBits == 4 ? 16 : 0;
  out[0] = vreinterpretq_s32_u8(vld1q_u8(g.panel[0] + offset));
  out[1] = vreinterpretq_s32_u8(vld1q_u8(g.panel[kBits == 8] + offset + second));
}
template <int kBits>
inline void load_scales(const Group& g, int64_t offset, int32_t scale_type, int32x4_t out[2]) {
  if (scale_type == k_scale_type_f32) return load_rows<kBits>(g, offset, out);
  for (int half = 0; half < 2; ++half) {
    const uint8_t* at = g.panel[kBits == 8 ? half : 0] + offset + (kBits == 4 ? 8 * half : 0);
    const uint16x4_t bits = vreinterpret_u16_u8(vld1_u8(at));
    out[half] = scale_type == k_scale_type_f16 ? vreinterpretq_s32_f32(vcvt_f32_f16(vreinterpret_f16_u16(bits)))
                                               : vreinterpretq_s32_u32(vshll_n_u16(bits, 16));
  }
}

template <int kBits>
inline void store_row(const Group& g, int64_t offset, const float32x4_t y[2]) {
  vst1q_f32(g.to[0] + offset, y[0]);
  if (kBits == 4) vst1q_f32(g.to[0] + offset + 4, y[1]);
  if (kBits == 8 && g.both) vst1q_f32(g.to[1] + offset, y[1]);
}

// Rows [first, first + kUnits * kRows) of a tile of m.
template <int kUnits, int kBits>
void quantized_rows(const PanelMatrix& p, const Group& g, const uint8_t* tile, int m, int first, int64_t row_stride) {
  constexpr int kV = Unit::kVectors;
  const int8_t* x = reinterpret_cast<const int8_t*>(tile) + 8 * first;
  const int64_t next = 8 * m;  // bytes from 8 columns to the next 8
  int32x4_t dot[kUnits][4], pair[2];
  float32x4_t acc[kUnits][kV];
  for (int u = 0; u < kUnits; ++u)
    for (int v = 0; v < kV; ++v) acc[u][v] = vdupq_n_f32(0.0f);
  const auto chunk = [&](const int8_t* at, auto weights) {
    int8x16_t row[kUnits];
    for (int u = 0; u < kUnits; ++u) row[u] = Unit::load(at + 8 * Unit::kRows * u);
    for (int j = 0; j < 4; ++j) {
      const int8x16_t w = weights(j);
      for (int u = 0; u < kUnits; ++u) dot[u][j] = Unit::dot(dot[u][j], row[u], w);
    }
  };
  int64_t b = 0;
  do {
    for (auto& unit : dot)
      for (auto& sum : unit) sum = vdupq_n_s32(0);
    const int64_t base = b * p.block_bytes;
    if constexpr (kBits == 4) {  // 16 times the values: the low nibbles shifted up, the high ones masked
      const int8x16_t mask = vdupq_n_s8(static_cast<int8_t>(0xf0));
      const int8_t* w = reinterpret_cast<const int8_t*>(g.panel[0]) + base;
      for (const int8_t* end = w + p.codes_bytes; w != end; w += 128, x += 4 * next)
        for (int s = 0; s < 2; ++s) {
          int8x16_t codes[4];
          for (int j = 0; j < 4; ++j) codes[j] = vld1q_s8(w + 64 * s + 16 * j);
          chunk(x + s * next, [&](int j) { return vshlq_n_s8(codes[j], 4); });
          chunk(x + (s + 2) * next, [&](int j) { return vandq_s8(codes[j], mask); });
        }
    } else {
      for (int64_t c = base; c < base + p.codes_bytes; c += 128, x += 4 * next)
        for (int i = 0; i < 4; ++i)
          chunk(x + i * next,
                [&](int j) { return vreinterpretq_s8_u8(vld1q_u8(g.panel[j / 2] + c + 32 * i + 16 * (j % 2))); });
    }
    if (p.grouped) {
      int32x4_t scales[kV], sums[kV];
      load_scales<kBits>(g, base + p.codes_bytes, p.scale_type, pair);
      Unit::spread(pair[0], pair[1], scales);
      for (int u = 0; u < kUnits; ++u) {
        Unit::reduce(dot[u], sums);
        for (int v = 0; v < kV; ++v) {
          const float32x4_t sum = kBits == 4 ? vcvtq_n_f32_s32(sums[v], 4) : vcvtq_f32_s32(sums[v]);
          acc[u][v] = vfmaq_f32(acc[u][v], sum, vreinterpretq_f32_s32(scales[v]));
        }
      }
    }
  } while (++b < p.blocks);
  const int32_t* negative_zero_points = reinterpret_cast<const int32_t*>(tile + p.kp * m);
  const int32_t* steps = negative_zero_points + m;
  int32x4_t row_sums[kV], scales[kV], biases[kV];
  load_rows<kBits>(g, p.tail(), pair);
  Unit::spread(pair[0], pair[1], row_sums);
  load_rows<kBits>(g, p.tail() + 4 * p.nr, pair);  // scales when channelwise
  Unit::spread(pair[0], pair[1], scales);
  load_rows<kBits>(g, p.tail() + (p.grouped ? 4 : 8) * p.nr, pair);
  Unit::spread(pair[0], pair[1], biases);
  for (int u = 0; u < kUnits; ++u) {
    const int i = first + u * Unit::kRows;
    const bool second = Unit::kRows == 2 && i + 1 < m;
    const int32x4_t z = Unit::broadcast(negative_zero_points + i, second);
    const float32x4_t step = vreinterpretq_f32_s32(Unit::broadcast(steps + i, second));
    int32x4_t sums[kV];
    float32x4_t y[kV], rows[Unit::kRows][2];
    Unit::reduce(dot[u], sums);
    for (int v = 0; v < kV; ++v) {
      if (p.grouped) {
        y[v] = vmulq_f32(vfmaq_f32(acc[u][v], vreinterpretq_f32_s32(row_sums[v]), vcvtq_f32_s32(z)), step);
      } else {
        const float32x4_t product = vcvtq_f32_s32(vmlaq_s32(sums[v], row_sums[v], z));
        y[v] = vmulq_f32(product, vmulq_f32(vreinterpretq_f32_s32(scales[v]), step));
      }
      y[v] = vaddq_f32(y[v], vreinterpretq_f32_s32(biases[v]));
    }
    Unit::rows(y, rows);
    store_row<kBits>(g, i * row_stride, rows[0]);
    if (second) store_row<kBits>(g, (i + 1) * row_stride, rows[Unit::kRows - 1]);
  }
}

// Float activations, x f32 [kp][m]: rows [first, first + kRows) of a tile of m, two columns of 8 weight rows at a time.
template <int kRows, int kBits>
void float_rows(const PanelMatrix& p, const Group& g, const uint8_t* tile, int m, int first, int64_t row_stride) {
  static constexpr uint8_t kFirstColumns[16] = {0, 8, 16, 24, 32, 40, 48, 56, 1, 9, 17, 25, 33, 41, 49, 57};
  const uint8x16_t first_columns = vld1q_u8(kFirstColumns);
  float32x4_t acc[kRows][2], part[kRows][2];
  for (auto& row : acc) row[0] = row[1] = vdupq_n_f32(0.0f);
  const auto columns = [&](const float* x,
                           const int8x16x4_t& weights) {  // 8 columns, 16 times the value when kBits is 4
    for (int c = 0; c < 8; c += 2) {
      const int8x16_t two = vqtbl4q_s8(weights, vaddq_u8(first_columns, vdupq_n_u8(static_cast<uint8_t>(c))));
      const int16x8_t column[2] = {vmovl_s8(vget_low_s8(two)), vmovl_s8(vget_high_s8(two))};
      for (int i = 0; i < 2; ++i, x += m) {
        const int32x4_t low = vmovl_s16(vget_low_s16(column[i])), high = vmovl_s16(vget_high_s16(column[i]));
        const float32x4_t w[2] = {kBits == 4 ? vcvtq_n_f32_s32(low, 4) : vcvtq_f32_s32(low),
                                  kBits == 4 ? vcvtq_n_f32_s32(high, 4) : vcvtq_f32_s32(high)};
        for (int r = 0; r < kRows; ++r)
          for (int half = 0; half < 2; ++half) part[r][half] = vfmaq_n_f32(part[r][half], w[half], x[r]);
      }
    }
  };
  const float* x = reinterpret_cast<const float*>(tile) + first;
  int64_t b = 0;
  do {
    for (auto& row : part) row[0] = row[1] = vdupq_n_f32(0.0f);
    const int64_t base = b * p.block_bytes;
    int8x16x4_t codes;
    if constexpr (kBits == 4) {
      for (int64_t c = 0; c < p.codes_bytes; c += 128, x += 32 * m)
        for (int high = 0; high < 2; ++high)
          for (int s = 0; s < 2; ++s) {
            for (int j = 0; j < 4; ++j) {
              const int8x16_t bytes = vreinterpretq_s8_u8(vld1q_u8(g.panel[0] + base + c + 64 * s + 16 * j));
              codes.val[j] = high ? vandq_s8(bytes, vdupq_n_s8(static_cast<int8_t>(0xf0))) : vshlq_n_s8(bytes, 4);
            }
            columns(x + (16 * high + 8 * s) * m, codes);
          }
    } else {
      for (int64_t c = 0; c < p.codes_bytes; c += 32, x += 8 * m) {
        for (int j = 0; j < 4; ++j)
          codes.val[j] = vreinterpretq_s8_u8(vld1q_u8(g.panel[j / 2] + base + c + 16 * (j % 2)));
        columns(x, codes);
      }
    }
    if (p.grouped) {
      int32x4_t scales[2];
      load_scales<kBits>(g, base + p.codes_bytes, p.scale_type, scales);
      for (int r = 0; r < kRows; ++r)
        for (int half = 0; half < 2; ++half)
          acc[r][half] = vfmaq_f32(acc[r][half], part[r][half], vreinterpretq_f32_s32(scales[half]));
    }
  } while (++b < p.blocks);
  int32x4_t scales[2], biases[2];
  load_rows<kBits>(g, p.tail() + 4 * p.nr, scales);
  load_rows<kBits>(g, p.tail() + (p.grouped ? 4 : 8) * p.nr, biases);
  for (int r = 0; r < kRows; ++r) {
    float32x4_t y[2];
    for (int half = 0; half < 2; ++half) {
      const float32x4_t scale = vmulq_n_f32(vreinterpretq_f32_s32(scales[half]), kBits == 4 ? 16.0f : 1.0f);
      y[half] =
          vaddq_f32(p.grouped ? acc[r][half] : vmulq_f32(part[r][half], scale), vreinterpretq_f32_s32(biases[half]));
    }
    store_row<kBits>(g, (first + r) * row_stride, y);
  }
}

constexpr int kMaxUnits = 4;

// Splits the rows of a tile evenly into passes of at most kMaxUnits units.
template <int kBits>
void multiply_tile(const PanelMatrix& p, const Group& g, bool quantized, const Tile& tile, int64_t row_stride) {
  using Rows = void (*)(const PanelMatrix&, const Group&, const uint8_t*, int, int, int64_t);
  static constexpr Rows kQuantized[] = {quantized_rows<1, kBits>, quantized_rows<2, kBits>, quantized_rows<3, kBits>,
                                        quantized_rows<4, kBits>};
  static constexpr Rows kFloat[] = {float_rows<1, kBits>, float_rows<2, kBits>, float_rows<3, kBits>,
                                    float_rows<4, kBits>};
  const int rows = quantized ? Unit::kRows : 1;
  int units = (tile.m + rows - 1) / rows, passes = (units + kMaxUnits - 1) / kMaxUnits, first = 0;
  for (; passes > 0; --passes) {
    const int n = (units + passes - 1) / passes;
    (quantized ? kQuantized : kFloat)[n - 1](p, g, tile.data, tile.m, first, row_stride);
    units -= n;
    first += n * rows;
  }
}

void multiply(const Product& product) {
  const PanelMatrix& p = *product.matrix;
  const int step = 8 / p.nr;
  for (int64_t panel = 0; panel < product.panel_count; panel += step) {
    Group g;
    g.both = panel + step <= product.panel_count;
    for (int i = 0; i < 2; ++i) {
      const int64_t index = panel + (step == 2 && g.both ? i : 0);
      g.panel[i] = product.panels + index * p.stride;
      g.to[i] = product.out + index % product.halves * product.half_stride + index / product.halves * p.nr;
    }
    for (int64_t t = 0; t < product.tile_count; ++t) {
      const Tile& tile = product.tiles[t];
      (p.bits == 4 ? multiply_tile<4> : multiply_tile<8>)(p, g, product.quantized, tile, product.row_stride);
      for (float*& to : g.to) to += tile.m * product.row_stride;
    }
  }
}

void pack_rows(const PanelMatrix& p, bool quantized, const Row* rows, int m, uint8_t* out) {
  if (!quantized) return pack_tile(p, quantized, rows, m, out);
  int32_t* negative_zero_points = reinterpret_cast<int32_t*>(out + p.kp * m);
  float* steps = reinterpret_cast<float*>(negative_zero_points + m);
  for (int i = 0; i < m; ++i) {
    for (int64_t k = 0; k < p.kp; k += 8) std::memcpy(out + k * m + 8 * i, rows[i].q + k, 8);
    negative_zero_points[i] = -rows[i].zero_point;
    steps[i] = rows[i].step;
  }
}

// This file's integer product on registers alone.
int64_t int8_peak(int64_t rounds) {
  constexpr int kSums = 16;
  int32x4_t sums[kSums];
  int8x16_t a = vdupq_n_s8(1), b = a;
  for (int32x4_t& sum : sums) sum = vdupq_n_s32(0);
  for (int64_t r = 0; r < rounds; ++r)
#pragma GCC unroll 16
    for (int32x4_t& sum : sums) {
      asm volatile("" : "+w"(a));  // a new product each time
      sum = Unit::dot(sum, a, b);
    }
  for (int32x4_t& sum : sums) asm volatile("" : : "w"(sum));
  return rounds * kSums * 16 * Unit::kRows;
}

inline bool carries(const PanelMatrix& p) { return p.plain(); }

inline bool cpu_has(unsigned long word, int bit) { return getauxval(word) >> bit & 1; }

}  // namespace
}  // namespace quantmoe
