// The lanes of k_tile.h and column_tile.h with NEON's int8 dot product: 8 rows.
#pragma once
#include <arm_neon.h>

#include "cpu/tiles/column_tile.h"
#include "cpu/tiles/neon_scaled.h"

namespace quantmoe {
namespace {

struct NeonLanes {
  static constexpr int kRows = 8, kBothTokens = 0, kPairTokens = kMaxTileRows;
  template <int>
  static constexpr int kDots = 8;
  struct Bytes {
    uint8x16_t v[2];
  };
  struct Sums {
    int32x4_t v[2];
  };
  struct Floats {
    float32x4_t v[2];
  };
  static Bytes load(const uint8_t* at) { return {{vld1q_u8(at), vld1q_u8(at + 16)}}; }
  template <bool high>
  static Bytes nibbles(const Bytes& a) {
    if constexpr (high) return {{vshrq_n_u8(a.v[0], 4), vshrq_n_u8(a.v[1], 4)}};
    return {{vandq_u8(a.v[0], vdupq_n_u8(15)), vandq_u8(a.v[1], vdupq_n_u8(15))}};
  }
  // Bits [from, from + count) of each byte, from `to` on.
  template <int from, int count, int to>
  static uint8x16_t moved(uint8x16_t bytes) {
    if constexpr (from <= to)
      bytes = vshlq_n_u8(bytes, to - from);
    else
      bytes = vshrq_n_u8(bytes, from - to);
    return vandq_u8(bytes, vdupq_n_u8(((1 << count) - 1) << to));
  }
  template <int from, int count>
  static Bytes bits(const Bytes& a) {
    return {{moved<from, count, 0>(a.v[0]), moved<from, count, 0>(a.v[1])}};
  }
  template <int from, int count, int to>
  static Bytes with_bits(const Bytes& n, const Bytes& a) {
    return {{vorrq_u8(n.v[0], moved<from, count, to>(a.v[0])), vorrq_u8(n.v[1], moved<from, count, to>(a.v[1]))}};
  }
  static Sums start(int32_t n) { return {{vdupq_n_s32(n), vdupq_n_s32(n)}}; }
  static void dot(Sums& sums, const Bytes& codes, const uint8_t* x) {
    const int8x16_t four = vreinterpretq_s8_s32(vld1q_dup_s32(reinterpret_cast<const int32_t*>(x)));
    for (int h = 0; h < 2; ++h) sums.v[h] = vdotq_s32(sums.v[h], vreinterpretq_s8_u8(codes.v[h]), four);
  }
  static void settle(Sums&) {}
  static Floats floats(const Sums& sums) { return {{vcvtq_f32_s32(sums.v[0]), vcvtq_f32_s32(sums.v[1])}}; }
  static Floats halves(const uint8_t* at) {
    Floats out;
    widen_f16(vreinterpretq_u16_u8(vld1q_u8(at)), out.v);
    return out;
  }
  static Floats int8s(const uint8_t* at) { return int8s(vreinterpret_s8_u8(vld1_u8(at))); }
  static Floats int8s(int8x8_t bytes) {
    const int16x8_t wide = vmovl_s8(bytes);
    return {{vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide))), vcvtq_f32_s32(vmovl_high_s16(wide))}};
  }
  template <bool high>
  static Floats halves_of_bytes(const uint8_t* at) {
    const uint8x8_t bytes = vld1_u8(at);
    return int8s(vreinterpret_s8_u8(high ? vshr_n_u8(bytes, 4) : vand_u8(bytes, vdup_n_u8(15))));
  }
  static Floats bf16s(const uint8_t* at) {
    Floats out;
    widen_bf16(vreinterpretq_u16_u8(vld1q_u8(at)), out.v);
    return out;
  }
  static Floats e4m3s(const uint8_t* at) {
    Floats out;
    widen_e4m3(vld1_u8(at), out.v);
    return out;
  }
  static Floats e8m0s(const uint8_t* at) {
    Floats out;
    widen_e8m0(vld1_u8(at), out.v);
    return out;
  }
  static float number(const float* x) { return *x; }
  static Floats fma(float a, const Floats& b, const Floats& c) {
    return {{vfmaq_n_f32(c.v[0], b.v[0], a), vfmaq_n_f32(c.v[1], b.v[1], a)}};
  }
  static constexpr int kColumns = 1, kColumnBytes = 64;
  static constexpr int panels_of(int) { return 1; }
  template <int i>
  static Floats column(const Bytes& a) {
    const auto one = [](uint8x16_t bytes) {
      uint32x4_t moved = vreinterpretq_u32_u8(bytes);
      if constexpr (i > 0) moved = vshrq_n_u32(moved, 8 * i);
      return vcvtq_f32_u32(vandq_u32(moved, vdupq_n_u32(255)));
    };
    return {{one(a.v[0]), one(a.v[1])}};
  }
  using Table = uint8x16x4_t;
  static Table table(const float* at) { return vld1q_u8_x4(reinterpret_cast<const uint8_t*>(at)); }
  template <int i>
  static Floats entry(const Table& table, const Bytes& a) {
    const auto one = [&](uint8x16_t bytes) {
      uint32x4_t place = vreinterpretq_u32_u8(bytes);
      if constexpr (i > 0) place = vshrq_n_u32(place, 8 * i);
      place = vandq_u32(place, vdupq_n_u32(15));
      // Bytes 4 place to 4 place + 3, of each lane.
      const uint32x4_t at = vmlaq_n_u32(vdupq_n_u32(0x03020100), place, 0x04040404);
      return vreinterpretq_f32_u8(vqtbl4q_u8(table, vreinterpretq_u8_u32(at)));
    };
    return {{one(a.v[0]), one(a.v[1])}};
  }
  static Floats fma(const Floats& a, const Floats& b, const Floats& c) {
    return {{vfmaq_f32(c.v[0], a.v[0], b.v[0]), vfmaq_f32(c.v[1], a.v[1], b.v[1])}};
  }
  static Floats fma_less(const Floats& a, const Floats& b, const Floats& c) {
    return {{vfmaq_f32(vnegq_f32(c.v[0]), a.v[0], b.v[0]), vfmaq_f32(vnegq_f32(c.v[1]), a.v[1], b.v[1])}};
  }
  static Floats negative_fma(const Floats& a, const Floats& b, const Floats& c) {
    return {{vfmsq_f32(c.v[0], a.v[0], b.v[0]), vfmsq_f32(c.v[1], a.v[1], b.v[1])}};
  }
  static Floats multiply(const Floats& a, const Floats& b) {
    return {{vmulq_f32(a.v[0], b.v[0]), vmulq_f32(a.v[1], b.v[1])}};
  }
  static Floats add(const Floats& a, const Floats& b) {
    return {{vaddq_f32(a.v[0], b.v[0]), vaddq_f32(a.v[1], b.v[1])}};
  }
  static Floats broadcast(float x) { return {{vdupq_n_f32(x), vdupq_n_f32(x)}}; }
  static Floats broadcast(const float* x) { return {{vld1q_dup_f32(x), vld1q_dup_f32(x)}}; }
  static Floats load_floats(const uint8_t* at) {
    return {{vreinterpretq_f32_u8(vld1q_u8(at)), vreinterpretq_f32_u8(vld1q_u8(at + 16))}};
  }
  static void store(float* to, const Floats& a) {
    vst1q_f32(to, a.v[0]);
    vst1q_f32(to + 4, a.v[1]);
  }
  static void prefetch(const uint8_t*) {}
};

}  // namespace
}  // namespace quantmoe
