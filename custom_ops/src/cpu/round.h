// Activations rounded to the checkpoint's float formats (FORMAT.md 4.1), kept as f32. Included by elementwise.h only.
#pragma once

// Nearest multiple of the format's spacing at x, ties to the even code; |x| is at most the largest value.
template <int kMantissa, int kMinExponent>
inline float round_minifloat(float x) {
  constexpr int kDrop = 23 - kMantissa;
  const uint32_t bits = bit_cast<uint32_t>(x);
  const uint32_t normal = (bits + (1u << (kDrop - 1)) - 1 + (bits >> kDrop & 1u)) & ~((1u << kDrop) - 1);
  // Below 2^kMinExponent the spacing is that of the subnormals: the ulp of this sum.
  constexpr float kMagic = 1.5f * static_cast<float>(1 << (kMantissa == 3 ? 14 : 22));  // 1.5 * 2^(23 - mantissa + min)
  static_assert((kMantissa == 3 && kMinExponent == -6) || (kMantissa == 1 && kMinExponent == 0));
  const float subnormal = (x + kMagic) - kMagic;
  return (bits & 0x7fffffffu) < static_cast<uint32_t>(kMinExponent + 127) << 23 ? subnormal : bit_cast<float>(normal);
}
inline float round_e4m3(float x) { return round_minifloat<3, -6>(x < -448.0f ? -448.0f : x > 448.0f ? 448.0f : x); }
inline float round_e2m1(float x) { return round_minifloat<1, 0>(x < -6.0f ? -6.0f : x > 6.0f ? 6.0f : x); }

inline float largest_magnitude(const float* x, int64_t n) {
  constexpr int kLanes = 16;
  float found[kLanes] = {};
  int64_t i = 0;
  const auto extend = [&](int lane, float value) {
    const float magnitude = value < 0.0f ? -value : value;
    found[lane] = magnitude > found[lane] ? magnitude : found[lane];
  };
  for (; i + kLanes <= n; i += kLanes)
    for (int lane = 0; lane < kLanes; ++lane) extend(lane, x[i + lane]);
  for (; i < n; ++i) extend(0, x[i]);
  for (int lane = 1; lane < kLanes; ++lane) extend(0, found[lane]);
  return found[0];
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

// Rounds x [k] to out [k]; false when the row is not finite. stored: the tensor's scale, for fp8_tensor and nvfp4.
bool round_row(int32_t activation_format, float stored, const float* x, int64_t k, float* out) {
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
        const float scale = round_e4m3(largest_magnitude(from, n) / 6.0f / stored);
        const float step = scale * stored;
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
