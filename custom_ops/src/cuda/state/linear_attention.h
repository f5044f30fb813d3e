// Shapes of CausalConv, GatedDelta and StateSpace, which plan, launch and kernels share.
#pragma once
#include <cstdint>

namespace quantmoe {

constexpr int kConvThreads = 128;                           // each has two channels
constexpr int kConvTokens = 16;                             // of a block; at least kMostKeptConvWidth
constexpr int kConvAhead = 8;                               // whose inputs are asked for at once
constexpr int kFewConvTokens = 8;                           // of a call whose reads are asked for at once
constexpr int kConvRows = 4;                                // of a block, where each has one token
constexpr int kLeastConvWidth = 2, kMostKeptConvWidth = 4;  // kept: in registers

constexpr int kDeltaParts = 4;              // lanes that share a column of a state, a quarter of its rows each
constexpr int kFewDeltaTokens = 8;          // up to which one kernel does all
constexpr int kDeltaColumns = 32;           // of a block of gated_delta
constexpr int kBatchDeltaWarps = 8;         // of a block of gated_delta_batch
enum class DeltaNorm { kCluster, kLater };  // who norms gated_delta's output
template <DeltaNorm norm>
constexpr int kDeltaChunk = norm == DeltaNorm::kLater ? 16 : kFewDeltaTokens;  // tokens that are read ahead
constexpr int kGateThreads = 256;                                              // a warp has a head of a token

// The chunked kernels, chunks.cuh.
constexpr int kChunkTokens = 64;         // of a chunk
constexpr int kChunkThreads = 128;       // of a block
constexpr int kScanColumns = 64;         // of a block
constexpr int kLeastChunkedTokens = 32;  // from which on a call takes them
constexpr int kMostChunks = 32;          // of a row that a launch has: their operands, 1 MB a head, stay in L2
// A chunk's operands, in floats: W, where a node recalls, and P, in two parts of 16 bits; then the tokens' factors.
constexpr int kChunkMatrix = kChunkTokens * kChunkTokens, kChunkFactors = 3 * kChunkTokens + 4;
template <bool recalls>
constexpr int kChunkMatrices = recalls ? 2 : 1;
template <bool recalls>
constexpr int kChunkFloats = kChunkMatrices<recalls> * kChunkMatrix + kChunkFactors;
enum ChunkProducts : int { kNoChunks, kChunksOnMma, kChunksOnWgmma };
// How GatedDelta runs tokens one after the other: gated_delta, and delta_gate norms; a cluster's gated_delta;
// gated_delta_batch.
enum DeltaSteps : int { kStepsThenGate, kStepsInCluster, kStepsInBatch };
// Places in qm_cuda_node_plan.chosen. Chunked: ChunkProducts, 64 tokens at a time on tensor cores, or one after the
// other, as DeltaSteps says.
enum StateChoice : int { kChunked, kSteps };
constexpr int kScanShared = 149024 + 1024;  // bytes of a block of K = 128: two stages, and to align them

constexpr int kSpaceColumns = 32, kSpaceThreads = 128;  // of a block of StateSpace; a warp has eight columns of a state
constexpr int kSpaceGateEach = 16,
              kSpaceGateThreads = 1024;  // features of a thread that gates and norms, at most; threads

}  // namespace quantmoe
