// SparseIndexer's kernels: scores of all keys for some tokens, then each token's list.
//
// index_scores: a warp has 32 keys in registers, and a block's tokens one after the other. Queries come through shared
// memory, so a token after many is bound by reading the keys once, and a prompt by mma.sync. New keys come from `key`.
// Other blocks store them, so nothing waits for the cache.
//
//                        heads of a token, 16 at a time (zeros fill up the last ones of a group)
//   32 keys of  warp 0   | products | ..      score of a key: the heads' weights times what is above 0
//               warp 1   |          |
//
// Where each group has one head, a column is a group, and there are 8 at a time. Of blocks of 32 slots, or a multiple,
// that have their best slot's score, a warp stores the best score of its keys alone.
//
// select_slots: a block, or a cluster that shares a list's scores, finds the least score that is selected. It counts
// 11, 11 and 10 bits of the scores' places in the order of integers. Then it writes the selected slots in their order.
// Counts are integers, so atomics change nothing.
#pragma once
#include "core/attributes.h"
#include "cuda/common/ptx.cuh"
#include "cuda/indexer/indexer_call.h"

namespace quantmoe {

struct IndexerParams {
  const void *query, *key, *past_keys;
  const float* head_weights;
  const int* rows;
  int* selected;
  void* present_keys;
  float* scores;  // [tokens of the runs, groups, stride]
  int64_t stride;
  int batch, tokens, past_slots, slots;
  int heads, groups, group_heads, group_columns, columns;  // columns: of all groups
  int step, unit;                      // slots between keys that have scores; slots of a score that is stored
  int size, top_blocks, local_blocks;  // a block's slots; blocks of a list
  int list_size;
  int run, runs_of_row, first_run;            // tokens of a block; of these runs
  int key_blocks, score_blocks, copy_blocks;  // of keys; of scores, before those that store keys; of a row
  bool relu, in_place;
  int cluster;
};

// What a batch row says, as CachedAttention's BatchRow. One that asks for what is not there counts nothing.
struct IndexerRow {
  int begin, count, past;
  __device__ IndexerRow(const IndexerParams& params, int b)
      : begin(params.rows[3 * b]), count(params.rows[3 * b + 1]), past(params.rows[3 * b + 2]) {
    const bool valid = begin >= 0 && count >= 0 && past >= 0 && begin <= params.tokens - count &&
                       past <= params.past_slots && past <= params.slots - count;
    if (!valid) begin = count = past = 0;
  }
};

// Stores new keys of 64 slots of a row. Where present is other memory it also copies past's, and zeros the slots after.
template <int D>
__device__ inline void store_keys(const IndexerParams& params, int block) {
  constexpr int kChunks = D / 8, kSlots = 64;
  const int b = block / params.copy_blocks, first = block % params.copy_blocks * kSlots;
  const IndexerRow row(params, b);
  const uint4 *key = static_cast<const uint4*>(params.key), *past = static_cast<const uint4*>(params.past_keys);
  uint4* present = static_cast<uint4*>(params.present_keys);
  for (int i = threadIdx.x; i < kSlots * kChunks; i += kIndexThreads) {
    const int at = first + i / kChunks, chunk = i % kChunks, slot = params.in_place ? row.past + at : at;
    if (params.in_place ? at >= row.count : slot >= params.slots) continue;
    const int index = slot - row.past;
    uint4 v{};
    if (index < 0)
      v = past[(static_cast<int64_t>(b) * params.past_slots + slot) * kChunks + chunk];
    else if (index < row.count)
      v = key[(static_cast<int64_t>(b) * params.tokens + row.begin + index) * kChunks + chunk];
    present[(static_cast<int64_t>(b) * params.slots + slot) * kChunks + chunk] = v;
  }
}

// max(x, least), NaN where x is NaN.
__device__ inline float at_least(float x, float least) {
  asm("max.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(least));
  return x;
}
// Where 16 bytes of a head's query lie in shared memory: two heads' same four chunks in different banks.
template <int D>
__device__ inline uint32_t query_at(int head, int chunk) {
  return static_cast<uint32_t>(head * (D / 8) + (chunk ^ (head & 1) << 2)) * 16;
}

// Adds products of 32 keys with queries of 8 N columns, from `column` on, whose stage lies at `at`. A lane gets keys m
// * 16 + g and 8 further, and columns n * 8 + 2 t and one further. Of 32 features it has 8 t to 8 t + 7 of a key, and
// of a query: a product's sum has any order.
template <typename T, int D, int N>
__device__ __forceinline__ void add_products(const uint4 (&keys)[2][2][D / 32], uint32_t at, int column,
                                             float (&products)[2][N][4]) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int j = 0; j < D / 32; ++j) {
    uint4 q[N];
#pragma unroll
    for (int n = 0; n < N; ++n) q[n] = load16(at + query_at<D>(column + 8 * n + g, j * 4 + t));
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const uint4 &low = keys[m][0][j], &high = keys[m][1][j];
      const uint32_t one[4] = {low.x, high.x, low.y, high.y}, two[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
      for (int n = 0; n < N; ++n) {
        Half<T>::mma(products[m][n], one, q[n].x, q[n].y);
        Half<T>::mma(products[m][n], two, q[n].z, q[n].w);
      }
    }
  }
}
// The best score of a warp's keys. Lanes of one t have keys 8 i + g. Those from `scored` on have none.
__device__ __forceinline__ float best_of(const float (&own)[4], int warp_key, int scored) {
  float best = -INFINITY;
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if (warp_key + i * 8 + static_cast<int>(threadIdx.x) % 32 / 4 < scored) best = at_least(best, own[i]);
  for (int d = 4; d < 32; d *= 2) best = at_least(best, __shfl_xor_sync(~0u, best, d));
  return best;
}

