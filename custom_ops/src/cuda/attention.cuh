// CachedAttention: append, attend, merge.
//
// AttentionAppend norms, turns and scales the queries, and stores the new keys and values in the cache. Attend takes
// tiles of query rows, a row being a head of a token: the heads that share keys lie side by side, so that a tile reads
// keys and values once for all of them. Tokens' ranges of slots are read on the device, so a launch has one shape at
// every position; splits share a tile's slots evenly, whatever their number, and AttendMerge adds up what they found.
//
// Scores are in units of log2(e): the queries' scale has it.
#pragma once
#include "core/attributes.h"
#include "cuda/attention.h"
#include "cuda/ptx.cuh"
#include "quantmoe/quant_moe_cuda.h"

namespace quantmoe {

constexpr float kLog2e = 1.44269504f, kLn2 = 0.693147181f;

struct AppendParams {
  qm_attention attention;
  int batch, tokens, past_slots, slots;  // slots: of present
  const void *qkv, *past_key, *past_value;
  const int* rows;
  const float *cos, *sin, *q_norm, *k_norm;
  void *queries, *output, *key, *value;  // queries: as AttendParams has them
  int token_blocks, blocks_per_token;    // blocks after these copy what past has, where present is other memory
};

struct AttendParams {
  const void* queries;      // T [batch, kv_heads, tokens * group, D], rows from the first token that counts
  const void *key, *value;  // T [batch, kv_heads, slots, D]
  const int* rows;
  const float* sinks;
  void* output;    // T [batch, tokens, kv_heads * group, D]
  float* partial;  // [batch, tokens, kv_heads * group, splits, D]
  float2* sums;    // of the same rows: largest score, sum of weights; sum 0: no slot, partial is not written
  int tokens, kv_heads, group, head_size, past_slots, slots, window, chunk;
  int tile_rows, tiles, pairs, splits;  // pairs: batch * kv_heads
  bool in_place;
  float softcap;  // 0: none
};

// What a batch row says. One that asks for tokens or slots that are not there counts nothing, and its output is NaN.
struct BatchRow {
  int begin, count, past;
  bool valid;
};
__device__ inline BatchRow ReadRow(const int* rows, int b, int tokens, int past_slots, int slots) {
  BatchRow r{rows[3 * b], rows[3 * b + 1], rows[3 * b + 2], true};
  r.valid = r.begin >= 0 && r.count >= 0 && r.past >= 0 && r.begin <= tokens - r.count && r.past <= past_slots &&
            r.past <= slots - r.count;
  if (!r.valid) r.begin = r.count = r.past = 0;
  return r;
}
// The first slot that the token in slot p sees.
__device__ inline int FirstSlot(const AttendParams& p, int slot) {
  int low = p.window ? max(slot - p.window + 1, 0) : 0;
  return p.chunk ? max(low, slot / p.chunk * p.chunk) : low;
}

// What a tile of query rows sees, in stages of slots, and how many splits share them.
struct Span {
  int first_slot, last_slot;  // of the first token, of the last
  int low, full_low;          // the first slot that any token sees, that all see
  int first_stage, stages, splits;
};
__device__ inline Span SpanOf(const AttendParams& p, const BatchRow& batch, int first_row, int tile_rows) {
  Span s;
  s.first_slot = batch.past + first_row / p.group;
  s.last_slot = batch.past + (min(first_row + tile_rows, batch.count * p.group) - 1) / p.group;
  s.low = FirstSlot(p, s.first_slot), s.full_low = FirstSlot(p, s.last_slot);
  s.first_stage = s.low / kAttendKeys, s.stages = s.last_slot / kAttendKeys + 1 - s.first_stage;
  const int least = tile_rows == kFewRows ? kLeastOfFew : kLeastOfMany;
  s.splits = min(p.splits, (s.stages + least - 1) / least);
  return s;
}

// Sum over the block; every thread calls it.
__device__ inline float BlockSum(float x, float* scratch) {
  for (int d = 16; d > 0; d /= 2) x += __shfl_xor_sync(~0u, x, d);
  __syncthreads();
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
  __syncthreads();
  x = 0;
  for (int i = 0; i < kAppendThreads / 32; ++i) x += scratch[i];
  return x;
}

// Copies what past has of 64 slots of a head, and zeros what comes after the new tokens.
__device__ inline void CopySlots(const AppendParams& p, int block) {
  const int parts = (p.slots + 63) / 64, pair = block / parts, first = block % parts * 64;
  const BatchRow row = ReadRow(p.rows, pair / p.attention.kv_num_heads, p.tokens, p.past_slots, p.slots);
  const int chunks = p.attention.head_size / 8;
  for (int i = threadIdx.x; i < 64 * chunks; i += kAppendThreads) {
    const int slot = first + i / chunks, chunk = i % chunks;
    if (slot >= p.slots || (slot >= row.past && slot < row.past + row.count)) continue;
    const int64_t from = (static_cast<int64_t>(pair) * p.past_slots + slot) * chunks + chunk;
    const int64_t to = (static_cast<int64_t>(pair) * p.slots + slot) * chunks + chunk;
    const bool old = slot < row.past;
    if (p.key != p.past_key)
      static_cast<uint4*>(p.key)[to] = old ? static_cast<const uint4*>(p.past_key)[from] : uint4{};
    if (p.value != p.past_value)
      static_cast<uint4*>(p.value)[to] = old ? static_cast<const uint4*>(p.past_value)[from] : uint4{};
  }
}

// The compiler moves no load from before this past it, to where its value is used.
__device__ inline void IssueLoads() { asm volatile("" ::: "memory"); }
__device__ inline void LoadEight(float (&to)[8], const float* from) {
  const float4 a = reinterpret_cast<const float4*>(from)[0], b = reinterpret_cast<const float4*>(from)[1];
  to[0] = a.x, to[1] = a.y, to[2] = a.z, to[3] = a.w, to[4] = b.x, to[5] = b.y, to[6] = b.z, to[7] = b.w;
}

// Sixteen lanes a head of a token; a lane has eight features. A block has the same heads of some tokens; what `rows`
// does not decide is asked for before it is there.
template <typename T>
__global__ void __launch_bounds__(kAppendThreads, 4) AttentionAppend(const __grid_constant__ AppendParams p) {
  constexpr int kLanes = 16, kMostFeatures = 8 * kLanes;
  __shared__ float4 features[kAppendHeads][kMostFeatures / 4];
  __shared__ float scratch[kAppendThreads / 32];
  WaitForPrevious();
  LaunchDependents();
  const int block = static_cast<int>(blockIdx.x);
  if (block >= p.token_blocks) return CopySlots(p, block - p.token_blocks);
  const qm_attention& a = p.attention;
  const int heads = a.num_heads, kv_heads = a.kv_num_heads, size = a.head_size;
  const int local = threadIdx.x / kLanes, d = threadIdx.x % kLanes * 8;
  const int head = block % p.blocks_per_token * kAppendHeads + local;  // of queries, then keys, then values
  const bool query = head < heads, key = !query && head < heads + kv_heads;
  const bool there = head < heads + 2 * kv_heads && d < size, normed = a.qk_norm && (query || key);
  const int group = heads / kv_heads, kv = query ? head / group : (head - heads) % kv_heads;
  float* of_head = reinterpret_cast<float*>(features[local]);

  const int64_t row_chunks = static_cast<int64_t>(heads + 2 * kv_heads) * (size / 8);
  const int steps = p.token_blocks / p.blocks_per_token;
  int token = block / p.blocks_per_token;
  auto load = [&](int token) {
    const uint4* qkv = static_cast<const uint4*>(p.qkv) + token * row_chunks;
    return there && token < p.batch * p.tokens ? qkv[(head * size + d) / 8] : uint4{};
  };
  uint4 next = load(token);
  float weights[8] = {1, 1, 1, 1, 1, 1, 1, 1};
  const bool by_row = a.qk_norm == k_qk_norm_row;
  if (normed && there)
    LoadEight(weights, (query ? p.q_norm : p.k_norm) + (by_row ? (query ? head : head - heads) * size : 0) + d);
  const float per_feature = 1.f / static_cast<float>(by_row ? (query ? heads : kv_heads) * size : size);
  const int half = a.rotary_size / 2;
  const bool turns = there && (query || key) && d < 2 * half, apart = !a.rotary_interleaved;
  const bool whole = apart && half % 8 == 0;  // all eight features are of one half
  const float scale = query ? (a.softcap != 0 ? a.scale : a.scale * kLog2e) : 1.f;

  for (; token < p.batch * p.tokens; token += steps) {
    float cos[8], sin[8];
    const int64_t turn = static_cast<int64_t>(token) * half;
    if (turns && whole) {
      const int from = d < half ? d : d - half;
      LoadEight(cos, p.cos + turn + from);
      LoadEight(sin, p.sin + turn + from);
    } else if (turns) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const int i = apart ? (d + j < half ? d + j : d + j - half) : (d + j) / 2;
        cos[j] = i < half ? p.cos[turn + i] : 1.f;
        sin[j] = i < half ? p.sin[turn + i] : 0.f;
      }
    }
    const uint4 loaded = next;
    next = load(token + steps);
    IssueLoads();

