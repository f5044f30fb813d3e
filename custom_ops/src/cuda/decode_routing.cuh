// The tile list of a small batch, made by every block for itself from topk_ids: cheaper than a kernel that makes it once.
//
// Column t of every tile is token t. A tile is (expert, how often the token had that expert before): with the usual
// distinct ids, one tile an expert. Tiles stand in order of first appearance, the same in every block.
#pragma once
#include "cuda/kernels.cuh"

namespace quantmoe {

struct DecodeRouting {
  int tiles;
  int key[kDecodePairs];
  unsigned first[kDecodePairs / 32];
  int expert[kDecodePairs];
  int pair[kDecodePairs][kDecodeTokens];  // -1: token t has not this expert
  float weight[kDecodePairs][kDecodeTokens];

  __device__ void Make(const Routing& r) {
    const int p = threadIdx.x, pairs = r.tokens * r.top_k;
    int local = -1;
    if (p < kDecodePairs) {
      if (p < pairs) local = LocalExpert(r, p);
      key[p] = local;
    }
    for (int i = p; i < pairs * kDecodeTokens; i += blockDim.x) {
      (&pair[0][0])[i] = -1;
      (&weight[0][0])[i] = 0.f;
    }
    __syncthreads();
    int own = -1;
    if (local >= 0) {
      own = local * kDecodePairs;
      for (int q = p - p % r.top_k; q < p; ++q) own += key[q] == local;
    }
    __syncthreads();
    if (p < kDecodePairs) key[p] = own;
    __syncthreads();
    int leader = p;
    if (own >= 0) {
      leader = 0;
      while (key[leader] != own) ++leader;
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
      pair[tile][p / r.top_k] = p;
      weight[tile][p / r.top_k] = r.topk_weights[p];
    }
    if (p == 0) {
      tiles = 0;
      for (unsigned mask : first) tiles += __popc(mask);
    }
    __syncthreads();
  }
};

}  // namespace quantmoe
