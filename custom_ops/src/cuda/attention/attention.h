// CachedAttention's shapes, which the plan and the kernels share.
#pragma once
#include <cstdint>

#include "cuda/common/host_device.h"

namespace quantmoe {

// Widths of keys and of values that there are kernels for; those with wgmma in tiles of 64 rows, too.
#define QM_ATTENTION_LARGE_SIZES(X) X(128, 128) X(192, 128) X(192, 192) X(256, 256)
#define QM_ATTENTION_SIZES(X) X(64, 64) X(96, 96) QM_ATTENTION_LARGE_SIZES(X)

constexpr int kAttendThreads = 128, kAppendThreads = 256, kFewThreads = 256;
constexpr int kMostSplits = 64, kMostCluster = 16;
constexpr int kFewRows = 16;  // query rows of a block of few
QM_CONSTEXPR bool is_wide(int keys, int values) { return keys + values > 256; }
// Slots of a stage of mma.sync; of few rows, warps share out 16 each, and of wide heads the values' columns.
QM_CONSTEXPR int attend_keys(int keys, int values) { return is_wide(keys, values) ? 32 : 64; }
// Of few rows a stage of codes has as many bytes as one of numbers, and a warp twice the slots: latency binds there.
QM_CONSTEXPR int few_keys(int keys, int values, bool codes) { return attend_keys(keys, values) * (codes ? 2 : 1); }
QM_CONSTEXPR int many_rows(int keys, int values) { return is_wide(keys, values) ? 64 : 128; }
constexpr int kFewStages = 3, kDeepStages = 6, kManyStages = 2;  // deep: where a block has many and room for them
// Sums of 16 rows from each block of a cluster, and of their values the columns that a block adds up, four at a time.
QM_CONSTEXPR int few_received_bytes(int values) { return kMostCluster * kFewRows * (8 + (values + 63) / 64 * 16); }
// The ring of stages; one of a cache of codes has bytes, and before it is a stage of the numbers that they stand for.
QM_CONSTEXPR int ring_bytes(int stage_keys, int keys, int values, int stages, bool codes) {
  return stage_keys * (keys + values) * (codes ? 2 + stages : 2 * stages);
}
// Of few rows codes are widened in registers, and stages have as many bytes.
QM_CONSTEXPR int few_shared_bytes(int keys, int values, int stages, bool cluster) {
  return ring_bytes(attend_keys(keys, values), keys, values, stages, false) +
         (cluster ? few_received_bytes(values) : 0);
}
QM_CONSTEXPR int many_shared_bytes(int keys, int values, bool codes) {
  return many_rows(keys, values) * keys * 2 + ring_bytes(attend_keys(keys, values), keys, values, kManyStages, codes);
}
// attention_wgmma.cuh; 1024: to align the queries
constexpr int kWideStageLog = 6, kWideKeys = 1 << kWideStageLog, kWideStages = 2;
QM_CONSTEXPR int wide_shared_bytes(int rows, int keys, int values, bool codes) {
  return 1024 + rows * keys * 2 + ring_bytes(kWideKeys, keys, values, kWideStages, codes);
}
QM_CONSTEXPR int wide_blocks(int keys, int values) { return is_wide(keys, values) ? 1 : 2; }  // of a multiprocessor
// attention_ring.cuh. keys: slots of a stage. registers: of a thread of the consumers.
struct RingSizes {
  int keys, query_buffers, registers, shared_bytes;
};
constexpr int kRingStages = 2, kProducerRegisters = 56;
QM_CONSTEXPR int ring_rows(int keys) { return keys == 64 ? 192 : 128; }  // of a tile
QM_CONSTEXPR RingSizes ring_sizes(int rows, int keys, int values) {
  RingSizes sizes{};
  sizes.keys = is_wide(keys, values) || keys == 64 ? 64 : 128;
  sizes.query_buffers = keys == 256 ? 1 : 2;
  sizes.registers = rows == 192 ? 152 : 224;
  sizes.shared_bytes = 1024 + sizes.query_buffers * rows * keys * 2 + kRingStages * sizes.keys * (keys + values) * 2;
  return sizes;
}

// Widths of keys and values, one for both, that have kernels for lists of slots.
#define QM_ATTENTION_LIST_SIZES(X) X(128, 128) X(256, 256)
// attention_lists.cuh: rows of a tile of wgmma, which a plan splits only if it has such tiles, too. Then a window of
// stages, a place in each list of a tile, masks.
constexpr int kWideListRows = 64, kMostListTokens = 128, kManyMaskWords = 512, kWideMaskWords = 1024;
QM_CONSTEXPR int list_window_bytes(int words) { return 16 + kMostListTokens * 4 + words * 4; }

// Of latent attention, whose values are the last features of its keys (attention_latent.cuh): the widths that models
// have, and how two caches share a key. Slots of a stage and stages of the ring, on mma.sync and on wgmma.
constexpr int kLatentKeys = 576, kLatentValues = 512, kLatentSplit = 288;
constexpr int kLatentThreads = 256, kMostLatentSplits = 128, kFewLatentTokens = 16;
constexpr int kLatentSlots = 32, kLatentStages = 4, kFewLatentStages = 2, kLatentScoreRow = 40;
constexpr int kLatentWideRows = 64, kLatentWideSlots = 64, kLatentWideStages = 2;
// Of keys that are their values (attention_equal.cuh), and of two caches that share them.
constexpr int kEqualKeys = 512, kEqualSplit = 256;
// keys: features of a key. The ring, and two halves of each score.
QM_CONSTEXPR int latent_shared_bytes(int keys, int stages) {
  return stages * kLatentSlots * keys * 2 + 2 * kFewRows * kLatentScoreRow * 4;
}
// 1024: to align the queries; then weights of one warpgroup for the other, and the largest scores of each.
QM_CONSTEXPR int latent_wide_shared_bytes(int keys) {
  return 1024 + (kLatentWideRows + kLatentWideStages * kLatentWideSlots) * keys * 2 + kLatentThreads * 32 +
         2 * kLatentWideRows * 4;
}

// Stages that a split has at least, where there are as many: fewer splits are quicker to add up.
// Logarithms of 2.
constexpr int kLeastOfFew = 1, kLeastOfMany = 2, kLeastOfCluster = 0;
constexpr int least_of(int tile_rows, bool cluster) {
  return tile_rows != kFewRows ? kLeastOfMany : cluster ? kLeastOfCluster : kLeastOfFew;
}

}  // namespace quantmoe
