// The panels of FORMAT.md 2.7 and 2.8 with NEON. This is what a code is to the tiles of neon.h, and scales and zero
// points of every type. Codes that are floats go column by column. Everything is in an unnamed namespace, as in
// elementwise.h.
#pragma once
#include <arm_neon.h>

#include "core/minifloat.h"
#include "cpu/kernel.h"

namespace quantmoe {
namespace {

// Where 8 weight rows come from and go to: with 8-bit codes a panel is 4 of them. A missing second panel repeats the
// first and is not stored.
struct NeonGroup {
  const uint8_t* panel[2];
  float* to[2];
  bool both;
};

// The eight 4-byte values, one a row, at a panel offset.
template <int kBits>
inline void load_rows(const NeonGroup& panels, int64_t offset, float32x4_t out[2]) {
  const int64_t second = kBits == 4 ? 16 : 0;
  out[0] = vreinterpretq_f32_u8(vld1q_u8(panels.panel[0] + offset));
  out[1] = vreinterpretq_f32_u8(vld1q_u8(panels.panel[kBits == 8] + offset + second));
}

// A struct for each code says what its 16 bytes are to an int8 product: 2^kFraction times its value.
struct NeonInt4 {
  static constexpr int kBits = 4, kFraction = 4;
  static constexpr bool kMultiplied = false;
  static int8x16_t low(int8x16_t v) { return vshlq_n_s8(v, 4); }
  static int8x16_t high(int8x16_t v) { return vandq_s8(v, vdupq_n_s8(static_cast<int8_t>(0xf0))); }
};
struct NeonInt8 {
  static constexpr int kBits = 8, kFraction = 0;
  static constexpr bool kMultiplied = false;
};
struct NeonE2m1 {
  static constexpr int kBits = 4, kFraction = 0;
  static constexpr bool kMultiplied = true;
  static int8x16_t look_up(uint8x16_t nibbles) { return vqtbl1q_s8(vld1q_s8(kE2m1Doubled), nibbles); }
  static int8x16_t low(int8x16_t v) { return look_up(vandq_u8(vreinterpretq_u8_s8(v), vdupq_n_u8(15))); }
  static int8x16_t high(int8x16_t v) { return look_up(vshrq_n_u8(vreinterpretq_u8_s8(v), 4)); }
};

template <class C>
inline float32x4_t to_float(int32x4_t v) {
  if constexpr (C::kFraction == 0)
    return vcvtq_f32_s32(v);
  else
    return vcvtq_n_f32_s32(v, C::kFraction);
}

// Eight numbers as f32.
inline void widen_f16(uint16x8_t bits, float32x4_t out[2]) {
  const float16x8_t half = vreinterpretq_f16_u16(bits);
  out[0] = vcvt_f32_f16(vget_low_f16(half));
  out[1] = vcvt_high_f32_f16(half);
}
inline void widen_bf16(uint16x8_t bits, float32x4_t out[2]) {
  out[0] = vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(bits), 16));
  out[1] = vreinterpretq_f32_u32(vshll_high_n_u16(bits, 16));
}
// e4m3 codes are 2^-8 times their values, as the f16 with their bits.
inline void widen_e4m3(uint8x8_t codes, float32x4_t out[2]) {
  const int16x8_t moved = vshll_n_s8(vreinterpret_s8_u8(codes), 7);
  widen_f16(vandq_u16(vreinterpretq_u16_s16(moved), vdupq_n_u16(0xbfff)), out);
}
// 2^(code - 127) as bf16: the code is the exponent, 2^-127 is subnormal.
inline void widen_e8m0(uint8x8_t codes, float32x4_t out[2]) {
  widen_bf16(vmaxq_u16(vshll_n_u8(codes, 7), vdupq_n_u16(0x40)), out);
}

// The eight numbers of a byte or of two, one a row, at a panel offset.
template <int kBits>
inline uint8x8_t load_rows8(const NeonGroup& panels, int64_t offset) {
  if constexpr (kBits == 4) return vld1_u8(panels.panel[0] + offset);
  const uint32_t* const at[2] = {reinterpret_cast<const uint32_t*>(panels.panel[0] + offset),
                                 reinterpret_cast<const uint32_t*>(panels.panel[1] + offset)};
  return vreinterpret_u8_u32(vld1_lane_u32(at[1], vld1_dup_u32(at[0]), 1));
}
template <int kBits>
inline uint16x8_t load_rows16(const NeonGroup& panels, int64_t offset) {
  if constexpr (kBits == 4) return vreinterpretq_u16_u8(vld1q_u8(panels.panel[0] + offset));
  return vreinterpretq_u16_u8(vcombine_u8(vld1_u8(panels.panel[0] + offset), vld1_u8(panels.panel[1] + offset)));
}

template <class C>
inline void load_scales(const PanelMatrix& matrix, const NeonGroup& panels, int64_t offset, float32x4_t out[2]) {
  if constexpr (C::kMultiplied) {
    const uint8x8_t codes = load_rows8<C::kBits>(panels, offset);
    return matrix.scale_type == k_scale_type_e4m3 ? widen_e4m3(codes, out) : widen_e8m0(codes, out);
  }
  if (matrix.scale_type == k_scale_type_f32) return load_rows<C::kBits>(panels, offset, out);
  const uint16x8_t bits = load_rows16<C::kBits>(panels, offset);
  matrix.scale_type == k_scale_type_f16 ? widen_f16(bits, out) : widen_bf16(bits, out);
}

// What the zero points add to the values that C multiplies with.
template <class C>
inline int16x8_t load_offsets(const PanelMatrix& matrix, const NeonGroup& panels, int64_t offset) {
  if (!matrix.zero_points) return vdupq_n_s16(0);
  const uint16x8_t middle_minus = vsubl_u8(vdup_n_u8(C::kBits == 4 ? 8 : 128), load_rows8<C::kBits>(panels, offset));
  return vshlq_n_s16(vreinterpretq_s16_u16(middle_minus), C::kFraction);
}

}  // namespace
}  // namespace quantmoe