// kOneHead: of each group.
template <typename T, int D, bool kOneHead>
__global__ void __launch_bounds__(kIndexThreads, 2) index_scores(const __grid_constant__ IndexerParams params) {
  constexpr int kSteps = D / 32, kChunks = D / 8, kTiles = 2;  // of 32 features; tiles of 16 keys
  extern __shared__ uint4 shared[];
  const int columns = params.columns, stage_bytes = columns * (D * 2 + 4);
  const uint32_t stages_at = shared_address(shared);
  wait_for_previous();
  launch_dependents();
  const int block = static_cast<int>(blockIdx.x);
  if (block >= params.score_blocks) return store_keys<D>(params, block - params.score_blocks);
  const int run = block / params.key_blocks, first_key = block % params.key_blocks * kIndexKeys;
  const int b = (params.first_run + run) / params.runs_of_row;
  const IndexerRow row(params, b);
  // Tokens of those that count, from the first that has scores of these keys on.
  const int from = (params.first_run + run) % params.runs_of_row * params.run - row.begin;
  const int end = min(from + params.run, row.count);
  const int least_slot = max(params.list_size, (first_key + 1) * params.step - 1);
  int index = max(max(from, 0), least_slot - row.past);
  if (index >= end) return;

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int64_t first_token = static_cast<int64_t>(b) * params.tokens + row.begin;
  auto head_of = [&](int column) {  // or -1
    const int group = column / params.group_columns, head = column % params.group_columns;
    return group < params.groups && head < params.group_heads ? group * params.group_heads + head : -1;
  };
  auto load = [&](int index, int stage) {  // a token's queries and weights
    const uint32_t at = stages_at + stage * stage_bytes;
    const int64_t token = first_token + index;
    const uint4* query = static_cast<const uint4*>(params.query) + token * params.heads * kChunks;
    for (int i = threadIdx.x; i < columns * kChunks; i += kIndexThreads) {
      const int column = i / kChunks, head = head_of(column);
      copy_async16(at + query_at<D>(column, i % kChunks), query + max(head, 0) * kChunks + i % kChunks, head >= 0);
    }
    if (const int column = threadIdx.x; column < columns) {
      const int head = head_of(column);
      copy_async4(at + columns * D * 2 + column * 4, params.head_weights + token * params.heads + max(head, 0),
                  head >= 0);
    }
    copy_async_commit();
  };
  load(index, 0);

  uint4 keys[kTiles][2][kSteps];
  const int warp_key = first_key + warp * 32, seen = row.past + end;
#pragma unroll
  for (int m = 0; m < kTiles; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int slot = (warp_key + m * 16 + h * 8 + g + 1) * params.step - 1;
      const uint4* key = slot < row.past
                             ? static_cast<const uint4*>(params.past_keys) +
                                   (static_cast<int64_t>(b) * params.past_slots + slot) * kChunks
                             : static_cast<const uint4*>(params.key) + (first_token + slot - row.past) * kChunks;
#pragma unroll
      for (int j = 0; j < kSteps; ++j) keys[m][h][j] = slot < seen ? key[j * 4 + t] : uint4{};
    }

  const float least = params.relu ? 0.f : -INFINITY;
  const int64_t places = static_cast<int64_t>(run) * params.run - from;  // of the run's tokens in scores
  for (int stage = 0; index < end; ++index, stage ^= 1) {
    copy_async_wait_all();
    __syncthreads();  // the token's queries are there for all threads, and the last token's are read
    if (index + 1 < end) load(index + 1, stage ^ 1);
    const int scored = (row.past + index + 1) / params.step;
    if (warp_key >= scored) continue;
    const uint32_t at = stages_at + stage * stage_bytes;
    float* scores = params.scores + (places + index) * params.groups * params.stride;
    const bool best = params.unit != params.step;
    auto weights_of = [&](int column) { return load8(at + columns * D * 2 + (column + 2 * t) * 4); };
    if constexpr (kOneHead) {
      for (int column = 0; column < columns; column += 8) {
        float products[kTiles][1][4] = {};
        add_products<T, D>(keys, at, column, products);
        const uint2 w = weights_of(column);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int group = column + 2 * t + i;
          float own[4], *to = scores + group * params.stride;
#pragma unroll
          for (int k = 0; k < 4; ++k)
            own[k] = __uint_as_float(i ? w.y : w.x) * at_least(products[k / 2][0][k % 2 * 2 + i], least);
          if (best) {
            const float found = best_of(own, warp_key, scored);
            if (group < params.groups && g == 0) to[warp_key / kIndexUnit] = found;
            continue;
          }
#pragma unroll
          for (int k = 0; k < 4; ++k)
            if (const int key = warp_key + k * 8 + g; group < params.groups && key < scored) to[key] = own[k];
        }
      }
    } else {
      for (int group = 0; group < params.groups; ++group, scores += params.stride) {
        float sums[4] = {};
        for (int head = 0; head < params.group_columns; head += kIndexColumns) {
          const int column = group * params.group_columns + head;
          float products[kTiles][2][4] = {};
          add_products<T, D>(keys, at, column, products);
#pragma unroll
          for (int n = 0; n < 2; ++n) {
            const uint2 w = weights_of(column + n * 8);
            const int left = params.group_heads - head - n * 8 - 2 * t;  // heads from the lane's first column on
#pragma unroll
            for (int k = 0; k < 4; ++k) {
              const float* p = products[k / 2][n] + k % 2 * 2;
              if (left > 0) sums[k] = fmaf(__uint_as_float(w.x), at_least(p[0], least), sums[k]);
              if (left > 1) sums[k] = fmaf(__uint_as_float(w.y), at_least(p[1], least), sums[k]);
            }
          }
        }
        float own = 0;  // the lane's of four: of key t * 8 + g
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          for (int d = 1; d < 4; d *= 2) sums[k] += __shfl_xor_sync(~0u, sums[k], d);
          if (t == k) own = sums[k];
        }
        if (best) own = best_of(sums, warp_key, scored);
        if (const int key = warp_key + t * 8 + g; best ? lane == 0 : key < scored)
          scores[best ? warp_key / kIndexUnit : key] = own;
      }
    }
  }
}

