// Exact values of the 4- and 8-bit floats of op.def, one at a time.
#pragma once
#include <cstdint>
#include <cstring>

namespace quantmoe {

// Twice the value of an e2m1 code: an integer.
constexpr int8_t kE2m1Doubled[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// bitsandbytes' tables of 4-bit codes, as its functional.py and csrc have them: nf4 and fp4.
constexpr float kNf4[16] = {-0x1p+0f,        -0x1.647362p-1f, -0x1.0cd66p-1f,  -0x1.946540p-2f,
                            -0x1.23449ap-2f, -0x1.7a6a7ep-3f, -0x1.74f0e2p-4f, 0.0f,
                            0x1.45f5fep-4f,  0x1.4995c6p-3f,  0x1.f809bap-3f,  0x1.5a0674p-2f,
                            0x1.c3497p-2f,   0x1.200f56p-1f,  0x1.722766p-1f,  1.0f};
constexpr float kBnbFp4[16] = {
    0.0f, 0x1.555556p-8f,  0x1.555556p-1f,  1.0f,  0x1.555556p-2f,  0.5f,  0x1.555556p-3f,  0.25f,
    0.0f, -0x1.555556p-8f, -0x1.555556p-1f, -1.0f, -0x1.555556p-2f, -0.5f, -0x1.555556p-3f, -0.25f};

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
