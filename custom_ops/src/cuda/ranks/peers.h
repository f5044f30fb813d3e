// What plan and kernels of ranks that write to each other's memory share.
#pragma once
#include "cuda/common/host_device.h"
#include "quantmoe/quant_moe_cuda.h"

namespace quantmoe {

// Up to kFewWords 16-byte words of a rank: it writes all of its x to all others. It adds up, or joins, what it has got.
constexpr int kFewThreads = 256, kFewBlocks = 256;
constexpr int kFewWords = kFewThreads * kFewBlocks;
// A larger sum: a tile has a part for each rank, which adds it up, and writes the sum to all others.
constexpr int kPartThreads = 512, kPartWords = 512, kPartBlocks = 2;

// What a rank has in its memory: this, and words at few_at, uint4 [3][world][kFewWords], and at parts_at, uint4
// [blocks][parts, sums][world][kPartWords]. Of a word's place one thread of one rank writes, and one thread (few) or
// block (parts) of the owner reads. Counters are the owner's alone, flags the others'.
struct Box {
  uint32_t given_up, unused[31];                          // not 0: who waits here ends the run with an error
  uint32_t few_slots[kFewBlocks];                         // which of three each block's next call has
  uint32_t tiles[QM_CUDA_MOST_BLOCKS];                    // that each block has had
  uint32_t flags[QM_CUDA_MOST_BLOCKS][2][QM_CUDA_PEERS];  // tiles whose parts, and sums, have come from a rank
};
QM_CONSTEXPR size_t few_at() { return sizeof(Box); }
QM_CONSTEXPR size_t parts_at(int world) { return few_at() + size_t{16} * 3 * world * kFewWords; }
constexpr size_t box_bytes(int world) {
  return parts_at(world) + size_t{16} * QM_CUDA_MOST_BLOCKS * 2 * world * kPartWords;
}

}  // namespace quantmoe
