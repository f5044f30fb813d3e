// Attend on mma.sync, for many query rows where there is no wgmma: four warps share a tile's rows out.
#pragma once
#include "cuda/attention.cuh"

namespace quantmoe {

template <typename T, int DK, int DV>
__global__ void __launch_bounds__(kAttendThreads, 2) Attend(const __grid_constant__ AttentionParams p) {
  constexpr int kKeys = AttendKeys(DK, DV), kRows = ManyRows(DK, DV), MT = kRows / 64, kWarpRows = 16 * MT;
  constexpr int kKeyBytes = kKeys * DK * 2, kStage = kKeys * (DK + DV) * 2;
  extern __shared__ uint4 shared[];
  const uint32_t q_at = SharedAddress(shared), kv_at = q_at + kRows * DK * 2;
  LaunchDependents();

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4;
  const int tile = p.tiles - 1 - static_cast<int>(blockIdx.x) / p.pairs;  // those with most slots first
  const int pair = static_cast<int>(blockIdx.x) % p.pairs;
  const int kv_heads = p.attention.kv_num_heads, b = pair / kv_heads, kv = pair % kv_heads;
  const int split = blockIdx.y, first_row = tile * kRows;
  const BatchRow batch = ReadRow(p, b);
  const int rows = batch.count * p.group;
  if (first_row >= rows) return WaitForPrevious();
  const Span span = SpanOf(p, batch, first_row);
  if (split >= span.splits) return WaitForPrevious();
  const int begin = span.Begin(split), end = span.Begin(split + 1);

  const T* keys = static_cast<const T*>(p.key) + static_cast<int64_t>(pair) * p.slots * DK;
  const T* values = static_cast<const T*>(p.value) + static_cast<int64_t>(pair) * p.slots * DV;
  auto at_stage = [&](int stage) { return kv_at + stage % kManyStages * kStage; };
  auto load = [&](int stage) {  // a group of copies, which may be empty
    auto rows_of = [&](auto width, const T* from, uint32_t to) {
      constexpr int D = decltype(width)::value;
#pragma unroll
      for (int i = 0; i < kKeys * D / 8 / kAttendThreads; ++i) {
        const int at = static_cast<int>(threadIdx.x) + i * kAttendThreads, key = at / (D / 8), chunk = at % (D / 8);
        const int slot = stage * kKeys + key;
        CopyAsync16Past(to + Swizzled<D>(key, chunk), from + static_cast<int64_t>(stage) * (kKeys * D) + at * 8,
                        slot >= span.low && slot <= span.last_slot);
      }
    };
    if (stage < end) {
      rows_of(Width<DK>{}, keys, at_stage(stage));
      rows_of(Width<DV>{}, values, at_stage(stage) + kKeyBytes);
    }
    CopyAsyncCommit();
  };
  const T* queries =
      static_cast<const T*>(p.queries) + (static_cast<int64_t>(pair) * p.tokens * p.group + first_row) * DK;
  WaitForPrevious();
  for (int at = threadIdx.x; at < kRows * DK / 8; at += kAttendThreads)
    CopyAsync16Past(q_at + Swizzled<DK>(at / (DK / 8), at % (DK / 8)), queries + at * 8,
                    first_row + at / (DK / 8) < rows);
  for (int i = 0; i < kManyStages - 1; ++i) load(begin + i);

  Sums<MT, DV / 8> sums(p, batch, first_row + warp * kWarpRows);
  auto query = [&](int d, int m, uint32_t(&q)[4]) {
    LoadMatrices(q, q_at + Swizzled<DK>(warp * kWarpRows + m * 16 + lane % 16, 2 * d + lane / 16));
  };
  for (int stage = begin; stage < end; ++stage) {
    CopyAsyncWait<kManyStages - 2>();
    __syncthreads();
    load(stage + kManyStages - 1);
    const uint32_t k_at = at_stage(stage);
    AttendStage<T, DK, DV, kKeys / 8>(p, k_at, k_at + kKeyBytes, 0, stage * kKeys, 0,
                                      IsMasked(span, stage * kKeys, kKeys), true, query, sums);
  }
#pragma unroll
  for (int m = 0; m < MT; ++m) {
    AddQuads(sums.sum[m]);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = first_row + warp * kWarpRows + m * 16 + h * 8 + g;
      if (row < rows)
        StoreRow<T>(p, sums.acc[m], h, sums.most[m][h], sums.sum[m][h], PlaceOf(p, batch, b, kv, row), split);
    }
  }
}

}  // namespace quantmoe
