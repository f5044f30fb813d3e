// Counting sort of (token, slot) pairs by expert, the tile list, act-order gathers and the combine.
#pragma once
#include "cuda/common/kernels.cuh"
#include "cuda/common/ptx.cuh"

namespace quantmoe {

constexpr int kRouteWarps = kRouteThreads / 32;

// 32 columns a thread: their 16 words, a 4 x 4 matrix of 4-word pieces, are transposed.
__device__ inline void prepare(const PrepareParams& params, int block, int blocks) {
  const int pieces = params.out_columns / 32;
  const int64_t items = static_cast<int64_t>(params.rows) * pieces;
  for (int64_t i = static_cast<int64_t>(block) * kRouteThreads + threadIdx.x; i < items;
       i += static_cast<int64_t>(blocks) * kRouteThreads) {
    const int64_t row = i / pieces;
    const int column = static_cast<int>(i % pieces) * 32;
    uint4 in[4];
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      in[q] = make_uint4(0, 0, 0, 0);
      if (column + 8 * q < params.columns)
        in[q] = *reinterpret_cast<const uint4*>(params.x + row * params.columns + column + 8 * q);
    }
    uint4* out = reinterpret_cast<uint4*>(params.out + row * params.out_columns + column);
    out[0] = make_uint4(in[0].x, in[1].x, in[2].x, in[3].x);
    out[1] = make_uint4(in[0].y, in[1].y, in[2].y, in[3].y);
    out[2] = make_uint4(in[0].z, in[1].z, in[2].z, in[3].z);
    out[3] = make_uint4(in[0].w, in[1].w, in[2].w, in[3].w);
  }
}

// What block `rank` of the cluster has at this address of its shared memory.
__device__ inline int remote(const int* shared, int rank) {
  int value = *shared;
#if __CUDA_ARCH__ >= 900
  asm volatile("ld.shared::cluster.s32 %0, [%1];"
               : "=r"(value)
               : "r"(cluster_address(shared_address(shared), rank))
               : "memory");
#endif
  return value;
}
__device__ inline void cluster_sync(int cluster) {
#if __CUDA_ARCH__ >= 900
  if (cluster > 1) {
    cluster_barrier();
    return;
  }
#endif
  __syncthreads();
}

// The sum of this lane's value and of those before it in its warp.
__device__ __forceinline__ int scan(int value, int lane) {
  for (int d = 1; d < 32; d *= 2) {
    const int a = __shfl_up_sync(~0u, value, d);
    if (lane >= d) value += a;
  }
  return value;
}

// What the parts of moe_route share. Shared memory has, for each expert, the number of the block's pairs, where the
// next of these goes, and the number of all blocks' pairs. With ordered lists counts become an expert's first tile.
struct RouteCounts {
  int experts, cluster, lane, warp;
  int *counts, *cursors, *totals;
  int (*places)[32];  // of a list's tiles of 8, 16, .. pairs: how many, then where the next goes
};
// Tiles of one expert as equal as multiples allow.
struct ExpertTiles {
  int count, pairs;
  int* place;
};
__device__ __forceinline__ ExpertTiles tiles_of(const RouteParams& params, const RouteCounts& tally, int l, int count) {
  const RouteParams::List& list = params.lists[l];
  const int tiles = (count + list.tile_pairs - 1) / list.tile_pairs, all = tiles * list.multiple;
  const int even = all ? (count + all - 1) / all * list.multiple : 0;
  return ExpertTiles{tiles, even, &tally.places[l][params.by_size ? even / 8 : 0]};
}

