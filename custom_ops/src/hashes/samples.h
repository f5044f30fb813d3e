// Which lines of a packed tensor stand for all of them, in an identity (quant_moe.def, Identity).
#pragma once
#include <algorithm>
#include <array>
#include <cstddef>

namespace quantmoe {

constexpr size_t kLine = 64;
// Their offsets.
inline std::array<size_t, 8> samples_of(size_t bytes) {
  std::array<size_t, 8> at;
  for (size_t i = 0; i < at.size(); ++i) at[i] = i * (std::max(bytes, kLine) / kLine - 1) / (at.size() - 1) * kLine;
  return at;
}

}  // namespace quantmoe
