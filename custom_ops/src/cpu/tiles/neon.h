// Panels times token tiles with NEON, on 8 weight rows at a time: one panel of 4-bit codes or two panels of 8-bit
// codes. One file for each instruction set includes this. Everything is in an unnamed namespace, as in elementwise.h.
//
// A quantized tile is q int8 [kp / 8][m][8] | -zero_point int32 [m] | step f32 [m]. With m = 1 and m = 4 these are
// KleidiAI's left-hand side bytes. With has_sums(), sums int32 [spans()][m] follow q. If the matrix is stepped, steps
// f32 [steps()][m] replace zero points and step. Rows are taken in units. With i8mm a unit is two rows, because its
// instruction multiplies 2 x 8 by 8 x 2. With dotprod it is one row. A unit multiplies with 16 weight bytes, 8 columns
// of two rows. So 8 weight rows are 4 accumulators a unit.
#pragma once
#if defined(__APPLE__)
#include <sys/sysctl.h>
#else
#include <sys/auxv.h>
#endif

#include "cpu/elementwise.h"
#include "cpu/tiles/neon_lanes.h"
#include "cpu/tiles/neon_scaled.h"

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
  // Eight values, one a weight row, as those vectors; and as what the accumulators of dot() start with.
  static void spread(const float32x4_t eight[2], float32x4_t out[kVectors]) {
    for (int half = 0; half < 2; ++half) {
      const float64x2_t pairs = vreinterpretq_f64_f32(eight[half]);
      out[2 * half] = vreinterpretq_f32_f64(vdupq_laneq_f64(pairs, 0));
      out[2 * half + 1] = vreinterpretq_f32_f64(vdupq_laneq_f64(pairs, 1));
    }
  }
  static void starts(int16x8_t eight, int32x4_t out[4]) {
    const float32x4_t wide[2] = {vreinterpretq_f32_s32(vmovl_s16(vget_low_s16(eight))),
                                 vreinterpretq_f32_s32(vmovl_high_s16(eight))};
    float32x4_t spread_out[4];
    spread(wide, spread_out);
    for (int j = 0; j < 4; ++j) out[j] = vreinterpretq_s32_f32(spread_out[j]);
  }
  // A value a token row. With an odd m the last unit's second is the 4 bytes that follow.
  static int32x4_t each(const int32_t* row) {
    const int32x4_t two = vcombine_s32(vld1_s32(row), vcreate_s32(0));
    return vzip1q_s32(two, two);
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
  static void spread(const float32x4_t eight[2], float32x4_t out[kVectors]) {
    out[0] = eight[0];
    out[1] = eight[1];
  }
  static void starts(int16x8_t eight, int32x4_t out[4]) {
    const int32x4_t zero = vdupq_n_s32(0);
    const int32x4_t low = vmovl_s16(vget_low_s16(eight)), high = vmovl_high_s16(eight);
    out[0] = vzip1q_s32(low, zero);
    out[1] = vzip2q_s32(low, zero);
    out[2] = vzip1q_s32(high, zero);
    out[3] = vzip2q_s32(high, zero);
  }
  static int32x4_t each(const int32_t* row) { return vdupq_n_s32(row[0]); }
  static int32x4_t broadcast(const int32_t* row, bool) { return each(row); }
  static void rows(const float32x4_t v[kVectors], float32x4_t out[kRows][2]) {
    out[0][0] = v[0];
    out[0][1] = v[1];
  }
};
#endif

template <int kBits>
inline void store_row(const NeonGroup& panels, int64_t offset, const float32x4_t y[2]) {
  vst1q_f32(panels.to[0] + offset, y[0]);
  if (kBits == 4) vst1q_f32(panels.to[0] + offset + 4, y[1]);
  if (kBits == 8 && panels.both) vst1q_f32(panels.to[1] + offset, y[1]);
}

// Written out so that arrays indexed by u live in registers.
#define QM_EACH_UNIT _Pragma("GCC unroll 4") for (int u = 0; u < kUnits; ++u)

