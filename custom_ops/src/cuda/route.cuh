// Counting sort of (token, slot) pairs by expert, the tile list, act-order gathers and the combine.
#pragma once
#include "cuda/kernels.cuh"
#include "cuda/ptx.cuh"

namespace quantmoe {

constexpr int kRouteWarps = kRouteThreads / 32;

// One block. Stable: a warp counts a contiguous part of the pairs, so the order does not depend on timing.
// Dynamic shared memory: int [kRouteWarps + 1][local_experts].
__global__ void __launch_bounds__(kRouteThreads) MoeRoute(const __grid_constant__ RouteParams p) {
  extern __shared__ int counts[];
  __shared__ int warp_pairs[kRouteWarps], warp_tiles[kRouteWarps];
  const int experts = p.routing.local_experts, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int pairs = p.routing.tokens * p.routing.top_k;
  LaunchDependents();
  for (int i = threadIdx.x; i < kRouteWarps * experts; i += kRouteThreads) counts[i] = 0;
  __syncthreads();
  const int steps = (pairs + kRouteThreads - 1) / kRouteThreads;
  const int begin = warp * steps * 32;
  int* own = counts + warp * experts;
  for (int i = 0; i < steps; ++i) {
    const int pair = begin + i * 32 + lane;
    const int e = pair < pairs ? LocalExpert(p.routing, pair) : -1;
    const unsigned same = __match_any_sync(~0u, e);
    if (e >= 0 && __ffs(same) - 1 == lane) own[e] += __popc(same);
    __syncwarp();
  }
  __syncthreads();
  // Experts in rounds of a block's threads; usually there is one round.
  int pairs_before = 0, tiles_before = 0;
  for (int base = 0; base < experts; base += kRouteThreads) {
    const int e = base + threadIdx.x;
    int count = 0;
    if (e < experts) {
      for (int w = 0; w < kRouteWarps; ++w) {
        const int c = counts[w * experts + e];
        counts[w * experts + e] = count;
        count += c;
      }
    }
    const int tiles = (count + p.tile_pairs - 1) / p.tile_pairs;
    int pair_scan = count, tile_scan = tiles;
    for (int d = 1; d < 32; d *= 2) {
      const int a = __shfl_up_sync(~0u, pair_scan, d), b = __shfl_up_sync(~0u, tile_scan, d);
      if (lane >= d) pair_scan += a, tile_scan += b;
    }
    if (lane == 31) warp_pairs[warp] = pair_scan, warp_tiles[warp] = tile_scan;
    __syncthreads();
    int first = pairs_before + pair_scan - count, tile = tiles_before + tile_scan - tiles;
    for (int w = 0; w < kRouteWarps; ++w) {
      if (w < warp) first += warp_pairs[w], tile += warp_tiles[w];
      pairs_before += warp_pairs[w], tiles_before += warp_tiles[w];
    }
    if (e < experts) {
      for (int w = 0; w < kRouteWarps; ++w) counts[w * experts + e] += first;
      // Tiles of one expert as equal as multiples of 8 allow.
      const int even = tiles ? ((count + tiles - 1) / tiles + 7) / 8 * 8 : 0;
      for (int i = 0; i < tiles; ++i) {
        const int at = min(i * even, count);
        p.tiles[tile + i] = Tile{e, first + at, min(even, count - at), 0};
      }
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) p.tiles[p.max_tiles].count = tiles_before;
  for (int i = 0; i < steps; ++i) {
    const int pair = begin + i * 32 + lane;
    const int e = pair < pairs ? LocalExpert(p.routing, pair) : -1;
    const unsigned same = __match_any_sync(~0u, e);
    int at = 0;
    if (e >= 0) at = own[e] + __popc(same & ((1u << lane) - 1));
    __syncwarp();
    if (e >= 0 && __ffs(same) - 1 == lane) own[e] += __popc(same);
    __syncwarp();
    if (e >= 0) p.sorted_pairs[at] = pair;
  }
}

// One block a pair.
__global__ void MoeGather(const __grid_constant__ GatherParams p) {
  const int pair = blockIdx.x, expert = LocalExpert(p.routing, pair);
  if (expert < 0) return;
  const int* perm = reinterpret_cast<const int*>(p.rows + expert * p.row_bytes + p.perm_at);
  const uint16_t* x = p.x + static_cast<int64_t>(pair / p.routing.top_k) * p.columns;
  uint16_t* out = p.out + static_cast<int64_t>(pair) * p.columns;
  for (int k = threadIdx.x; k < p.columns; k += blockDim.x) out[k] = x[perm[k]];
}

// out[token] = sum over slots of partial[pair], f32, ascending slot. One block 1024 columns of one token.
template <typename T>
__global__ void __launch_bounds__(256) MoeCombine(const __grid_constant__ CombineParams p) {
  WaitForPrevious();
  const int token = blockIdx.x, column = (blockIdx.y * 256 + threadIdx.x) * 4;
  if (column >= p.columns) return;
  float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
  for (int j = 0; j < p.routing.top_k; ++j) {
    const int64_t pair = static_cast<int64_t>(token) * p.routing.top_k + j;
    if (LocalExpert(p.routing, pair) < 0) continue;
    const float4 v = __ldcs(reinterpret_cast<const float4*>(p.partial + pair * p.columns + column));
    sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
  }
  uint2 packed = make_uint2(Half<T>::Pack(sum.x, sum.y), Half<T>::Pack(sum.z, sum.w));
  *reinterpret_cast<uint2*>(static_cast<T*>(p.out) + static_cast<int64_t>(token) * p.columns + column) = packed;
}

}  // namespace quantmoe