    const int b = token / p.tokens;
    const BatchRow row = ReadRow(p.rows, b, p.tokens, p.past_slots, p.slots);
    const int index = token % p.tokens - row.begin;
    if (index < 0 || index >= row.count) {
      const uint32_t outside = row.valid ? 0 : Half<T>::Pack(NAN, NAN);
      if (query && there)
        static_cast<uint4*>(p.output)[(static_cast<int64_t>(token) * heads + head) * (size / 8) + d / 8] = {
            outside, outside, outside, outside};
      continue;
    }

    float x[8] = {Half<T>::Low(loaded.x), Half<T>::High(loaded.x), Half<T>::Low(loaded.y), Half<T>::High(loaded.y),
                  Half<T>::Low(loaded.z), Half<T>::High(loaded.z), Half<T>::Low(loaded.w), Half<T>::High(loaded.w)};
    float squares = 0;
    if (by_row) {  // of all heads
      const uint4* qkv = static_cast<const uint4*>(p.qkv) + token * row_chunks;
      float sums[2] = {0, 0};
      for (int i = threadIdx.x; i < (heads + kv_heads) * (size / 8); i += kAppendThreads) {
        const uint4 v = qkv[i];
        float sum = 0;
        for (uint32_t pair : {v.x, v.y, v.z, v.w})
          sum = fmaf(Half<T>::Low(pair), Half<T>::Low(pair), fmaf(Half<T>::High(pair), Half<T>::High(pair), sum));
        sums[i >= heads * (size / 8)] += sum;
      }
      const float q = BlockSum(sums[0], scratch), k = BlockSum(sums[1], scratch);
      squares = query ? q : k;
    } else if (a.qk_norm) {
#pragma unroll
      for (int j = 0; j < 8; ++j) squares = fmaf(x[j], x[j], squares);
      for (int i = kLanes / 2; i > 0; i /= 2) squares += __shfl_xor_sync(~0u, squares, i);
    }
    if (normed) {
      const float inverse = 1.f / sqrtf(fmaf(squares, per_feature, a.norm_epsilon));
#pragma unroll
      for (int j = 0; j < 8; ++j) x[j] = x[j] * inverse * weights[j];
    }
    if (apart && half) {
      __syncwarp();  // the last token's are read
      features[local][d / 4] = {x[0], x[1], x[2], x[3]};
      features[local][d / 4 + 1] = {x[4], x[5], x[6], x[7]};
      __syncwarp();
    }
    if (turns) {
      float other[8];
      if (whole) {
        LoadEight(other, of_head + (d < half ? d + half : d - half));
      } else if (apart) {
#pragma unroll
        for (int j = 0; j < 8; ++j)
          other[j] = d + j >= 2 * half ? 0.f : of_head[d + j < half ? d + j + half : d + j - half];
      } else {
#pragma unroll
        for (int j = 0; j < 8; ++j) other[j] = x[j ^ 1];
      }
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const bool second = apart ? d + j >= half : j % 2;
        const float across = other[j] * sin[j];
        x[j] = fmaf(x[j], cos[j], second ? across : -across);
      }
    }

    const int64_t pair = static_cast<int64_t>(b) * kv_heads + kv;
    const int64_t at = query ? pair * p.tokens * group + static_cast<int64_t>(index) * group + head % group
                             : pair * p.slots + row.past + index;