// What groups have: nothing (scales belong to rows), scales, or zero points as well.
enum class Groups { kNone, kScales, kZeroPoints };

// Rows [first, first + kUnits * kRows) of a tile of `tokens`. kParts: groups of a block. One long function: what its
// end stores are the registers that its loops add to.
template <int kUnits, class C, Groups kGroups, int kParts, Steps kSteps>
void quantized_rows(const PanelMatrix& matrix, const NeonGroup& panels, const uint8_t* tile, int tokens, int first,
                    int64_t row_stride) {
  constexpr int kV = Unit::kVectors;
  constexpr bool kSums = kGroups == Groups::kZeroPoints, kStepped = kSteps != kRowStep;
  const int8_t* x = reinterpret_cast<const int8_t*>(tile) + 8 * first;
  const int64_t next = 8 * tokens;  // bytes from 8 columns to the next 8
  const int32_t* sums_of = reinterpret_cast<const int32_t*>(tile + matrix.kp * tokens) + first;
  const int32_t* steps_of = sums_of + (kSums ? matrix.spans() * tokens : 0);
  int32x4_t dot[kUnits][4];
  float32x4_t acc[kUnits][kV];
  [[maybe_unused]] float32x4_t of_pair[kUnits][kV];
  QM_EACH_UNIT for (float32x4_t& sum : acc[u]) sum = vdupq_n_f32(0.0f);
  const auto chunk = [&](const int8_t* from, auto weights) {
    int8x16_t row[kUnits];
    QM_EACH_UNIT row[u] = Unit::load(from + 8 * Unit::kRows * u);
    for (int j = 0; j < 4; ++j) {
      const int8x16_t w = weights(j);
      QM_EACH_UNIT dot[u][j] = Unit::dot(dot[u][j], row[u], w);
    }
  };
  NeonGroup block = panels;
  const uint8_t* const end_of_blocks = panels.panel[0] + matrix.tail();
  do {
#pragma GCC unroll 2
    for (int part = 0; part < kParts; ++part) {
      // Two groups of 16 columns are the low and the high nibbles of 128 bytes, or their halves.
      const bool low = part == 0, high = part == kParts - 1;
      const uint8_t *bytes = block.panel[0], *other = block.panel[1], *const end_of_codes = bytes + matrix.codes_bytes;
      do {  // the spans of a group
        if constexpr (kSums) {
          int32x4_t starts[4];
          Unit::starts(load_offsets<C>(matrix, block, matrix.zeros() + part * matrix.nr), starts);
          QM_EACH_UNIT {
            const int32x4_t sum = Unit::each(sums_of + u * Unit::kRows);
            for (int j = 0; j < 4; ++j) dot[u][j] = vmulq_s32(starts[j], sum);
          }
          sums_of += tokens;
        } else {
          QM_EACH_UNIT for (int32x4_t& sum : dot[u]) sum = vdupq_n_s32(0);
        }
        const uint8_t* const end = kStepped ? bytes + 4 * matrix.span : end_of_codes;
        do {
          if constexpr (C::kBits == 4) {
            for (int s = 0; s < 2; ++s) {
              int8x16_t codes[4];
              for (int j = 0; j < 4; ++j) codes[j] = vreinterpretq_s8_u8(vld1q_u8(bytes + 64 * s + 16 * j));
              if (low) chunk(x + s * next, [&](int j) { return C::low(codes[j]); });
              if (high) chunk(x + (s + 2) * next, [&](int j) { return C::high(codes[j]); });
            }
          } else {
            for (int i = low ? 0 : 2; i < (high ? 4 : 2); ++i)
              chunk(x + i * next, [&](int j) {
                return vreinterpretq_s8_u8(vld1q_u8((j < 2 ? bytes : other) + 32 * i + 16 * (j % 2)));
              });
          }
          if (high) x += 4 * next;
          if constexpr (kUnits > 2) asm("" : "+r"(x));  // gcc would keep and spill a pointer for each of the loads
          bytes += 128;
          other += 128;
        } while (kParts == 1 && bytes != end);
        if constexpr (kGroups != Groups::kNone || kStepped) {
          float32x4_t scales[kV];
          int32x4_t sums[kV];
          if constexpr (kGroups != Groups::kNone) {
            float32x4_t eight[2];
            load_scales<C>(matrix, block, matrix.codes_bytes + part * matrix.nr * scale_size(matrix.scale_type), eight);
            Unit::spread(eight, scales);
          }
          const bool ends = kSteps == kSpanStep || (kSteps == kPairStep && high);
          QM_EACH_UNIT {
            Unit::reduce(dot[u], sums);
            [[maybe_unused]] float32x4_t step;
            if (ends) step = vreinterpretq_f32_s32(Unit::each(steps_of + u * Unit::kRows));
            for (int v = 0; v < kV; ++v) {
              const float32x4_t sum = to_float<C>(sums[v]);
              if constexpr (kGroups == Groups::kNone)
                acc[u][v] = vfmaq_f32(acc[u][v], sum, step);
              else if constexpr (!kStepped)
                acc[u][v] = vfmaq_f32(acc[u][v], sum, scales[v]);
              else if constexpr (kSteps == kSpanStep)
                acc[u][v] = vfmaq_f32(acc[u][v], vmulq_f32(sum, scales[v]), step);
              else if (low)
                of_pair[u][v] = vmulq_f32(sum, scales[v]);
              else
                acc[u][v] = vfmaq_f32(acc[u][v], vfmaq_f32(of_pair[u][v], sum, scales[v]), step);
            }
          }
          if (ends) steps_of += tokens;
        }
      } while (kStepped && kParts == 1 && bytes != end_of_codes);
    }
    block.panel[0] += matrix.block_bytes;
    block.panel[1] += matrix.block_bytes;
  } while (block.panel[0] != end_of_blocks);
  const int32_t* negative_zero_points =
      reinterpret_cast<const int32_t*>(tile + (matrix.kp + (kSums ? 4 * matrix.spans() : 0)) * tokens);
  const int32_t* steps = negative_zero_points + tokens;
  float32x4_t row_sums[kV], scales[kV], biases[kV];
  const auto tail = [&](int64_t offset, float32x4_t out[kV]) {
    float32x4_t eight[2];
    load_rows<C::kBits>(panels, offset, eight);
    Unit::spread(eight, out);
  };
  tail(matrix.tail(), row_sums);
  tail(matrix.tail() + 4 * matrix.nr, scales);  // of rows, or multipliers
  tail(matrix.biases(), biases);
  QM_EACH_UNIT {
    const int i = first + u * Unit::kRows;
    const bool second = Unit::kRows == 2 && i + 1 < tokens;
    [[maybe_unused]] int32x4_t zero_points, sums[kV];
    [[maybe_unused]] float32x4_t step;
    float32x4_t y[kV], rows[Unit::kRows][2];
    if constexpr (!kStepped) {
      zero_points = Unit::broadcast(negative_zero_points + i, second);
      step = vreinterpretq_f32_s32(Unit::broadcast(steps + i, second));
      Unit::reduce(dot[u], sums);
    }
    for (int v = 0; v < kV; ++v) {
      if constexpr (kStepped) {
        y[v] = acc[u][v];
        if constexpr (kGroups == Groups::kNone)
          y[v] = vmulq_f32(y[v], vmulq_n_f32(scales[v], C::kBits == 4 ? 16.0f : 1.0f));
        if constexpr (C::kMultiplied) y[v] = vmulq_f32(y[v], scales[v]);
      } else if constexpr (kGroups == Groups::kNone) {
        const int32x4_t product = vmlaq_s32(sums[v], vreinterpretq_s32_f32(row_sums[v]), zero_points);
        y[v] = vmulq_f32(vcvtq_f32_s32(product), vmulq_f32(scales[v], step));
      } else {
        y[v] = vfmaq_f32(acc[u][v], row_sums[v], vcvtq_f32_s32(zero_points));
        if (C::kMultiplied) y[v] = vmulq_f32(y[v], scales[v]);
        y[v] = vmulq_f32(y[v], step);
      }
      y[v] = vaddq_f32(y[v], biases[v]);
    }
    Unit::rows(y, rows);
    store_row<C::kBits>(panels, i * row_stride, rows[0]);
    if (second) store_row<C::kBits>(panels, (i + 1) * row_stride, rows[Unit::kRows - 1]);
  }
}

