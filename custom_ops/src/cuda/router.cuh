// MoERouter: the router's product in f32, and MoERouting of it.
#pragma once
#include "cuda/between.h"
#include "cuda/select_experts.cuh"

namespace quantmoe {

struct RouterParams {
  const void* x;            // T [tokens, columns]
  const void* weight;       // T [experts, columns]
  const float* bias;        // [experts], null: none
  const float* correction;  // [experts], null: none
  int* topk_ids;
  float* topk_weights;
  float* logits;  // [tokens, experts] for MoeSelect
  int tokens, columns;
  qm_routing routing;
};

// sum += the eight products of two 16-byte words.
template <typename T>
__device__ inline void Dot8(float& sum, const uint4& a, const uint4& b) {
  const uint32_t x[] = {a.x, a.y, a.z, a.w}, y[] = {b.x, b.y, b.z, b.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sum = fmaf(Half<T>::Low(x[i]), Half<T>::Low(y[i]), sum);
    sum = fmaf(Half<T>::High(x[i]), Half<T>::High(y[i]), sum);
  }
}

// columns: a multiple of 8. Dynamic shared memory: the block's rows of weights, SelectWords. The weights come before
// the kernel waits for x, and each block's logits go to the first block's words.
template <typename T>
__global__ void __launch_bounds__(kRouterThreads) RouterCluster(const __grid_constant__ RouterParams p) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) uint8_t shared[];
  LaunchDependents();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, rank = blockIdx.x;
  const int experts = p.routing.num_experts, each = (experts + kRouterBlocks - 1) / kRouterBlocks;
  const int first = min(rank * each, experts), count = min(each, experts - first), words = p.columns / 8;
  float* logits = reinterpret_cast<float*>(shared + 2 * each * p.columns);
  const uint4* from = static_cast<const uint4*>(p.weight) + static_cast<int64_t>(first) * words;
  for (int i = threadIdx.x; i < count * words; i += kRouterThreads)
    CopyAsync16Past(SharedAddress(shared) + 16 * i, from + i, true);
  CopyAsyncCommit();
  ClusterArrive();  // all blocks are there before one stores to another
  WaitForPrevious();
  const uint4* x = static_cast<const uint4*>(p.x) + static_cast<int64_t>(blockIdx.y) * words;
  CopyAsyncWaitAll();
  __syncthreads();
  ClusterWait();
  for (int e = warp; e < count; e += kRouterThreads / 32) {
    const uint4* w = reinterpret_cast<const uint4*>(shared) + e * words;
    float sum = 0.f;
#pragma unroll 4
    for (int i = lane; i < words; i += 32) Dot8<T>(sum, x[i], w[i]);
    sum = WarpSum(sum);
    if (lane == 0) ClusterStore(logits + first + e, 0, p.bias ? sum + p.bias[first + e] : sum);
  }
  __syncwarp();
  ClusterArrive();
  ClusterWait();
  if (rank == 0 && warp == 0) {
    const int64_t at = static_cast<int64_t>(blockIdx.y) * p.routing.top_k;
    Select(p.routing, reinterpret_cast<unsigned*>(logits), p.correction, p.topk_ids + at, p.topk_weights + at);
  }
#endif
}

// Any columns. kWords: they are a multiple of 8.
template <typename T, bool kWords>
__global__ void __launch_bounds__(kRouterRowsThreads) RouterRows(const __grid_constant__ RouterParams p) {
  LaunchDependents();
  const int lane = threadIdx.x % 32, e = blockIdx.y * (kRouterRowsThreads / 32) + threadIdx.x / 32;
  const bool there = e < p.routing.num_experts;
  const int64_t token = blockIdx.x, row = static_cast<int64_t>(e) * p.columns;
  if (kWords && there && lane == 0 && token == 0) Prefetch(static_cast<const T*>(p.weight) + row, 2 * p.columns);
  WaitForPrevious();
  if (!there) return;
  float sum = 0.f;
  if constexpr (kWords) {
    const uint4* x = static_cast<const uint4*>(p.x) + token * (p.columns / 8);
    const uint4* w = static_cast<const uint4*>(p.weight) + row / 8;
#pragma unroll 4
    for (int i = lane; i < p.columns / 8; i += 32) Dot8<T>(sum, x[i], w[i]);
  } else {
    const T* x = static_cast<const T*>(p.x) + token * p.columns;
    const T* w = static_cast<const T*>(p.weight) + row;
    for (int i = lane; i < p.columns; i += 32) sum = fmaf(static_cast<float>(x[i]), static_cast<float>(w[i]), sum);
  }
  sum = WarpSum(sum);
  if (lane == 0) p.logits[token * p.routing.num_experts + e] = p.bias ? sum + p.bias[e] : sum;
}

