// The elementwise passes of FORMAT.md section 4, as plain loops: each kernel file includes this once and gets them
// compiled, and vectorised, for its own instruction set. Every operation is exactly rounded and no loop reassociates,
// so all copies agree bit for bit. Everything is in an unnamed namespace: two copies must never be merged by the
// linker.
#pragma once
#include <cmath>
#include <cstring>

#include "core/half.h"
#include "cpu/kernel.h"

namespace quantmoe {
namespace {

template <typename To, typename From>
inline To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

// fma(a, b, c), rounded once. Without the instruction a compiler calls fmaf, and that of PyPI's clang (Zig's
// compiler_rt) rounds twice. Here the product is exact in double and its sum with c is rounded to odd, after which
// rounding to float is right: 53 bits are more than twice 24 and two (Boldo and Melquiond, "Emulation of FMA and
// correctly rounded sums").
inline float fma(float a, float b, float c) {
#if defined(__FMA__) || defined(__aarch64__)
  return __builtin_fmaf(a, b, c);
#else
  const double product = static_cast<double>(a) * b, sum = product + c, added = sum - product;
  const double error = (product - (sum - added)) + (c - added);  // NaN where the sum is infinite or NaN: neither branch
  int64_t bits = bit_cast<int64_t>(sum);
  if ((error > 0.0 || error < 0.0) && bits % 2 == 0) bits += (error > 0.0) == (sum > 0.0) ? 1 : -1;
  return static_cast<float>(bit_cast<double>(bits));
#endif
}

// Adding and subtracting 1.5 * 2^23 rounds to the nearest integer, halves to even, for |x| < 2^22.
constexpr float kRoundMagic = 12582912.0f;
inline float round_half_even(float x) { return (x + kRoundMagic) - kRoundMagic; }

// e^x, relative error below 2.31e-7 for x in [-87, 88] (every float measured); arguments are clamped to that range, NaN
// stays NaN. x = n ln 2 + r (Cody and Waite), degree-6 Taylor-like polynomial in r fitted on [-ln2/2, ln2/2].
inline float exp_f32(float x) {
  x = x < -87.0f ? -87.0f : x;
  x = x > 88.0f ? 88.0f : x;
  const float shifted = fma(x, 1.44269504f, kRoundMagic);
  const float n = shifted - kRoundMagic;
  float r = fma(n, -0.693145752f, x);
  r = fma(n, -1.42860677e-6f, r);
  float p = 1.38888896e-3f;
  p = fma(p, r, 8.33333377e-3f);
  p = fma(p, r, 4.16666679e-2f);
  p = fma(p, r, 1.66666672e-1f);
  p = fma(p, r, 0.5f);
  p = fma(p, r, 1.0f);
  p = fma(p, r, 1.0f);
  const int32_t exponent = bit_cast<int32_t>(shifted) - bit_cast<int32_t>(kRoundMagic);
  return p * bit_cast<float>((exponent + 127) << 23);
}
inline float sigmoid_f32(float x) { return 1.0f / (1.0f + exp_f32(-x)); }
inline float silu_f32(float x) { return x / (1.0f + exp_f32(-x)); }
inline float tanh_f32(float x) { return 1.0f - 2.0f / (exp_f32(x + x) + 1.0f); }
// erfc of a non-negative argument times e^-z^2: Press et al., Numerical Recipes 6.2 (erfcc), relative error
// below 1.2e-7 before rounding.
inline float erf_f32(float x) {
  const float z = x < 0.0f ? -x : x;
  const float t = 1.0f / fma(0.5f, z, 1.0f);
  float p = 0.17087277f;
  p = fma(p, t, -0.82215223f);
  p = fma(p, t, 1.48851587f);
  p = fma(p, t, -1.13520398f);
  p = fma(p, t, 0.27886807f);
  p = fma(p, t, -0.18628806f);
  p = fma(p, t, 0.09678418f);
  p = fma(p, t, 0.37409196f);
  p = fma(p, t, 1.00002368f);
  p = fma(p, t, -1.26551223f);
  const float tail = t * exp_f32(fma(-z, z, p));
  return x < 0.0f ? tail - 1.0f : 1.0f - tail;
}

inline float half_to_float(uint16_t bits) {
#if defined(__F16C__) || defined(__aarch64__)
  return static_cast<float>(bit_cast<Half>(bits));
#else
  // Widen the exponent by a multiply: exact, subnormals included.
  const uint32_t shifted = (bits & 0x7fffu) << 13;
  float value = bit_cast<float>(shifted) * bit_cast<float>(0x77800000u);  // 2^112
  if ((bits & 0x7c00u) == 0x7c00u) value = bit_cast<float>(shifted | 0x7f800000u);
  return bit_cast<float>(bit_cast<uint32_t>(value) | (bits & 0x8000u) << 16);
#endif
}
inline uint16_t float_to_half(float x) {
#if defined(__F16C__) || defined(__aarch64__)
  const uint16_t bits = bit_cast<uint16_t>(static_cast<Half>(x));
#else
  const uint32_t raw = bit_cast<uint32_t>(x), sign = raw >> 16 & 0x8000u, magnitude = raw & 0x7fffffffu;
  uint32_t out;
  if (magnitude >= 0x47800000u) {  // 65536 and above: infinity
    out = 0x7c00u;
  } else if (magnitude < 0x38800000u) {  // below 2^-14: adding 1/2 aligns the ulp with the subnormal's
    out = bit_cast<uint32_t>(bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
  } else {
    out = (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
  }
  const uint16_t bits = static_cast<uint16_t>(sign | out);
#endif
  return x != x ? uint16_t{0x7e00} : bits;
}
inline float bfloat_to_float(uint16_t bits) { return bit_cast<float>(uint32_t{bits} << 16); }
inline uint16_t float_to_bfloat(float x) {
  const uint32_t raw = bit_cast<uint32_t>(x);
  const uint16_t rounded = static_cast<uint16_t>((raw + 0x7fffu + (raw >> 16 & 1u)) >> 16);
  return x != x ? uint16_t{0x7fc0} : rounded;
}

// The float16 of an e4m3 code's number times 2^-8; 0x7f and 0xff are NaN.
inline uint16_t e4m3_half(uint8_t code) {
  const int magnitude = code & 0x7f;
  return static_cast<uint16_t>(magnitude == 0x7f ? 0x7e00 : magnitude << 7 | (code & 0x80) << 8);
}
// An element of a cache.
inline float widen(float x) { return x; }
inline float widen(uint16_t x) { return half_to_float(x); }
inline float widen(int8_t x) { return x; }
inline float widen(E4m3 x) { return half_to_float(e4m3_half(x.code)); }

void to_float(qm_type type, const void* source, int64_t n, float* out) {
  const uint16_t* bits = static_cast<const uint16_t*>(source);
  if (type == QM_F32) {
    std::memcpy(out, source, static_cast<size_t>(n) * 4);
  } else if (type == QM_F16) {
    for (int64_t i = 0; i < n; ++i) out[i] = half_to_float(bits[i]);
  } else {
    for (int64_t i = 0; i < n; ++i) out[i] = bfloat_to_float(bits[i]);
  }
}

void from_float(qm_type type, const float* source, int64_t n, void* out) {
  uint16_t* bits = static_cast<uint16_t*>(out);
  if (type == QM_F32) {
    float* values = static_cast<float*>(out);
    for (int64_t i = 0; i < n; ++i) values[i] = source[i] != source[i] ? bit_cast<float>(0x7fc00000u) : source[i];
  } else if (type == QM_F16) {
    for (int64_t i = 0; i < n; ++i) bits[i] = float_to_half(source[i]);
  } else {
    for (int64_t i = 0; i < n; ++i) bits[i] = float_to_bfloat(source[i]);
  }
}

void scale(float factor, float* x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) x[i] *= factor;
}

bool all_finite(const float* x, int64_t n) {
  uint32_t worst = 0;  // |x| as an integer orders like |x|, with infinity and NaN on top
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t magnitude = bit_cast<uint32_t>(x[i]) & 0x7fffffffu;
    worst = magnitude > worst ? magnitude : worst;
  }
  return worst < 0x7f800000u;
}

#include "cpu/round.h"

// q is __restrict: as a character pointer it could alias everything, and no loop would vectorise.
bool quantize(int32_t activation_format, const float* x, int64_t k, int64_t kp, int8_t* __restrict q, float* step,
              int32_t* zero_point) {
  *step = 1.0f;
  *zero_point = 0;
  std::memset(q, 0, static_cast<size_t>(kp));
  if (!all_finite(x, k)) return false;
  // Sixteen running extremes: compilers do not reassociate a floating-point minimum, though it may be.
  constexpr int kLanes = 16;
  float lows[kLanes] = {}, highs[kLanes] = {};
  const auto extend = [&](int lane, float value) {
    lows[lane] = value < lows[lane] ? value : lows[lane];
    highs[lane] = value > highs[lane] ? value : highs[lane];
  };
  int64_t i = 0;
  for (; i + kLanes <= k; i += kLanes)
    for (int lane = 0; lane < kLanes; ++lane) extend(lane, x[i + lane]);
  for (; i < k; ++i) extend(0, x[i]);
  float low = 0.0f, high = 0.0f;
  for (int lane = 0; lane < kLanes; ++lane) {
    low = lows[lane] < low ? lows[lane] : low;
    high = highs[lane] > high ? highs[lane] : high;
  }
  if (activation_format == k_activation_format_int8_token) {
    const float largest = -low > high ? -low : high;
    if (largest > 0.0f) *step = largest / 127.5f;
    if (*step == 0.0f) *step = 1.0f;  // a subnormal maximum: every value rounds to zero
    const float divisor = *step;
    for (i = 0; i < k; ++i) {
      const float rounded = round_half_even(x[i] / divisor);
      q[i] = static_cast<int8_t>(rounded > 127.0f ? 127.0f : rounded < -128.0f ? -128.0f : rounded);
    }
    return true;
  }
  const float range = high - low;
  const float inverse = range == 0.0f ? 1.0f : 255.0f / range;
  *step = inverse == 0.0f ? 0.0f : 1.0f / inverse;
  const float a = low * inverse, b = high * inverse;
  if (!(range < INFINITY && inverse < INFINITY)) {
    *step = 1.0f;
    return range < INFINITY;  // a range below 255 / FLT_MAX is zero
  }
  const float from_low = -128.0f + a, from_high = 127.0f + b;
  float zero = from_low + from_high > 0.0f ? -128.0f - a : 127.0f - b;
  zero = zero < -128.0f ? -128.0f : zero > 127.0f ? 127.0f : zero;
  const int32_t z = static_cast<int32_t>(round_half_even(zero));
  *zero_point = z;
  for (i = 0; i < k; ++i) {
    const int32_t value = static_cast<int32_t>(round_half_even(x[i] * inverse)) + z;
    q[i] = static_cast<int8_t>(value > 127 ? 127 : value < -128 ? -128 : value);
  }
  return true;
}

void block_sums(const int8_t* q, int64_t block, int64_t blocks, int32_t* sums) {  // of groups, where a block has two
  for (int64_t b = 0; b < blocks; ++b, q += block) {
    int32_t sum = 0;
    for (int64_t i = 0; i < block; ++i) sum += q[i];
    sums[b] = sum;
  }
}

template <typename F>
inline void map(const float* gate, const float* up, int64_t n, float* h, F f) {
  for (int64_t i = 0; i < n; ++i) h[i] = f(gate[i], up[i]);
}
inline float clamp_to(float x, float limit) { return x > limit ? limit : x < -limit ? -limit : x; }

// Ungated layers pass up as gate and get act(up) by ignoring the second operand.
template <bool kGated>
void activate_as(const qm_moe& moe, const float* gate, const float* up, int64_t n, float* h) {
  const float alpha = moe.swiglu_alpha, limit = moe.swiglu_limit;
  const auto times = [](float a, float u) { return kGated ? a * u : a; };
  static_assert(count_values("activation") == 6, "a case for each");
  switch (moe.activation) {
    case k_activation_silu:
      return map(gate, up, n, h, [=](float g, float u) { return times(silu_f32(g), u); });
    case k_activation_gelu:
      return map(gate, up, n, h,
                 [=](float g, float u) { return times(0.5f * g * (1.0f + erf_f32(g * 0.707106781f)), u); });
    case k_activation_gelu_tanh:
      return map(gate, up, n, h, [=](float g, float u) {
        const float inner = 0.797884561f * fma(0.044715f * g * g, g, g);
        return times(0.5f * g * (1.0f + tanh_f32(inner)), u);
      });
    case k_activation_relu2:
      return map(gate, up, n, h, [=](float g, float u) {
        const float positive = g < 0.0f ? 0.0f : g;
        return times(positive * positive, u);
      });
    case k_activation_swiglu_oai:
      return map(gate, up, n, h, [=](float g, float u) {
        g = g > limit ? limit : g;
        return g * sigmoid_f32(alpha * g) * (clamp_to(u, limit) + 1.0f);
      });
    case k_activation_swiglu_step:
      return map(gate, up, n, h, [=](float g, float u) {
        const float s = silu_f32(g);
        return (s > limit ? limit : s) * clamp_to(u, limit);
      });
  }
}

void activate(const qm_moe& moe, const float* gate, const float* up, int64_t n, float* h) {
  gate ? activate_as<true>(moe, gate, up, n, h) : activate_as<false>(moe, up, up, n, h);
}

void accumulate(float weight, const float* x, int64_t n, float* y) {
  for (int64_t i = 0; i < n; ++i) y[i] = fma(weight, x[i], y[i]);
}

// Interleaves m rows of 4-byte pieces, in the order of the output: a tile is larger than L1, so its lines are written
// once.
inline void interleave(const uint8_t* const* rows, int m, int64_t bytes, uint8_t* __restrict out) {
  for (int64_t at = 0; at < bytes; at += 4, out += 4 * m)
    for (int i = 0; i < m; ++i) std::memcpy(out + 4 * i, rows[i] + at, 4);
}

void pack_tile(const PanelMatrix& p, bool quantized, const Row* rows, int m, uint8_t* out) {
  const uint8_t* sources[kMaxTileRows];
  for (int i = 0; i < m; ++i)
    sources[i] = quantized ? reinterpret_cast<const uint8_t*>(rows[i].q) : reinterpret_cast<const uint8_t*>(rows[i].x);
  interleave(sources, m, quantized ? p.kp : 4 * p.kp, out);
  if (!quantized) return;
  int32_t* sums = reinterpret_cast<int32_t*>(out + p.kp * m);
  for (int i = 0; i < m; ++i)
    for (int64_t b = 0; b < p.groups(); ++b) sums[b * m + i] = rows[i].sums[b];
  float* steps = reinterpret_cast<float*>(sums + p.groups() * m);
  if (p.stepped) {
    for (int i = 0; i < m; ++i)
      for (int64_t b = 0; b < p.groups(); ++b) steps[b * m + i] = rows[i].steps[b];
    return;
  }
  int32_t* zero_points = reinterpret_cast<int32_t*>(steps + m);
  for (int i = 0; i < m; ++i) {
    steps[i] = rows[i].step;
    zero_points[i] = rows[i].zero_point;
  }
}

// For kernels whose codes are unsigned, offset by 8, 128 or (e2m1) 12: the sums become what a dot product starts at,
// -offset * sum. With zero points that depends on the weights' row: the sums become two 16-bit factors, sum % 128 and
// sum / 128, which one multiply-add of pairs with -zero and -128 * zero turns into it.
inline void pack_tile_offset(const PanelMatrix& p, bool quantized, const Row* rows, int m, uint8_t* out) {
  pack_tile(p, quantized, rows, m, out);
  if (!quantized) return;
  int32_t* sums = reinterpret_cast<int32_t*>(out + p.kp * m);
  if (p.zero_points) {
    for (int64_t i = 0; i < p.groups() * m; ++i)
      sums[i] = static_cast<int32_t>((sums[i] & 127) | static_cast<uint32_t>(sums[i] >> 7) << 16);
    return;
  }
  const int32_t offset = is_e2m1(p.format) ? 12 : p.bits == 4 ? 8 : 128;
  for (int64_t i = 0; i < p.groups() * m; ++i) sums[i] *= -offset;
}

#define QM_ELEMENTWISE(pack) \
  to_float, from_float, scale, all_finite, quantize, block_sums, round_row, quantize_nvfp4, activate, accumulate, pack

}  // namespace
}  // namespace quantmoe
