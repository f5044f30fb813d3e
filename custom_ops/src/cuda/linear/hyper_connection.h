// What the plan and the kernel of HyperConnection share.
#pragma once
#include <cstdint>

namespace quantmoe {

constexpr int32_t kMostStreams = 5;        // whose squares a warp's lanes have
constexpr int32_t kCollapseThreads = 128;  // each has eight features
constexpr int32_t kCollapsed = 8 * kCollapseThreads;

}  // namespace quantmoe
