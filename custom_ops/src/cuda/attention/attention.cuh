// What CachedAttention's kernels share.
//
// Rows are heads of tokens. Heads that share keys lie side by side, so a block reads keys and values once for all of
// them. Few rows, as in decode, take one kernel. attend_few norms, rotates and appends, too, and the blocks of a
// cluster add up what each found in its share of the slots. Many rows take attention_append first, which writes the
// queries to the workspace, then attend or attend_wide in tiles. If splits of a tile's slots are no cluster,
// attend_merge adds them up. The device reads tokens' ranges of slots, so a launch has one shape at every position.
//
// With `selected`, attend_few and the kernels of latents gather the slots of a token's list. attend and attend_wide
// have tiles of several tokens. So they read stages of all slots that a list of the tile has a part of
// (attention_lists.cuh).
//
// Scores are in units of log2(e): score_factor has it.
//
// A cache of codes (kCodes) goes through shared memory as bytes. A stage of it is widened to float16 before the
// product: float16 has all numbers of int8 and e4m3. Queries and weights are then float16, too, whatever T is. Scores
// and sums are multiplied by the scales.
#pragma once
#include <cuda.h>

#include <type_traits>

#include "core/attributes.h"
#include "cuda/attention/attention.h"
#include "cuda/common/ptx.cuh"
#include "quantmoe/quant_moe_cuda.h"

