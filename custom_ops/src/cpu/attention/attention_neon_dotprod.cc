// CachedAttention, CausalConv, GatedDelta and StateSpace with NEON: a vector is four registers.
#include <arm_neon.h>

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-function"
#include "cpu/attention/latent_attention.h"
#include "cpu/attention/linear_attention.h"
#pragma GCC diagnostic pop

namespace quantmoe {
namespace {

struct NeonVectors {
  static constexpr int kRows = 6, kVectors = 1;  // 24 registers of sums
  static constexpr int kSlab = 2;

  struct Vector {
    float32x4_t parts[4];
  };
  static float32x4_t load_four(const float* x) { return vld1q_f32(x); }
  static float32x4_t load_four(const uint16_t* x) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(x))); }
  static uint8x8_t load_bytes(const void* x) {
    uint32_t four;
    std::memcpy(&four, x, 4);
    return vreinterpret_u8_u32(vdup_n_u32(four));
  }
  static float32x4_t load_four(const int8_t* x) {
    return vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u8(load_bytes(x))))));
  }
  static float32x4_t load_four(const E4m3* x) {  // e4m3_half
    const uint16x4_t code = vget_low_u16(vmovl_u8(load_bytes(x))), ones = vdup_n_u16(0x7f);
    const uint16x4_t magnitude = vand_u16(code, ones), sign = vshl_n_u16(vbic_u16(code, ones), 8);
    const uint16x4_t half = vorr_u16(vshl_n_u16(magnitude, 7), sign);
    const uint16x4_t number = vbsl_u16(vceq_u16(magnitude, ones), vdup_n_u16(0x7e00), half);
    return vcvt_f32_f16(vreinterpret_f16_u16(number));
  }
  static Vector zero() { return {{vdupq_n_f32(0), vdupq_n_f32(0), vdupq_n_f32(0), vdupq_n_f32(0)}}; }
  template <class C>
  static Vector load(const C* x) {
    return {{load_four(x), load_four(x + 4), load_four(x + 8), load_four(x + 12)}};
  }
  static void store(float* out, const Vector& x) {
    for (int i = 0; i < 4; ++i) vst1q_f32(out + 4 * i, x.parts[i]);
  }
  static Vector multiply(float a, const Vector& x) {
    return {{vmulq_n_f32(x.parts[0], a), vmulq_n_f32(x.parts[1], a), vmulq_n_f32(x.parts[2], a),
             vmulq_n_f32(x.parts[3], a)}};
  }
  static Vector multiply_add(float a, const Vector& x, const Vector& sum) {
    return {{vfmaq_n_f32(sum.parts[0], x.parts[0], a), vfmaq_n_f32(sum.parts[1], x.parts[1], a),
             vfmaq_n_f32(sum.parts[2], x.parts[2], a), vfmaq_n_f32(sum.parts[3], x.parts[3], a)}};
  }

  // 4 features of 4 keys, to columns of 16.
  template <class C>
  static void transpose_four(const C* const* rows, int64_t feature, float* out) {
    const float32x4x2_t a = vtrnq_f32(load_four(rows[0] + feature), load_four(rows[1] + feature));
    const float32x4x2_t b = vtrnq_f32(load_four(rows[2] + feature), load_four(rows[3] + feature));
    for (int i = 0; i < 2; ++i) {
      vst1q_f32(out + i * 16, vcombine_f32(vget_low_f32(a.val[i]), vget_low_f32(b.val[i])));
      vst1q_f32(out + (i + 2) * 16, vcombine_f32(vget_high_f32(a.val[i]), vget_high_f32(b.val[i])));
    }
  }
  template <class C>
  static void transpose(const C* const* rows, int64_t at, float* out) {
    for (int key = 0; key < 16; key += 4)
      for (int feature = 0; feature < 16; feature += 4)
        transpose_four(rows + key, at + feature, out + feature * 16 + key);
  }
  static Vector without_payload(Vector x) {
    for (float32x4_t& part : x.parts)
      part = vbslq_f32(vceqq_f32(part, part), part, vdupq_n_f32(bit_cast<float>(0x7fc00000u)));
    return x;
  }
};

}  // namespace

const AttentionFunctions attention_neon_dotprod = attention_kernel<NeonVectors>;
const LinearAttentionFunctions linear_attention_neon_dotprod = linear_attention_kernel<NeonVectors>;

}  // namespace quantmoe
