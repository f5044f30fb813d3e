// Attention of few query rows, all of it: a block prepares the queries, stores the new keys and values of its slots,
// and attends to these. Its warps share a stage's slots, 16 each, and of wide heads the values' columns. Where the
// splits are a cluster, its blocks leave what they found in shared memory, and each adds up a part of the output.
#pragma once
#include "cuda/attention.cuh"

namespace quantmoe {

// Of the blocks of a cluster.
__device__ inline void SyncCluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
// What block `rank` has at this address of its shared memory.
__device__ inline float2 LoadRemote(uint32_t shared, int rank) {
  float2 value{0, 0};
#if __CUDA_ARCH__ >= 900
  uint32_t at;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(shared), "r"(rank));
  asm volatile("ld.shared::cluster.v2.f32 {%0,%1}, [%2];" : "=f"(value.x), "=f"(value.y) : "r"(at) : "memory");
#endif
  return value;
}
__device__ inline void Store16(uint32_t at, const uint4& v) {
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

template <typename T, int DK, int DV>
__global__ void __launch_bounds__(kAttendThreads, 2) AttendFew(const __grid_constant__ AttentionParams p) {
  constexpr int kKeys = AttendKeys(DK, DV), kStages = kFewStages, kWarpKeys = 16, kWarps = kAttendThreads / 32;
  constexpr int KW = kKeys / kWarpKeys, VW = kWarps / KW, M = DV / 8 / VW;  // warps that share slots, columns
  constexpr int kKeyBytes = kKeys * DK * 2, kStage = kKeys * (DK + DV) * 2;
  constexpr int kLanes = IsWide(DK, DV) ? 32 : 16, kAtOnce = kAttendThreads / kLanes;
  extern __shared__ uint4 shared[];
  const uint32_t kv_at = SharedAddress(shared);
  // Queries, what heads turn in and sums of squares lie where the last stage will.
  constexpr int kQueries = (kStages - 1) * kStage, kTurning = kQueries + kFewRows * DK * 2;
  constexpr int kSquares = kTurning + kAttendThreads * 32;
  static_assert(kSquares + 2 * kFewRows * 4 <= kStages * kStage, "fits in a stage");

  const qm_attention& a = p.attention;
  const int split = static_cast<int>(blockIdx.x) % p.splits, pair = static_cast<int>(blockIdx.x) / p.splits;
  const int b = pair / a.kv_num_heads, kv = pair % a.kv_num_heads, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const T* old_keys = static_cast<const T*>(p.past_key) + static_cast<int64_t>(pair) * p.past_slots * DK;
  const T* old_values = static_cast<const T*>(p.past_value) + static_cast<int64_t>(pair) * p.past_slots * DV;
  // A hint: what the cache has if `rows` is there already, which must not be known before the kernel before has ended.
  if (pair < p.pairs && threadIdx.x == 0) {
    const BatchRow early = ReadRow(p, static_cast<const volatile int*>(p.rows), b);
    if (early.count > 0) {
      const Span span = SpanOf(p, early, 0);
      const int first = max(span.Begin(split) * kKeys, span.low);
      const int slots = min(min(span.Begin(split + 1), span.Begin(split) + kStages) * kKeys, early.past) - first;
      if (split < span.splits && slots > 0) {
        Prefetch(old_keys + static_cast<int64_t>(first) * DK, slots * DK * 2);
        Prefetch(old_values + static_cast<int64_t>(first) * DV, slots * DV * 2);
      }
    }
  }
  WaitForPrevious();
  LaunchDependents();
  if (pair >= p.pairs) return CopySlots(p, static_cast<int>(blockIdx.x) - p.pairs * p.splits);

  const BatchRow batch = ReadRow(p, p.rows, b);
  const int rows = batch.count * p.group;
  if (split == 0) {  // the output of tokens that do not count
    const uint32_t outside = batch.valid ? 0 : Half<T>::Pack(NAN, NAN);
    for (int i = threadIdx.x; i < p.tokens * p.group * (DV / 8); i += kAttendThreads) {
      const int row = i / (DV / 8), token = row / p.group;
      if (token >= batch.begin && token < batch.begin + batch.count) continue;
      const int64_t place = (static_cast<int64_t>(b) * p.tokens + token) * a.num_heads + kv * p.group + row % p.group;
      static_cast<uint4*>(p.output)[place * (DV / 8) + i % (DV / 8)] = {outside, outside, outside, outside};
    }
  }
  if (rows == 0) return;
  const Span span = SpanOf(p, batch, 0);
  const bool active = split < span.splits;
  if (!active && !p.cluster) return;
  const int begin = active ? span.Begin(split) : 0, end = active ? span.Begin(split + 1) : 0;

  T* keys = static_cast<T*>(p.key) + static_cast<int64_t>(pair) * p.slots * DK;
  T* values = static_cast<T*>(p.value) + static_cast<int64_t>(pair) * p.slots * DV;
  auto at_stage = [&](int stage) { return kv_at + (stage - begin) % kStages * kStage; };
  // A group of copies, which may be empty; at first without the new slots, which this block is about to have.
  auto load = [&](int stage, bool at_first) {
    auto rows_of = [&](auto width, const T* old, const T* present, uint32_t to) {
      constexpr int D = decltype(width)::value;
#pragma unroll
      for (int i = 0; i < kKeys * D / 8 / kAttendThreads; ++i) {
        const int at = static_cast<int>(threadIdx.x) + i * kAttendThreads, key = at / (D / 8), chunk = at % (D / 8);
        const int slot = stage * kKeys + key;
        if (at_first && slot >= batch.past && slot <= span.last_slot) continue;
        CopyAsync16Past(to + Swizzled<D>(key, chunk),
                        (slot < batch.past ? old : present) + static_cast<int64_t>(stage) * (kKeys * D) + at * 8,
                        slot >= span.low && slot <= span.last_slot);
      }
    };
    if (stage < end) {
      rows_of(Width<DK>{}, old_keys, keys, at_stage(stage));
      rows_of(Width<DV>{}, old_values, values, at_stage(stage) + kKeyBytes);
    }
    CopyAsyncCommit();
  };
  for (int i = 0; i < kStages - 1; ++i) load(begin + i, true);

  // Queries of all rows, then keys, then values of the new tokens whose slots are the block's.
  const int new_begin = max(batch.past, begin * kKeys), new_end = min(batch.past + batch.count, end * kKeys);
  const int appended = max(new_end - new_begin, 0);
  const uint4* qkv = static_cast<const uint4*>(p.qkv);
  const int64_t row_chunks = RowChunks(a);
  float* squares = reinterpret_cast<float*>(shared) + kSquares / 4;  // of each token's row: all queries; all keys
  if (a.qk_norm == k_qk_norm_row) {
    for (int i = warp; i < 2 * batch.count; i += kWarps) {
      const int index = i / 2, first = i % 2 ? a.num_heads * (DK / 8) : 0;
      const int chunks = (i % 2 ? a.kv_num_heads : a.num_heads) * (DK / 8);
      const int64_t token = static_cast<int64_t>(b) * p.tokens + batch.begin + index;
      float sum = 0;
      for (int at = lane; at < chunks; at += 32) sum = AddSquares<T>(qkv[token * row_chunks + first + at], sum);
      for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
      if (lane == 0) squares[i % 2 * kFewRows + index] = sum;
    }
    __syncthreads();
  }
  float4* of_head = reinterpret_cast<float4*>(shared) + kTurning / 16 + threadIdx.x / kLanes * 2 * kLanes;
  for (int first = 0; first < rows + 2 * appended; first += kAtOnce) {
    const int item = first + static_cast<int>(threadIdx.x) / kLanes, appending = item - rows;
    const bool query = appending < 0, key = !query && appending < appended, there = appending < 2 * appended;
    const int slot = new_begin + (key ? appending : appending - appended);  // unless it is a query's
    const int index = !there ? 0 : query ? item / p.group : slot - batch.past;
    const int token = b * p.tokens + batch.begin + index;
    const int head = query ? kv * p.group + item % p.group : a.num_heads + (key ? 0 : a.kv_num_heads) + kv;
    HeadPart<T, kLanes> part(p, head, threadIdx.x % kLanes);
    part.LoadTurn(p, token);
    const uint4 loaded = part.there ? qkv[token * row_chunks + part.chunk] : uint4{};
    IssueLoads();
    float x[8];
    Widen<T>(x, loaded);
    part.Apply(p, a.qk_norm == k_qk_norm_row ? squares[(query ? 0 : kFewRows) + index] : 0.f, of_head, x);
    if (!there || !part.there) continue;
    const uint4 stored = Narrow<T>(x);
    if (query) {
      Store16(kv_at + kQueries + Swizzled<DK>(item, part.d / 8), stored);
      continue;
    }
    T* to = key ? keys : values;
    *reinterpret_cast<uint4*>(to + static_cast<int64_t>(slot) * part.size + part.d) = stored;
    const int stage = slot / kKeys;
    if (stage < begin + kStages - 1)
      Store16(at_stage(stage) +
                  (key ? Swizzled<DK>(slot % kKeys, part.d / 8) : kKeyBytes + Swizzled<DV>(slot % kKeys, part.d / 8)),
              stored);
  }
  for (int i = rows * (DK / 8) + threadIdx.x; i < kFewRows * (DK / 8); i += kAttendThreads)
    Store16(kv_at + kQueries + Swizzled<DK>(i / (DK / 8), i % (DK / 8)), uint4{});
  __syncthreads();
  uint32_t own[DK / 16][4];
#pragma unroll
  for (int d = 0; d < DK / 16; ++d) LoadMatrices(own[d], kv_at + kQueries + Swizzled<DK>(lane % 16, 2 * d + lane / 16));

  Sums<1, M> found(p, batch, 0);
  auto query = [&](int d, int, uint32_t(&q)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) q[i] = own[d][i];
  };
  const int key_warp = warp % KW, value_warp = warp / KW;
  for (int stage = begin; stage < end; ++stage) {
    CopyAsyncWait<kStages - 2>();
    __syncthreads();
    load(stage + kStages - 1, false);
    const uint32_t k_at = at_stage(stage);
    AttendStage<T, DK, DV, kWarpKeys / 8>(p, k_at, k_at + kKeyBytes, key_warp * kWarpKeys,
                                          stage * kKeys + key_warp * kWarpKeys, value_warp * M,
                                          IsMasked(span, stage * kKeys, kKeys), query, found);
  }
  AddQuads(found.sum[0]);

  // The warps' results, over the stages: [KW][16][kStride], then pairs of largest score and sum, the last of the block.
  constexpr int kStride = DV + 4;
  static_assert((KW * kFewRows * (kStride + 2) + 2 * kFewRows) * 4 <= kStages * kStage, "fits in the stages");
  float* of_warps = reinterpret_cast<float*>(shared);
  float2* sums = reinterpret_cast<float2*>(of_warps + KW * kFewRows * kStride);
  __syncthreads();
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = key_warp * kFewRows + h * 8 + lane / 4;
    if (lane % 4 == 0 && value_warp == 0) sums[row] = {found.most[0][h], found.sum[0][h]};
#pragma unroll
    for (int n = 0; n < M; ++n)
      *reinterpret_cast<float2*>(of_warps + row * kStride + (value_warp * M + n) * 8 + lane % 4 * 2) = {
          found.acc[0][n][2 * h], found.acc[0][n][2 * h + 1]};
  }
  __syncthreads();
  for (int i = threadIdx.x; i < rows * (DV / 2); i += kAttendThreads) {
    const int row = i / (DV / 2), column = i % (DV / 2) * 2;
    const int64_t to = PlaceOf(p, batch, b, kv, row);
    const float own_score = p.splits > 1 ? -INFINITY : SinkOf(p, to);
    float largest = own_score;
#pragma unroll
    for (int w = 0; w < KW; ++w) largest = fmaxf(largest, sums[w * kFewRows + row].x);
    const float base = largest == -INFINITY ? 0.f : largest;
    float all = Exp2(own_score - base);
    float2 y{0, 0};
#pragma unroll
    for (int w = 0; w < KW; ++w) {
      const float factor = Exp2(sums[w * kFewRows + row].x - base);
      const float2 x = *reinterpret_cast<const float2*>(of_warps + (w * kFewRows + row) * kStride + column);
      all = fmaf(sums[w * kFewRows + row].y, factor, all);
      y.x = fmaf(x.x, factor, y.x), y.y = fmaf(x.y, factor, y.y);
    }
    if (p.cluster) {  // where the first warp's was, which no other thread reads
      if (column == 0) sums[KW * kFewRows + row] = {largest, all};
      *reinterpret_cast<float2*>(of_warps + row * kStride + column) = y;
    } else if (p.splits > 1) {
      const int64_t part = to * p.splits + split;
      if (column == 0) p.sums[part] = {largest, all};
      *reinterpret_cast<float2*>(p.partial + part * DV + column) = y;
    } else {
      const float inverse = 1.f / all;
      static_cast<uint32_t*>(p.output)[(to * DV + column) / 2] = Half<T>::Pack(y.x * inverse, y.y * inverse);
    }
  }
  if (!p.cluster) return;

  SyncCluster();
  const int units = rows * (DV / 2), share = (units + p.splits - 1) / p.splits;
  const uint32_t sums_at = SharedAddress(sums + KW * kFewRows);
  for (int i = split * share + threadIdx.x; i < min(units, (split + 1) * share); i += kAttendThreads) {
    const int row = i / (DV / 2), column = i % (DV / 2) * 2;
    const int64_t to = PlaceOf(p, batch, b, kv, row);
    const float sink = SinkOf(p, to);
    float2 of[kMostCluster], x[kMostCluster];
#pragma unroll
    for (int r = 0; r < kMostCluster; ++r) {
      of[r] = {-INFINITY, 0}, x[r] = {0, 0};
      if (r < span.splits) {
        of[r] = LoadRemote(sums_at + row * 8, r);
        x[r] = LoadRemote(kv_at + (row * kStride + column) * 4, r);
      }
    }
    float largest = sink;
#pragma unroll
    for (int r = 0; r < kMostCluster; ++r) largest = fmaxf(largest, of[r].x);
    const float base = largest == -INFINITY ? 0.f : largest;
    float all = Exp2(sink - base);
    float2 y{0, 0};
#pragma unroll
    for (int r = 0; r < kMostCluster; ++r) {
      const float factor = Exp2(of[r].x - base);
      all = fmaf(of[r].y, factor, all);
      y.x = fmaf(x[r].x, factor, y.x), y.y = fmaf(x[r].y, factor, y.y);
    }
    const float inverse = 1.f / all;
    static_cast<uint32_t*>(p.output)[(to * DV + column) / 2] = Half<T>::Pack(y.x * inverse, y.y * inverse);
  }
  SyncCluster();  // no block ends while others read what it found
}

}  // namespace quantmoe