#pragma unroll
    for (int j = 0; j < 8; ++j) x[j] *= scale;
    if (there)
      static_cast<uint4*>(query ? p.queries
                          : key ? p.key
                                : p.value)[at * (size / 8) + d / 8] = {
          Half<T>::Pack(x[0], x[1]), Half<T>::Pack(x[2], x[3]), Half<T>::Pack(x[4], x[5]), Half<T>::Pack(x[6], x[7])};
  }
}

// Where 16 bytes of a row of D values lie in shared memory: eight rows' same chunk in eight different groups of banks.
template <int D>
__device__ inline uint32_t Swizzled(int row, int chunk) {
  constexpr int kChunks = D / 8;
  const int turn = kChunks % 8 ? (row >> 1) & 3 : row & 7;
  return static_cast<uint32_t>(row * kChunks + (chunk ^ turn)) * 16;
}

// Of two values: whether one is an infinity or a NaN, which their exponents tell; those alone, zero for others.
__device__ inline bool IsOdd(uint32_t pair, uint32_t exponent) {
  return (pair & exponent) == exponent || (pair >> 16 & exponent) == exponent;
}
__device__ inline uint32_t OnlyOdd(uint32_t pair, uint32_t exponent) {
  return ((pair & exponent) == exponent ? pair & 0xffff : 0) |
         ((pair >> 16 & exponent) == exponent ? pair & 0xffff0000 : 0);
}

