// Scales, and zero points or minima, with the least weighted square error that a search finds. A group's result depends
// only on its own weights, and every sum has one order. So any number of threads, on any processor, gives the same
// bytes.
#pragma once
#include <cmath>
#include <cstdint>
#include <limits>

#include "core/half.h"
#include "core/minifloat.h"
#include "cpu/rounded_activations.h"

namespace quantmoe {
namespace {

constexpr int kLanes = 8;  // partial sums of a group, each of every eighth weight
constexpr float kInfinite = std::numeric_limits<float>::infinity();

// A group of floats. count is a multiple of kLanes: what is beyond the group has importance 0.
struct Group {
  const float* x;
  const float* importance;  // of each one's squared error
  int64_t count;
};

inline float nearest(float value) { return (value + 0x1.8p23f) - 0x1.8p23f; }  // of magnitudes below 2^22
inline float clamped(float value, float low, float high) { return value < low ? low : value > high ? high : value; }
// What weights are multiplied by to be codes; 0 where the scale is: all values are 0 then.
inline float inverse_of(float scale) { return scale != 0 ? 1.0f / scale : 0.0f; }

// The sums over a group of what f(x, importance, terms) writes.
template <int kTerms, typename F>
inline void sums(const Group& g, float (&out)[kTerms], const F& f) {
  float parts[kTerms][kLanes] = {};
  for (int64_t i = 0; i < g.count; i += kLanes)
    for (int j = 0; j < kLanes; ++j) {
      float terms[kTerms];
      f(g.x[i + j], g.importance[i + j], terms);
      for (int t = 0; t < kTerms; ++t) parts[t][j] += terms[t];
    }
  for (int t = 0; t < kTerms; ++t) {
    const float(&p)[kLanes] = parts[t];
    out[t] = ((p[0] + p[4]) + (p[2] + p[6])) + ((p[1] + p[5]) + (p[3] + p[7]));
  }
}

struct Range {
  float low, high;  // with 0 between them
};
inline Range range_of(const Group& g) {
  float low[kLanes] = {}, high[kLanes] = {};
  for (int64_t i = 0; i < g.count; i += kLanes)
    for (int j = 0; j < kLanes; ++j) {
      const float x = g.x[i + j];
      low[j] = x < low[j] ? x : low[j];
      high[j] = x > high[j] ? x : high[j];
    }
  Range found{low[0], high[0]};
  for (int j = 1; j < kLanes; ++j) {
    found.low = low[j] < found.low ? low[j] : found.low;
    found.high = high[j] > found.high ? high[j] : found.high;
  }
  return found;
}

// What a matrix stores of a scale.
struct F32Scale {
  using Stored = float;
  static float rounded(float scale) { return scale; }
  static Stored stored(float scale) { return scale; }
};
struct F16Scale {
  using Stored = Half;
  static float rounded(float scale) { return static_cast<float>(static_cast<Half>(clamped(scale, -65504, 65504))); }
  static Stored stored(float scale) { return static_cast<Half>(scale); }
};
struct Bf16Scale {
  using Stored = uint16_t;
  static float rounded(float scale) {
    const uint32_t bits = bit_cast<uint32_t>(scale);
    return bit_cast<float>((bits + 0x7fffu + (bits >> 16 & 1u)) & 0xffff0000u);
  }
  static Stored stored(float scale) { return static_cast<uint16_t>(bit_cast<uint32_t>(scale) >> 16); }
};

// Codes from low to high, in steps of 1, times a scale.
struct Integers {
  float low, high;
  float operator()(float scaled) const { return clamped(nearest(clamped(scaled, low, high)), low, high); }
};
struct E2m1 {
  float operator()(float scaled) const { return round_e2m1(scaled); }
};

// The weighted square error of a group's nearest values.
template <typename Values>
inline float error_of(const Group& g, float scale, const Values& values) {
  const float inverse = inverse_of(scale);
  float out[1];
  sums(g, out, [&](float x, float importance, float(&terms)[1]) {
    const float error = x - scale * values(x * inverse);
    terms[0] = importance * error * error;
  });
  return out[0];
}

// The scale of the least error for the values that a scale gives; 0: they are all 0.
template <typename Values>
inline float fitted(const Group& g, float scale, const Values& values) {
  const float inverse = 1.0f / scale;
  float out[2];
  sums(g, out, [&](float x, float importance, float(&terms)[2]) {
    const float value = values(x * inverse), weighted = importance * value;
    terms[0] = weighted * x;
    terms[1] = weighted * value;
  });
  return out[1] > 0 ? out[0] / out[1] : 0.0f;
}

struct Best {
  float scale = 0, error = kInfinite;
  Integers values{};  // low is minus the zero point
};

template <typename Scale>
inline void consider(const Group& g, float wanted, const Integers& values, Best& best) {
  const float scale = Scale::rounded(wanted);
  if (!(std::fabs(scale) >= std::numeric_limits<float>::min())) return;
  if (const float error = error_of(g, scale, values); error < best.error) best = {scale, error, values};
}

// Fits the scale of the best so far to its values, then the values to the scale.
template <typename Scale>
inline void polish(const Group& g, Best& best) {
  for (int round = 0; round < 3 && best.error < kInfinite; ++round) {
    const float before = best.error;
    const Best start = best;
    consider<Scale>(g, fitted(g, start.scale, start.values), start.values, best);
    if (!(best.error < before)) return;
  }
}

// Integers without zero points: -half to half - 1, with scales of both signs, as the range is no symmetric one.
template <typename Scale>
inline Best symmetric(const Group& g, int half) {
  const Range range = range_of(g);
  const float reach = -range.low > range.high ? -range.low : range.high;
  const Integers values{static_cast<float>(-half), static_cast<float>(half - 1)};
  Best best;
  if (reach == 0) return {0, 0, values};
  // At a size of 1 the largest magnitude has the largest code. Below it is clipped, less where there are more codes.
  const bool few = half == 8;
  for (int sign = 0; sign < (few ? 2 : 1); ++sign) {
    float size = reach / static_cast<float>(half - 1);
    consider<Scale>(g, sign ? -size : size, values, best);
    size *= few ? 1.16f : 1.02f;
    for (int i = 0; i < (few ? 44 : 16); ++i, size *= few ? 0.97f : 0.985f)
      consider<Scale>(g, sign ? -size : size, values, best);
  }
  polish<Scale>(g, best);
  if (best.error == kInfinite) return {0, 0, values};  // below the smallest scale
  return best;
}

// Codes 0 to levels with a zero point.
template <typename Scale>
inline Best with_zero_point(const Group& g, int levels) {
  const Range range = range_of(g);
  const float size = range.high - range.low, top = static_cast<float>(levels);
  const Integers middle{-static_cast<float>(levels / 2 + 1), static_cast<float>(levels / 2)};
  if (size == 0) return {0, 0, middle};
  Best best;
  const auto consider_zeros = [&](float scale, float from, float to) {
    for (float zero = clamped(from, 0, top); zero <= clamped(to, 0, top); ++zero)
      consider<Scale>(g, scale, Integers{-zero, top - zero}, best);
  };
  float scale = size / top * 1.06f;
  for (int i = 0; i < 14; ++i, scale *= 0.93f) {
    // From the one that clips nothing below to the one that clips nothing above.
    const float a = nearest(-range.low / scale), b = top - nearest(range.high / scale);
    consider_zeros(scale, a < b ? a : b, a < b ? b : a);
  }
  const Best coarse = best;
  for (const float finer : {0.965f, 1.035f})
    consider_zeros(coarse.scale * finer, -coarse.values.low - 1, -coarse.values.low + 1);
  polish<Scale>(g, best);
  if (best.error == kInfinite) return {0, 0, middle};
  return best;
}

}  // namespace
}  // namespace quantmoe