namespace quantmoe {

constexpr float kLog2e = 1.44269504f, kLn2 = 0.693147181f;

struct AttentionParams {
  qm_attention attention;
  int batch, tokens, past_slots, slots, group;  // slots: of present; group: query heads that share keys
  const void *qkv, *past_key, *past_value;
  int row_size, gates_size;  // of a token in qkv, and how many of it are gates
  const int* rows;
  // For caches in blocks, with packed tokens of all rows. Null: each row has slots and tokens of its own.
  const int* block_table;        // [batch, columns]
  int columns, blocks;           // of the table; of the caches
  int positions;                 // rows of cos and sin, by slot
  int all_tokens;                // of all rows
  int row_tokens, least_tokens;  // of a row that the kernel has: at most, at least; other kernels have other rows
  const float *cos, *sin, *q_norm, *k_norm, *sinks;
  float score_factor;          // of products of queries and keys
  void *output, *key, *value;  // key, value: T or codes [batch, kv_heads, slots, ..]
  void* queries;               // T or, of codes, float16 [batch, kv_heads, tokens * group, D], rows from the first
                               // token that counts
  float* partial;              // [batch, tokens, kv_heads * group, splits, V]
  float2* sums;  // of the same rows: largest score, sum of weights; sum 0: no slot, partial is not written
  int tile_rows, tiles, pairs, splits;  // pairs: batch * kv_heads
  int stage_log, least_log;             // logarithms of 2: slots of a stage, stages that a split has at least
  int token_blocks, blocks_per_token;   // of attention_append, before those that copy past
  int heads_per_block;                  // of a token, of queries, keys and values
  int key_width, value_width;           // of the caches
  bool cluster, deep;                   // the splits of a tile are one; kDeepStages of them
  bool appended;                        // of latent attention: the new keys are in the cache
  const int* selected;                  // [batch, tokens, lists, list_size], or null
  int list_size, lists;
  bool gathers;         // stages are of a list's places, in that a token's heads are a tile; else of all slots
  int tiles_per_token;  // of latent attention
  // Of keys that are their values, whose stages are of entries (attention_equal.cuh); attention.sliding_window is 0
  // then.
  bool equal;
  int window;    // the node's sliding_window
  int* entries;  // of each list: how many compressed keys it has, and their slots
};

// What attend_ring is told. Boxes of the maps: 64 columns of a tile's query rows, and 64 columns of a stage's slots.
struct RingParams {
  AttentionParams attention;
  int tiles;  // of all heads and requests
  CUtensorMap queries, keys, values;
};

// What a batch row says. One that asks for tokens or slots that are not there counts nothing, and its output is NaN.
struct BatchRow {
  int begin, count, past;
  bool valid;
};
__device__ inline BatchRow check_row(const AttentionParams& params, int batch_row, int begin, int count, int past) {
  BatchRow r{begin, count, past, true};
  r.valid = r.begin >= 0 && r.count >= 0 && r.past >= 0 && r.begin <= params.tokens - r.count &&
            r.past <= params.past_slots && r.past <= params.slots - r.count;
  if (params.block_table) {
    r.valid &= r.count > 0 && r.past <= params.positions - r.count;
    if (params.all_tokens == params.batch) r.valid &= r.begin == batch_row && r.count == 1;
  }
  if (!r.valid) r.begin = r.count = r.past = 0;
  return r;
}
__device__ inline BatchRow read_row(const AttentionParams& params, int batch_row) {
  return check_row(params, batch_row, params.rows[3 * batch_row], params.rows[3 * batch_row + 1],
                   params.rows[3 * batch_row + 2]);
}
// Whether the kernel has the row.
__device__ inline bool is_mine(const AttentionParams& params, const BatchRow& row) {
  return row.count >= params.least_tokens && row.count <= params.row_tokens;
}
// The last row whose start is not after `wanted`; starts ascend.
template <class Start>
__device__ inline int find_row(const AttentionParams& params, int wanted, const Start& start) {
  int low = 0, high = params.batch - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (start(middle) <= wanted)
      low = middle;
    else
      high = middle - 1;
  }
  return low;
}
// The row of a token, counted through the batch.
__device__ inline int row_of_token(const AttentionParams& params, int token) {
  if (!params.block_table) return token / params.tokens;
  return find_row(params, token, [&](int row) { return params.rows[3 * row]; });
}
// A row's first token, counted through the batch, if all its tokens count.
__device__ inline int64_t first_token(const AttentionParams& params, int batch_row) {
  return params.block_table ? 0 : static_cast<int64_t>(batch_row) * params.tokens;
}
// The place of a token's angles in cos and sin. token: in the batch. index: among the row's tokens that count.
__device__ inline int angles_of(const AttentionParams& params, int token, int past, int index) {
  return params.block_table ? min(max(past, 0) + index, params.positions - 1) : token;
}
// The place of a row's slot in the caches of a head, in slots. Not `there`: the table names no block. A stage's slots
// are in one block, `slot_step` apart.
struct Place {
  int64_t at;
  bool there;
};
__device__ inline Place find_slot(const AttentionParams& params, int batch_row, int slot) {
  if (!params.block_table) return {slot, true};
  const int size = params.attention.block_size;
  const int block = params.block_table[batch_row * params.columns + slot / size];
  const bool there = static_cast<unsigned>(block) < static_cast<unsigned>(params.blocks);
  return {there ? (static_cast<int64_t>(block) * size + slot % size) * params.attention.kv_num_heads : 0, there};
}
__device__ inline int slot_step(const AttentionParams& params) {
  return params.block_table ? params.attention.kv_num_heads : 1;
}
// The caches of a row's head: slots of a head before it, `slots` of each pair.
__device__ inline int64_t first_slot_of(const AttentionParams& params, int pair, int kv_head, int slots) {
  return params.block_table ? kv_head : static_cast<int64_t>(pair) * slots;
}
// Where a token's queries of a kv head are: [batch, kv_heads, tokens * group], packed [kv_heads, all_tokens * group].
__device__ inline int64_t queries_of(const AttentionParams& params, const BatchRow& row, int pair, int kv_head,
                                     int index) {
  const int64_t token = params.block_table ? static_cast<int64_t>(kv_head) * params.all_tokens + row.begin
                                           : static_cast<int64_t>(pair) * params.tokens;
  return (token + index) * params.group;
}
// What a block of many rows has: of a row's head the tile's first row of queries, which may be after the last.
struct ManyTile {
  int pair, batch_row, kv_head, first_row;
};
// Those with most slots first. Packed rows have as many tiles as any lengths need: row r begins with tile
// begin * group / rows + r.
__device__ inline ManyTile many_tile(const AttentionParams& params, int rows, int block) {
  const int kv_heads = params.attention.kv_num_heads;
  if (!params.block_table) {
    const int pair = block % params.pairs;
    return {pair, pair / kv_heads, pair % kv_heads, (params.tiles - 1 - block / params.pairs) * rows};
  }
  const int tile = params.tiles - 1 - block / kv_heads, kv_head = block % kv_heads;
  auto start = [&](int row) { return max(params.rows[3 * row], 0) * params.group / rows + row; };
  const int batch_row = find_row(params, tile, start);
  return {batch_row * kv_heads + kv_head, batch_row, kv_head, max(tile - start(batch_row), 0) * rows};
}
// The first slot that the token in slot p sees.
__device__ inline int first_visible_slot(const AttentionParams& params, int slot) {
  const int window = params.attention.sliding_window, chunk = params.attention.chunk_size;
  const int low = window ? max(slot - window + 1, 0) : 0;
  return chunk ? max(low, slot / chunk * chunk) : low;
}