// A lane has two rows of a tile of 16, g and g + 8 (h), and of eight columns two: [n][2 h + i] is column 8 n + 2 t + i.
template <int N>
__device__ inline void Softcap(const AttendParams& p, float (&s)[N][4]) {
  if (p.softcap == 0) return;
  const float inner = 2 * kLog2e / p.softcap, outer = p.softcap * kLog2e;
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i)  // tanh x = 1 - 2 / (1 + e^2x)
      s[n][i] = outer * (1.f - 2 * Reciprocal(1.f + Exp2(s[n][i] * inner)));
}
// Scores of slots, from `first` on, that the rows do not see: none.
template <int N>
__device__ inline void Mask(const AttendParams& p, float (&s)[N][4], const int (&slot_of)[2], int first) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int from = FirstSlot(p, slot_of[h]) - first, to = slot_of[h] - first;
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int key = n * 8 + threadIdx.x % 4 * 2 + i;
        if (key < from || key > to) s[n][2 * h + i] = -INFINITY;
      }
  }
}
// Scores become weights, relative to the largest so far; what was summed before is scaled to that. A lane's sum is of
// its own columns.
template <int N, int M>
__device__ inline void Weigh(float (&s)[N][4], float (&acc)[M][4], float (&most)[2], float (&sum)[2]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float largest = most[h];
#pragma unroll
    for (int n = 0; n < N; ++n) largest = fmaxf(largest, fmaxf(s[n][2 * h], s[n][2 * h + 1]));
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
    const float base = largest == -INFINITY ? 0.f : largest;  // nothing seen yet
    const float factor = Exp2(most[h] - base);
    most[h] = largest;
    float added = 0;
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) added += s[n][2 * h + i] = Exp2(s[n][2 * h + i] - base);
    sum[h] = fmaf(sum[h], factor, added);
