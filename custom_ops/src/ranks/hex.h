// Bytes as hex digits, two for each: what ranks tell each other is text.
#pragma once
#include <cstddef>
#include <string>

namespace quantmoe {

inline std::string to_hex(const void* bytes, size_t size) {
  std::string digits;
  for (size_t i = 0; i < size; ++i) {
    const auto value = static_cast<const unsigned char*>(bytes)[i];
    digits += {"0123456789abcdef"[value >> 4], "0123456789abcdef"[value & 15]};
  }
  return digits;
}

// The bytes of twice as many digits.
inline void from_hex(const std::string& digits, void* bytes, size_t size) {
  for (size_t i = 0; i < size; ++i)
    static_cast<unsigned char*>(bytes)[i] = static_cast<unsigned char>(std::stoi(digits.substr(2 * i, 2), nullptr, 16));
}

}  // namespace quantmoe