// What a tile of query rows sees, in stages of slots, and how many splits share them.
struct Span {
  int first_slot, last_slot;  // of the first token, of the last
  int low, full_low;          // the first slot that any token sees, that all see
  int first_stage, stages, splits;
  // The first stage of a split; the next one's is its end. Stages and splits are below 2^24 and 2^7.
  __device__ int begin(int split) const {
    return first_stage + static_cast<int>(static_cast<uint32_t>(stages) * static_cast<uint32_t>(split) /
                                          static_cast<uint32_t>(splits));
  }
};
// first, last: tokens of those that count.
__device__ inline Span span_of(const AttentionParams& params, const BatchRow& batch, int first, int last) {
  Span span;
  span.first_slot = batch.past + first, span.last_slot = batch.past + last;
  span.low = first_visible_slot(params, span.first_slot), span.full_low = first_visible_slot(params, span.last_slot);
  span.first_stage = span.low >> params.stage_log,
  span.stages = (span.last_slot >> params.stage_log) + 1 - span.first_stage;
  span.splits = min(params.splits, (span.stages + (1 << params.least_log) - 1) >> params.least_log);
  return span;
}
// Whether the row's tokens see lists of slots.
__device__ inline bool has_lists(const AttentionParams& params, const BatchRow& batch) {
  return params.selected && batch.past + batch.count > params.list_size;
}
// What a list of the token in `slot` has, at most, as if it had slots 0, 1, ..
__device__ inline Span span_of_list(const AttentionParams& params, int slot) {
  Span span{};
  span.first_slot = span.last_slot = min(params.list_size, slot + 1) - 1;
  span.stages = (span.last_slot >> params.stage_log) + 1;
  span.splits = min(params.splits, (span.stages + (1 << params.least_log) - 1) >> params.least_log);
  return span;
}
// The list of a row's token, counted from the first that counts on.
__device__ inline const int* list_of(const AttentionParams& params, const BatchRow& batch, int batch_row, int kv_head,
                                     int token) {
  const int64_t at = static_cast<int64_t>(batch_row) * params.tokens + batch.begin + token;
  return params.selected + (at * params.lists + (params.lists > 1 ? kv_head : 0)) * params.list_size;
}
// How many of a list's first `most` places have slots.
__device__ inline int length_of(const int* list, int most) {
  if (list[most - 1] >= 0) return most;
  int low = 0, high = most - 1;  // places below `low` have slots, from `high` on none
  while (low < high) {
    const int middle = (low + high) / 2;
    if (list[middle] >= 0)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}
// The same of a tile of rows.
__device__ inline Span span_of(const AttentionParams& params, const BatchRow& batch, int first_row) {
  const int end = min(first_row + params.tile_rows, batch.count * params.group);
  return span_of(params, batch, first_row / params.group, (end - 1) / params.group);
}

// Copies what past has of 64 slots of a head, and zeros what comes after the new tokens.
__device__ inline void copy_slots(const AttentionParams& params, int block) {
  const int parts = (params.slots + 63) / 64, pair = block / parts, first = block % parts * 64;
  if (pair >= params.batch * params.attention.kv_num_heads) return;
  const BatchRow row = read_row(params, pair / params.attention.kv_num_heads);
  auto copy = [&](void* present, const void* past, int chunks) {
    for (int i = threadIdx.x; present != past && i < 64 * chunks; i += static_cast<int>(blockDim.x)) {
      const int slot = first + i / chunks, chunk = i % chunks;
      if (slot >= params.slots || (slot >= row.past && slot < row.past + row.count)) continue;
      const int64_t from = (static_cast<int64_t>(pair) * params.past_slots + slot) * chunks + chunk;
      const int64_t to = (static_cast<int64_t>(pair) * params.slots + slot) * chunks + chunk;
      static_cast<uint4*>(present)[to] = slot < row.past ? static_cast<const uint4*>(past)[from] : uint4{};
    }
  };
  const int elements = params.attention.cache_format == k_cache_format_none ? 8 : 16;  // of 16 bytes
  copy(params.key, params.past_key, params.key_width / elements);
  copy(params.value, params.past_value, params.value_width / elements);
}

template <typename T>
__device__ inline void widen(float (&x)[8], const uint4& v) {
  x[0] = Half<T>::low(v.x), x[1] = Half<T>::high(v.x), x[2] = Half<T>::low(v.y), x[3] = Half<T>::high(v.y);
  x[4] = Half<T>::low(v.z), x[5] = Half<T>::high(v.z), x[6] = Half<T>::low(v.w), x[7] = Half<T>::high(v.w);
}
template <typename T>
__device__ inline uint4 narrow(const float (&x)[8]) {
  return {Half<T>::pack(x[0], x[1]), Half<T>::pack(x[2], x[3]), Half<T>::pack(x[4], x[5]), Half<T>::pack(x[6], x[7])};
}

// What keys, values, queries and weights are multiplied as, and an element of the cache.
template <typename T, bool kCodes>
struct Cached {
  using Number = std::conditional_t<kCodes, __half, T>;
  using Element = std::conditional_t<kCodes, uint8_t, T>;
  static constexpr int kChunk = 16 / sizeof(Element);  // of 16 bytes
};

// The code of x / scale: "Cache formats" of ops/cached_attention.def.
__device__ inline uint32_t int8_code(float x, float scale) {
  const float number = fminf(fmaxf(__fdiv_rn(x, scale), -128.f), 127.f);
  return static_cast<uint32_t>(__float2int_rn(x != x ? 0.f : number)) & 0xff;
}
__device__ inline uint32_t e4m3_codes(float first, float second, float scale) {
  uint16_t codes = 0;
#if __CUDA_ARCH__ >= 900
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;"
      : "=h"(codes)
      : "f"(__fdiv_rn(second, scale)), "f"(__fdiv_rn(first, scale)));
#endif
  return codes;
}
// Eight numbers as the cache has them: T, or codes.
template <typename T, bool kCodes>
__device__ inline void store_eight(const qm_attention& node, bool key, const float (&x)[8], void* to) {
  if constexpr (kCodes) {
    const float scale = key ? node.k_scale : node.v_scale;
    uint32_t codes[2] = {0, 0};
    if (node.cache_format == k_cache_format_fp8_e4m3) {
#pragma unroll
      for (int i = 0; i < 4; ++i) codes[i / 2] |= e4m3_codes(x[2 * i], x[2 * i + 1], scale) << i % 2 * 16;
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) codes[i / 4] |= int8_code(x[i], scale) << i % 4 * 8;
    }
    *static_cast<uint2*>(to) = {codes[0], codes[1]};
  } else {
    *static_cast<uint4*>(to) = narrow<T>(x);
  }
}

