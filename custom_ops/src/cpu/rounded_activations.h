// Activations rounded to the checkpoint's float formats (quant_moe.def, Activations), kept as f32. In an
// unnamed namespace, as elementwise.h, which includes this.
#pragma once
#include "cpu/scalar.h"

namespace quantmoe {
namespace {

// Nearest multiple of the format's spacing at x, ties to the even code; |x| is at most the largest value.
template <int kMantissa, int kMinExponent>
inline float round_minifloat(float x) {
  constexpr int kDrop = 23 - kMantissa;
  const uint32_t bits = bit_cast<uint32_t>(x);
  const uint32_t normal = (bits + (1u << (kDrop - 1)) - 1 + (bits >> kDrop & 1u)) & ~((1u << kDrop) - 1);
  // Below 2^kMinExponent the spacing is the subnormals': the ulp of this sum.
  constexpr float kMagic = 1.5f * static_cast<float>(1 << (kMantissa == 3 ? 14 : 22));  // 1.5 * 2^(23 - mantissa + min)
  static_assert((kMantissa == 3 && kMinExponent == -6) || (kMantissa == 1 && kMinExponent == 0));
  const float subnormal = (x + kMagic) - kMagic;
  return (bits & 0x7fffffffu) < static_cast<uint32_t>(kMinExponent + 127) << 23 ? subnormal : bit_cast<float>(normal);
}
inline float round_e4m3(float x) { return round_minifloat<3, -6>(x < -448.0f ? -448.0f : x > 448.0f ? 448.0f : x); }
inline float round_e2m1(float x) { return round_minifloat<1, 0>(x < -6.0f ? -6.0f : x > 6.0f ? 6.0f : x); }

// Of finite numbers: as integers, whose maximum compilers reassociate.
inline float largest_magnitude(const float* x, int64_t n) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t magnitude = bit_cast<uint32_t>(x[i]) & 0x7fffffffu;
    largest = magnitude > largest ? magnitude : largest;
  }
  return bit_cast<float>(largest);
}

// max / 448, 1 when that is zero.
inline float e4m3_step(float largest) {
  const float step = largest / 448.0f;
  return step > 0.0f ? step : 1.0f;
}

// 2^(floor(log2 largest) - emax), where largest is first rounded to one bit after the point; compressed-tensors'
// generate_mx_scales.
inline float e8m0_step(float largest, int emax) {
  const int32_t exponent = static_cast<int32_t>((bit_cast<uint32_t>(largest) + (1u << 21)) >> 23) - emax;
  return exponent > 0 ? bit_cast<float>(static_cast<uint32_t>(exponent) << 23) : bit_cast<float>(0x00400000u);
}

template <bool kE2m1>
inline void round_to(const float* x, int64_t n, float step, float* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = (kE2m1 ? round_e2m1(x[i] / step) : round_e4m3(x[i] / step)) * step;
}

// The step of 16 features.
inline float nvfp4_step(float largest, float stored) { return round_e4m3(largest / 6.0f / stored) * stored; }

// A loop for each step: all of them are vectors.
inline void quantize_groups(float stored, const float* x, int64_t groups, int8_t* q, float* steps) {
  for (int64_t group = 0; group < groups; ++group) steps[group] = largest_magnitude(x + 16 * group, 16);
  for (int64_t group = 0; group < groups; ++group) {
    const float step = nvfp4_step(steps[group], stored);
    steps[group] = step > 0.0f ? step : 0.0f;
  }
  for (int64_t group = 0; group < groups; ++group) {
    const bool zero = steps[group] == 0.0f;
    const float divisor = zero ? INFINITY : steps[group];
    for (int i = 0; i < 16; ++i) {
      const float rounded = round_e2m1(x[16 * group + i] / divisor);
      q[16 * group + i] = static_cast<int8_t>(static_cast<int32_t>(rounded + rounded));
    }
    steps[group] = steps[group] * 0.5f;
  }
}

[[maybe_unused]] bool quantize_nvfp4(float stored, const float* x, int64_t k, int64_t groups, int8_t* q, float* steps) {
  const bool finite = all_finite(x, k);
  const int64_t whole = finite ? k / 16 : 0;
  quantize_groups(stored, x, whole, q, steps);
  float rest[16] = {};
  if (finite) std::memcpy(rest, x + 16 * whole, static_cast<size_t>(k % 16) * 4);
  for (int64_t g = whole; g < groups; ++g) {
    quantize_groups(stored, rest, 1, q + 16 * g, steps + g);
    std::memset(rest, 0, sizeof(rest));
  }
  return finite;
}

// Rounds x [k] to out [k]; false when the row is not finite. stored: the tensor's scale, for fp8_tensor and nvfp4.
[[maybe_unused]] bool round_row(int32_t activation_format, float stored, const float* x, int64_t k, float* out) {
  if (!all_finite(x, k)) return false;
  const auto grouped = [&](int64_t size, auto&& each) {
    for (int64_t i = 0; i < k; i += size) each(x + i, i + size < k ? size : k - i, out + i);
  };
  switch (activation_format) {
    case k_activation_format_fp8_token:
      round_to<false>(x, k, e4m3_step(largest_magnitude(x, k)), out);
      return true;
    case k_activation_format_fp8_tensor:
      round_to<false>(x, k, stored, out);
      return true;
    case k_activation_format_fp8_group128:
      grouped(128, [](const float* from, int64_t n, float* to) {
        round_to<false>(from, n, e4m3_step(largest_magnitude(from, n)), to);
      });
      return true;
    case k_activation_format_mxfp8:
      grouped(32, [](const float* from, int64_t n, float* to) {
        round_to<false>(from, n, e8m0_step(largest_magnitude(from, n), 8), to);
      });
      return true;
    case k_activation_format_mxfp4:
      grouped(32, [](const float* from, int64_t n, float* to) {
        round_to<true>(from, n, e8m0_step(largest_magnitude(from, n), 2), to);
      });
      return true;
    case k_activation_format_nvfp4:
      grouped(16, [stored](const float* from, int64_t n, float* to) {
        const float step = nvfp4_step(largest_magnitude(from, n), stored);
        if (step > 0.0f)
          round_to<true>(from, n, step, to);
        else
          std::memset(to, 0, static_cast<size_t>(n) * 4);
      });
      return true;
    default:
      std::memcpy(out, x, static_cast<size_t>(k) * 4);
      return true;
  }
}

}  // namespace
}  // namespace quantmoe
