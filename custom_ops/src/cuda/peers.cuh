// Sums over GPUs that write to each other's memory, and gathers: what ranks of one host do in the place of NCCL.
#pragma once
#include <type_traits>

#include "cuda/peers.h"
#include "cuda/ptx.cuh"

namespace quantmoe {

struct SumParams {
  qm_cuda_peers peers;
  const uint16_t* x;
  uint16_t* y;
  int64_t count;
  int64_t columns;  // of a gather: y is [rows, world, columns]
  int64_t first;    // of a gather's words, those of this call
};

// Never a word of x: a reader waits until each of a place's words is another.
constexpr uint32_t kNothing = 0xffffffff;
__device__ inline uint32_t told_from_nothing(uint32_t word) {
  return word == kNothing ? 0x7fff7fff : word;  // two NaNs, as before
}
__device__ inline bool has_come(uint4 v) {
  return v.x != kNothing && v.y != kNothing && v.z != kNothing && v.w != kNothing;
}

__device__ inline uint4 load_shared_by_gpus(const uint4* from) {
  uint4 v;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from)
               : "memory");
  return v;
}
__device__ inline void store_shared_by_gpus(uint4* to, uint4 v) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

// Now and then while a kernel waits for another rank: a kernel that would end it may find no room on the GPU.
__device__ inline void end_if_given_up(const void* own_box, uint32_t& waits) {
  if (++waits % 1024 != 0) return;
  uint32_t given_up;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];"
               : "=r"(given_up)
               : "l"(&static_cast<const Box*>(own_box)->given_up)
               : "memory");
  if (given_up) __trap();
}

// Word i of the tensor; what is past its end is zero.
__device__ inline uint4 load_word(const SumParams& params, int64_t i) {
  const uint16_t* from = params.x + 8 * i;
  if (8 * i + 8 <= params.count && reinterpret_cast<uintptr_t>(params.x) % 16 == 0)
    return *reinterpret_cast<const uint4*>(from);
  uint32_t word[4]{};
  for (int at = 0; at < 8 && 8 * i + at < params.count; ++at) word[at / 2] |= uint32_t{from[at]} << at % 2 * 16;
  return make_uint4(word[0], word[1], word[2], word[3]);
}
__device__ inline void store_word(const SumParams& params, int64_t i, uint4 v) {
  uint16_t* to = params.y + 8 * i;
  if (8 * i + 8 <= params.count && reinterpret_cast<uintptr_t>(params.y) % 16 == 0) {
    *reinterpret_cast<uint4*>(to) = v;
    return;
  }
  const uint32_t word[]{v.x, v.y, v.z, v.w};
  for (int at = 0; at < 8 && 8 * i + at < params.count; ++at)
    to[at] = static_cast<uint16_t>(word[at / 2] >> at % 2 * 16);
}

// Word i of x of a rank in a gather.
__device__ inline void join_word(const SumParams& params, int64_t i, int from, uint4 v) {
  const auto to = [&](int64_t at) {
    return params.y + (at / params.columns * params.peers.world + from) * params.columns + at % params.columns;
  };
  if (params.columns % 8 == 0 && reinterpret_cast<uintptr_t>(params.y) % 16 == 0) {
    *reinterpret_cast<uint4*>(to(8 * i)) = v;
    return;
  }
  const uint32_t word[]{v.x, v.y, v.z, v.w};
  for (int at = 0; at < 8 && 8 * i + at < params.count; ++at)
    *to(8 * i + at) = static_cast<uint16_t>(word[at / 2] >> at % 2 * 16);
}

// In the order of the ranks, in f32.
template <typename T>
__device__ uint4 sum_of(const uint4 (&part)[QM_CUDA_PEERS], int world) {
  float sum[8];
#pragma unroll
  for (int from = 0; from < QM_CUDA_PEERS; ++from) {
    if (from >= world) continue;
    const uint32_t word[]{part[from].x, part[from].y, part[from].z, part[from].w};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint16_t bits = static_cast<uint16_t>(word[i / 2] >> i % 2 * 16);
      const float value = static_cast<float>(reinterpret_cast<const T&>(bits));
      sum[i] = from == 0 ? value : sum[i] + value;
    }
  }
  return make_uint4(Half<T>::pack(sum[0], sum[1]), Half<T>::pack(sum[2], sum[3]), Half<T>::pack(sum[4], sum[5]),
                    Half<T>::pack(sum[6], sum[7]));
}

// Others by their distance, so that ranks do not write to the same one at the same time.
__device__ inline int peer_of(const qm_cuda_peers& peers, int distance) {
  const int to = peers.rank + distance;
  return to < peers.world ? to : to - peers.world;
}