// Four codes as float16.
__device__ inline uint2 widen_int8(uint32_t codes) {
  const uint32_t biased = codes ^ 0x80808080;  // 1024 + code + 128
  uint32_t low, high;
  asm("prmt.b32 %0, %1, %2, 0x5150;" : "=r"(low) : "r"(biased), "r"(0x64646464));
  asm("prmt.b32 %0, %1, %2, 0x5352;" : "=r"(high) : "r"(biased), "r"(0x64646464));
  return {Half<__half>::sub(low, 0x64806480), Half<__half>::sub(high, 0x64806480)};
}
__device__ inline uint2 widen_e4m3(uint32_t codes) {
  uint2 numbers{0, 0};
#if __CUDA_ARCH__ >= 900
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(numbers.x) : "h"(static_cast<uint16_t>(codes)));
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(numbers.y) : "h"(static_cast<uint16_t>(codes >> 16)));
#endif
  return numbers;
}
// kRows rows of D codes, one after the other, as float16 where place(row, chunk of eight) says; by kThreads threads.
template <int D, int kRows, int kThreads, class Place>
__device__ __forceinline__ void widen_rows(bool e4m3, uint32_t from, const Place& place) {
  constexpr int kChunks = kRows * D / 8;
  static_assert(kChunks % kThreads == 0, "each thread widens as many");
#pragma unroll
  for (int i = 0; i < kChunks / kThreads; ++i) {
    const int at = static_cast<int>(threadIdx.x) + i * kThreads;
    const uint2 codes = load8(from + at * 8);
    const uint2 low = e4m3 ? widen_e4m3(codes.x) : widen_int8(codes.x);
    const uint2 high = e4m3 ? widen_e4m3(codes.y) : widen_int8(codes.y);
    store16(place(at / (D / 8), at % (D / 8)), {low.x, low.y, high.x, high.y});
  }
}

// The compiler moves no load from before this past it, to where its value is used.
__device__ inline void issue_loads() { asm volatile("" ::: "memory"); }
__device__ inline void load_eight(float (&to)[8], const float* from) {
  const float4 a = reinterpret_cast<const float4*>(from)[0], b = reinterpret_cast<const float4*>(from)[1];
  to[0] = a.x, to[1] = a.y, to[2] = a.z, to[3] = a.w, to[4] = b.x, to[5] = b.y, to[6] = b.z, to[7] = b.w;
}
template <typename T>
__device__ inline float add_squares(const uint4& v, float sum) {
  for (uint32_t pair : {v.x, v.y, v.z, v.w})
    sum = fmaf(Half<T>::low(pair), Half<T>::low(pair), fmaf(Half<T>::high(pair), Half<T>::high(pair), sum));
  return sum;
}
// A token's queries, keys and values, in chunks of eight features.
__device__ inline const uint4* row_of(const AttentionParams& params, int64_t token) {
  return static_cast<const uint4*>(params.qkv) + (token * params.row_size + params.gates_size) / 8;
}
// What multiplies an even feature and the next one of a head of a token, `place`.
template <typename T>
__device__ inline float2 gates_of(const AttentionParams& params, int64_t place, int feature) {
  if (!params.gates_size) return {1.f, 1.f};
  const uint32_t head = static_cast<uint32_t>(place) % params.attention.num_heads,
                 token = static_cast<uint32_t>(place) / params.attention.num_heads;
  const int64_t at = static_cast<int64_t>(token) * params.row_size + head * params.attention.v_head_size + feature;
  const uint32_t gates = static_cast<const uint32_t*>(params.qkv)[at / 2];
  return {sigmoid(Half<T>::low(gates)), sigmoid(Half<T>::high(gates))};
}
// To the output: four features of a head of a token, times `factor`.
template <typename T>
__device__ inline void store_four(const AttentionParams& params, int64_t place, int feature, const float4& y,
                                  float factor) {
  const float2 low = gates_of<T>(params, place, feature), high = gates_of<T>(params, place, feature + 2);
  static_cast<uint2*>(params.output)[(place * params.attention.v_head_size + feature) / 4] = {
      Half<T>::pack(y.x * factor * low.x, y.y * factor * low.y),
      Half<T>::pack(y.z * factor * high.x, y.w * factor * high.y)};
}

