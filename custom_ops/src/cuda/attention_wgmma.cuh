// Attend on wgmma (sm_90a), for many query rows: two warpgroups of 64 rows a block, two blocks a multiprocessor, whose
// products run while the other's scores become weights. Weights come from registers, all else from shared memory.
#pragma once
#include "cuda/attention.cuh"
#include "cuda/wgmma.cuh"

namespace quantmoe {

// Where 16 bytes of one of `rows` rows of D values lie as wgmma reads them: tiles of 64 values, 128-byte swizzle.
template <int rows>
__device__ inline uint32_t SwizzledTile(int row, int chunk) {
  return static_cast<uint32_t>((chunk / 8 * rows + row) * 128 + ((chunk ^ row) & 7) * 16);
}

template <typename T, int D>
__global__ void __launch_bounds__(kWideThreads, 2) AttendWide(const __grid_constant__ AttendParams p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  constexpr int kKeys = kAttendKeys, kStage = kKeys * D * 2, kTile = kKeys * 128, NT = kKeys / 8;
  constexpr uint32_t kExponent = Half<T>::kOne == 0x3c003c00 ? 0x7c00 : 0x7f80;
  extern __shared__ uint4 shared[];
  const uint32_t q_at = (SharedAddress(shared) + 1023) / 1024 * 1024, kv_at = q_at + kManyRows * D * 2;
  LaunchDependents();

  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, row_of = threadIdx.x / 32 * 16 + g;
  const int tile = p.tiles - 1 - static_cast<int>(blockIdx.x) / p.pairs;  // those with most slots first
  const int pair = static_cast<int>(blockIdx.x) % p.pairs;
  const int b = pair / p.kv_heads, kv = pair % p.kv_heads, split = blockIdx.y, first_row = tile * kManyRows;
  const BatchRow batch = ReadRow(p.rows, b, p.tokens, p.past_slots, p.slots);
  const int rows = batch.count * p.group;
  WaitForPrevious();
  if (first_row >= rows) return;
  const Span span = SpanOf(p, batch, first_row, kManyRows);
  if (split >= span.splits) return;
  const int begin = span.first_stage + static_cast<int>(static_cast<int64_t>(span.stages) * split / span.splits);
  const int end = span.first_stage + static_cast<int>(static_cast<int64_t>(span.stages) * (split + 1) / span.splits);

  const T* keys = static_cast<const T*>(p.key) + static_cast<int64_t>(pair) * p.slots * D;
  const T* values = static_cast<const T*>(p.value) + static_cast<int64_t>(pair) * p.slots * D;
  auto at_stage = [&](int stage) { return kv_at + (stage % kWideStages) * 2 * kStage; };
  auto load = [&](int stage) {
#pragma unroll
    for (int i = 0; i < kKeys * D / 8 / kWideThreads && stage < end; ++i) {
      const int at = static_cast<int>(threadIdx.x) + i * kWideThreads, key = at / (D / 8), chunk = at % (D / 8);
      const int slot = stage * kKeys + key;
      const bool there = slot >= span.low && slot <= span.last_slot;
      const uint32_t to = at_stage(stage) + SwizzledTile<kKeys>(key, chunk);
      const int64_t from = static_cast<int64_t>(stage) * (kKeys * D) + at * 8;
      CopyAsync16Past(to, keys + from, there);
      CopyAsync16Past(to + kStage, values + from, there);
    }
  };
  const T* queries =
      static_cast<const T*>(p.queries) + (static_cast<int64_t>(pair) * p.tokens * p.group + first_row) * D;
  for (int at = threadIdx.x; at < kManyRows * D / 8; at += kWideThreads)
    CopyAsync16Past(q_at + SwizzledTile<kManyRows>(at / (D / 8), at % (D / 8)), queries + at * 8,
                    first_row + at / (D / 8) < rows);
  load(begin);

  float acc[D / 8][4], most[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0};
#pragma unroll
  for (int n = 0; n < D / 8; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) acc[n][i] = 0;
  const int slot_of[2] = {batch.past + (first_row + row_of) / p.group, batch.past + (first_row + row_of + 8) / p.group};

  const uint32_t own_at = q_at + threadIdx.x / 128 * 64 * 128;  // of the warpgroup's rows
  for (int stage = begin; stage < end; ++stage) {
    CopyAsyncWaitAll();
    FenceAsyncProxy();
    __syncthreads();  // the stage is there for all threads, and the last one is read
    load(stage + 1);
    float s[NT][4];
    WgmmaFence();
#pragma unroll
    for (int d = 0; d < D / 16; ++d)
      WgmmaShared<T, kKeys>(s[0], Descriptor(DescriptorLow(own_at + d / 4 * kManyRows * 128 + d % 4 * 32)),
                            Descriptor(DescriptorLow(at_stage(stage) + d / 4 * kTile + d % 4 * 32)), d > 0);
    WgmmaCommit();
    WgmmaWait<0>();
    Softcap(p, s);
    const int stage_slot = stage * kKeys;
    const bool masked = stage_slot < span.full_low || stage_slot + kKeys - 1 > span.first_slot;  // for some row
    if (masked) Mask(p, s, slot_of, stage_slot);
    Weigh(s, acc, most, sum);

    const uint32_t v_at = at_stage(stage) + kStage;
    if (masked) {
      // Where not every row sees a stage's slots, a value that is not finite is added, not multiplied by zero.
      bool odd = false;
      for (int at = threadIdx.x; at < kStage / 16; at += kWideThreads) {
        const uint4 v = Load16(v_at + at * 16);
        odd |= IsOdd(v.x, kExponent) || IsOdd(v.y, kExponent) || IsOdd(v.z, kExponent) || IsOdd(v.w, kExponent);
      }
      if (__syncthreads_or(odd)) {
#pragma unroll 1
        for (int key = 0; key < kKeys; ++key)
#pragma unroll
          for (int n = 0; n < D / 8; ++n) {
            const uint32_t v = OnlyOdd(Load4(v_at + SwizzledTile<kKeys>(key, n) + 4 * t), kExponent);
#pragma unroll
            for (int h = 0; v && h < 2; ++h)
              if (stage_slot + key <= slot_of[h] && stage_slot + key >= FirstSlot(p, slot_of[h]))
                acc[n][2 * h] += Half<T>::Low(v), acc[n][2 * h + 1] += Half<T>::High(v);
          }
        __syncthreads();
        for (int at = threadIdx.x; at < kStage / 4; at += kWideThreads)
          Store4(v_at + at * 4, Load4(v_at + at * 4) ^ OnlyOdd(Load4(v_at + at * 4), kExponent));
        FenceAsyncProxy();
        __syncthreads();
      }
    }
    uint32_t weights[NT / 2][4];
#pragma unroll
    for (int k = 0; k < NT / 2; ++k) PackWeights<T>(weights[k], s, 2 * k);
    WgmmaFence();
#pragma unroll
    for (int k = 0; k < NT / 2; ++k) WgmmaRows<T, D>(acc[0], weights[k], RowsDescriptor(v_at + k * 2048, kTile), true);
    WgmmaCommit();
    WgmmaWait<0>();
  }
  AddQuads(sum);
#pragma unroll
  for (int h = 0; h < 2; ++h)
    if (const int row = first_row + row_of + h * 8; row < rows)
      StoreRow<T>(p, acc, h, most[h], sum[h], PlaceOf(p, batch, b, kv, row), split);
#endif
}

}  // namespace quantmoe