// Float activations, x f32 [kp][tokens]: rows [first, first + kRows) of a tile, two columns of 8 weight rows at a time.
template <int kRows, class C, int kParts>
void float_rows(const PanelMatrix& matrix, const NeonGroup& panels, const uint8_t* tile, int tokens, int first,
                int64_t row_stride) {
  static constexpr uint8_t kFirstColumns[16] = {0, 8, 16, 24, 32, 40, 48, 56, 1, 9, 17, 25, 33, 41, 49, 57};
  const uint8x16_t first_columns = vld1q_u8(kFirstColumns);
  const float* x = reinterpret_cast<const float*>(tile) + first;
  float32x4_t acc[kRows][2], part[kRows][2];
  for (auto& row : acc) row[0] = row[1] = vdupq_n_f32(0.0f);
  int16x8_t offsets = vdupq_n_s16(0);
  const auto columns = [&](const int8x16x4_t& weights) {  // the next 8
    for (int pair = 0; pair < 8; pair += 2) {
      const int8x16_t two = vqtbl4q_s8(weights, vaddq_u8(first_columns, vdupq_n_u8(static_cast<uint8_t>(pair))));
      const int16x8_t column[2] = {vaddw_s8(offsets, vget_low_s8(two)), vaddw_high_s8(offsets, two)};
      for (int i = 0; i < 2; ++i, x += tokens) {
        const float32x4_t w[2] = {to_float<C>(vmovl_s16(vget_low_s16(column[i]))),
                                  to_float<C>(vmovl_high_s16(column[i]))};
        for (int r = 0; r < kRows; ++r)
          for (int half = 0; half < 2; ++half) part[r][half] = vfmaq_n_f32(part[r][half], w[half], x[r]);
      }
    }
  };
  int64_t block = 0;
  do {
    const int64_t base = block * matrix.block_bytes;
    for (int group = 0; group < kParts; ++group) {
      for (auto& row : part) row[0] = row[1] = vdupq_n_f32(0.0f);
      if constexpr (!C::kMultiplied)
        offsets = load_offsets<C>(matrix, panels, base + matrix.zeros() + group * matrix.nr);
      int8x16x4_t codes;
      if constexpr (C::kBits == 4) {
        for (int64_t offset = 0; offset < matrix.codes_bytes; offset += 128)
          for (int high = group; high < (kParts == 2 ? group + 1 : 2); ++high)
            for (int s = 0; s < 2; ++s) {
              for (int j = 0; j < 4; ++j) {
                const int8x16_t bytes =
                    vreinterpretq_s8_u8(vld1q_u8(panels.panel[0] + base + offset + 64 * s + 16 * j));
                codes.val[j] = high ? C::high(bytes) : C::low(bytes);
              }
              columns(codes);
            }
      } else {
        const int64_t bytes = matrix.codes_bytes / kParts;
        for (int64_t c = group * bytes; c < (group + 1) * bytes; c += 32) {
          for (int j = 0; j < 4; ++j)
            codes.val[j] = vreinterpretq_s8_u8(vld1q_u8(panels.panel[j / 2] + base + c + 16 * (j % 2)));
          columns(codes);
        }
      }
      if (matrix.grouped) {
        float32x4_t scales[2];
        load_scales<C>(matrix, panels, base + matrix.codes_bytes + group * matrix.nr * scale_size(matrix.scale_type),
                       scales);
        for (int row = 0; row < kRows; ++row)
          for (int half = 0; half < 2; ++half)
            acc[row][half] = vfmaq_f32(acc[row][half], part[row][half], scales[half]);
      }
    }
  } while (++block < matrix.blocks);
  float32x4_t scales[2], biases[2];
  load_rows<C::kBits>(panels, matrix.tail() + 4 * matrix.nr, scales);
  load_rows<C::kBits>(panels, matrix.biases(), biases);
  for (int row = 0; row < kRows; ++row) {
    float32x4_t y[2];
    for (int half = 0; half < 2; ++half) {
      y[half] = acc[row][half];
      if (C::kMultiplied) y[half] = vmulq_f32(y[half], scales[half]);
      if (!matrix.grouped)
        y[half] = vmulq_f32(part[row][half], vmulq_n_f32(scales[half], C::kBits == 4 ? 16.0f : 1.0f));
      y[half] = vaddq_f32(y[half], biases[half]);
    }
    store_row<C::kBits>(panels, (first + row) * row_stride, y);
  }
}