// The angles of a token that a lane's eight features turn by.
struct HeadTurn {
  float cos[8], sin[8];
};
// A lane's part of a head: eight features from d on. kLanes lanes of a warp have it all.
template <typename T, int kLanes>
struct HeadPart {
  int d, size, head, chunk;  // head: of queries, of keys, or of values; chunk: where it is of row_of
  bool query, key, there, normed, turns;
  bool by_row, apart, whole;  // whole: all eight features are of one half
  int half;
  float per_feature, scale;  // 1 / features that are normed together
  float weights[8];

  // index: heads of queries, then keys, then values
  __device__ HeadPart(const AttentionParams& params, int index, int lane) {
    const qm_attention& node = params.attention;
    const int heads = node.num_heads, groups = node.kv_num_heads;
    d = lane * 8;
    query = index < heads, key = !query && index < heads + groups;
    head = query ? index : key ? index - heads : index - heads - groups;
    size = query || key ? node.head_size : node.v_head_size;
    chunk = (query || key ? index * node.head_size : (heads + groups) * node.head_size + head * size) / 8 + lane;
    there = index < heads + 2 * groups && d < size;
    normed = node.qk_norm && (query || key);
    by_row = node.qk_norm == k_qk_norm_row, apart = !node.rotary_interleaved, half = node.rotary_size / 2;
    turns = there && (query || key) && d < 2 * half, whole = apart && half % 8 == 0;
    per_feature = 1.f / static_cast<float>(by_row ? (query ? heads : groups) * size : size);
    scale = query && node.cache_format == k_cache_format_none ? params.score_factor : 1.f;
  }
  __device__ void load_weights(const AttentionParams& params) {
#pragma unroll
    for (int j = 0; j < 8; ++j) weights[j] = 1;
    if (normed && there) load_eight(weights, (query ? params.q_norm : params.k_norm) + (by_row ? head * size : 0) + d);
  }
  // The angles of a row of cos and sin.
  __device__ void load_turn(const AttentionParams& params, int row, HeadTurn& turn) const {
    const int64_t at = static_cast<int64_t>(row) * half;
    if (turns && whole) {
      const int from = d < half ? d : d - half;
      load_eight(turn.cos, params.cos + at + from);
      load_eight(turn.sin, params.sin + at + from);
    } else if (turns) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const int i = apart ? (d + j < half ? d + j : d + j - half) : (d + j) / 2;
        turn.cos[j] = i < half ? params.cos[at + i] : 1.f;
        turn.sin[j] = i < half ? params.sin[at + i] : 0.f;
      }
    }
  }
  // Norms, turns and scales. squares: of the token's row, where norms are of that. of_head: shared, 2 kLanes of them,
  // the head's own.
  __device__ void apply(const AttentionParams& params, const HeadTurn& turn, float squares, float4* of_head,
                        float (&x)[8]) const {
    const qm_attention& node = params.attention;
    if (node.qk_norm && !by_row) {
      squares = 0;
#pragma unroll
      for (int j = 0; j < 8; ++j) squares = fmaf(x[j], x[j], squares);
      for (int i = kLanes / 2; i > 0; i /= 2) squares += __shfl_xor_sync(~0u, squares, i);
    }
    if (normed) {
      const float inverse = rsqrtf(fmaf(squares, per_feature, node.norm_epsilon));
#pragma unroll
      for (int j = 0; j < 8; ++j) x[j] = x[j] * inverse * weights[j];
    }
    const float* values = reinterpret_cast<const float*>(of_head);
    if (apart && half) {
      __syncwarp();  // the last token's are read
      of_head[d / 4] = {x[0], x[1], x[2], x[3]};
      of_head[d / 4 + 1] = {x[4], x[5], x[6], x[7]};
      __syncwarp();
    }
    if (turns) {
      float other[8];
      if (whole) {
        load_eight(other, values + (d < half ? d + half : d - half));
      } else if (apart) {
#pragma unroll
        for (int j = 0; j < 8; ++j)
          other[j] = d + j >= 2 * half ? 0.f : values[d + j < half ? d + j + half : d + j - half];
      } else {
#pragma unroll
        for (int j = 0; j < 8; ++j) other[j] = x[j ^ 1];
      }
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const bool second = apart ? d + j >= half : j % 2;
        const float across = other[j] * turn.sin[j];
        x[j] = fmaf(x[j], turn.cos[j], second ? across : -across);
      }
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) x[j] *= scale;
  }
};

