// One number at a time, in exactly rounded operations: conversions, fma, exp and what activation functions need of it.
// In an unnamed namespace, as elementwise.h.
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

// fma(a, b, c), rounded once. Without the instruction a compiler calls fmaf, and the fmaf of PyPI's clang (Zig's
// compiler_rt) rounds twice. Here the product is exact in double, and its sum with c is rounded to odd. Then rounding
// to float is right, because 53 bits are more than twice 24 and two. Source: Boldo and Melquiond, "Emulation of FMA and
// correctly rounded sums".
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

// e^x = (1 + r p) 2^n with r in [-ln2/2, ln2/2], for x in [-87, 88]: arguments are clamped to that range, NaN stays
// NaN. x = n ln 2 + r (Cody and Waite), 1 + r p is a degree-6 Taylor-like polynomial fitted on r's range.
struct Exponential {
  float r, p, power;  // power: 2^n
};
inline Exponential exponential(float x) {
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
  const int32_t exponent = bit_cast<int32_t>(shifted) - bit_cast<int32_t>(kRoundMagic);
  return {r, p, bit_cast<float>((exponent + 127) << 23)};
}
// Relative error below 2.31e-7 (every float of the range measured).
inline float exp_f32(float x) {
  const Exponential e = exponential(x);
  return fma(e.p, e.r, 1.0f) * e.power;
}
inline float sigmoid_f32(float x) { return 1.0f / (1.0f + exp_f32(-x)); }
inline float silu_f32(float x) { return x / (1.0f + exp_f32(-x)); }
inline float tanh_f32(float x) { return 1.0f - 2.0f / (exp_f32(x + x) + 1.0f); }
// cap tanh(x / cap): with m = e^(2 |x / cap|) - 1, tanh is m / (m + 2). Relative error below 7e-7, also of small x
// (every float up to 100 with a cap of 1, each seventh with four others).
inline float softcap_f32(float x, float cap) {
  const float t = x / cap;
  const Exponential e = exponential(2.0f * (t < 0.0f ? -t : t));
  const float m = fma(e.p * e.r, e.power, e.power - 1.0f);
  const float capped = cap * (m / (m + 2.0f));
  return t < 0.0f ? -capped : capped;
}
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

inline bool all_finite(const float* x, int64_t n) {
  uint32_t worst = 0;  // |x| as an integer orders like |x|, with infinity and NaN on top
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t magnitude = bit_cast<uint32_t>(x[i]) & 0x7fffffffu;
    worst = magnitude > worst ? magnitude : worst;
  }
  return worst < 0x7f800000u;
}

}  // namespace
}  // namespace quantmoe
