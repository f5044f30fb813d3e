// CachedAttention's shapes, which the plan and the kernels share.
#pragma once
#include <cstdint>

namespace quantmoe {

constexpr int kAttendThreads = 128, kAppendThreads = 256;
constexpr int kAttendKeys = 64;  // slots of a stage
constexpr int kMostSplits = 64;
constexpr int kFewRows = 16, kManyRows = 128;  // query rows of a block; of few, the warps share the slots
// Queries and two stages of keys and values. The warps' results lie over the stages.
constexpr int AttendSharedBytes(int rows, int head_size) { return 2 * head_size * (rows + 2 * 2 * kAttendKeys); }

}  // namespace quantmoe
