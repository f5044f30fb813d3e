// CachedAttention's shapes, which the plan and the kernels share.
#pragma once
#include <cstdint>

#ifdef __CUDACC__
#define QM_CONSTEXPR __host__ __device__ constexpr
#else
#define QM_CONSTEXPR constexpr
#endif

namespace quantmoe {

// Widths of keys and of values that there are kernels for; on wgmma all but 96.
#define QM_ATTENTION_WGMMA_SIZES(X) X(64, 64) X(128, 128) X(192, 128) X(192, 192) X(256, 256)
#define QM_ATTENTION_SIZES(X) QM_ATTENTION_WGMMA_SIZES(X) X(96, 96)

constexpr int kAttendThreads = 128, kAppendThreads = 256;
constexpr int kMostSplits = 64, kMostCluster = 16;
constexpr int kFewRows = 16;  // query rows of a block of few
QM_CONSTEXPR bool IsWide(int keys, int values) { return keys + values > 256; }
// Slots of a stage of mma.sync; of few rows, warps share out 16 each, and of wide heads the values' columns.
QM_CONSTEXPR int AttendKeys(int keys, int values) { return IsWide(keys, values) ? 32 : 64; }
QM_CONSTEXPR int ManyRows(int keys, int values) { return IsWide(keys, values) ? 64 : 128; }
constexpr int kFewStages = 3, kManyStages = 2;
QM_CONSTEXPR int FewSharedBytes(int keys, int values) {
  return kFewStages * AttendKeys(keys, values) * (keys + values) * 2;
}
QM_CONSTEXPR int ManySharedBytes(int keys, int values) {
  return (ManyRows(keys, values) * keys + kManyStages * AttendKeys(keys, values) * (keys + values)) * 2;
}
// attention_wgmma.cuh; 1024: to align the queries
constexpr int kWideThreads = 256, kWideRows = 128, kWideKeys = 64, kWideStages = 2;
QM_CONSTEXPR int WideSharedBytes(int keys, int values) {
  return 1024 + (kWideRows * keys + kWideStages * kWideKeys * (keys + values)) * 2;
}
QM_CONSTEXPR int WideBlocks(int keys, int values) { return IsWide(keys, values) ? 1 : 2; }  // of a multiprocessor

// Stages that a split has at least, where there are as many: fewer splits are quicker to add up.
constexpr int kLeastOfFew = 2, kLeastOfMany = 4, kLeastOfCluster = 1;

}  // namespace quantmoe