// A score's place in the order of unsigned integers: 0 has one, NaN is above all.
__device__ inline uint32_t place_of(float score) {
  if (score != score) return UINT32_MAX;
  const uint32_t bits = __float_as_uint(score + 0.f);  // -0 is 0
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// A list's part of the scores, which a block of a cluster has: first .. last of the blocks of slots.
struct SelectPart {
  const float* scores;
  int each, first, last;  // scores of a block of slots, whose best counts
  // The places of four, 0 where there are none.
  __device__ void places(int i, uint32_t (&place)[4]) const {
    if (each == 1) {
      const float4 v = *reinterpret_cast<const float4*>(scores + i);
      place[0] = place_of(v.x), place[1] = place_of(v.y), place[2] = place_of(v.z), place[3] = place_of(v.w);
    } else {
      for (int j = 0; j < 4; ++j) {
        place[j] = 0;
        for (int k = 0; i + j < last && k < each; ++k)
          place[j] = max(place[j], place_of(scores[static_cast<int64_t>(i + j) * each + k]));
      }
    }
  }
};

// Sums of x over the threads after this one, and over the block's earlier .. all: 16 warps of `totals`.
template <class Sum>
__device__ inline Sum sum_after(Sum x, Sum* totals) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  Sum all = x;
  for (int d = 1; d < 32; d *= 2) {
    const Sum other = __shfl_down_sync(~0u, all, d);
    if (lane + d < 32) all += other;
  }
  if (lane == 0) totals[warp] = all;
  __syncthreads();
  Sum after = all - x;
  for (int w = warp + 1; w < kSelectThreads / 32; ++w) after += totals[w];
  return after;
}

