// Attend on wgmma (sm_90a), for many query rows: a warpgroup for each 64 rows of a block. With narrow heads there are
// two blocks a multiprocessor, and one multiplies while the other's scores become weights. Weights come from registers,
// all else from shared memory.
//
//                                slots of the block's split, kKeys a stage, the next one copied meanwhile
//   queries  warpgroup 0, 64 rows   S = queries x keys     ->  weights in registers  ->  acc += weights x values
//   of a     warpgroup 1, 64 rows   both in shared memory                                values in shared memory
//   tile     ...
#pragma once
#include "cuda/attention/attention.cuh"
#include "cuda/attention/attention_lists.cuh"
#include "cuda/common/wgmma.cuh"

namespace quantmoe {

// Adds weights times a stage's values, whose 64-column tiles are `tile` bytes apart: N columns from v_at on.
template <typename T, int N>
__device__ __forceinline__ void add_values(float* acc, const uint32_t (&weights)[4], uint32_t v_at, uint32_t tile) {
  constexpr int kColumns = N < 128 ? 64 : 128;
  wgmma_rows<T, kColumns>(acc, weights, rows_descriptor(v_at, tile), true);
  if constexpr (N > kColumns)
    add_values<T, N - kColumns>(acc + kColumns / 2, weights, v_at + kColumns / 64 * tile, tile);
}

// If some row does not see a stage's slots, a value that is not finite is added, not multiplied by zero. This adds such
// values to the sums of the rows that see their slots, and clears them. all_at: the values of kKeys slots, `bytes` in
// all. v_at: the values of the warpgroup's M tiles of eight columns. kThreads threads call it, for which `meet` waits.
template <typename T, int kKeys, int M, int kThreads, int bytes, class Seen, class Meet>
__device__ __forceinline__ void take_out(uint32_t all_at, uint32_t v_at, const Seen& seen, int t, float (&acc)[M][4],
                                         const Meet& meet) {
#pragma unroll 1
  for (int key = 0; key < kKeys; ++key)
#pragma unroll
    for (int n = 0; n < M; ++n) {
      const uint32_t v = only_odd(load4(v_at + swizzled_tile<kKeys>(key, n) + 4 * t), kExponent<T>);
#pragma unroll
      for (int h = 0; v && h < 2; ++h)
        if (seen.sees(0, h, key)) acc[n][2 * h] += Half<T>::low(v), acc[n][2 * h + 1] += Half<T>::high(v);
    }
  meet();
  for (int at = threadIdx.x; at < bytes / 4; at += kThreads)
    store4(all_at + at * 4, load4(all_at + at * 4) ^ only_odd(load4(all_at + at * 4), kExponent<T>));
  fence_async_proxy();
  meet();
}
// The same where a block of kThreads threads finds some.
template <typename T, int kKeys, int M, int kThreads, int bytes, class Seen>
__device__ __forceinline__ void take_out(uint32_t all_at, uint32_t v_at, const Seen& seen, int t, float (&acc)[M][4]) {
  bool odd = false;
  for (int at = threadIdx.x; at < bytes / 16; at += kThreads) odd |= is_odd(load16(all_at + at * 16), kExponent<T>);
  if (__syncthreads_or(odd))
    take_out<T, kKeys, M, kThreads, bytes>(all_at, v_at, seen, t, acc, [] { __syncthreads(); });
}

// One long function: a stage's scores become its weights, operands of wgmma, in the registers that they are in. kLists:
// of rows that read lists.
template <typename T, int DK, int DV, int kRows, bool kCodes, bool kLists>
__global__ void __launch_bounds__(2 * kRows, wide_blocks(DK, DV))
    attend_wide(const __grid_constant__ AttentionParams params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Number = typename Cached<T, kCodes>::Number;
  using Element = typename Cached<T, kCodes>::Element;
  constexpr int kChunk = Cached<T, kCodes>::kChunk;
  constexpr int kThreads = 2 * kRows, kKeys = kWideKeys, kKeyBytes = kKeys * DK * 2, kValueBytes = kKeys * DV * 2;
  constexpr int kStage = kKeyBytes + kValueBytes, kTile = kKeys * 128, NT = kKeys / 8;  // of numbers
  constexpr int kRingKeys = kKeys * DK * sizeof(Element), kRingStage = kKeys * (DK + DV) * sizeof(Element);
  extern __shared__ uint4 shared[];
  const uint32_t q_at = (shared_address(shared) + 1023) / 1024 * 1024, kv_at = q_at + kRows * DK * 2,
                 ring_at = kv_at + (kCodes ? kStage : 0);
  launch_dependents();

  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, row_of = threadIdx.x / 32 * 16 + g;
  const ManyTile tile = many_tile(params, kRows, static_cast<int>(blockIdx.x));
  const int pair = tile.pair, batch_row = tile.batch_row, kv_head = tile.kv_head, first_row = tile.first_row;
  const int split = blockIdx.y;
  const BatchRow batch = read_row(params, batch_row);
  const bool mine = is_mine(params, batch) && has_lists(params, batch) == kLists;
  const int rows = mine ? batch.count * params.group : 0;
  wait_for_previous();
  if (first_row >= rows) return;
  const Span span = span_of(params, batch, first_row);
  if (split >= span.splits) return;
  const int begin = span.begin(split), end = span.begin(split + 1);

  const int64_t own_slots = first_slot_of(params, pair, kv_head, params.slots);
  const Element* keys = static_cast<const Element*>(params.key) + own_slots * DK;
  const Element* values = static_cast<const Element*>(params.value) + own_slots * DV;
  const int step = slot_step(params);
  const ListWindow<kKeys, kWideMaskWords, kThreads> window{
      params, batch, batch_row, kv_head, first_row, min(kRows, rows - first_row), ring_at + kWideStages * kRingStage};
  auto find = [&](int stage) { return kLists ? window.find(stage, end) : stage; };
  // turn: how many stages were read before.
  auto at_stage = [&](int stage, int turn) { return ring_at + (kLists ? turn : stage) % kWideStages * kRingStage; };
  auto load = [&](int stage, int turn) {
    const Place first = stage < end ? find_slot(params, batch_row, stage * kKeys) : Place{0, false};
    auto copy = [&](uint32_t to, const Element* from, auto width, int i) {
      constexpr int D = decltype(width)::value;
      static_assert(kKeys * D / kChunk % kThreads == 0, "each thread copies as many");
      const int at = static_cast<int>(threadIdx.x) + i * kThreads, key = at / (D / kChunk), chunk = at % (D / kChunk);
      const int slot = stage * kKeys + key;
      const bool there = first.there && slot >= span.low && slot <= span.last_slot;
      const uint32_t place = to + (kCodes ? at * 16 : swizzled_tile<kKeys>(key, chunk));
      const int64_t offset = first.at * D + key * step * D + chunk * kChunk;
      copy_async16_past(place, from + offset, there);
      if constexpr (DK == DV) copy_async16_past(place + kRingKeys, values + offset, there);
    };
    if (stage >= end) return;
#pragma unroll
    for (int i = 0; i < kKeys * DK / kChunk / kThreads; ++i) copy(at_stage(stage, turn), keys, Width<DK>{}, i);
    if constexpr (DK != DV)
#pragma unroll
      for (int i = 0; i < kKeys * DV / kChunk / kThreads; ++i)
        copy(at_stage(stage, turn) + kRingKeys, values, Width<DV>{}, i);
  };
  const Number* queries =
      static_cast<const Number*>(params.queries) + (queries_of(params, batch, pair, kv_head, 0) + first_row) * DK;
  for (int at = threadIdx.x; at < kRows * DK / 8; at += kThreads)
    copy_async16_past(q_at + swizzled_tile<kRows>(at / (DK / 8), at % (DK / 8)), queries + at * 8,
                      first_row + at / (DK / 8) < rows);
  if (kLists) window.begin(begin);
  int stage = find(begin);
  load(stage, 0);

  float acc[DV / 8][4], most[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0};
#pragma unroll
  for (int n = 0; n < DV / 8; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) acc[n][i] = 0;
  const int slot_of[1][2] = {
      {batch.past + (first_row + row_of) / params.group, batch.past + (first_row + row_of + 8) / params.group}};

  const uint32_t own_at = q_at + threadIdx.x / 128 * 64 * 128;  // of the warpgroup's rows
  for (int turn = 0, next; stage < end; stage = next, ++turn) {
    copy_async_wait_all();
    if constexpr (!kCodes) fence_async_proxy();
    __syncthreads();  // the stage is there for all threads, and the last one is read
    const auto seen = [&] {
      if constexpr (kLists)
        return window.template read<1>(stage, first_row + row_of);
      else
        return SlotsBefore<1>{params, slot_of, stage * kKeys};
    }();
    next = find(stage + 1);
    load(next, turn + 1);
    const uint32_t ring = at_stage(stage, turn), k_at = kCodes ? kv_at : ring, v_at = k_at + kKeyBytes;
    if constexpr (kCodes) {
      const bool e4m3 = params.attention.cache_format == k_cache_format_fp8_e4m3;
      widen_rows<DK, kKeys, kThreads>(e4m3, ring,
                                      [&](int row, int chunk) { return k_at + swizzled_tile<kKeys>(row, chunk); });
      widen_rows<DV, kKeys, kThreads>(e4m3, ring + kRingKeys,
                                      [&](int row, int chunk) { return v_at + swizzled_tile<kKeys>(row, chunk); });
      fence_async_proxy();
      __syncthreads();
    }
    float s[NT][4];
    wgmma_fence();
#pragma unroll
    for (int d = 0; d < DK / 16; ++d)
      wgmma_shared<Number, kKeys>(s[0], wgmma_descriptor(descriptor_low(own_at + d / 4 * kRows * 128 + d % 4 * 32)),
                                  wgmma_descriptor(descriptor_low(k_at + d / 4 * kTile + d % 4 * 32)), d > 0);
    wgmma_commit();
    wgmma_wait<0>();
    if constexpr (kCodes) scale_scores(params, s);
    softcap_scores(params, s);
    const bool masked = kLists || is_masked(span, stage * kKeys, kKeys);
    if (masked) seen.mask(0, s);
    weigh(s, acc, most, sum);

    if (masked) take_out<Number, kKeys, DV / 8, kThreads, kValueBytes>(v_at, v_at, seen, t, acc);
    uint32_t weights[NT / 2][4];
#pragma unroll
    for (int k = 0; k < NT / 2; ++k) pack_weights<Number>(weights[k], s, 2 * k);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < NT / 2; ++k) add_values<Number, DV>(acc[0], weights[k], v_at + k * 2048, kTile);
    wgmma_commit();
    wgmma_wait<0>();
  }
  if (kLists) copy_async_wait_all();  // of a part without a stage
  add_quads(sum);
#pragma unroll
  for (int h = 0; h < 2; ++h)
    if (const int row = first_row + row_of + h * 8; row < rows)
      store_row<T>(params, acc, h, most[h], sum[h], place_of(params, batch, batch_row, kv_head, row), split);
#endif
}

}  // namespace quantmoe
