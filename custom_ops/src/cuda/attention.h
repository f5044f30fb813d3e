// CachedAttention's shapes, which the plan and the kernels share.
#pragma once
#include <cstdint>

namespace quantmoe {

constexpr int kAttendThreads = 128, kAppendThreads = 256, kAppendHeads = kAppendThreads / 16;
constexpr int kAttendKeys = 64;  // slots of a stage
constexpr int kMostSplits = 64;
constexpr int kFewRows = 16, kManyRows = 128;  // query rows of a block; of few, the warps share the slots
// Stages that a split has at least, where there are as many: fewer splits are quicker to add up.
constexpr int kLeastOfFew = 2, kLeastOfMany = 4;
// Queries and two stages of keys and values. The warps' results lie over the stages.
constexpr int AttendSharedBytes(int rows, int head_size) { return 2 * head_size * (rows + 2 * 2 * kAttendKeys); }
constexpr int kWideThreads = 256, kWideStages = 4;  // attention_wgmma.cuh
constexpr int WideSharedBytes(int head_size) { return 1024 + kWideStages * 4 * kAttendKeys * head_size; }

}  // namespace quantmoe
