// Sums over GPUs that write to each other's memory, and gathers: what ranks of one host do in the place of NCCL.
#pragma once
#include <type_traits>

#include "cuda/common/ptx.cuh"
#include "cuda/ranks/peers.h"
#include "cuda/router/norm.cuh"

namespace quantmoe {

struct SumParams {
  qm_cuda_peers peers;
  const uint16_t* x;
  uint16_t* y;
  int64_t count;
  int64_t columns;  // of a gather: y is [rows, world, columns]
  int64_t first;    // the first of a gather's words in this call
};

// A row of y is a block's, a word of it a thread's.
struct SumNormParams {
  qm_cuda_peers peers;
  NormParams norm;
  int64_t rows;
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

// Gives word i of a call to all others, and gets theirs. own: this rank's word, or past the end nothing.
//
// A place is written in every third call of its threads, and emptied in the call after that. A rank that writes there
// again has had this rank's part of a later call. So only the end of a kernel has to be waited for.
__device__ inline void exchange_word(const qm_cuda_peers& peers, uint32_t slot, int i, const uint4* own,
                                     uint4 (&part)[QM_CUDA_PEERS]) {
  const int rank = peers.rank, world = peers.world;
  const auto place = [&](int of, uint32_t slot, int from) {
    return reinterpret_cast<uint4*>(static_cast<char*>(peers.boxes[of]) + few_at()) +
           (slot * world + from) * kFewWords + i;
  };
  uint4 mine{};
  if (own) {
    mine = make_uint4(told_from_nothing(own->x), told_from_nothing(own->y), told_from_nothing(own->z),
                      told_from_nothing(own->w));
    for (int other = 1; other < world; ++other) store_shared_by_gpus(place(peer_of(peers, other), slot, rank), mine);
  }
  for (int from = 0; from < world; ++from)
    *place(rank, (slot + 2) % 3, from) = make_uint4(kNothing, kNothing, kNothing, kNothing);
  if (!own) return;
  uint32_t waits = 0;
  for (bool all = false; !all; end_if_given_up(peers.boxes[rank], waits)) {
    all = true;
#pragma unroll
    for (int from = 0; from < QM_CUDA_PEERS; ++from)
      if (from < world) {
        part[from] = from == rank ? mine : load_shared_by_gpus(place(rank, slot, from));
        all = all && has_come(part[from]);
      }
  }
}
__device__ inline uint32_t* few_slot(const qm_cuda_peers& peers, int i) {
  return static_cast<Box*>(peers.boxes[peers.rank])->few_slots + i / kFewThreads;
}

// T: of a sum; void: a gather.
template <typename T>
__global__ void __launch_bounds__(kFewThreads) exchange_few(const __grid_constant__ SumParams params) {
  const qm_cuda_peers& peers = params.peers;
  const int i = blockIdx.x * kFewThreads + threadIdx.x;
  const int64_t word = params.first + i;
  uint32_t* const next = few_slot(peers, i);
  launch_dependents();
  wait_for_previous();
  const uint32_t slot = *next;
  const bool mine = 8 * word < params.count;
  uint4 own{}, part[QM_CUDA_PEERS];
  if (mine) own = load_word(params, word);
  exchange_word(peers, slot, i, mine ? &own : nullptr, part);
  if (mine) {
    if constexpr (std::is_void_v<T>) {
#pragma unroll
      for (int from = 0; from < QM_CUDA_PEERS; ++from)
        if (from < peers.world) join_word(params, word, from, part[from]);
    } else {
      store_word(params, word, sum_of<T>(part, peers.world));
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) *next = (slot + 1) % 3;
}

// A block has a row and the places of several of exchange_few's blocks.
template <typename T>
__global__ void __launch_bounds__(kMostNormThreads) add_norm_few(const __grid_constant__ SumNormParams params) {
  using Piece = NormPiece<T, 8>;
  const NormParams& norm = params.norm;
  const int words = norm.columns / 8, thread = threadIdx.x;
  const int64_t at = int64_t{blockIdx.x} * words + thread;
  const int i = blockIdx.x * blockDim.x + thread;
  uint32_t* const next = few_slot(params.peers, i);
  const bool mine = thread < words;
  Piece w{}, sum{};
  launch_dependents();
  if (mine) w = static_cast<const Piece*>(norm.weight)[thread];
  wait_for_previous();
  const uint32_t slot = *next;
  uint4 own{}, part[QM_CUDA_PEERS];
  Piece residual{};
  if (mine) own = static_cast<const uint4*>(norm.x)[at], residual = static_cast<const Piece*>(norm.residual)[at];
  exchange_word(params.peers, slot, i, mine ? &own : nullptr, part);
  float squares = 0.f;
  if (mine) {
    const uint4 all = sum_of<T>(part, params.peers.world);
    sum = add_pieces(reinterpret_cast<const Piece&>(all), residual, squares);
    static_cast<Piece*>(norm.sum)[at] = sum;
  }
  const float factor = norm_factor(norm, squares);
  if (mine) static_cast<Piece*>(norm.y)[at] = normed(sum, factor, w);
  if (thread % kFewThreads == 0) *next = (slot + 1) % 3;
}

// Tells all others that this block has written to them, once all of it has. A block of several has their parts and
// flags: `block` is the one of this thread's part, and `thread` its place there.
__device__ inline void tell_peers(const qm_cuda_peers& peers, int block, int thread, int step, uint32_t tile) {
  __syncthreads();
  if (thread >= peers.world || thread == peers.rank) return;
  uint32_t* flag = &static_cast<Box*>(peers.boxes[thread])->flags[block][step][peers.rank];
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(tile) : "memory");
}
// Waits until all others have.
__device__ inline void hear_peers(const qm_cuda_peers& peers, int block, int thread, int step, uint32_t tile) {
  if (thread < peers.world && thread != peers.rank) {
    const uint32_t* flag = &static_cast<Box*>(peers.boxes[peers.rank])->flags[block][step][thread];
    uint32_t found, waits = 0;
    do {
      end_if_given_up(peers.boxes[peers.rank], waits);
      asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(found) : "l"(flag) : "memory");
    } while (found != tile);
  }
  __syncthreads();
}
__device__ inline uint4* part_place(const qm_cuda_peers& peers, int of, int block, int step, int from, int i) {
  return reinterpret_cast<uint4*>(static_cast<char*>(peers.boxes[of]) + parts_at(peers.world)) +
         ((block * 2 + step) * peers.world + from) * kPartWords + i;
}

// A rank that says something about a tile's sums has also read the parts. A rank that says something about the next
// tile's parts has also read the sums. So places of one tile are enough.
template <typename T>
__global__ void __launch_bounds__(kPartThreads, kPartBlocks) sum_many(const __grid_constant__ SumParams params) {
  const qm_cuda_peers& peers = params.peers;
  const int rank = peers.rank, world = peers.world;
  const int64_t words = (params.count + 7) / 8;
  const int block = blockIdx.x, thread = threadIdx.x;
  const auto place = [&](int of, int step, int from, int i) { return part_place(peers, of, block, step, from, i); };
  uint32_t* const tiles = static_cast<Box*>(peers.boxes[rank])->tiles + block;
  launch_dependents();
  wait_for_previous();
  uint32_t tile = *tiles;
  for (int64_t first = int64_t{block} * world * kPartWords; first < words;
       first += int64_t{gridDim.x} * world * kPartWords) {
    ++tile;
    for (int other = 1; other < world; ++other) {
      const int to = peer_of(peers, other);
      for (int i = thread; i < kPartWords; i += kPartThreads)
        if (const int64_t at = first + to * kPartWords + i; at < words)
          store_shared_by_gpus(place(to, 0, rank, i), load_word(params, at));
    }
    tell_peers(peers, block, thread, 0, tile);
    hear_peers(peers, block, thread, 0, tile);
    for (int i = thread; i < kPartWords; i += kPartThreads) {
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
    tell_peers(peers, block, thread, 1, tile);
    hear_peers(peers, block, thread, 1, tile);
    for (int from = 0; from < world; ++from)
      for (int i = thread; i < kPartWords && from != rank; i += kPartThreads)
        if (const int64_t at = first + from * kPartWords + i; at < words)
          store_word(params, at, load_shared_by_gpus(place(rank, 1, from, i)));
  }
  if (thread == 0) *tiles = tile;
}

// A tile has a row for each rank, which adds it up, normalizes it and gives it to all others. A block has a row's words
// in the parts of as many of sum_many's blocks as it has times their threads.
template <typename T>
__global__ void __launch_bounds__(2 * kPartThreads) add_norm_many(const __grid_constant__ SumNormParams params) {
  using Piece = NormPiece<T, 8>;
  const qm_cuda_peers& peers = params.peers;
  const NormParams& norm = params.norm;
  const int rank = peers.rank, world = peers.world, words = norm.columns / 8;
  const int i = threadIdx.x % kPartThreads, word = threadIdx.x;
  const int block = blockIdx.x * (blockDim.x / kPartThreads) + threadIdx.x / kPartThreads;
  const auto place = [&](int of, int step, int from) { return part_place(peers, of, block, step, from, i); };
  uint32_t* const tiles = static_cast<Box*>(peers.boxes[rank])->tiles + block;
  const auto has = [&](int64_t row) { return word < words && row < params.rows; };
  const uint4* const x = static_cast<const uint4*>(norm.x) + word;
  uint4* const y = static_cast<uint4*>(norm.y) + word;
  Piece w{};
  launch_dependents();
  if (word < words) w = static_cast<const Piece*>(norm.weight)[word];
  wait_for_previous();
  uint32_t tile = *tiles;
  for (int64_t first = int64_t{blockIdx.x} * world; first < params.rows; first += int64_t{gridDim.x} * world) {
    ++tile;
    for (int other = 1; other < world; ++other) {
      const int to = peer_of(peers, other);
      if (has(first + to)) store_shared_by_gpus(place(to, 0, rank), x[(first + to) * words]);
    }
    const int64_t row = first + rank, own = row * words;
    Piece residual{}, sum{};
    uint4 part[QM_CUDA_PEERS];
    if (has(row)) {
      residual = static_cast<const Piece*>(norm.residual)[own + word];
#pragma unroll
      for (int from = 0; from < QM_CUDA_PEERS; ++from)
        if (from == rank) part[from] = x[own];
    }
    tell_peers(peers, block, i, 0, tile);
    hear_peers(peers, block, i, 0, tile);
    float squares = 0.f;
    if (has(row)) {
#pragma unroll
      for (int from = 0; from < QM_CUDA_PEERS; ++from)
        if (from < world && from != rank) part[from] = load_shared_by_gpus(place(rank, 0, from));
      const uint4 all = sum_of<T>(part, world);
      sum = add_pieces(reinterpret_cast<const Piece&>(all), residual, squares);
      static_cast<Piece*>(norm.sum)[own + word] = sum;
    }
    const float factor = norm_factor(norm, squares);
    if (has(row)) {
      const Piece made = normed(sum, factor, w);
      const uint4& bits = reinterpret_cast<const uint4&>(made);
      for (int other = 1; other < world; ++other) store_shared_by_gpus(place(peer_of(peers, other), 1, rank), bits);
      y[own] = bits;
    }
    tell_peers(peers, block, i, 1, tile);
    hear_peers(peers, block, i, 1, tile);
    for (int from = 0; from < world; ++from)
      if (from != rank && has(first + from)) y[(first + from) * words] = load_shared_by_gpus(place(rank, 1, from));
  }
  if (i == 0) *tiles = tile;
}

}  // namespace quantmoe