#pragma unroll
    for (int n = 0; n < M; ++n) acc[n][2 * h] *= factor, acc[n][2 * h + 1] *= factor;
  }
}
// Weights of 16 columns from n * 8 on, as the first operand of a product.
template <typename T, int N>
__device__ inline void PackWeights(uint32_t (&a)[4], const float (&s)[N][4], int n) {
#pragma unroll
  for (int i = 0; i < 4; ++i) a[i] = Half<T>::Pack(s[n + i / 2][i % 2 * 2], s[n + i / 2][i % 2 * 2 + 1]);
}
// Sums of the four lanes of a row.
__device__ inline void AddQuads(float (&sum)[2]) {
#pragma unroll
  for (int h = 0; h < 2; ++h)
    for (int d = 1; d < 4; d *= 2) sum[h] += __shfl_xor_sync(~0u, sum[h], d);
}
// Of a query row: its place in [batch, tokens, heads]; of a place: its sink.
__device__ inline int64_t PlaceOf(const AttendParams& p, const BatchRow& batch, int b, int kv, int row) {
  const int64_t token = static_cast<int64_t>(b) * p.tokens + batch.begin + row / p.group;
  return (token * p.kv_heads + kv) * p.group + row % p.group;
}
__device__ inline float SinkOf(const AttendParams& p, int64_t place) {
  return p.sinks[place % (p.kv_heads * p.group)] * kLog2e;
}
// Row h of what a lane has summed: to the output, or as a part of it.
template <typename T, int M>
__device__ inline void StoreRow(const AttendParams& p, const float (&acc)[M][4], int h, float most, float sum,
                                int64_t place, int split) {
  const int t = threadIdx.x % 4;
  if (p.splits > 1) {
    const int64_t part = place * p.splits + split;
    if (t == 0) p.sums[part] = {most, sum};
#pragma unroll
    for (int n = 0; n < M; ++n)
      *reinterpret_cast<float2*>(p.partial + (part * M + n) * 8 + 2 * t) = {acc[n][2 * h], acc[n][2 * h + 1]};
    return;
  }
  const float sink = SinkOf(p, place), largest = fmaxf(most, sink), factor = Exp2(most - largest);
  const float inverse = factor / fmaf(sum, factor, Exp2(sink - largest));
  uint32_t* out = static_cast<uint32_t*>(p.output) + place * (M * 4) + t;
#pragma unroll
  for (int n = 0; n < M; ++n) out[n * 4] = Half<T>::Pack(acc[n][2 * h] * inverse, acc[n][2 * h + 1] * inverse);
}

// MT: tiles of 16 rows a warp has; RW: warps that share rows out, the others share out a stage's slots.
template <typename T, int D, int MT, int RW>
__global__ void __launch_bounds__(kAttendThreads, 2) Attend(const __grid_constant__ AttendParams p) {
  constexpr int KW = kAttendThreads / 32 / RW, kKeys = kAttendKeys, kWarpKeys = kKeys / KW, NT = kWarpKeys / 8;
  constexpr int kRows = 16 * MT * RW, kStage = kKeys * D * 2;  // bytes of keys, or values
  constexpr int kStages = RW == 1 ? kFewStages : kManyStages;
  constexpr uint32_t kExponent = Half<T>::kOne == 0x3c003c00 ? 0x7c00 : 0x7f80;
  extern __shared__ uint4 shared[];
  const uint32_t q_at = SharedAddress(shared), kv_at = q_at + (RW == 1 ? 0 : kRows * D * 2);
  LaunchDependents();

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int row_warp = warp % RW, key_warp = warp / RW;
  const int tile = p.tiles - 1 - static_cast<int>(blockIdx.x) / p.pairs;  // those with most slots first
  const int pair = static_cast<int>(blockIdx.x) % p.pairs;
  const int b = pair / p.kv_heads, kv = pair % p.kv_heads, split = blockIdx.y, first_row = tile * kRows;
  const BatchRow batch = ReadRow(p.rows, b, p.tokens, p.past_slots, p.slots);
  const int rows = batch.count * p.group;
  if (first_row >= rows) return WaitForPrevious();
  const auto [first_slot, last_slot, low, full_low, first_stage, stages, splits] = SpanOf(p, batch, first_row, kRows);
  if (split >= splits) return WaitForPrevious();
  const int begin = first_stage + static_cast<int>(static_cast<int64_t>(stages) * split / splits);
  const int end = first_stage + static_cast<int>(static_cast<int64_t>(stages) * (split + 1) / splits);

  const T* keys = static_cast<const T*>(p.key) + static_cast<int64_t>(pair) * p.slots * D;
  const T* values = static_cast<const T*>(p.value) + static_cast<int64_t>(pair) * p.slots * D;
  const int first = low, last = last_slot;  // a lambda does not capture structured bindings
  auto at_stage = [&](int stage) { return kv_at + stage % kStages * 2 * kStage; };
  auto load = [&](int stage) {  // a group of copies, which may be empty
    constexpr int kCopies = kKeys * D / 8 / kAttendThreads;
#pragma unroll
    for (int i = 0; i < kCopies && stage < end; ++i) {
      const int at = static_cast<int>(threadIdx.x) + i * kAttendThreads, key = at / (D / 8), chunk = at % (D / 8);
      const int slot = stage * kKeys + key;
      const bool there = slot >= first && slot <= last;
      const uint32_t to = at_stage(stage) + Swizzled<D>(key, chunk);
      const int64_t from = static_cast<int64_t>(stage) * (kKeys * D) + at * 8;
      CopyAsync16Past(to, keys + from, there);
      CopyAsync16Past(to + kStage, values + from, there);
    }
    CopyAsyncCommit();
  };
  const T* queries = static_cast<const T*>(p.queries) + static_cast<int64_t>(pair) * p.tokens * p.group * D;
  uint32_t own[RW == 1 ? D / 16 : 1][4];  // queries, where all warps have the same rows
  if constexpr (RW == 1) {
    for (int i = 0; i < kStages - 1; ++i) {
      // What the append does not write may be read while it runs.
      if (!p.in_place || (begin + i + 1) * kKeys > batch.past) WaitForPrevious();
      load(begin + i);
    }
    WaitForPrevious();
#pragma unroll
    for (int d = 0; d < D / 16; ++d)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = first_row + i % 2 * 8 + g;
        const uint32_t* of_row = reinterpret_cast<const uint32_t*>(queries + static_cast<int64_t>(row) * D);
        own[d][i] = row < rows ? of_row[d * 8 + i / 2 * 4 + t] : 0;
      }
  } else {
    WaitForPrevious();
    for (int at = threadIdx.x; at < kRows * D / 8; at += kAttendThreads)
      CopyAsync16Past(q_at + Swizzled<D>(at / (D / 8), at % (D / 8)),
                      queries + static_cast<int64_t>(first_row) * D + at * 8, first_row + at / (D / 8) < rows);
    for (int i = 0; i < kStages - 1; ++i) load(begin + i);
  }

  float acc[MT][D / 8][4], most[MT][2], sum[MT][2];
  int slot_of[MT][2];  // of the lane's rows
