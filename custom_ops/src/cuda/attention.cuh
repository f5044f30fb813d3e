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
  int tokens, kv_heads, group, head_size, past_slots, slots, window, chunk, splits;
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

// A warp a head of a token; lanes have two features at a time.
template <typename T>
__global__ void __launch_bounds__(kAppendThreads) AttentionAppend(const __grid_constant__ AppendParams p) {
  constexpr int kWarps = kAppendThreads / 32, kMostFeatures = 256;
  __shared__ float features[kWarps][kMostFeatures], scratch[kWarps];
  LaunchDependents();
  const int block = static_cast<int>(blockIdx.x);
  if (block >= p.token_blocks) return CopySlots(p, block - p.token_blocks);
  const qm_attention& a = p.attention;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int heads = a.num_heads, kv_heads = a.kv_num_heads, size = a.head_size, width = (heads + 2 * kv_heads) * size;
  const int token = block / p.blocks_per_token, b = token / p.tokens, s = token % p.tokens;
  const int head = block % p.blocks_per_token * kWarps + warp;  // of queries, then keys, then values
  const BatchRow row = ReadRow(p.rows, b, p.tokens, p.past_slots, p.slots);
  const int index = s - row.begin;
  const bool query = head < heads, key = !query && head < heads + kv_heads;
  if (index < 0 || index >= row.count) {
    const float outside = row.valid ? 0.f : NAN;
    uint32_t* out = static_cast<uint32_t*>(p.output) + (static_cast<int64_t>(token) * heads + head) * (size / 2);
    for (int i = lane; query && i < size / 2; i += 32) out[i] = Half<T>::Pack(outside, outside);
    return;
  }
  const uint32_t* qkv = static_cast<const uint32_t*>(p.qkv) + static_cast<int64_t>(token) * (width / 2);

  float squares = 0;  // of all heads
  if (a.qk_norm == k_qk_norm_row) {
    float sums[2] = {0, 0};
    for (int i = threadIdx.x; i < (heads + kv_heads) * (size / 2); i += kAppendThreads) {
      const float low = Half<T>::Low(qkv[i]), high = Half<T>::High(qkv[i]);
      float& sum = sums[i >= heads * (size / 2)];
      sum = fmaf(low, low, fmaf(high, high, sum));
    }
    const float q = BlockSum(sums[0], scratch), k = BlockSum(sums[1], scratch);
    squares = query ? q : k;
  }
  if (head >= heads + 2 * kv_heads) return;

  float* x = features[warp];
  const uint32_t* from = qkv + static_cast<int64_t>(head) * (size / 2);
  float own = 0;
  for (int i = lane; i < size / 2; i += 32) {
    const float low = Half<T>::Low(from[i]), high = Half<T>::High(from[i]);
    x[2 * i] = low, x[2 * i + 1] = high;
    own = fmaf(low, low, fmaf(high, high, own));
  }
  if (a.qk_norm && (query || key)) {
    const bool by_row = a.qk_norm == k_qk_norm_row;
    for (int d = 16; d > 0; d /= 2) own += __shfl_xor_sync(~0u, own, d);
    const int of_row = by_row ? (query ? heads : kv_heads) * size : size;
    const float inverse = 1.f / sqrtf((by_row ? squares : own) / static_cast<float>(of_row) + a.norm_epsilon);
    const float* weights = (query ? p.q_norm : p.k_norm) + (by_row ? (query ? head : head - heads) * size : 0);
    for (int i = lane; i < size / 2; i += 32) {
      x[2 * i] = x[2 * i] * inverse * weights[2 * i];
      x[2 * i + 1] = x[2 * i + 1] * inverse * weights[2 * i + 1];
    }
  }
  __syncwarp();

  const int half = query || key ? a.rotary_size / 2 : 0;
  const float* cos = p.cos + static_cast<int64_t>(token) * half;
  const float* sin = p.sin + static_cast<int64_t>(token) * half;
  auto turned = [&](int d) {
    if (d >= 2 * half) return x[d];
    const bool second = a.rotary_interleaved ? d % 2 : d >= half;
    const int step = a.rotary_interleaved ? 1 : half, i = a.rotary_interleaved ? d / 2 : d % half;
    const float other = second ? x[d - step] * sin[i] : -(x[d + step] * sin[i]);
    return fmaf(x[d], cos[i], other);
  };
  const int group = heads / kv_heads, kv = query ? head / group : (head - heads) % kv_heads;
  const int64_t pair = static_cast<int64_t>(b) * kv_heads + kv;
  const int64_t at = query ? pair * p.tokens * group + static_cast<int64_t>(index) * group + head % group
                           : pair * p.slots + row.past + index;
  uint32_t* out = static_cast<uint32_t*>(query ? p.queries : key ? p.key : p.value) + at * (size / 2);
  const float scale = query ? (a.softcap != 0 ? a.scale : a.scale * kLog2e) : 1.f;
  for (int i = lane; i < size / 2; i += 32) out[i] = Half<T>::Pack(turned(2 * i) * scale, turned(2 * i + 1) * scale);
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

// MT: tiles of 16 rows a warp has; RW: warps that share rows out, the others share out a stage's slots.
template <typename T, int D, int MT, int RW>
__global__ void __launch_bounds__(kAttendThreads, RW == 1 ? 3 : 2) Attend(const __grid_constant__ AttendParams p) {
  constexpr int KW = kAttendThreads / 32 / RW, kKeys = kAttendKeys, kWarpKeys = kKeys / KW, NT = kWarpKeys / 8;
  constexpr int kRows = 16 * MT * RW, kStage = kKeys * D * 2;  // bytes of keys, or values
  constexpr uint32_t kExponent = Half<T>::kOne == 0x3c003c00 ? 0x7c00 : 0x7f80;
  extern __shared__ uint4 shared[];
  const uint32_t q_at = SharedAddress(shared), kv_at = q_at + kRows * D * 2;
  LaunchDependents();

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int row_warp = warp % RW, key_warp = warp / RW;
  const int pair = blockIdx.y, b = pair / p.kv_heads, kv = pair % p.kv_heads, split = blockIdx.z;
  const int first_row = static_cast<int>(gridDim.x - 1 - blockIdx.x) * kRows;  // those with most slots start first
  const BatchRow batch = ReadRow(p.rows, b, p.tokens, p.past_slots, p.slots);
  const int rows = batch.count * p.group;
  if (first_row >= rows) return WaitForPrevious();
  const int first_slot = batch.past + first_row / p.group;  // of the first token here, and of the last
  const int last_slot = batch.past + (min(first_row + kRows, rows) - 1) / p.group;
  const int low = FirstSlot(p, first_slot), full_low = FirstSlot(p, last_slot);
  const int first_tile = low / kKeys, tiles = last_slot / kKeys + 1 - first_tile;
  const int begin = first_tile + static_cast<int>(static_cast<int64_t>(tiles) * split / p.splits);
  const int end = first_tile + static_cast<int>(static_cast<int64_t>(tiles) * (split + 1) / p.splits);

  const T* keys = static_cast<const T*>(p.key) + static_cast<int64_t>(pair) * p.slots * D;
  const T* values = static_cast<const T*>(p.value) + static_cast<int64_t>(pair) * p.slots * D;
  auto load = [&](int tile) {
    const uint32_t to = kv_at + (tile & 1) * 2 * kStage;
#pragma unroll
    for (int i = 0; i < kKeys * D / 8 / kAttendThreads; ++i) {
      const int at = static_cast<int>(threadIdx.x) + i * kAttendThreads, key = at / (D / 8), chunk = at % (D / 8);
      const int slot = tile * kKeys + key;
      const bool there = slot >= low && slot <= last_slot;
      const int64_t from = static_cast<int64_t>(there ? slot : last_slot) * D + chunk * 8;
      CopyAsync16Past(to + Swizzled<D>(key, chunk), keys + from, there);
      CopyAsync16Past(to + kStage + Swizzled<D>(key, chunk), values + from, there);
    }
  };
  // What the append does not write may be read while it runs.
  const bool early = p.in_place && (begin + 1) * kKeys <= batch.past;
  if (!early) WaitForPrevious();
  if (begin < end) load(begin);
  if (early) WaitForPrevious();
  const T* queries = static_cast<const T*>(p.queries) + static_cast<int64_t>(pair) * p.tokens * p.group * D;
  for (int at = threadIdx.x; begin < end && at < kRows * D / 8; at += kAttendThreads) {
    const int row = at / (D / 8), chunk = at % (D / 8);
    const bool there = first_row + row < rows;
    CopyAsync16Past(q_at + Swizzled<D>(row, chunk),
                    queries + static_cast<int64_t>(there ? first_row + row : 0) * D + chunk * 8, there);
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

  for (int tile = begin; tile < end; ++tile) {
    CopyAsyncWaitAll();
    __syncthreads();
    if (tile + 1 < end) load(tile + 1);
    const uint32_t k_at = kv_at + (tile & 1) * 2 * kStage, v_at = k_at + kStage;
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
      for (int m = 0; m < MT; ++m)
        LoadMatrices(q[m], q_at + Swizzled<D>((row_warp * MT + m) * 16 + lane % 16, 2 * d + lane / 16));
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

    if (p.softcap != 0) {
      const float inner = 2 * kLog2e / p.softcap, outer = p.softcap * kLog2e;
#pragma unroll
      for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i)  // tanh x = 1 - 2 / (1 + e^2x)
            s[m][n][i] = outer * (1.f - 2 * Reciprocal(1.f + Exp2(s[m][n][i] * inner)));
    }
    const int stage_slot = tile * kKeys;
    const bool masked = stage_slot < full_low || stage_slot + kKeys - 1 > first_slot;  // for some row
    auto sees = [&](int m, int h, int key) {                                           // key: of the warp's
      const int slot = stage_slot + first_key + key;
      return slot <= slot_of[m][h] && slot >= FirstSlot(p, slot_of[m][h]);
    };
    if (masked) {
#pragma unroll
      for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int from = FirstSlot(p, slot_of[m][h]) - stage_slot - first_key;
          const int to = slot_of[m][h] - stage_slot - first_key;
#pragma unroll
          for (int n = 0; n < NT; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              const int key = n * 8 + 2 * t + i;
              if (key < from || key > to) s[m][n][2 * h + i] = -INFINITY;
            }
        }
    }

#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float largest = most[m][h];
#pragma unroll
        for (int n = 0; n < NT; ++n) largest = fmaxf(largest, fmaxf(s[m][n][2 * h], s[m][n][2 * h + 1]));
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
        const float base = largest == -INFINITY ? 0.f : largest;  // nothing seen yet
        const float factor = Exp2(most[m][h] - base);
        most[m][h] = largest;
        float added = 0;
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
          for (int i = 0; i < 2; ++i) added += s[m][n][2 * h + i] = Exp2(s[m][n][2 * h + i] - base);
        sum[m][h] = fmaf(sum[m][h], factor, added);
#pragma unroll
        for (int n = 0; n < D / 8; ++n) acc[m][n][2 * h] *= factor, acc[m][n][2 * h + 1] *= factor;
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
      for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          weight[m][i] = Half<T>::Pack(s[m][k + i / 2][i % 2 * 2], s[m][k + i / 2][i % 2 * 2 + 1]);
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
  for (int m = 0; m < MT; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h)
      for (int d = 1; d < 4; d *= 2) sum[m][h] += __shfl_xor_sync(~0u, sum[m][h], d);

  const int heads = p.kv_heads * p.group;
  // Of a row of the tile: its place in [batch, tokens, heads].
  auto place = [&](int row) {
    const int at = first_row + row;
    return (static_cast<int64_t>(b) * p.tokens + batch.begin + at / p.group) * heads + kv * p.group + at % p.group;
  };
  auto sink = [&](int row) { return p.sinks[kv * p.group + (first_row + row) % p.group] * kLog2e; };
  if constexpr (KW == 1) {
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = (row_warp * MT + m) * 16 + h * 8 + g;
        if (first_row + row >= rows) continue;
        const int64_t to = place(row);
        if (p.splits > 1) {
          const int64_t part = to * p.splits + split;
          if (t == 0) p.sums[part] = {most[m][h], sum[m][h]};
          if (begin == end) continue;
#pragma unroll
          for (int n = 0; n < D / 8; ++n)
            *reinterpret_cast<float2*>(p.partial + part * D + n * 8 + 2 * t) = {acc[m][n][2 * h], acc[m][n][2 * h + 1]};
          continue;
        }
        const float own = sink(row), largest = fmaxf(most[m][h], own), factor = Exp2(most[m][h] - largest);
        const float inverse = factor / fmaf(sum[m][h], factor, Exp2(own - largest));
        uint32_t* out = static_cast<uint32_t*>(p.output) + to * (D / 2) + t;
#pragma unroll
        for (int n = 0; n < D / 8; ++n)
          out[n * 4] = Half<T>::Pack(acc[m][n][2 * h] * inverse, acc[m][n][2 * h + 1] * inverse);
      }
  } else {
    static_assert(MT == 1 && RW == 1, "a warp's rows are the block's");
    constexpr int kStride = D + 4;
    static_assert(KW * 16 * (kStride + 2) * 4 <= 4 * kStage, "fits in the stages");
    float* of_warps = reinterpret_cast<float*>(shared) + kRows * D / 2;  // [KW][16][kStride], then [KW][16] pairs
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
      const int64_t to = place(row);
      float largest = p.splits > 1 ? -INFINITY : sink(row);
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
        if (begin < end) *reinterpret_cast<float2*>(p.partial + part * D + column) = y;
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
  WaitForPrevious();
  if (index < 0 || index >= row.count) return;

  const int64_t first = static_cast<int64_t>(place) * p.splits;
  float2 sums[2];
  float largest = sink;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    sums[i] = lane + 32 * i < p.splits ? p.sums[first + lane + 32 * i] : float2{-INFINITY, 0};
    largest = fmaxf(largest, sums[i].x);
  }
  for (int d = 16; d > 0; d /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, d));
  const float base = largest == -INFINITY ? 0.f : largest;
  float weights[2], all = 0;
  unsigned used[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    used[i] = __ballot_sync(~0u, sums[i].y != 0);
    weights[i] = Exp2(sums[i].x - base);
    all = fmaf(sums[i].y, weights[i], all);
  }
  for (int d = 16; d > 0; d /= 2) all += __shfl_xor_sync(~0u, all, d);
  all += Exp2(sink - base);

  float4 y{0, 0, 0, 0};
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int j = 0; j < 32 / kWarps; ++j) {
      const int split = j * kWarps + warp;
      const float weight = __shfl_sync(~0u, weights[i], split);
      float4 x{0, 0, 0, 0};
      if (used[i] >> split & 1 && lane < features)
        x = reinterpret_cast<const float4*>(p.partial)[(first + 32 * i + split) * features + lane];
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