constexpr int kMaxUnits = 4;

// By the number of units of rows, less one.
using NeonRowsFunction = void (*)(const PanelMatrix&, const NeonGroup&, const uint8_t*, int, int, int64_t);
template <class C, Groups kGroups, int kParts, Steps kSteps>
constexpr NeonRowsFunction kQuantizedRows[kMaxUnits] = {
    quantized_rows<1, C, kGroups, kParts, kSteps>, quantized_rows<2, C, kGroups, kParts, kSteps>,
    quantized_rows<3, C, kGroups, kParts, kSteps>, quantized_rows<4, C, kGroups, kParts, kSteps>};
template <class C, int kParts>
constexpr NeonRowsFunction kFloatRows[kMaxUnits] = {float_rows<1, C, kParts>, float_rows<2, C, kParts>,
                                                    float_rows<3, C, kParts>, float_rows<4, C, kParts>};
// Whether tiles have the sums of q over groups: where codes have zero points, and in groups of 16, which may.
inline bool has_sums(const PanelMatrix& matrix) { return is_integer(matrix.format) && !matrix.plain(); }

// kSteps: of a group. Two groups may share one.
template <class C, Steps kSteps>
const NeonRowsFunction* integer_rows(const PanelMatrix& matrix) {
  constexpr Steps kOfPairs = kSteps == kSpanStep ? kPairStep : kRowStep;
  if (matrix.parts == 2) return kQuantizedRows<C, Groups::kZeroPoints, 2, kOfPairs>;
  return has_sums(matrix) ? kQuantizedRows<C, Groups::kZeroPoints, 1, kSteps>
         : matrix.grouped ? kQuantizedRows<C, Groups::kScales, 1, kSteps>
                          : kQuantizedRows<C, Groups::kNone, 1, kSteps>;
}
template <class C>
const NeonRowsFunction* integer_rows(const PanelMatrix& matrix, bool quantized) {
  if (!quantized) return matrix.parts == 2 ? kFloatRows<C, 2> : kFloatRows<C, 1>;
  return matrix.stepped ? integer_rows<C, kSpanStep>(matrix) : integer_rows<C, kRowStep>(matrix);
}
inline const NeonRowsFunction* rows_of(const PanelMatrix& matrix, bool quantized) {
  switch (matrix.format) {
    case k_format_int4:
      return integer_rows<NeonInt4>(matrix, quantized);
    case k_format_int8:
      return integer_rows<NeonInt8>(matrix, quantized);
    default:
      if (!quantized) return matrix.parts == 2 ? kFloatRows<NeonE2m1, 2> : kFloatRows<NeonE2m1, 1>;
      if (matrix.parts == 1)
        return matrix.stepped ? kQuantizedRows<NeonE2m1, Groups::kScales, 1, kSpanStep>
                              : kQuantizedRows<NeonE2m1, Groups::kScales, 1, kRowStep>;
      return !matrix.stepped          ? kQuantizedRows<NeonE2m1, Groups::kScales, 2, kRowStep>
             : matrix.step_spans == 2 ? kQuantizedRows<NeonE2m1, Groups::kScales, 2, kPairStep>
                                      : kQuantizedRows<NeonE2m1, Groups::kScales, 2, kSpanStep>;
  }
}