#pragma unroll
  for (int m = 0; m < MT; ++m) {
#pragma unroll
    for (int n = 0; n < D / 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[m][n][i] = 0;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      most[m][h] = -INFINITY, sum[m][h] = 0;
      slot_of[m][h] = batch.past + (first_row + row_warp * 16 * MT + m * 16 + h * 8 + g) / p.group;
    }
  }

  for (int stage = begin; stage < end; ++stage) {
    CopyAsyncWait<kStages - 2>();
    __syncthreads();
    load(stage + kStages - 1);
    const uint32_t k_at = at_stage(stage), v_at = k_at + kStage;
    const int first_key = key_warp * kWarpKeys;  // of the warp, in the stage

    float s[MT][NT][4];
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
      for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) s[m][n][i] = 0;
#pragma unroll
    for (int d = 0; d < D / 16; ++d) {
      uint32_t q[MT][4];
#pragma unroll
      for (int m = 0; m < MT; ++m) {
        if constexpr (RW == 1)
          for (int i = 0; i < 4; ++i) q[m][i] = own[d][i];
        else
          LoadMatrices(q[m], q_at + Swizzled<D>((row_warp * MT + m) * 16 + lane % 16, 2 * d + lane / 16));
      }
#pragma unroll
      for (int n = 0; n < NT; n += 2) {
        uint32_t k[4];
        LoadMatrices(k, k_at + Swizzled<D>(first_key + n * 8 + lane % 8 + lane / 16 * 8, 2 * d + lane / 8 % 2));
#pragma unroll
        for (int m = 0; m < MT; ++m) {
          Half<T>::Mma(s[m][n], q[m], k[0], k[1]);
          Half<T>::Mma(s[m][n + 1], q[m], k[2], k[3]);
        }
      }
    }

#pragma unroll
    for (int m = 0; m < MT; ++m) Softcap(p, s[m]);
    const int stage_slot = stage * kKeys;
    const bool masked = stage_slot < full_low || stage_slot + kKeys - 1 > first_slot;  // for some row
    auto sees = [&](int m, int h, int key) {                                           // key: of the warp's
      const int slot = stage_slot + first_key + key;
      return slot <= slot_of[m][h] && slot >= FirstSlot(p, slot_of[m][h]);
    };
