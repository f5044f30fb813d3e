// Attend on mma.sync, for many query rows where there is no wgmma: four warps share a tile's rows out.
//
//                      slots of the block's split, kKeys a stage, kManyStages - 1 copied ahead
//   rows of  warp 0    | scores and weights of 16 MT rows | ...
//   a tile   warp 1    |  keys, then values, are read     |
//            warp 2    |  from shared memory by all four  |
//            warp 3    |                                  |
#pragma once
#include "cuda/attention/attention.cuh"
#include "cuda/attention/attention_lists.cuh"

namespace quantmoe {

// Asks for a stage's keys or values, D elements each, `step` slots of a head apart; zero where no row sees them.
template <int D, int kKeys, bool kCodes, typename Element>
__device__ __forceinline__ void copy_rows(const Span& span, int stage, const Place& place, int step,
                                          const Element* from, uint32_t to) {
  constexpr int kChunk = 16 / sizeof(Element);
  static_assert(kKeys * D / kChunk % kAttendThreads == 0, "each thread copies as many");
#pragma unroll
  for (int i = 0; i < kKeys * D / kChunk / kAttendThreads; ++i) {
    const int at = static_cast<int>(threadIdx.x) + i * kAttendThreads;
    const int key = at / (D / kChunk), chunk = at % (D / kChunk), slot = stage * kKeys + key;
    copy_async16_past(to + (kCodes ? at * 16 : swizzled<D>(key, chunk)),
                      from + place.at * D + key * step * D + chunk * kChunk,
                      place.there && slot >= span.low && slot <= span.last_slot);
  }
}

// kLists: of rows that read lists.
template <typename T, int DK, int DV, bool kCodes, bool kLists>
__global__ void __launch_bounds__(kAttendThreads, 2) attend(const __grid_constant__ AttentionParams params) {
  using Number = typename Cached<T, kCodes>::Number;
  using Element = typename Cached<T, kCodes>::Element;
  constexpr int kKeys = attend_keys(DK, DV), kRows = many_rows(DK, DV), MT = kRows / 64, kWarpRows = 16 * MT;
  constexpr int kKeyBytes = kKeys * DK * 2, kStage = kKeys * (DK + DV) * 2;  // of numbers
  constexpr int kRingKeys = kKeys * DK * sizeof(Element), kRingStage = kKeys * (DK + DV) * sizeof(Element);
  extern __shared__ uint4 shared[];
  const uint32_t q_at = shared_address(shared), kv_at = q_at + kRows * DK * 2, ring_at = kv_at + (kCodes ? kStage : 0);
  launch_dependents();

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4;
  const ManyTile tile = many_tile(params, kRows, static_cast<int>(blockIdx.x));
  const int pair = tile.pair, batch_row = tile.batch_row, kv_head = tile.kv_head, first_row = tile.first_row;
  const int split = blockIdx.y;
  const BatchRow batch = read_row(params, batch_row);
  const bool mine = is_mine(params, batch) && has_lists(params, batch) == kLists;
  const int rows = mine ? batch.count * params.group : 0;
  if (first_row >= rows) return wait_for_previous();
  const Span span = span_of(params, batch, first_row);
  if (split >= span.splits) return wait_for_previous();
  const int begin = span.begin(split), end = span.begin(split + 1);

  const int64_t own_slots = first_slot_of(params, pair, kv_head, params.slots);
  const Element* keys = static_cast<const Element*>(params.key) + own_slots * DK;
  const Element* values = static_cast<const Element*>(params.value) + own_slots * DV;
  const int step = slot_step(params);
  const ListWindow<kKeys, kManyMaskWords, kAttendThreads> window{
      params, batch, batch_row, kv_head, first_row, min(kRows, rows - first_row), ring_at + kManyStages * kRingStage};
  auto find = [&](int stage) { return kLists ? window.find(stage, end) : stage; };
  // turn: how many stages were read before.
  auto at_stage = [&](int stage, int turn) { return ring_at + (kLists ? turn : stage) % kManyStages * kRingStage; };
  auto load = [&](int stage, int turn) {  // a group of copies, which may be empty
    if (stage < end) {
      const Place place = find_slot(params, batch_row, stage * kKeys);
      copy_rows<DK, kKeys, kCodes>(span, stage, place, step, keys, at_stage(stage, turn));
      copy_rows<DV, kKeys, kCodes>(span, stage, place, step, values, at_stage(stage, turn) + kRingKeys);
    }
    copy_async_commit();
  };
  const Number* queries =
      static_cast<const Number*>(params.queries) + (queries_of(params, batch, pair, kv_head, 0) + first_row) * DK;
  wait_for_previous();
  for (int at = threadIdx.x; at < kRows * DK / 8; at += kAttendThreads)
    copy_async16_past(q_at + swizzled<DK>(at / (DK / 8), at % (DK / 8)), queries + at * 8,
                      first_row + at / (DK / 8) < rows);
  static_assert(kManyStages == 2, "one is copied ahead");
  if (kLists) window.begin(begin);
  int stage = find(begin);
  load(stage, 0);

  AttentionSums<MT, DV / 8> sums(params, batch, first_row + warp * kWarpRows);
  auto query = [&](int d, int m, uint32_t(&q)[4]) {
    load_matrices(q, q_at + swizzled<DK>(warp * kWarpRows + m * 16 + lane % 16, 2 * d + lane / 16));
  };
  for (int turn = 0, next; stage < end; stage = next, ++turn) {
    copy_async_wait<kManyStages - 2>();
    __syncthreads();
    const auto seen = [&] {
      if constexpr (kLists)
        return window.template read<MT>(stage, first_row + warp * kWarpRows + g);
      else
        return SlotsBefore<MT>{params, sums.slot_of, stage * kKeys};
    }();
    next = find(stage + 1);
    load(next, turn + 1);
    const uint32_t ring = at_stage(stage, turn), k_at = kCodes ? kv_at : ring;
    if constexpr (kCodes) {
      const bool e4m3 = params.attention.cache_format == k_cache_format_fp8_e4m3;
      widen_rows<DK, kKeys, kAttendThreads>(e4m3, ring,
                                            [&](int row, int chunk) { return k_at + swizzled<DK>(row, chunk); });
      widen_rows<DV, kKeys, kAttendThreads>(
          e4m3, ring + kRingKeys, [&](int row, int chunk) { return k_at + kKeyBytes + swizzled<DV>(row, chunk); });
      __syncthreads();
    }
    attend_stage<Number, DK, DV, kKeys / 8, kCodes>(
        params, k_at, k_at + kKeyBytes, 0, 0, kLists || is_masked(span, stage * kKeys, kKeys), true, query, seen, sums);
  }
  if (kLists) copy_async_wait_all();  // of a part without a stage
#pragma unroll
  for (int m = 0; m < MT; ++m) {
    add_quads(sums.sum[m]);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = first_row + warp * kWarpRows + m * 16 + h * 8 + g;
      if (row < rows)
        store_row<T>(params, sums.acc[m], h, sums.most[m][h], sums.sum[m][h],
                     place_of(params, batch, batch_row, kv_head, row), split);
    }
  }
}

}  // namespace quantmoe
