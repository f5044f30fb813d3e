// The elementwise passes of ops/*.def, as plain loops. Each kernel file includes this once, and gets them compiled
// and vectorised for its own instruction set. Every operation is exactly rounded and no loop reassociates, so
// all copies agree bit for bit. Everything is in an unnamed namespace: the linker must never merge two copies.
#pragma once
#include "cpu/rounded_activations.h"

namespace quantmoe {
namespace {

void to_float(qm_type type, const void* source, int64_t count, float* out) {
  const uint16_t* bits = static_cast<const uint16_t*>(source);
  if (type == QM_F32) {
    std::memcpy(out, source, static_cast<size_t>(count) * 4);
  } else if (type == QM_F16) {
    for (int64_t i = 0; i < count; ++i) out[i] = half_to_float(bits[i]);
  } else {
    for (int64_t i = 0; i < count; ++i) out[i] = bfloat_to_float(bits[i]);
  }
}

void from_float(qm_type type, const float* source, int64_t count, void* out) {
  uint16_t* bits = static_cast<uint16_t*>(out);
  if (type == QM_F32) {
    float* values = static_cast<float*>(out);
    for (int64_t i = 0; i < count; ++i) values[i] = source[i] != source[i] ? bit_cast<float>(0x7fc00000u) : source[i];
  } else if (type == QM_F16) {
    for (int64_t i = 0; i < count; ++i) bits[i] = float_to_half(source[i]);
  } else {
    for (int64_t i = 0; i < count; ++i) bits[i] = float_to_bfloat(source[i]);
  }
}

void scale(float factor, float* x, int64_t count) {
  for (int64_t i = 0; i < count; ++i) x[i] *= factor;
}

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
  const float scaled_low = low * inverse, scaled_high = high * inverse;
  if (!(range < INFINITY && inverse < INFINITY)) {
    *step = 1.0f;
    return range < INFINITY;  // a range below 255 / FLT_MAX is zero
  }
  const float from_low = -128.0f + scaled_low, from_high = 127.0f + scaled_high;
  float zero = from_low + from_high > 0.0f ? -128.0f - scaled_low : 127.0f - scaled_high;
  zero = zero < -128.0f ? -128.0f : zero > 127.0f ? 127.0f : zero;
  const int32_t rounded_zero = static_cast<int32_t>(round_half_even(zero));
  *zero_point = rounded_zero;
  for (i = 0; i < k; ++i) {
    const int32_t value = static_cast<int32_t>(round_half_even(x[i] * inverse)) + rounded_zero;
    q[i] = static_cast<int8_t>(value > 127 ? 127 : value < -128 ? -128 : value);
  }
  return true;
}

template <int kColumns>
inline bool quantize_columns(const float* x, int64_t groups, int8_t* __restrict q, float* steps) {
  for (int64_t group = 0; group < groups; ++group) steps[group] = largest_magnitude(x + kColumns * group, kColumns);
  const bool finite = largest_magnitude(steps, groups) < INFINITY;
  for (int64_t group = 0; group < groups; ++group) {
    const float inverse = 127.0f / steps[group], factor = finite && inverse < INFINITY ? inverse : 0.0f;
    steps[group] = steps[group] / 127.0f;
    // The lowest byte of the sum that rounds is the integer.
    for (int i = 0; i < kColumns; ++i)
      q[kColumns * group + i] = static_cast<int8_t>(bit_cast<int32_t>(x[kColumns * group + i] * factor + kRoundMagic));
  }
  return finite;
}

template <int kColumns>
inline bool quantize_padded(const float* x, int64_t k, int64_t kp, int8_t* q, float* steps) {
  const int64_t whole = k / kColumns;
  float rest[kColumns] = {};
  std::memcpy(rest, x + kColumns * whole, static_cast<size_t>(k % kColumns) * 4);
  bool finite = quantize_columns<kColumns>(x, whole, q, steps);
  for (int64_t group = whole; group < kp / kColumns; ++group) {
    finite &= quantize_columns<kColumns>(rest, 1, q + kColumns * group, steps + group);
    std::memset(rest, 0, sizeof(rest));
  }
  return finite;
}

bool quantize_int8(const float* x, int64_t k, int64_t kp, int64_t columns, int8_t* q, float* steps) {
  return columns == 64 ? quantize_padded<64>(x, k, kp, q, steps) : quantize_padded<32>(x, k, kp, q, steps);
}

void block_sums(const int8_t* q, int64_t block, int64_t blocks, int32_t* sums) {  // of spans
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
void activate_as(const qm_moe& moe, const float* gate, const float* up, int64_t count, float* h) {
  const float alpha = moe.swiglu_alpha, limit = moe.swiglu_limit;
  const auto times = [](float a, float u) { return kGated ? a * u : a; };
  static_assert(count_values("activation") == 8, "a case for each");
  switch (moe.activation) {
    case k_activation_silu:
      return map(gate, up, count, h, [=](float g, float u) { return times(silu_f32(g), u); });
    case k_activation_gelu:
      return map(gate, up, count, h,
                 [=](float g, float u) { return times(0.5f * g * (1.0f + erf_f32(g * 0.707106781f)), u); });
    case k_activation_gelu_tanh:
      return map(gate, up, count, h, [=](float g, float u) {
        const float inner = 0.797884561f * fma(0.044715f * g * g, g, g);
        return times(0.5f * g * (1.0f + tanh_f32(inner)), u);
      });
    case k_activation_relu2:
      return map(gate, up, count, h, [=](float g, float u) {
        const float positive = g < 0.0f ? 0.0f : g;
        return times(positive * positive, u);
      });
    case k_activation_swiglu_oai:
      return map(gate, up, count, h, [=](float g, float u) {
        g = g > limit ? limit : g;
        return g * sigmoid_f32(alpha * g) * (clamp_to(u, limit) + 1.0f);
      });
    case k_activation_swiglu_step:
      return map(gate, up, count, h, [=](float g, float u) {
        const float s = silu_f32(g);
        return (s > limit ? limit : s) * clamp_to(u, limit);
      });
    case k_activation_swiglu_clamp:
      return map(gate, up, count, h,
                 [=](float g, float u) { return silu_f32(g > limit ? limit : g) * clamp_to(u, limit); });
    case k_activation_swiglu_tanh:
      return map(gate, up, count, h,
                 [=](float g, float u) { return softcap_f32(g, alpha) * sigmoid_f32(g) * softcap_f32(u, limit); });
  }
}

void activate(const qm_moe& moe, const float* gate, const float* up, int64_t count, float* h) {
  gate ? activate_as<true>(moe, gate, up, count, h) : activate_as<false>(moe, up, up, count, h);
}

void accumulate(float weight, const float* x, int64_t count, float* y) {
  for (int64_t i = 0; i < count; ++i) y[i] = fma(weight, x[i], y[i]);
}

// Interleaves rows of 4-byte pieces, in the order of the output: a tile is larger than L1, so its lines are written
// once.
inline void interleave(const PanelMatrix&, const uint8_t* const* rows, int count, int64_t bytes,
                       uint8_t* __restrict out) {
  for (int64_t at = 0; at < bytes; at += 4, out += 4 * count)
    for (int i = 0; i < count; ++i) std::memcpy(out + 4 * i, rows[i] + at, 4);
}

// kPlace: where a tile's values go.
template <auto kPlace = interleave>
void pack_tile(const PanelMatrix& matrix, bool quantized, const ActivationRow* rows, int tokens, uint8_t* out) {
  const uint8_t* sources[kMaxTileRows];
  for (int i = 0; i < tokens; ++i)
    sources[i] = quantized ? reinterpret_cast<const uint8_t*>(rows[i].q) : reinterpret_cast<const uint8_t*>(rows[i].x);
  kPlace(matrix, sources, tokens, quantized ? matrix.kp : 4 * matrix.kp, out);
  if (!quantized) return;
  int32_t* sums = reinterpret_cast<int32_t*>(out + matrix.kp * tokens);
  for (int i = 0; i < tokens; ++i)
    for (int64_t span = 0; span < matrix.spans(); ++span) sums[span * tokens + i] = rows[i].sums[span];
  float* steps = reinterpret_cast<float*>(sums + matrix.spans() * tokens);
  if (matrix.stepped) {
    for (int i = 0; i < tokens; ++i)
      for (int64_t step = 0; step < matrix.steps(); ++step) steps[step * tokens + i] = rows[i].steps[step];
    return;
  }
  int32_t* zero_points = reinterpret_cast<int32_t*>(steps + tokens);
  for (int i = 0; i < tokens; ++i) {
    steps[i] = rows[i].step;
    zero_points[i] = rows[i].zero_point;
  }
}

// For kernels whose codes are unsigned, offset by 8, 128 or (e2m1) 12: the sums become the start of a dot product,
// -offset * sum. With zero points this depends on the weights' row. Then the sums become two 16-bit factors, sum % 128
// and sum / 128. One multiply-add of pairs with -zero and -128 * zero makes the start of them.
template <auto kPlace = interleave>
inline void pack_tile_offset(const PanelMatrix& matrix, bool quantized, const ActivationRow* rows, int tokens,
                             uint8_t* out) {
  pack_tile<kPlace>(matrix, quantized, rows, tokens, out);
  if (!quantized) return;
  int32_t* sums = reinterpret_cast<int32_t*>(out + matrix.kp * tokens);
  if (matrix.zero_points) {
    for (int64_t i = 0; i < matrix.spans() * tokens; ++i)
      sums[i] = static_cast<int32_t>((sums[i] & 127) | static_cast<uint32_t>(sums[i] >> 7) << 16);
    return;
  }
  const int32_t offset = is_e2m1(matrix.format) ? 12 : matrix.bits == 4 ? 8 : 128;
  for (int64_t i = 0; i < matrix.spans() * tokens; ++i) sums[i] *= -offset;
}

#define QM_ELEMENTWISE(pack)                                                                                         \
  to_float, from_float, scale, all_finite, quantize, block_sums, round_row, quantize_int8, quantize_nvfp4, activate, \
      accumulate, pack

}  // namespace
}  // namespace quantmoe
