// ggml's K-quants: 256 weights in sub-blocks, whose scales and minima are integers times two floats of the block.
#pragma once
#include "quantize/search.h"

namespace quantmoe {
namespace {

constexpr int kBlock = 256;

// x ~ scale * code - minimum, codes 0 to levels.
struct Affine {
  float scale = 0, minimum = 0, error = kInfinite;
};

inline float affine_error(const Group& g, float scale, float minimum, float levels) {
  const float inverse = inverse_of(scale);
  float out[1];
  sums(g, out, [&](float x, float importance, float(&terms)[1]) {
    const float code = nearest(clamped((x + minimum) * inverse, 0, levels));
    const float error = x - (scale * code - minimum);
    terms[0] = importance * error * error;
  });
  return out[0];
}

// The scale and minimum of a sub-block, as if they were floats.
inline Affine affine(const Group& g, float levels) {
  const Range range = range_of(g);
  Affine best{0, -range.low, affine_error(g, 0, -range.low, levels)};
  if (range.high - range.low == 0) return best;
  const auto consider = [&](float scale, float minimum) {
    if (const float error = affine_error(g, scale, minimum, levels); error < best.error) best = {scale, minimum, error};
  };
  float first = (range.high - range.low) / levels * 1.06f;
  for (int i = 0; i < 14; ++i, first *= 0.93f) {
    float scale = first, minimum = -range.low;
    consider(scale, minimum);
    for (int round = 0; round < 2; ++round) {  // both that fit the codes that they give
      const float inverse = 1.0f / scale;
      float s[5];
      sums(g, s, [&](float x, float importance, float(&terms)[5]) {
        const float code = nearest(clamped((x + minimum) * inverse, 0, levels));
        terms[0] = importance;
        terms[1] = importance * x;
        terms[2] = importance * code;
        terms[3] = importance * code * code;
        terms[4] = importance * code * x;
      });
      const float determinant = s[0] * s[3] - s[2] * s[2];
      if (!(determinant > 0)) break;  // one code alone
      scale = (s[0] * s[4] - s[1] * s[2]) / determinant;
      minimum = (s[2] * s[4] - s[3] * s[1]) / determinant;
      if (minimum < 0) {
        minimum = 0;
        scale = s[4] / s[3];
      }
      if (!(scale > 0)) break;
      consider(scale, minimum);
    }
  }
  return best;
}

struct K32 {
  Half d, d_min;
  int8_t scales[8], minima[8];
};
struct K16 {
  Half d;
  int8_t scales[16];
};

// The integers of a sub-block's scale and minimum for a block's d and d_min, near the floats' integers.
struct Codes {
  int scale = 0, minimum = 0;
  float error = kInfinite;
};
inline Codes near(const Group& g, const Affine& wanted, float d, float d_min, float levels) {
  const auto code = [](float value, float unit) {
    return unit > 0 ? static_cast<int>(clamped(nearest(clamped(value / unit, 0, 63)), 0, 63)) : 0;
  };
  const int scale = code(wanted.scale, d), minimum = code(wanted.minimum, d_min);
  Codes best;
  for (int s = scale - 2; s <= scale + 2; ++s)
    for (int m = minimum - 2; m <= minimum + 2; ++m)
      if (s >= 0 && s <= 63 && m >= 0 && m <= 63) {
        const float error = affine_error(g, d * static_cast<float>(s), d_min * static_cast<float>(m), levels);
        if (error < best.error) best = {s, m, error};
      }
  return best;
}

// q4_k and q5_k: eight sub-blocks of 32.
inline void quantize_k32(const float* x, const float* importance, int levels, uint8_t* codes, K32& out) {
  const float top = static_cast<float>(levels);
  Affine wanted[8];
  float largest = 0, lowest = 0;
  const auto part = [&](int i) { return Group{x + 32 * i, importance + 32 * i, 32}; };
  for (int i = 0; i < 8; ++i) {
    wanted[i] = affine(part(i), top);
    largest = wanted[i].scale > largest ? wanted[i].scale : largest;
    lowest = wanted[i].minimum > lowest ? wanted[i].minimum : lowest;
  }
  float d = F16Scale::rounded(largest / 63), d_min = F16Scale::rounded(lowest / 63), least = kInfinite;
  Codes best[8] = {};
  float best_d = 0, best_d_min = 0;
  for (int round = 0; round < 3; ++round) {
    Codes found[8];
    float error = 0, s[5] = {};
    for (int i = 0; i < 8; ++i) {
      const Group g = part(i);
      found[i] = near(g, wanted[i], d, d_min, top);
      error += found[i].error;
      const float scale = d * static_cast<float>(found[i].scale),
                  minimum = d_min * static_cast<float>(found[i].minimum);
      const float inverse = inverse_of(scale);
      float own[5];
      sums(g, own, [&](float v, float weight, float(&terms)[5]) {
        const float a = static_cast<float>(found[i].scale) * nearest(clamped((v + minimum) * inverse, 0, top));
        const float b = static_cast<float>(found[i].minimum);
        terms[0] = weight * a * a;
        terms[1] = weight * a * b;
        terms[2] = weight * b * b;
        terms[3] = weight * a * v;
        terms[4] = weight * b * v;
      });
      for (int t = 0; t < 5; ++t) s[t] += own[t];
    }
    if (!(error < least)) break;
    least = error;
    best_d = d;
    best_d_min = d_min;
    for (int i = 0; i < 8; ++i) best[i] = found[i];
    // x ~ d a - d_min b
    const float determinant = s[0] * s[2] - s[1] * s[1];
    if (!(determinant > 0)) break;
    const float next_d = (s[3] * s[2] - s[1] * s[4]) / determinant,
                next_min = (s[1] * s[3] - s[0] * s[4]) / determinant;
    if (!(next_d > 0) || !(next_min >= 0)) break;
    d = F16Scale::rounded(next_d);
    d_min = F16Scale::rounded(next_min);
  }
  out.d = F16Scale::stored(best_d);
  out.d_min = F16Scale::stored(best_d_min);
  for (int i = 0; i < 8; ++i) {
    out.scales[i] = static_cast<int8_t>(best[i].scale);
    out.minima[i] = static_cast<int8_t>(best[i].minimum);
    const float scale = best_d * static_cast<float>(best[i].scale),
                minimum = best_d_min * static_cast<float>(best[i].minimum);
    const float inverse = inverse_of(scale);
    for (int j = 0; j < 32; ++j)
      codes[32 * i + j] = static_cast<uint8_t>(nearest(clamped((x[32 * i + j] + minimum) * inverse, 0, top)));
  }
}

// q6_k: sixteen sub-blocks of 16, without minima.
inline void quantize_k16(const float* x, const float* importance, uint8_t* codes, K16& out) {
  const Integers values{-32, 31};
  Best wanted[16];
  float largest = 0;
  const auto part = [&](int i) { return Group{x + 16 * i, importance + 16 * i, 16}; };
  for (int i = 0; i < 16; ++i) {
    wanted[i] = symmetric<F32Scale>(part(i), 32);
    largest = std::fabs(wanted[i].scale) > largest ? std::fabs(wanted[i].scale) : largest;
  }
  float d = F16Scale::rounded(largest / 127), least = kInfinite, best_d = 0;
  int best[16] = {};
  for (int round = 0; round < 3 && d > 0; ++round) {
    int found[16] = {};
    float error = 0, s[2] = {};
    for (int i = 0; i < 16; ++i) {
      const Group g = part(i);
      const int code = static_cast<int>(nearest(clamped(wanted[i].scale / d, -127, 127)));
      float own = kInfinite;
      for (int c = code - 1; c <= code + 1; ++c) {
        if (c < -128 || c > 127) continue;
        if (const float candidate = error_of(g, d * static_cast<float>(c), values); candidate < own) {
          own = candidate;
          found[i] = c;
        }
      }
      error += own;
      const float c = static_cast<float>(found[i]), inverse = inverse_of(d * c);
      float terms_of[2];
      sums(g, terms_of, [&](float v, float weight, float(&terms)[2]) {
        const float a = c * values(v * inverse);
        terms[0] = weight * a * v;
        terms[1] = weight * a * a;
      });
      for (int t = 0; t < 2; ++t) s[t] += terms_of[t];
    }
    if (!(error < least)) break;
    least = error;
    best_d = d;
    for (int i = 0; i < 16; ++i) best[i] = found[i];
    if (!(s[1] > 0)) break;
    d = F16Scale::rounded(s[0] / s[1]);
  }
  out.d = F16Scale::stored(best_d);
  for (int i = 0; i < 16; ++i) {
    out.scales[i] = static_cast<int8_t>(best[i]);
    const float inverse = inverse_of(best_d * static_cast<float>(best[i]));
    for (int j = 0; j < 16; ++j) codes[16 * i + j] = static_cast<uint8_t>(values(x[16 * i + j] * inverse) + 32);
  }
}

}  // namespace
}  // namespace quantmoe