// Counts to first places, in every block alike; the first one counts tiles. Experts in rounds of a block's threads;
// usually there is one round. Returns how many places there are.
__device__ __forceinline__ int place_experts(const RouteParams& params, const RouteCounts& tally, int rank) {
  __shared__ int warp_pairs[kRouteWarps], warp_tiles[kRouteWarps];
  const int experts = tally.experts, lane = tally.lane, warp = tally.warp;
  int pairs_before = 0, tiles_before = 0;
  for (int base = 0; base < experts; base += kRouteThreads) {
    const int e = base + threadIdx.x;
    int count = 0, before = 0;  // before: of this expert in the blocks before this one
    if (e < experts) {
      for (int r = 0; r < tally.cluster; ++r) {
        const int there = tally.cluster > 1 ? remote(tally.counts + e, r) : tally.counts[e];
        count += there;
        if (r < rank) before += there;
      }
      tally.totals[e] = count;
    }
    const int aligned = (count + params.align - 1) / params.align * params.align;
    const int pair_scan = scan(aligned, lane);
    const int tiles = params.ordered ? tiles_of(params, tally, 0, count).count : 0, tile_scan = scan(tiles, lane);
    if (lane == 31) warp_pairs[warp] = pair_scan, warp_tiles[warp] = tile_scan;
    __syncthreads();
    int first = pairs_before + pair_scan - aligned;
    for (int w = 0; w < kRouteWarps; ++w) {
      if (w < warp) first += warp_pairs[w];
      pairs_before += warp_pairs[w];
    }
    if (params.ordered) {  // counts have been read: now of an expert's first tile
      int tile = tiles_before + tile_scan - tiles;
      for (int w = 0; w < kRouteWarps; ++w) {
        if (w < warp) tile += warp_tiles[w];
        tiles_before += warp_tiles[w];
      }
      if (e < experts) tally.counts[e] = tile;
    }
    if (e < experts) tally.cursors[e] = first + before;
    if (rank == 0) {
      for (int i = count; i < aligned; ++i) params.sorted_pairs[first + i] = SortedPair{-1, 0.f};
      for (int l = 0; l < params.list_count; ++l) {
        const ExpertTiles tiles = tiles_of(params, tally, l, count);
        if (tiles.count) atomicAdd(tiles.place, tiles.count);
      }
    }
    __syncthreads();
  }
  return pairs_before;
}

// Lists of tiles, the largest first (by an expert's first tile). So the work that is left for the last round of a
// product's blocks (Turns) is quick.
__device__ __forceinline__ void list_tiles(const RouteParams& params, const RouteCounts& tally, int places) {
  const int experts = tally.experts, lane = tally.lane, warp = tally.warp;
  if (warp < params.list_count) {
    const RouteParams::List& list = params.lists[warp];
    const int tiles = tally.places[warp][31 - lane], until = scan(tiles, lane);
    tally.places[warp][31 - lane] = until - tiles;
    if (lane == 31) list.tiles[list.max_tiles] = Tile{0, places, until};
  }
  __syncthreads();
  for (int e = threadIdx.x; e < experts; e += kRouteThreads)
    for (int l = 0; l < params.list_count; ++l) {
      const ExpertTiles tiles = tiles_of(params, tally, l, tally.totals[e]);
      if (!tiles.count) continue;
      const int place = params.ordered ? tally.counts[e] : atomicAdd(tiles.place, tiles.count), count = tally.totals[e];
      for (int i = 0; i < tiles.count; ++i) {
        const int at = min(i * tiles.pairs, count), group = i / kTileGroup * kTileGroup;
        params.lists[l].tiles[place + i] = Tile{e, tally.cursors[e] + at, min(tiles.pairs, count - at), place + group,
                                                min(kTileGroup, tiles.count - group)};
      }
    }
  __syncthreads();
}

// Pairs in their experts' places, by pair. unordered: as many.
__device__ __forceinline__ void place_in_order(const RouteParams& params, const RouteCounts& tally, int pairs,
                                               int* unordered) {
  for (int pair = threadIdx.x; pair < pairs; pair += kRouteThreads)
    if (const int e = local_expert(params.routing, pair); e >= 0) unordered[atomicAdd(&tally.cursors[e], 1)] = pair;
  __syncthreads();
  for (int pair = threadIdx.x; pair < pairs; pair += kRouteThreads) {
    const int e = local_expert(params.routing, pair);
    if (e < 0) continue;
    int at = tally.cursors[e] - tally.totals[e];
#pragma unroll 4
    for (int i = at, past = tally.cursors[e]; i < past; ++i) at += unordered[i] < pair;
    params.sorted_pairs[at] = SortedPair{pair, params.routing.topk_weights[pair]};
  }
}