// columns: a multiple of 8. A warp has all tokens of the tile and 16 experts. A row of a stage is 128 bytes, whose
// 16-byte words are exchanged by its number, so that eight rows' words are in other banks.
template <typename T>
__global__ void __launch_bounds__(kRouterTileThreads) RouterTiles(const __grid_constant__ RouterParams p) {
  constexpr int kTokens = kRouterTileTokens, kRows = kTokens + kRouterTileExperts, kWords = kRouterTileColumns / 8;
  extern __shared__ __align__(128) uint8_t shared[];
  LaunchDependents();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int token0 = blockIdx.x * kTokens, expert0 = blockIdx.y * kRouterTileExperts;
  const int experts = p.routing.num_experts, words = p.columns / 8, steps = (words + kWords - 1) / kWords;
  const uint32_t base = SharedAddress(shared);
  const auto at = [&](int stage, int row, int word) {
    return base + ((stage * kRows + row) * kWords + (word ^ row % 8)) * 16;
  };
  const auto load = [&](int step, int from, int to) {
    for (int i = from * kWords + threadIdx.x; i < to * kWords; i += kRouterTileThreads) {
      const int row = i / kWords, word = step * kWords + i % kWords;
      const bool token = row < kTokens;
      const int number = token ? token0 + row : expert0 + row - kTokens;
      const bool valid = word < words && number < (token ? p.tokens : experts);
      const uint4* rows = static_cast<const uint4*>(token ? p.x : p.weight);
      const uint4* source = valid ? rows + static_cast<int64_t>(number) * words + word : rows;
      CopyAsync16Past(at(step % kRouterStages, row, i % kWords), source, valid);
    }
  };
  // Weights of the first stages, then, after the wait, the tokens'.
  for (int step = 0; step < min(kRouterStages - 1, steps); ++step) load(step, kTokens, kRows);
  WaitForPrevious();
  for (int step = 0; step < kRouterStages - 1; ++step) {
    if (step < steps) load(step, 0, kTokens);
    CopyAsyncCommit();
  }
  float sums[2][2][4] = {};
  for (int step = 0; step < steps; ++step) {
    CopyAsyncWait<kRouterStages - 2>();
    __syncthreads();
    if (step + kRouterStages - 1 < steps) load(step + kRouterStages - 1, 0, kRows);
    CopyAsyncCommit();
    const int stage = step % kRouterStages;
#pragma unroll
    for (int k = 0; k < kRouterTileColumns / 16; ++k) {
      uint32_t a[2][4], b[4];
      for (int m = 0; m < 2; ++m) LoadMatrices(a[m], at(stage, m * 16 + lane % 16, 2 * k + lane / 16));
      LoadMatrices(b, at(stage, kTokens + warp * 16 + lane % 8 + lane / 16 * 8, 2 * k + lane / 8 % 2));
#pragma unroll
      for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int n = 0; n < 2; ++n) Half<T>::Mma(sums[m][n], a[m], b[2 * n], b[2 * n + 1]);
    }
  }
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const int m = i / 8, n = i / 4 % 2, c = i % 4;
    const int token = token0 + m * 16 + c / 2 * 8 + lane / 4, e = expert0 + warp * 16 + n * 8 + lane % 4 * 2 + c % 2;
    if (token < p.tokens && e < experts)
      p.logits[static_cast<int64_t>(token) * experts + e] = p.bias ? sums[m][n][c] + p.bias[e] : sums[m][n][c];
  }
}

}  // namespace quantmoe