__global__ void __launch_bounds__(kSelectThreads) select_slots(const __grid_constant__ IndexerParams params) {
  constexpr int kPasses = 3, kShift[kPasses] = {21, 10, 0}, kBits[kPasses] = {11, 11, 10};
  constexpr int kWarps = kSelectThreads / 32;
  __shared__ uint4 counters[kPasses][kSelectThreads];  // of four digits each
  __shared__ uint64_t totals[kPasses][kWarps];
  __shared__ uint32_t turns[2][kWarps];
  __shared__ int found[kPasses][4];
  wait_for_previous();
  launch_dependents();
  const int rank = static_cast<int>(blockIdx.x) % params.cluster, at = static_cast<int>(blockIdx.x) / params.cluster;
  const int group = at % params.groups, place = at / params.groups, run = params.first_run + place / params.run;
  const int b = run / params.runs_of_row, token = run % params.runs_of_row * params.run + place % params.run;
  if (token >= params.tokens) return;
  const IndexerRow row(params, b);
  const int index = token - row.begin, slot = row.past + index;
  const int seen = index >= 0 && index < row.count ? slot + 1 : 0;
  int* list =
      params.selected + ((static_cast<int64_t>(b) * params.tokens + token) * params.groups + group) * params.list_size;
  const int threads = params.cluster * kSelectThreads;
  if (seen <= params.list_size) {
    for (int i = rank * kSelectThreads + threadIdx.x; i < params.list_size; i += threads) list[i] = i < seen ? i : -1;
    return;
  }
  // The best blocks, then the slots from there on, which are always selected.
  const int blocks = params.local_blocks ? slot / params.size + 1 - params.local_blocks : seen / params.size;
  const int wanted = params.top_blocks - params.local_blocks;
  for (int i = wanted * params.size + rank * kSelectThreads + threadIdx.x; i < params.list_size; i += threads) {
    const int last = (blocks - wanted) * params.size + i;
    list[i] = last <= slot ? last : -1;
  }
  if (wanted == 0) return;

  SelectPart part{params.scores + (static_cast<int64_t>(place) * params.groups + group) * params.stride,
                  params.size / params.unit, 0, 0};
  const int share = (blocks + params.cluster * 4 - 1) / (params.cluster * 4) * 4;
  part.first = rank * share, part.last = min(blocks, part.first + share);
  for (int pass = 0; pass < kPasses; ++pass) counters[pass][threadIdx.x] = {};
  __syncthreads();
  // The least place that is selected, as far as it is known, and how many with it are. above, equal: in the parts
  // before this one.
  uint32_t least = 0;
  int left = wanted, above = 0, equal = 0;
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const int shift = kShift[pass], bits = kBits[pass];
    const uint32_t known = shift + bits == 32 ? 0 : ~0u << (shift + bits), mask = (1u << bits) - 1;
    int* const of_digits = reinterpret_cast<int*>(counters[pass]);
    for (int i = part.first + 4 * threadIdx.x; i < part.last; i += 4 * kSelectThreads) {
      uint32_t places[4];
      part.places(i, places);
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (i + j < part.last && (places[j] & known) == least) atomicAdd(of_digits + (places[j] >> shift & mask), 1);
    }
    if (params.cluster > 1)
      cluster_barrier();
    else
      __syncthreads();
    uint32_t all[4] = {}, before[4] = {};
    for (int r = 0; r < params.cluster; ++r) {
      uint4 own = counters[pass][threadIdx.x];
      if (r != rank) {
        const float4 v = load_remote16(shared_address(&counters[pass][threadIdx.x]), r);
        own = {__float_as_uint(v.x), __float_as_uint(v.y), __float_as_uint(v.z), __float_as_uint(v.w)};
      }
      const uint32_t of_rank[4] = {own.x, own.y, own.z, own.w};
#pragma unroll
      for (int k = 0; k < 4; ++k) all[k] += of_rank[k], before[k] += r < rank ? of_rank[k] : 0;
    }
    uint64_t sum = 0;  // of all parts; of those before, in the high half
#pragma unroll
    for (int k = 0; k < 4; ++k) sum += all[k] | static_cast<uint64_t>(before[k]) << 32;
    sum = sum_after(sum, totals[pass]);
    int higher = static_cast<int>(sum), higher_before = static_cast<int>(sum >> 32);
#pragma unroll
    for (int k = 3; k >= 0; --k) {
      if (higher < left && left <= higher + static_cast<int>(all[k])) {
        int* f = found[pass];
        f[0] = 4 * static_cast<int>(threadIdx.x) + k, f[1] = left - higher, f[2] = higher_before;
        f[3] = static_cast<int>(before[k]);
      }
      higher += static_cast<int>(all[k]), higher_before += static_cast<int>(before[k]);
    }
    __syncthreads();
    const int* f = found[pass];
    least |= static_cast<uint32_t>(f[0]) << shift, left = f[1], above += f[2], equal = f[3];
  }
  if (params.cluster > 1) cluster_arrive();  // its counters are read

  for (int base = part.first, turn = 0; base < part.last; base += 4 * kSelectThreads, turn ^= 1) {
    const int i = base + 4 * static_cast<int>(threadIdx.x), lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    uint32_t places[4], own = 0;  // how many are above, and in the high half equal
    if (i < part.last) part.places(i, places);
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (i + j < part.last) own += places[j] > least ? 1 : places[j] == least ? 1 << 16 : 0;
    uint32_t sum = own;
    for (int d = 1; d < 32; d *= 2) {
      const uint32_t other = __shfl_up_sync(~0u, sum, d);
      if (lane >= d) sum += other;
    }
    if (lane == 31) turns[turn][warp] = sum;
    __syncthreads();
    uint32_t before = sum - own, all = 0;
    for (int w = 0; w < kWarps; ++w) {
      if (w == warp) before += all;
      all += turns[turn][w];
    }
    int my_above = above + static_cast<int>(before & 0xffff), my_equal = equal + static_cast<int>(before >> 16);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (i + j >= part.last) break;
      const bool same = places[j] == least;
      if (places[j] > least || (same && my_equal < left)) {
        int* to = list + (my_above + min(my_equal, left)) * params.size;
        for (int k = 0; k < params.size; ++k) to[k] = (i + j) * params.size + k;
      }
      my_above += places[j] > least, my_equal += same;
    }
    above += static_cast<int>(all & 0xffff), equal += static_cast<int>(all >> 16);
  }
  if (params.cluster > 1) cluster_wait();
}

}  // namespace quantmoe