template <int D>
struct Width {
  static constexpr int value = D;
};
// Where 16 bytes of a row of D values lie in shared memory: eight rows' same chunk in eight different groups of banks.
template <int D>
__device__ inline uint32_t swizzled(int row, int chunk) {
  constexpr int kChunks = D / 8;
  const int turn = kChunks % 8 ? (row >> 1) & 3 : row & 7;
  return static_cast<uint32_t>(row * kChunks + (chunk ^ turn)) * 16;
}

// Of two values: whether one is an infinity or a NaN, which their exponents tell; those alone, zero for others.
template <typename T>
constexpr uint32_t kExponent = Half<T>::kOne == 0x3c003c00 ? 0x7c00 : 0x7f80;
__device__ inline bool is_odd(uint32_t pair, uint32_t exponent) {
  return (pair & exponent) == exponent || (pair >> 16 & exponent) == exponent;
}
__device__ inline bool is_odd(const uint4& v, uint32_t exponent) {
  return is_odd(v.x, exponent) || is_odd(v.y, exponent) || is_odd(v.z, exponent) || is_odd(v.w, exponent);
}
__device__ inline uint32_t only_odd(uint32_t pair, uint32_t exponent) {
  return ((pair & exponent) == exponent ? pair & 0xffff : 0) |
         ((pair >> 16 & exponent) == exponent ? pair & 0xffff0000 : 0);
}