#pragma unroll
    for (int m = 0; m < MT; ++m) {
      if (masked) Mask(p, s[m], slot_of[m], stage_slot + first_key);
      Weigh(s[m], acc[m], most[m], sum[m]);
    }

    // Where not every row sees a stage's slots, a value that is not finite is added, not multiplied by zero.
    bool odd = false;
    if (masked)
      for (int at = lane; at < kWarpKeys * D / 8; at += 32) {
        const uint4 v = Load16(v_at + Swizzled<D>(first_key + at / (D / 8), at % (D / 8)));
        odd |= IsOdd(v.x, kExponent) || IsOdd(v.y, kExponent) || IsOdd(v.z, kExponent) || IsOdd(v.w, kExponent);
      }
    odd = __any_sync(~0u, odd);
#pragma unroll 1
    for (int key = 0; odd && key < kWarpKeys; ++key) {
#pragma unroll
      for (int n = 0; n < D / 8; ++n) {
        const uint32_t v = OnlyOdd(Load4(v_at + Swizzled<D>(first_key + key, n) + 4 * t), kExponent);
#pragma unroll
        for (int m = 0; v && m < MT; ++m)
#pragma unroll
          for (int h = 0; h < 2; ++h)
            if (sees(m, h, key)) acc[m][n][2 * h] += Half<T>::Low(v), acc[m][n][2 * h + 1] += Half<T>::High(v);
      }
    }
#pragma unroll
    for (int k = 0; k < NT; k += 2) {
      uint32_t weight[MT][4];
#pragma unroll
      for (int m = 0; m < MT; ++m) PackWeights<T>(weight[m], s[m], k);
#pragma unroll
      for (int n = 0; n < D / 8; n += 2) {
        uint32_t v[4];
        LoadTransposed(v, v_at + Swizzled<D>(first_key + k * 8 + lane % 16, n + lane / 16));
        if (odd)
#pragma unroll
          for (int i = 0; i < 4; ++i) v[i] ^= OnlyOdd(v[i], kExponent);
#pragma unroll
        for (int m = 0; m < MT; ++m) {
          Half<T>::Mma(acc[m][n], weight[m], v[0], v[1]);
          Half<T>::Mma(acc[m][n + 1], weight[m], v[2], v[3]);
        }
      }
    }
  }
#pragma unroll
  for (int m = 0; m < MT; ++m) AddQuads(sum[m]);

  if constexpr (KW == 1) {
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = (row_warp * MT + m) * 16 + h * 8 + g;
        if (first_row + row < rows)
          StoreRow<T>(p, acc[m], h, most[m][h], sum[m][h], PlaceOf(p, batch, b, kv, first_row + row), split);
      }
  } else {
    static_assert(MT == 1 && RW == 1, "a warp's rows are the block's");
    constexpr int kStride = D + 4;
    static_assert(KW * 16 * (kStride + 2) * 4 <= 4 * kStage, "fits in the stages");
    float* of_warps = reinterpret_cast<float*>(shared);  // [KW][16][kStride], then [KW][16] pairs
    float2* sums = reinterpret_cast<float2*>(of_warps + KW * 16 * kStride);
    __syncthreads();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = warp * 16 + h * 8 + g;
      if (t == 0) sums[row] = {most[0][h], sum[0][h]};
#pragma unroll
      for (int n = 0; n < D / 8; ++n)
        *reinterpret_cast<float2*>(of_warps + row * kStride + n * 8 + 2 * t) = {acc[0][n][2 * h], acc[0][n][2 * h + 1]};
    }
    __syncthreads();
    for (int i = threadIdx.x; i < 16 * (D / 2); i += kAttendThreads) {
      const int row = i / (D / 2), column = i % (D / 2) * 2;
      if (first_row + row >= rows) break;
      const int64_t to = PlaceOf(p, batch, b, kv, first_row + row);
      float largest = p.splits > 1 ? -INFINITY : SinkOf(p, to);
      const float own = largest;
#pragma unroll
      for (int w = 0; w < KW; ++w) largest = fmaxf(largest, sums[w * 16 + row].x);
      const float base = largest == -INFINITY ? 0.f : largest;
      float all = Exp2(own - base);
      float2 y{0, 0};
#pragma unroll
      for (int w = 0; w < KW; ++w) {
        const float factor = Exp2(sums[w * 16 + row].x - base);
        const float2 x = *reinterpret_cast<const float2*>(of_warps + (w * 16 + row) * kStride + column);
        all = fmaf(sums[w * 16 + row].y, factor, all);
        y.x = fmaf(x.x, factor, y.x), y.y = fmaf(x.y, factor, y.y);
      }
      if (p.splits > 1) {
        const int64_t part = to * p.splits + split;
        if (column == 0) p.sums[part] = {largest, all};
        *reinterpret_cast<float2*>(p.partial + part * D + column) = y;
      } else {
        const float inverse = 1.f / all;
        static_cast<uint32_t*>(p.output)[(to * D + column) / 2] = Half<T>::Pack(y.x * inverse, y.y * inverse);
      }
    }
  }
}

