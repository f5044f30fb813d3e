// A layer's experts in host memory, and slots for some of them in device memory. The device itself decides which
// experts have a slot, so a launch needs no host and can be captured.
//
//     topk_ids -> resolve_experts -> where[expert], copies -> fill_experts -> slots -> the products, which read where
//                 (one block)                                 (all blocks)
//
// An expert that the call asks for is read where `where` says: in its slot, or in a row of `staging`. A call fills its
// rows of `staging` itself. When these are full, it is read in host memory. A call never gives a slot that it reads to
// another expert. Misses take the slots that were used least recently. A call is one step of time, and slots of one
// step are in ascending order. So equal calls have equal hits on every device.
//
// With a host that multiplies (qm_cuda_host) a share of the misses is not copied. resolve_experts leaves their pairs
// out of the ids that the products read. It writes a request, which a thread of the host waits for. add_host, the last
// kernel, waits for the answer. A share is of one call's misses, rounded down. A single miss is copied into a slot,
// because the host's part takes longer. Which misses are copied changes from call to call. Empty slots are filled
// first.
#pragma once
#include "cuda/common/experts_memory.h"
#include "cuda/common/kernels.cuh"
#include "cuda/common/ptx.cuh"

namespace quantmoe {

// One expert to copy: its index, and where to.
struct alignas(16) ExpertCopy {
  uint8_t* to;
  int64_t expert;
};
static_assert(sizeof(ExpertCopy) == kCopyBytes);

struct CacheParams {
  RoutedPairs routing;
  const uint8_t* rows[2];   // of w13 and w2, in host memory
  const void* const* each;  // or [2, experts]: each row's address
  uint64_t row_bytes[2];
  uint64_t second_at, slot_bytes;  // of a slot: where the row of w2 begins, all of it
  uint8_t *slots, *staging;
  int slot_count, staging_count;
  CacheState* state;
  // Of this call, in the workspace.
  const uint8_t** where[2];  // [experts]
  ExpertCopy* copies;        // [experts]
  int* copy_count;
  // Of the host's part.
  int host_share, host_layer;  // share 0: there is none
  HostPlaces host;
  uint64_t* asked;    // of this call, 0: nothing
  int32_t* kept_ids;  // [pairs]
  const uint16_t* x;  // [tokens, columns]
  int columns;
  bool is_bf16;
};

struct AddParams {
  const uint64_t* asked;
  HostPlaces host;
  void* out;  // T [tokens, columns]
  int columns;
};

// Where the bytes of an expert's row are that no slot has.
__device__ __forceinline__ const uint8_t* row_of(const CacheParams& params, int matrix, int64_t expert) {
  if (params.each) return static_cast<const uint8_t*>(params.each[matrix * params.routing.local_experts + expert]);
  return params.rows[matrix] + expert * params.row_bytes[matrix];
}

// How many threads before this one, and in the block, have `mine` set.
__device__ __forceinline__ int count_before(bool mine, int& all) {
  __shared__ int warp_counts[kRouteThreads / 32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const unsigned mask = __ballot_sync(~0u, mine);
  if (lane == 0) warp_counts[warp] = __popc(mask);
  __syncthreads();
  int before = __popc(mask & ((1u << lane) - 1));
  all = 0;
  for (int w = 0; w < kRouteThreads / 32; ++w) {
    if (w < warp) before += warp_counts[w];
    all += warp_counts[w];
  }
  __syncthreads();
  return before;
}
// How many slots are free. victims[i] becomes the least recently used slot, except for i others.
template <class IsFree>
__device__ __forceinline__ int find_victims(int slots, const uint32_t* used, IsFree is_free, int* victims) {
  int free_slots = 0;
  for (int base = 0; base < slots; base += kRouteThreads) {
    const int slot = base + static_cast<int>(threadIdx.x);
    int all;
    count_before(slot < slots && is_free(slot), all);
    free_slots += all;
  }
  for (int slot = threadIdx.x; slot < slots; slot += kRouteThreads) {
    if (!is_free(slot)) continue;
    int rank = 0;
    for (int other = 0; other < slots; ++other)
      rank += is_free(other) && (used[other] < used[slot] || (used[other] == used[slot] && other < slot));
    victims[rank] = slot;
  }
  __syncthreads();
  return free_slots;
}

// Asks the host for the pairs of experts that are marked, and tells the products the others.
constexpr int kMissed = 2;  // in `wanted`: the host's
__device__ __forceinline__ void ask_host(const CacheParams& params, const int* wanted, uint32_t step, bool any) {
  const RoutedPairs& routing = params.routing;
  for (int pair = threadIdx.x; pair < routing.tokens * routing.top_k; pair += kRouteThreads) {
    const int e = local_expert(routing, pair);
    const bool missed = e >= 0 && wanted[e] == kMissed;
    params.kept_ids[pair] = e < 0 || missed ? -1 : routing.expert_offset + e;
    if (!any) continue;
    params.host.ids[pair] = missed ? routing.expert_offset + e : -1;
    params.host.weights[pair] = routing.topk_weights[pair];
  }
  const uint64_t asked = any ? static_cast<uint64_t>(step) << 32 | static_cast<uint32_t>(params.host_layer + 1) : 0;
  if (threadIdx.x == 0) *params.asked = asked;
  if (!any) return;
  for (int i = threadIdx.x; i < routing.tokens * params.columns; i += kRouteThreads)
    params.host.x[i] = params.is_bf16 ? Half<__nv_bfloat16>::low(params.x[i]) : Half<__half>::low(params.x[i]);
  __syncthreads();
  if (threadIdx.x != 0) return;
  volatile qm_cuda_host& request = *params.host.request;
  request.layer = params.host_layer, request.tokens = routing.tokens, request.top_k = routing.top_k;
  __threadfence_system();  // for all threads, which the barrier puts before it: a fence of each takes longer
  request.asked = asked;
}

// Experts and slots are numbered by threads, kRouteThreads at a time. Shared memory: int wanted[experts], then
// victims[slots].
__global__ void __launch_bounds__(kRouteThreads) resolve_experts(const __grid_constant__ CacheParams params) {
  extern __shared__ int wanted[];
  const int experts = params.routing.local_experts, pairs = params.routing.tokens * params.routing.top_k;
  int* const victims = wanted + experts;
  CacheState& state = *params.state;
  int* const slot_of = reinterpret_cast<int*>(params.state + 1);
  int* const expert_of = slot_of + experts;
  auto* const used = reinterpret_cast<uint32_t*>(expert_of + params.slot_count);
  wait_for_previous();
  launch_dependents();
  const uint32_t step = state.step + 1;
  for (int e = threadIdx.x; e < experts; e += kRouteThreads) wanted[e] = 0;
  __syncthreads();
  for (int pair = threadIdx.x; pair < pairs; pair += kRouteThreads)
    if (const int e = local_expert(params.routing, pair); e >= 0) wanted[e] = 1;
  __syncthreads();

  const auto is_free = [&](int slot) { return expert_of[slot] == 0 || !wanted[expert_of[slot] - 1]; };
  int missing = 0;  // in all
  for (int base = 0; base < experts; base += kRouteThreads) {
    const int e = base + static_cast<int>(threadIdx.x);
    missing += __syncthreads_count(e < experts && wanted[e] && slot_of[e] == 0);
  }
  int of_host = missing * params.host_share / 256;
  if (of_host) {
    int empty = 0;
    for (int base = 0; base < params.slot_count; base += kRouteThreads) {
      const int slot = base + static_cast<int>(threadIdx.x);
      empty += __syncthreads_count(slot < params.slot_count && expert_of[slot] == 0);
    }
    of_host = min(of_host, max(0, missing - empty));
  }
  int free_slots = 0;  // counted for copies alone: most calls of a token have none
  if (missing > of_host) free_slots = find_victims(params.slot_count, used, is_free, victims);

  int hits = 0, misses = 0;
  for (int base = 0; base < experts; base += kRouteThreads) {
    const int e = base + static_cast<int>(threadIdx.x);
    const bool asked = e < experts && wanted[e];
    const int slot = asked ? slot_of[e] - 1 : -1;
    int more_hits, more;
    count_before(asked && slot >= 0, more_hits);
    const int miss = misses + count_before(asked && slot < 0, more);
    hits += more_hits, misses += more;
    if (!asked) continue;
    // The first of those that are copied is another one in each call. Below 0: the host's.
    const int rank = of_host ? (miss + static_cast<int>(step % missing)) % missing - of_host : miss;
    if (slot < 0 && rank < 0) {
      wanted[e] = kMissed;
      continue;
    }
    uint8_t* at = nullptr;
    if (slot >= 0) {
      used[slot] = step;
      at = params.slots + slot * params.slot_bytes;
    } else if (rank < free_slots) {
      const int taken = victims[rank];
      // No other thread of this call has the old expert: it is not asked for.
      if (const int old = expert_of[taken]) slot_of[old - 1] = 0;
      expert_of[taken] = e + 1, slot_of[e] = taken + 1, used[taken] = step;
      at = params.slots + taken * params.slot_bytes;
    } else if (rank - free_slots < params.staging_count) {
      at = params.staging + (rank - free_slots) * params.slot_bytes;
    }
    if (slot < 0 && at) params.copies[rank] = ExpertCopy{at, e};
    params.where[0][e] = at ? at : row_of(params, 0, e);
    params.where[1][e] = at ? at + params.second_at : row_of(params, 1, e);
  }
  if (params.host_share) {
    __syncthreads();  // wanted
    ask_host(params, wanted, step, of_host > 0);
  }
  if (threadIdx.x == 0) {
    state.counts.computed += of_host;
    misses -= of_host;
    *params.copy_count = min(misses, free_slots + params.staging_count);
    state.step = step;
    state.counts.hits += hits;
    state.counts.misses += misses + of_host;
    state.counts.staged += max(0, min(misses - free_slots, params.staging_count));
    state.counts.not_copied += max(0, misses - free_slots - params.staging_count);
  }
}

// Copies in pieces. A block has one of 16 KiB under way: in all blocks that is several times what the bus takes to
// answer.
constexpr int kFillPiece = kFillThreads * 64;
__global__ void __launch_bounds__(kFillThreads) fill_experts(const __grid_constant__ CacheParams params) {
  wait_for_previous();
  const int first = static_cast<int>((params.row_bytes[0] + kFillPiece - 1) / kFillPiece);
  const int pieces = first + static_cast<int>((params.row_bytes[1] + kFillPiece - 1) / kFillPiece);
  const int64_t all = static_cast<int64_t>(*params.copy_count) * pieces;
  for (int64_t i = blockIdx.x; i < all; i += gridDim.x) {
    const ExpertCopy copy = params.copies[i / pieces];
    const int piece = static_cast<int>(i % pieces), matrix = piece >= first;
    const uint64_t begin = static_cast<uint64_t>(piece - (matrix ? first : 0)) * kFillPiece;
    const auto* from = reinterpret_cast<const int4*>(row_of(params, matrix, copy.expert) + begin);
    auto* to = reinterpret_cast<int4*>(copy.to + (matrix ? params.second_at : 0) + begin);
    const int left = static_cast<int>(min(static_cast<uint64_t>(kFillPiece), params.row_bytes[matrix] - begin) / 16);
    int4 held[4];
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (const int at = threadIdx.x + j * kFillThreads; at < left) held[j] = __ldcs(from + at);
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (const int at = threadIdx.x + j * kFillThreads; at < left) to[at] = held[j];
  }
}

// out += what the host answers, whose memory no cache of the device has.
template <typename T>
__global__ void __launch_bounds__(kAddThreads) add_host(const __grid_constant__ AddParams params) {
  wait_for_previous();
  const uint64_t asked = *params.asked;
  if (!asked) return;
  if (threadIdx.x == 0) {
    while (*const_cast<const volatile uint64_t*>(&params.host.request->answered) != asked) {
    }
    __threadfence_system();
  }
  __syncthreads();
  const int column = (blockIdx.y * kAddThreads + threadIdx.x) * 8;
  if (column >= params.columns) return;
  const int64_t at = static_cast<int64_t>(blockIdx.x) * params.columns + column;
  const auto* from = reinterpret_cast<const float4*>(params.host.y + at);
  const float4 y[2] = {__ldcv(from), __ldcv(from + 1)};
  auto* const to = reinterpret_cast<uint4*>(static_cast<T*>(params.out) + at);
  const uint4 own = *to;
  const auto sum = [](uint32_t a, float low, float high) {
    return Half<T>::pack(Half<T>::low(a) + low, Half<T>::high(a) + high);
  };
  *to = make_uint4(sum(own.x, y[0].x, y[0].y), sum(own.y, y[0].z, y[0].w), sum(own.z, y[1].x, y[1].y),
                   sum(own.w, y[1].z, y[1].w));
}

}  // namespace quantmoe
