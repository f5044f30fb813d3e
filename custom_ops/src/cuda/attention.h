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
// Stages of keys and values; of many rows also the queries. The warps' results lie over the stages.
constexpr int kFewStages = 3, kManyStages = 2;
constexpr int AttendStageBytes(int head_size) { return 2 * 2 * kAttendKeys * head_size; }
constexpr int AttendSharedBytes(int rows, int head_size) {
  return rows == kFewRows ? kFewStages * AttendStageBytes(head_size)
                          : 2 * rows * head_size + kManyStages * AttendStageBytes(head_size);
}
constexpr int kWideThreads = 256, kWideStages = 2;  // attention_wgmma.cuh; 1024: to align the queries
constexpr int WideSharedBytes(int head_size) {
  return 1024 + 2 * kManyRows * head_size + kWideStages * AttendStageBytes(head_size);
}

}  // namespace quantmoe