void multiply(const PanelProduct& product) {
  const PanelMatrix& matrix = *product.matrix;
  if (is_k(matrix.format)) return multiply_k<NeonLanes, kMaxUnits, false>(product);
  if (matrix.columns) return multiply_columns<NeonLanes, kMaxUnits, false>(product);
  const NeonRowsFunction* const rows = rows_of(matrix, product.quantized);
  const int unit = product.quantized ? Unit::kRows : 1, step = matrix.nr == 4 ? 2 : 1;
  for (int64_t panel = 0; panel < product.panel_count; panel += step) {
    NeonGroup panels;
    panels.both = panel + step <= product.panel_count;
    for (int i = 0; i < 2; ++i) {
      const int64_t index = panel + (step == 2 && panels.both ? i : 0);
      panels.panel[i] = product.panels + index * matrix.stride;
      panels.to[i] = product.out + index % product.halves * product.half_stride + index / product.halves * matrix.nr;
    }
    for (int64_t tile_index = 0; tile_index < product.tile_count; ++tile_index) {
      const TokenTile& tile = product.tiles[tile_index];
      // Its rows split evenly into passes of at most kMaxUnits units.
      int units = (tile.m + unit - 1) / unit, passes = (units + kMaxUnits - 1) / kMaxUnits, first = 0;
      for (; passes > 0; --passes) {
        const int count = (units + passes - 1) / passes;
        rows[count - 1](matrix, panels, tile.data, tile.m, first, product.row_stride);
        units -= count;
        first += count * unit;
      }
      for (float*& to : panels.to) to += tile.m * product.row_stride;
    }
  }
}

