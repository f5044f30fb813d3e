// Exact values of the 4- and 8-bit floats of op.def, one at a time.
#pragma once
#include <cstdint>
#include <cstring>

namespace quantmoe {

// Twice the value of an e2m1 code: an integer.
constexpr int8_t kE2m1Doubled[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

inline float float_of_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
// 2^-8 times the value of an e4m3 code, which is no NaN.
inline float e4m3_scaled(uint8_t code) {
  const uint32_t magnitude = code & 0x7fu;
  const float value =
      magnitude < 8 ? static_cast<float>(magnitude) * 0x1p-17f : float_of_bits((magnitude << 20) + (112u << 23));
  return code & 0x80 ? -value : value;
}
// 2^(code - 127).
inline float e8m0(uint8_t code) { return float_of_bits(code ? uint32_t{code} << 23 : 0x00400000u); }

}  // namespace quantmoe
