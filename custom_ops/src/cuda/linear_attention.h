// Shapes of CausalConv and GatedDelta, which plan, launch and kernels share.
#pragma once
#include <cstdint>

namespace quantmoe {

constexpr int kConvThreads = 128;  // each has two channels
constexpr int kConvTokens = 32;    // of a block; at least the widest convolution
constexpr int kLeastConvWidth = 2, kMostConvWidth = 4;

constexpr int kDeltaParts = 4;                      // lanes that share a column of a state, a quarter of its rows each
constexpr int kFewDeltaTokens = 8;                  // up to which one kernel does all
constexpr int kFewDeltaColumns = 32;                // of a block, where a head has several
enum class DeltaNorm { kWhole, kCluster, kLater };  // who norms the output
template <DeltaNorm norm>
constexpr int kDeltaChunk = norm == DeltaNorm::kLater ? 16 : kFewDeltaTokens;  // tokens that are read ahead
constexpr int kGateThreads = 256;                                              // a warp has a head of a token

}  // namespace quantmoe