void pack_rows(const PanelMatrix& matrix, bool quantized, const ActivationRow* rows, int tokens, uint8_t* out) {
  if (is_k(matrix.format)) return pack_k_tile(matrix, quantized, rows, tokens, out);
  if (!quantized) return pack_tile(matrix, quantized, rows, tokens, out);
  for (int i = 0; i < tokens; ++i)
    for (int64_t k = 0; k < matrix.kp; k += 8) std::memcpy(out + k * tokens + 8 * i, rows[i].q + k, 8);
  out += matrix.kp * tokens;
  if (has_sums(matrix))
    for (int64_t span = 0; span < matrix.spans(); ++span)
      for (int i = 0; i < tokens; ++i, out += 4) std::memcpy(out, rows[i].sums + span, 4);
  for (int64_t step = 0; step < matrix.steps(); ++step)
    for (int i = 0; i < tokens; ++i, out += 4) std::memcpy(out, rows[i].steps + step, 4);
  if (matrix.stepped) return;
  int32_t* negative_zero_points = reinterpret_cast<int32_t*>(out);
  float* steps = reinterpret_cast<float*>(out + 4 * tokens);
  for (int i = 0; i < tokens; ++i) {
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

#if defined(__APPLE__)
inline bool cpu_has(const char* feature) {
  int has = 0;
  size_t size = sizeof has;
  return sysctlbyname(feature, &has, &size, nullptr, 0) == 0 && has;
}
inline bool cpu_has_dotprod() { return cpu_has("hw.optional.arm.FEAT_DotProd"); }
inline bool cpu_has_i8mm() { return cpu_has("hw.optional.arm.FEAT_I8MM"); }
#else
inline bool cpu_has_dotprod() { return getauxval(AT_HWCAP) >> 20 & 1; }
inline bool cpu_has_i8mm() { return getauxval(AT_HWCAP2) >> 13 & 1; }
#endif

}  // namespace
}  // namespace quantmoe
