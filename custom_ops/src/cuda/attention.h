// CachedAttention's shapes, which the plan and the kernels share.
#pragma once
#include <cstdint>

#include "cuda/host_device.h"

namespace quantmoe {

// Widths of keys and of values that there are kernels for; those with wgmma in tiles of 64 rows, too.
#define QM_ATTENTION_LARGE_SIZES(X) X(128, 128) X(192, 128) X(192, 192) X(256, 256)
#define QM_ATTENTION_SIZES(X) X(64, 64) X(96, 96) QM_ATTENTION_LARGE_SIZES(X)

constexpr int kAttendThreads = 128, kAppendThreads = 256, kFewThreads = 256;
constexpr int kMostSplits = 64, kMostCluster = 16;
constexpr int kFewRows = 16;  // query rows of a block of few
QM_CONSTEXPR bool IsWide(int keys, int values) { return keys + values > 256; }
// Slots of a stage of mma.sync; of few rows, warps share out 16 each, and of wide heads the values' columns.
QM_CONSTEXPR int AttendKeys(int keys, int values) { return IsWide(keys, values) ? 32 : 64; }
// Of few rows a stage of codes has as many bytes as one of numbers, and a warp twice the slots: latency binds there.
QM_CONSTEXPR int FewKeys(int keys, int values, bool codes) { return AttendKeys(keys, values) * (codes ? 2 : 1); }
QM_CONSTEXPR int ManyRows(int keys, int values) { return IsWide(keys, values) ? 64 : 128; }
constexpr int kFewStages = 3, kDeepStages = 6, kManyStages = 2;  // deep: where a block has many and room for them
// Sums of 16 rows from each block of a cluster, and of their values the columns that a block adds up, four at a time.
QM_CONSTEXPR int FewReceivedBytes(int values) { return kMostCluster * kFewRows * (8 + (values + 63) / 64 * 16); }
// The ring of stages; one of a cache of codes has bytes, and before it is a stage of the numbers that they stand for.
QM_CONSTEXPR int RingBytes(int stage_keys, int keys, int values, int stages, bool codes) {
  return stage_keys * (keys + values) * (codes ? 2 + stages : 2 * stages);
}
// Of few rows codes are widened in registers, and stages have as many bytes.
QM_CONSTEXPR int FewSharedBytes(int keys, int values, int stages, bool cluster) {
  return RingBytes(AttendKeys(keys, values), keys, values, stages, false) + (cluster ? FewReceivedBytes(values) : 0);
}
QM_CONSTEXPR int ManySharedBytes(int keys, int values, bool codes) {
  return ManyRows(keys, values) * keys * 2 + RingBytes(AttendKeys(keys, values), keys, values, kManyStages, codes);
}
// attention_wgmma.cuh; 1024: to align the queries
constexpr int kWideKeys = 64, kWideStages = 2;
QM_CONSTEXPR int WideSharedBytes(int rows, int keys, int values, bool codes) {
  return 1024 + rows * keys * 2 + RingBytes(kWideKeys, keys, values, kWideStages, codes);
}
QM_CONSTEXPR int WideBlocks(int keys, int values) { return IsWide(keys, values) ? 1 : 2; }  // of a multiprocessor

// Of latent attention, whose values are the last features of its keys (attention_latent.cuh): the widths that models
// have, and how two caches share a key. Slots of a stage and stages of the ring, on mma.sync and on wgmma.
constexpr int kLatentKeys = 576, kLatentValues = 512, kLatentSplit = 288;
constexpr int kLatentThreads = 256, kMostLatentSplits = 128, kFewLatentTokens = 16;
constexpr int kLatentSlots = 32, kLatentStages = 4, kFewLatentStages = 2, kLatentScoreRow = 40;
constexpr int kLatentWideRows = 64, kLatentWideSlots = 64, kLatentWideStages = 2;
// The ring, and two halves of each score.
QM_CONSTEXPR int LatentSharedBytes(int stages) {
  return stages * kLatentSlots * kLatentKeys * 2 + 2 * kFewRows * kLatentScoreRow * 4;
}
// 1024: to align the queries; then weights of one warpgroup for the other, and the largest scores of each.
constexpr int kLatentWideSharedBytes = 1024 +
                                       (kLatentWideRows + kLatentWideStages * kLatentWideSlots) * kLatentKeys * 2 +
                                       kLatentThreads * 32 + 2 * kLatentWideRows * 4;

// Stages that a split has at least, where there are as many: fewer splits are quicker to add up.
// Logarithms of 2.
constexpr int kLeastOfFew = 1, kLeastOfMany = 2, kLeastOfCluster = 0;
constexpr int LeastOf(int tile_rows, bool cluster) {
  return tile_rows != kFewRows ? kLeastOfMany : cluster ? kLeastOfCluster : kLeastOfFew;
}

}  // namespace quantmoe