// A place is written in every third call of its block, and emptied in the call after that: a rank that writes there
// again has had this one's part of a call that came later, so nothing but the end of a kernel has to be waited for.
// T: of a sum; void: a gather.
template <typename T>
__global__ void __launch_bounds__(kFewThreads) exchange_few(const __grid_constant__ SumParams params) {
  const qm_cuda_peers& peers = params.peers;
  const int rank = peers.rank, world = peers.world;
  const int i = blockIdx.x * kFewThreads + threadIdx.x;
  const int64_t word = params.first + i;
  const bool mine = 8 * word < params.count;
  const auto place = [&](int of, uint32_t slot, int from) {
    return reinterpret_cast<uint4*>(static_cast<char*>(peers.boxes[of]) + few_at()) +
           (slot * world + from) * kFewWords + i;
  };
  uint32_t* const next = static_cast<Box*>(peers.boxes[rank])->few_slots + blockIdx.x;
  launch_dependents();
  wait_for_previous();
  const uint32_t slot = *next;
  uint4 own{};
  if (mine) {
    own = load_word(params, word);
    own = make_uint4(told_from_nothing(own.x), told_from_nothing(own.y), told_from_nothing(own.z),
                     told_from_nothing(own.w));
    for (int other = 1; other < world; ++other) store_shared_by_gpus(place(peer_of(peers, other), slot, rank), own);
  }
  for (int from = 0; from < world; ++from)
    *place(rank, (slot + 2) % 3, from) = make_uint4(kNothing, kNothing, kNothing, kNothing);
  if (mine) {
    uint4 part[QM_CUDA_PEERS];
    uint32_t waits = 0;
    for (bool all = false; !all; end_if_given_up(peers.boxes[rank], waits)) {
      all = true;
#pragma unroll
      for (int from = 0; from < QM_CUDA_PEERS; ++from)
        if (from < world) {
          part[from] = from == rank ? own : load_shared_by_gpus(place(rank, slot, from));
          all = all && has_come(part[from]);
        }
    }
    if constexpr (std::is_void_v<T>) {
#pragma unroll
      for (int from = 0; from < QM_CUDA_PEERS; ++from)
        if (from < world) join_word(params, word, from, part[from]);
    } else {
      store_word(params, word, sum_of<T>(part, world));
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) *next = (slot + 1) % 3;
}

// Tells all others that this block has written to them, once all of it has.
__device__ inline void tell_peers(const qm_cuda_peers& peers, int step, uint32_t tile) {
  __syncthreads();
  const int to = threadIdx.x;
  if (to >= peers.world || to == peers.rank) return;
  uint32_t* flag = &static_cast<Box*>(peers.boxes[to])->flags[blockIdx.x][step][peers.rank];
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(tile) : "memory");
}
// Waits until all others have.
__device__ inline void hear_peers(const qm_cuda_peers& peers, int step, uint32_t tile) {
  const int from = threadIdx.x;
  if (from < peers.world && from != peers.rank) {
    const uint32_t* flag = &static_cast<Box*>(peers.boxes[peers.rank])->flags[blockIdx.x][step][from];
    uint32_t found, waits = 0;
    do {
      end_if_given_up(peers.boxes[peers.rank], waits);
      asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(found) : "l"(flag) : "memory");
    } while (found != tile);
  }
  __syncthreads();
}

// What a rank says of a tile's sums says too that it has read the parts, and of the next tile's parts that it has read
// the sums: places of one tile do.
template <typename T>
__global__ void __launch_bounds__(kPartThreads, kPartBlocks) sum_many(const __grid_constant__ SumParams params) {
  const qm_cuda_peers& peers = params.peers;
  const int rank = peers.rank, world = peers.world;
  const int64_t words = (params.count + 7) / 8;
  const auto place = [&](int of, int step, int from, int i) {
    return reinterpret_cast<uint4*>(static_cast<char*>(peers.boxes[of]) + parts_at(world)) +
           ((blockIdx.x * 2 + step) * world + from) * kPartWords + i;
  };
  uint32_t* const tiles = static_cast<Box*>(peers.boxes[rank])->tiles + blockIdx.x;
  launch_dependents();
  wait_for_previous();
  uint32_t tile = *tiles;
  for (int64_t first = int64_t{blockIdx.x} * world * kPartWords; first < words;
       first += int64_t{gridDim.x} * world * kPartWords) {
    ++tile;
    for (int other = 1; other < world; ++other) {
      const int to = peer_of(peers, other);
      for (int i = threadIdx.x; i < kPartWords; i += kPartThreads)
        if (const int64_t at = first + to * kPartWords + i; at < words)
          store_shared_by_gpus(place(to, 0, rank, i), load_word(params, at));
    }
    tell_peers(peers, 0, tile);
    hear_peers(peers, 0, tile);
    for (int i = threadIdx.x; i < kPartWords; i += kPartThreads) {
      const int64_t at = first + rank * kPartWords + i;
      if (at >= words) continue;
      uint4 part[QM_CUDA_PEERS];
#pragma unroll
      for (int from = 0; from < QM_CUDA_PEERS; ++from)
        if (from < world)
          part[from] = from == rank ? load_word(params, at) : load_shared_by_gpus(place(rank, 0, from, i));
      const uint4 sum = sum_of<T>(part, world);
      for (int other = 1; other < world; ++other) store_shared_by_gpus(place(peer_of(peers, other), 1, rank, i), sum);
      store_word(params, at, sum);
    }
    tell_peers(peers, 1, tile);
    hear_peers(peers, 1, tile);
    for (int from = 0; from < world; ++from)
      for (int i = threadIdx.x; i < kPartWords && from != rank; i += kPartThreads)
        if (const int64_t at = first + from * kPartWords + i; at < words)
          store_word(params, at, load_shared_by_gpus(place(rank, 1, from, i)));
  }
  if (threadIdx.x == 0) *tiles = tile;
}

}  // namespace quantmoe