// The first cluster sorts, a part of the pairs a block. The others prepare x. Dynamic shared memory: int
// [3][local_experts], and if ordered, int [pairs].
//
// Atomics make the order of tiles and of an expert's pairs, so it differs between calls. Results do not differ. A token
// is a column (path fp8: a row) of a product, computed alike wherever it stands, and results go to their pair's place.
// moe_gemm_span.cuh is different, because it cuts K elsewhere in each tile. It gets one order, by expert and pair.
__global__ void __launch_bounds__(kRouteThreads) moe_route(const __grid_constant__ RouteParams params) {
  extern __shared__ int counts[];
  __shared__ int places[2][32];
  const int experts = params.routing.local_experts, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int pairs = params.routing.tokens * params.routing.top_k, cluster = params.cluster, rank = blockIdx.x;
  const RouteCounts tally{experts, cluster, lane, warp, counts, counts + experts, counts + 2 * experts, places};
  launch_dependents();
  wait_for_previous();
  if (rank >= cluster) {
    prepare(params.prepare, blockIdx.x - cluster, gridDim.x - cluster);
    return;
  }
  for (int i = threadIdx.x; i < experts; i += kRouteThreads) counts[i] = 0;
  if (warp < 2) places[warp][lane] = 0;
  __syncthreads();
  const int begin = static_cast<int>(static_cast<int64_t>(rank) * pairs / cluster);
  const int end = static_cast<int>((static_cast<int64_t>(rank) + 1) * pairs / cluster);
#pragma unroll 4
  for (int pair = begin + threadIdx.x; pair < end; pair += kRouteThreads) {
    const int e = local_expert(params.routing, pair);
    if (e >= 0) atomicAdd(&counts[e], 1);
  }
  cluster_sync(cluster);
  const int all = place_experts(params, tally, rank);
  if (rank == 0) list_tiles(params, tally, all);
  if (params.ordered) return place_in_order(params, tally, pairs, tally.totals + experts);
#pragma unroll 4
  for (int pair = begin + threadIdx.x; pair < end; pair += kRouteThreads) {
    const int e = local_expert(params.routing, pair);
    const int at = e >= 0 ? atomicAdd(&tally.cursors[e], 1) : -1;
    if (e >= 0) params.sorted_pairs[at] = SortedPair{pair, params.routing.topk_weights[pair]};
    if (params.positions) params.positions[pair] = at;
  }
  cluster_sync(cluster);  // no block ends while others read its counts
}

// One block a pair. An order is the model's: one that names no feature makes a wrong result, not a read elsewhere.
__global__ void moe_gather(const __grid_constant__ GatherParams params) {
  const int pair = blockIdx.x, expert = local_expert(params.routing, pair);
  if (expert < 0) return;
  const int* perm = reinterpret_cast<const int*>(params.rows[expert] + params.perm_at);
  const uint16_t* x = params.x + static_cast<int64_t>(pair / params.x_divisor) * params.columns;
  uint16_t* out = params.out + static_cast<int64_t>(pair) * params.out_columns;
  for (int k = threadIdx.x; k < params.out_columns; k += blockDim.x) {
    const int order = k >= params.half, column = order ? k - params.half : k;
    out[k] = 0;
    if (column < params.columns)
      out[k] = x[min(static_cast<unsigned>(perm[order * params.order_words + column]), params.columns - 1u)];
  }
}

// out[token] = sum over slots and parts of K of partial[pair][part], in f32, ascending. A thread has 8 columns. It asks
// for kAhead rows of them before it adds any up: with few tokens, this kernel takes latency.
template <typename T, typename Partial>
__global__ void __launch_bounds__(kCombineThreads) moe_combine(const __grid_constant__ CombineParams params) {
  constexpr int kAhead = 8, kWords = sizeof(Partial) / 2;
  wait_for_previous();
  const int token = blockIdx.x, column = (blockIdx.y * kCombineThreads + threadIdx.x) * 8;
  if (column >= params.columns) return;
  const int64_t pair = static_cast<int64_t>(token) * params.routing.top_k;
  const Partial* from = static_cast<const Partial*>(params.partial) + pair * params.parts * params.columns + column;
  float sum[8] = {};
  int slot = 0, part = 0;
  while (slot < params.routing.top_k) {
    bool here[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      here[i] = slot < params.routing.top_k && local_expert(params.routing, pair + slot) >= 0;
      if (++part == params.parts) part = 0, ++slot;
    }
    uint4 rows[kAhead][kWords];
#pragma unroll
    for (int i = 0; i < kAhead; ++i, from += params.columns)
#pragma unroll
      for (int j = 0; j < kWords; ++j)
        if (here[i]) rows[i][j] = __ldcs(reinterpret_cast<const uint4*>(from) + j);
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (!here[i]) continue;
#pragma unroll
      for (int j = 0; j < kWords; ++j) {
        const uint32_t v[4] = {rows[i][j].x, rows[i][j].y, rows[i][j].z, rows[i][j].w};
#pragma unroll
        for (int k = 0; k < 4; ++k)
          if constexpr (kWords == 2) {
            sum[4 * j + k] += __uint_as_float(v[k]);
          } else {
            sum[2 * k] += Half<T>::low(v[k]), sum[2 * k + 1] += Half<T>::high(v[k]);
          }
      }
    }
  }
  *reinterpret_cast<uint4*>(static_cast<T*>(params.out) + static_cast<int64_t>(token) * params.columns + column) =
      make_uint4(Half<T>::pack(sum[0], sum[1]), Half<T>::pack(sum[2], sum[3]), Half<T>::pack(sum[4], sum[5]),
                 Half<T>::pack(sum[6], sum[7]));
}

}  // namespace quantmoe
