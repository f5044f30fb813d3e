// What the plan and the kernel of Hadamard share.
#pragma once
#include "core/tensors.h"

namespace quantmoe {

constexpr int32_t kMostRotated = 1 << 13;   // features of a block: 32 KB of f32 in shared memory
constexpr int32_t kLeastRotated = 1 << 10;  // that a thread block takes

// Features of a thread block: blocks of `size`, whatever their rows are.
inline int32_t rotated_by_block(const qm_hadamard& node) {
  return node.size > kLeastRotated ? node.size : kLeastRotated;
}

}  // namespace quantmoe