// A lane has two rows of a tile of 16, g and g + 8 (h), and two of eight columns. [n][2 h + i] is column 8 n + 2 t + i.
template <int N>
__device__ inline void softcap_scores(const AttentionParams& params, float (&s)[N][4]) {
  const float softcap = params.attention.softcap;
  if (softcap == 0) return;
  const float inner = 2 * kLog2e / softcap, outer = softcap * kLog2e;
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i)  // tanh x = 1 - 2 / (1 + e^2x)
      s[n][i] = outer * (1.f - 2 * reciprocal(1.f + fast_exp2(s[n][i] * inner)));
}
// Of codes; others have it in the queries, which float16 has not the range for.
template <int N>
__device__ inline void scale_scores(const AttentionParams& params, float (&s)[N][4]) {
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) s[n][i] *= params.score_factor;
}
// Scores of slots, from `first` on, that the rows do not see: none.
template <int N>
__device__ inline void mask_scores(const AttentionParams& params, float (&s)[N][4], const int (&slot_of)[2],
                                   int first) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int from = first_visible_slot(params, slot_of[h]) - first, to = slot_of[h] - first;
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int key = n * 8 + threadIdx.x % 4 * 2 + i;
        if (key < from || key > to) s[n][2 * h + i] = -INFINITY;
      }
  }
}
// What a lane's rows see of the slots from `first` on: those from their first visible one to their own.
template <int MT>
struct SlotsBefore {
  const AttentionParams& params;
  const int (&slot_of)[MT][2];
  int first;
  template <int N>
  __device__ void mask(int m, float (&s)[N][4]) const {
    mask_scores(params, s, slot_of[m], first);
  }
  __device__ bool sees(int m, int h, int key) const {
    return first + key <= slot_of[m][h] && first + key >= first_visible_slot(params, slot_of[m][h]);
  }
};
// The largest score of each row, if that is more.
template <int N>
__device__ inline void find_largest(const float (&s)[N][4], float (&largest)[2]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
#pragma unroll
    for (int n = 0; n < N; ++n) largest[h] = fmaxf(largest[h], fmaxf(s[n][2 * h], s[n][2 * h + 1]));
    largest[h] = fmaxf(largest[h], __shfl_xor_sync(~0u, largest[h], 1));
    largest[h] = fmaxf(largest[h], __shfl_xor_sync(~0u, largest[h], 2));
  }
}
// Scores become weights, relative to the largest so far; factor: by which what was summed before is scaled to that. A
// lane's sum is of its own columns.
template <int N>
__device__ inline void weigh(float (&s)[N][4], const float (&largest)[2], float (&most)[2], float (&sum)[2],
                             float (&factor)[2]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float base = largest[h] == -INFINITY ? 0.f : largest[h];  // nothing seen yet
    factor[h] = fast_exp2(most[h] - base);
    most[h] = largest[h];
    float added = 0;
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) added += s[n][2 * h + i] = fast_exp2(s[n][2 * h + i] - base);
    sum[h] = fmaf(sum[h], factor[h], added);
  }
}
template <int M>
__device__ inline void rescale(float (&acc)[M][4], const float (&factor)[2]) {
#pragma unroll
  for (int h = 0; h < 2; ++h)
#pragma unroll
    for (int n = 0; n < M; ++n) acc[n][2 * h] *= factor[h], acc[n][2 * h + 1] *= factor[h];
}
template <int N, int M>
__device__ inline void weigh(float (&s)[N][4], float (&acc)[M][4], float (&most)[2], float (&sum)[2]) {
  float largest[2] = {most[0], most[1]}, factor[2];
  find_largest(s, largest);
  weigh(s, largest, most, sum, factor);
  rescale(acc, factor);
}
// Weights of 16 columns from n * 8 on, as the first operand of a product.
template <typename T, int N>
__device__ inline void pack_weights(uint32_t (&a)[4], const float (&s)[N][4], int n) {
#pragma unroll
  for (int i = 0; i < 4; ++i) a[i] = Half<T>::pack(s[n + i / 2][i % 2 * 2], s[n + i / 2][i % 2 * 2 + 1]);
}
// Sums of the four lanes of a row.
__device__ inline void add_quads(float (&sum)[2]) {
#pragma unroll
  for (int h = 0; h < 2; ++h)
    for (int d = 1; d < 4; d *= 2) sum[h] += __shfl_xor_sync(~0u, sum[h], d);
}
// Of a query row: its place in [batch, tokens, heads]; of a place: its sink.
__device__ inline int64_t place_of(const AttentionParams& params, const BatchRow& batch, int batch_row, int kv_head,
                                   int row) {
  const int64_t token = first_token(params, batch_row) + batch.begin + row / params.group;
  return (token * params.attention.kv_num_heads + kv_head) * params.group + row % params.group;
}
__device__ inline float sink_of(const AttentionParams& params, int64_t place) {
  return params.sinks[place % params.attention.num_heads] * kLog2e;
}
// Writes row h of a lane's sums to the output, or as a part of it. The sums are of kTiles tiles of eight columns, from
// first_n on.
template <typename T, int M, int kTiles = M>
__device__ inline void store_row(const AttentionParams& params, const float (&acc)[M][4], int h, float most, float sum,
                                 int64_t place, int split, int first_n = 0) {
  const int t = threadIdx.x % 4;
  if (params.splits > 1) {
    const int64_t part = place * params.splits + split;
    if (t == 0 && first_n == 0) params.sums[part] = {most, sum};
#pragma unroll
    for (int n = 0; n < M; ++n)
      *reinterpret_cast<float2*>(params.partial + (part * kTiles + first_n + n) * 8 + 2 * t) = {acc[n][2 * h],
                                                                                                acc[n][2 * h + 1]};
    return;
  }
  const float sink = sink_of(params, place), largest = fmaxf(most, sink), factor = fast_exp2(most - largest);
  const float inverse = factor / fmaf(sum, factor, fast_exp2(sink - largest)) * params.attention.v_scale;
  uint32_t* out = static_cast<uint32_t*>(params.output) + (place * kTiles + first_n) * 4 + t;
#pragma unroll
  for (int n = 0; n < M; ++n) {
    const float2 gates = gates_of<T>(params, place, (first_n + n) * 8 + 2 * t);
    out[n * 4] = Half<T>::pack(acc[n][2 * h] * inverse * gates.x, acc[n][2 * h + 1] * inverse * gates.y);
  }
}

// What a warp of mma.sync has summed: MT tiles of 16 rows, M tiles of eight of the values' columns.
template <int MT, int M>
struct AttentionSums {
  float acc[MT][M][4], most[MT][2], sum[MT][2];
  int slot_of[MT][2];  // of the lane's rows

  __device__ AttentionSums(const AttentionParams& params, const BatchRow& batch, int first_row) {
#pragma unroll
    for (int m = 0; m < MT; ++m) {
#pragma unroll
      for (int n = 0; n < M; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[m][n][i] = 0;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        most[m][h] = -INFINITY, sum[m][h] = 0;
        const int row = first_row + m * 16 + h * 8 + static_cast<int>(threadIdx.x) % 32 / 4;
        slot_of[m][h] = batch.past + row / params.group;
      }
    }
  }
};

