// The tile list of a small batch, made by every block for itself from topk_ids: cheaper than a kernel that makes it
// once.
//
// Column t of every tile is token t. A tile is (expert, how often the token had that expert before): with the usual
// distinct ids, one tile an expert. Tiles stand in order of first appearance, the same in every block.
#pragma once
#include "cuda/common/kernels.cuh"

namespace quantmoe {

struct DecodeRouting {
  int tiles, top_k;
  alignas(16) int key[kDecodePairs];
  unsigned first[kDecodePairs / 32];
  int expert[kDecodePairs];
  float weight[kDecodePairs];
  alignas(8) int8_t slot[kDecodePairs][kDecodeTokens];  // of token t; -1: it has not this expert

  __device__ int pair_of(int tile, int t) const {
    const int s = slot[tile][t];
    return s < 0 ? -1 : t * top_k + s;
  }

  __device__ void make(const RoutedPairs& routing) {
    const int p = threadIdx.x, pairs = routing.tokens * routing.top_k;
    if (routing.tokens == 1 && pairs <= 32) {  // every slot is a tile
      if (p < 32) {
        const int local = p < pairs ? local_expert(routing, p) : -1;
        const unsigned mask = __ballot_sync(~0u, local >= 0);
        const int tile = __popc(mask & ((1u << p) - 1));
        if (local >= 0) {
          expert[tile] = local;
          weight[p] = router_weight(routing, p);
          reinterpret_cast<int2*>(slot)[tile] = make_int2(static_cast<int>(0xffffff00u | p), -1);
        }
        if (p == 0) top_k = routing.top_k, tiles = __popc(mask);
      }
      __syncthreads();
      return;
    }
    const int token = p / routing.top_k;
    int local = -1;
    if (p < kDecodePairs) {
      if (p < pairs) {
        local = local_expert(routing, p);
        weight[p] = router_weight(routing, p);
      }
      key[p] = local;
    }
    for (int i = p; i < pairs * kDecodeTokens / 4; i += kThreads) reinterpret_cast<int*>(slot)[i] = -1;
    if (p == 0) top_k = routing.top_k;
    __syncthreads();
    int own = -1;
    if (local >= 0) {
      own = local * kDecodePairs;
#pragma unroll 1
      for (int q = token * routing.top_k; q < p; ++q) own += key[q] == local;
    }
    __syncthreads();
    if (p < kDecodePairs) key[p] = own;
    __syncthreads();
    int leader = p;
    if (own >= 0) {
      // Backwards over all, so that loads do not wait for one another; the first that has it stays.
#pragma unroll 4
      for (int q = (pairs - 1) / 4 * 4; q >= 0; q -= 4) {
        const int4 four = *reinterpret_cast<const int4*>(&key[q]);
        leader = four.x == own ? q : four.y == own ? q + 1 : four.z == own ? q + 2 : four.w == own ? q + 3 : leader;
      }
    }
    if (p < kDecodePairs) {
      const unsigned mask = __ballot_sync(~0u, own >= 0 && leader == p);
      if (p % 32 == 0) first[p / 32] = mask;
    }
    __syncthreads();
    if (own >= 0) {
      int tile = __popc(first[leader / 32] & ((1u << leader % 32) - 1));
      for (int i = 0; i < leader / 32; ++i) tile += __popc(first[i]);
      expert[tile] = local;
      slot[tile][token] = static_cast<int8_t>(p - token * routing.top_k);
    }
    if (p == 0) {
      tiles = 0;
      for (unsigned mask : first) tiles += __popc(mask);
    }
    __syncthreads();
  }
};

}  // namespace quantmoe
