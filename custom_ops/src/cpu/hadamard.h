// Blocks of features times a Hadamard matrix (ops/hadamard.def).
#pragma once
#include <cmath>
#include <cstdint>

namespace quantmoe {
namespace {

// x [count], a multiple of `size`, in place.
inline void rotate(float* x, int64_t count, int64_t size) {
  const float factor = static_cast<float>(1 / std::sqrt(static_cast<double>(size)));
  for (float* block = x; block < x + count; block += size) {
    for (int64_t half = 1; half < size; half *= 2)
      for (float* pairs = block; pairs < block + size; pairs += 2 * half)
        for (int64_t i = 0; i < half; ++i) {
          const float a = pairs[i], b = pairs[i + half];
          pairs[i] = a + b;
          pairs[i + half] = a - b;
        }
    for (int64_t i = 0; i < size; ++i) block[i] *= factor;
  }
}

}  // namespace
}  // namespace quantmoe