// Adds weights times values, for NT tiles of eight slots of a stage in shared memory. The tiles begin at first_key.
// Rows have D features; tiles of columns begin at first_n. seen: SlotsBefore or SlotsOfLists. mixed: some row sees a
// slot that another row does not see.
template <typename T, int D, int NT, int MT, int M, class Seen>
__device__ __forceinline__ void add_stage_values(uint32_t v_at, int first_key, int first_n, bool mixed,
                                                 const Seen& seen, const float (&s)[MT][NT][4],
                                                 AttentionSums<MT, M>& sums) {
  const int lane = threadIdx.x % 32, t = lane % 4;
  // Where not every row sees a stage's slots, a value that is not finite is added, not multiplied by zero.
  bool odd = false;
  if (mixed)
    for (int at = lane; at < NT * 8 * M; at += 32)
      odd |= is_odd(load16(v_at + swizzled<D>(first_key + at / M, first_n + at % M)), kExponent<T>);
  odd = __any_sync(~0u, odd);
#pragma unroll 1
  for (int key = 0; odd && key < NT * 8; ++key) {
#pragma unroll
    for (int n = 0; n < M; ++n) {
      const uint32_t v = only_odd(load4(v_at + swizzled<D>(first_key + key, first_n + n) + 4 * t), kExponent<T>);
#pragma unroll
      for (int m = 0; v && m < MT; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h)
          if (seen.sees(m, h, key))
            sums.acc[m][n][2 * h] += Half<T>::low(v), sums.acc[m][n][2 * h + 1] += Half<T>::high(v);
    }
  }
#pragma unroll
  for (int k = 0; k < NT; k += 2) {
    uint32_t weight[MT][4];
#pragma unroll
    for (int m = 0; m < MT; ++m) pack_weights<T>(weight[m], s[m], k);
#pragma unroll
    for (int n = 0; n < M; n += 2) {
      uint32_t v[4];
      load_transposed(v, v_at + swizzled<D>(first_key + k * 8 + lane % 16, first_n + n + lane / 16));
      if (odd)
#pragma unroll
        for (int i = 0; i < 4; ++i) v[i] ^= only_odd(v[i], kExponent<T>);
#pragma unroll
      for (int m = 0; m < MT; ++m) {
        Half<T>::mma(sums.acc[m][n], weight[m], v[0], v[1]);
        Half<T>::mma(sums.acc[m][n + 1], weight[m], v[2], v[3]);
      }
    }
  }
}

// Adds NT tiles of eight slots of a stage in shared memory. They begin at first_key. The values' columns begin at tile
// first_n. query(d, m, q) loads features 16 d on of the queries of tile m. seen: SlotsBefore or SlotsOfLists. masked:
// some row does not see one of the stage's slots. mixed: another row may see it.
template <typename T, int DK, int DV, int NT, bool kCodes, int MT, int M, class Query, class Seen>
__device__ __forceinline__ void attend_stage(const AttentionParams& params, uint32_t k_at, uint32_t v_at, int first_key,
                                             int first_n, bool masked, bool mixed, const Query& query, const Seen& seen,
                                             AttentionSums<MT, M>& sums) {
  const int lane = threadIdx.x % 32;
  float s[MT][NT][4];
#pragma unroll
  for (int m = 0; m < MT; ++m)
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) s[m][n][i] = 0;
#pragma unroll
  for (int d = 0; d < DK / 16; ++d) {
    uint32_t q[MT][4];
#pragma unroll
    for (int m = 0; m < MT; ++m) query(d, m, q[m]);
#pragma unroll
    for (int n = 0; n < NT; n += 2) {
      uint32_t k[4];
      load_matrices(k, k_at + swizzled<DK>(first_key + n * 8 + lane % 8 + lane / 16 * 8, 2 * d + lane / 8 % 2));
#pragma unroll
      for (int m = 0; m < MT; ++m) {
        Half<T>::mma(s[m][n], q[m], k[0], k[1]);
        Half<T>::mma(s[m][n + 1], q[m], k[2], k[3]);
      }
    }
  }

#pragma unroll
  for (int m = 0; m < MT; ++m) {
    if constexpr (kCodes) scale_scores(params, s[m]);
    softcap_scores(params, s[m]);
  }
#pragma unroll
  for (int m = 0; m < MT; ++m) {
    if (masked) seen.mask(m, s[m]);
    weigh(s[m], sums.acc[m], sums.most[m], sums.sum[m]);
  }
  add_stage_values<T, DV>(v_at, first_key, first_n, masked && mixed, seen, s, sums);
}

// Stages that some row of the tile does not see all of.
__device__ inline bool is_masked(const Span& span, int slot, int slots) {
  return slot < span.full_low || slot + slots - 1 > span.first_slot;
}

}  // namespace quantmoe