// Adds up the splits of a head of a token: a block, whose warps take splits in turn; lanes have four features.
template <typename T>
__global__ void __launch_bounds__(kAttendThreads) AttendMerge(const __grid_constant__ AttendParams p) {
  constexpr int kWarps = kAttendThreads / 32;
  __shared__ float4 results[kWarps][32];
  LaunchDependents();
  const int heads = p.kv_heads * p.group, place = blockIdx.x, head = place % heads, token = place / heads;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, features = p.head_size / 4;
  const BatchRow row = ReadRow(p.rows, token / p.tokens, p.tokens, p.past_slots, p.slots);
  const int index = token % p.tokens - row.begin;
  const float sink = p.sinks[head] * kLog2e;
  if (index < 0 || index >= row.count) return WaitForPrevious();
  const int first_row = (index * p.group + head % p.group) / p.tile_rows * p.tile_rows;
  const int splits = SpanOf(p, row, first_row, p.tile_rows).splits;
  WaitForPrevious();

  const int64_t first = static_cast<int64_t>(place) * p.splits;
  float2 sums[2];
  float4 parts[2][32 / kWarps];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    sums[i] = lane + 32 * i < splits ? p.sums[first + lane + 32 * i] : float2{-INFINITY, 0};
#pragma unroll
    for (int j = 0; j < 32 / kWarps; ++j) {
      const int split = 32 * i + j * kWarps + warp;
      parts[i][j] = float4{0, 0, 0, 0};
      if (split < splits && lane < features)
        parts[i][j] = reinterpret_cast<const float4*>(p.partial)[(first + split) * features + lane];
    }
  }
  IssueLoads();
  float largest = fmaxf(sink, fmaxf(sums[0].x, sums[1].x));
  for (int d = 16; d > 0; d /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, d));
  const float base = largest == -INFINITY ? 0.f : largest;
  const float weights[2] = {Exp2(sums[0].x - base), Exp2(sums[1].x - base)};
  float all = fmaf(sums[0].y, weights[0], sums[1].y * weights[1]);
  for (int d = 16; d > 0; d /= 2) all += __shfl_xor_sync(~0u, all, d);
  all += Exp2(sink - base);

  float4 y{0, 0, 0, 0};
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int j = 0; j < 32 / kWarps; ++j) {
      const float4 x = parts[i][j];
      const float weight = __shfl_sync(~0u, weights[i], j * kWarps + warp);
      y.x = fmaf(x.x, weight, y.x), y.y = fmaf(x.y, weight, y.y);
      y.z = fmaf(x.z, weight, y.z), y.w = fmaf(x.w, weight, y.w);
    }
  results[warp][lane] = y;
  __syncthreads();
  if (warp || lane >= features) return;
  for (int w = 1; w < kWarps; ++w) {
    const float4 x = results[w][lane];
    y.x += x.x, y.y += x.y, y.z += x.z, y.w += x.w;
  }
  const float inverse = 1.f / all;
  static_cast<uint2*>(p.output)[static_cast<int64_t>(place) * features + lane] = {
      Half<T>::Pack(y.x * inverse, y.y * inverse), Half<T>::Pack(y.z * inverse, y.w * inverse)};
}

}  // namespace quantmoe
