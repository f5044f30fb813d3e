// Attention whose keys of 512 features are their values: DeepSeek-V4's, with a compress_rate or without, and latents
// without features that rotate, GLM-5.3-Flash's. equal_append comes first, and stores queries and new keys. Then the
// kernels of latents take tiles of one token's heads, and gather what the token sees: its entries.
//
//   entries                    0 .. compressed - 1                          compressed ..
//   compress_rate N            compressed keys, N slots each, or a list's   keys of the window
//   key_split                  none                                         keys of the window
//   key_split, with a list     keys of the list's slots                     none
//
// Entries take the place of slots 0, 1, .. A list's compressed keys are brought together by equal_append.
#pragma once
#include <climits>

#include "cuda/attention/attention.cuh"

namespace quantmoe {

constexpr int kEqualChunks = kEqualKeys / 8;

// What a token sees. list: the slots of the first `listed` entries; null: the last slot of each window of tokens.
struct Entries {
  int listed, low, count;
  const int* list;
};
// A list's compressed keys, behind their number.
__device__ inline int* compressed_list(const AttentionParams& params, int64_t list) {
  return params.entries + list * (params.list_size + 1);
}
// token: of the row's, that counts.
__device__ inline Entries entries_of(const AttentionParams& params, const BatchRow& batch, int batch_row, int kv_head,
                                     int token) {
  const int own = batch.past + token, rate = params.attention.compress_rate;
  Entries found{rate ? (own + 1) / rate : 0, params.window ? max(own - params.window + 1, 0) : 0, 0, nullptr};
  if (has_lists(params, batch)) {
    found.list = list_of(params, batch, batch_row, kv_head, token);
    if (rate) {
      const int* const made = compressed_list(params, (found.list - params.selected) / params.list_size);
      found.listed = made[0], found.list = made + 1;
    } else {
      found.listed = length_of(found.list, min(params.list_size, own + 1)), found.low = own + 1;
    }
  }
  found.count = found.listed + own + 1 - found.low;
  return found;
}
__device__ inline Span span_of_entries(const AttentionParams& params, const Entries& entries) {
  Span span{};
  span.first_slot = span.last_slot = entries.count - 1;
  span.stages = (span.last_slot >> params.stage_log) + 1;
  span.splits = min(params.splits, (span.stages + (1 << params.least_log) - 1) >> params.least_log);
  return span;
}

// A block's list: brings the slots that have a compressed key to the front.
__device__ inline void compress_list(const AttentionParams& params, int list) {
  constexpr int kEach = 8, kWarps = kAppendThreads / 32;
  __shared__ int warps[kWarps];
  const int token = list / params.lists, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const BatchRow row = read_row(params, token / params.tokens);
  const int index = token % params.tokens - row.begin;
  if (index < 0 || index >= row.count || !has_lists(params, row)) return;
  const int* const from = params.selected + static_cast<int64_t>(list) * params.list_size;
  int* const to = compressed_list(params, list);
  int before = 0;
  for (int first = 0; first < params.list_size; first += kEach * kAppendThreads) {
    int slots[kEach], own = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int at = first + static_cast<int>(threadIdx.x) * kEach + i;
      slots[i] = at < params.list_size ? from[at] : -1;
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if ((slots[i] + 1) % params.attention.compress_rate) slots[i] = -1;
      own += slots[i] >= 0;
    }
    int up_to = own;  // of the warp's lanes, this one included
    for (int d = 1; d < 32; d *= 2) {
      const int other = __shfl_up_sync(~0u, up_to, d);
      if (lane >= d) up_to += other;
    }
    if (lane == 31) warps[warp] = up_to;
    __syncthreads();
    int at = before + up_to - own;
    for (int w = 0; w < kWarps; ++w) {
      if (w < warp) at += warps[w];
      before += warps[w];
    }
    __syncthreads();  // `warps` is read
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      if (slots[i] >= 0) to[1 + at++] = slots[i];
  }
  if (threadIdx.x == 0) to[0] = before;
}

// Sixteen features of a head of a lane, from 8 lane and from 256 + 8 lane on: turned. shared: 512 of the warp.
__device__ inline void turn_head(const AttentionParams& params, int64_t token, int lane, float* shared,
                                 float (&x)[2][8]) {
  const int half = params.attention.rotary_size / 2;
  if (!half) return;
  const float *cos = params.cos + token * half, *sin = params.sin + token * half;
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int j = 0; j < 8; ++j) shared[(i * 32 + lane) * 8 + j] = x[i][j];
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const int d = (i * 32 + lane) * 8 + j;
      if (d >= 2 * half) continue;
      const bool pairs = params.attention.rotary_interleaved, second = pairs ? d % 2 : d >= half;
      const int angle = pairs ? d / 2 : second ? d - half : d, other = pairs ? d ^ 1 : second ? d - half : d + half;
      const float across = shared[other] * sin[angle];
      x[i][j] = fmaf(x[i][j], cos[angle], second ? across : -across);
    }
}

// A warp has a head of a token: queries to the workspace, keys and compressed keys to the caches. Then come the blocks
// of lists, and those that copy past.
template <typename T>
__global__ void __launch_bounds__(kAppendThreads) equal_append(const __grid_constant__ AttentionParams params) {
  constexpr int kHeads = kAppendThreads / 32;
  __shared__ float features[kHeads][kEqualKeys];
  wait_for_previous();
  launch_dependents();
  const qm_attention& node = params.attention;
  int block = static_cast<int>(blockIdx.x);
  if (block >= params.token_blocks) {
    const int lists = params.selected && node.compress_rate ? params.all_tokens * params.lists : 0;
    block -= params.token_blocks;
    return block < lists ? compress_list(params, block) : copy_slots(params, block - lists);
  }
  const int heads = node.num_heads, kv_heads = node.kv_num_heads, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int token = block / params.blocks_per_token, head = block % params.blocks_per_token * kHeads + warp;
  if (head >= heads + kv_heads * (node.key_split ? 1 : 2)) return;
  const int batch_row = token / params.tokens;
  const BatchRow row = read_row(params, batch_row);
  const int index = token % params.tokens - row.begin;
  const bool query = head < heads, key = !query && head < heads + kv_heads;
  if (index < 0 || index >= row.count) {
    const uint32_t outside = row.valid ? 0 : Half<T>::pack(NAN, NAN);
    uint4* const out = static_cast<uint4*>(params.output) + (static_cast<int64_t>(token) * heads + head) * kEqualChunks;
    if (query) out[lane] = out[lane + 32] = {outside, outside, outside, outside};
    return;
  }
  const uint4* const from = row_of(params, token) + head * kEqualChunks;
  const uint4 loaded[2] = {from[lane], from[lane + 32]};
  float x[2][8];
  widen<T>(x[0], loaded[0]);
  widen<T>(x[1], loaded[1]);
  if (node.qk_norm && (query || key)) {
    float squares = add_squares<T>(loaded[1], add_squares<T>(loaded[0], 0));
    for (int d = 16; d > 0; d /= 2) squares += __shfl_xor_sync(~0u, squares, d);
    const float inverse = rsqrtf(fmaf(squares, 1.f / kEqualKeys, node.norm_epsilon));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float weights[8];
      load_eight(weights, (query ? params.q_norm : params.k_norm) + (i * 32 + lane) * 8);
#pragma unroll
      for (int j = 0; j < 8; ++j) x[i][j] = x[i][j] * inverse * weights[j];
    }
  }
  if (query || key) turn_head(params, token, lane, features[warp], x);
  const uint4 made[2] = {narrow<T>(x[0]), narrow<T>(x[1])};
  if (query) {
    const int kv_head = head / params.group;
    const int64_t at = queries_of(params, row, batch_row * kv_heads + kv_head, kv_head, index) + head % params.group;
    uint4* const to = static_cast<uint4*>(params.queries) + at * kEqualChunks;
    to[lane] = made[0], to[lane + 32] = made[1];
    return;
  }
  const int kv_head = (head - heads) % kv_heads;
  const int64_t slot = static_cast<int64_t>(batch_row * kv_heads + kv_head) * params.slots + row.past + index;
  auto* const keys = static_cast<uint4*>(params.key);
  auto* const values = static_cast<uint4*>(params.value);
  if (node.key_split) {
    keys[slot * 32 + lane] = made[0], values[slot * 32 + lane] = made[1];
  } else {
    uint4* const to = (key ? keys : values) + slot * kEqualChunks;
    to[lane] = made[0], to[lane + 32] = made[1];
  }
}

// A block's tile of a token's heads, and its part of the token's entries. Of what it copies, eight threads have a row's
// tile of 64 values.
struct EqualTile {
  static constexpr int kKeys = kEqualKeys, kTiles = kKeys / 64, kRowsAtOnce = kLatentThreads / 8;
  static constexpr bool kAppends = false;               // equal_append does it
  static constexpr int kNone = INT_MAX;                 // no entry
  int pair, b, kv, split, first_row, rows, begin, end;  // as LatentTile's
  int own_slot;
  const uint4 *keys, *values;  // of the pair
  BatchRow batch;
  Entries entries;
  Span span;    // of entries
  int next[2];  // the entries of the next stage that the thread copies: slots, and ~slot of a compressed key

  __device__ explicit EqualTile(const AttentionParams& params) {
    const int block = static_cast<int>(blockIdx.x) / params.splits;
    split = static_cast<int>(blockIdx.x) % params.splits, pair = block % params.pairs;
    b = pair / params.attention.kv_num_heads, kv = pair % params.attention.kv_num_heads;
    const int tile = params.tiles - 1 - block / params.pairs, token = tile / params.tiles_per_token;
    batch = read_row(params, b), begin = end = 0;
    if (token >= batch.count) return;
    first_row = token * params.group + tile % params.tiles_per_token * params.tile_rows;
    rows = (token + 1) * params.group, own_slot = batch.past + token;
    entries = entries_of(params, batch, b, kv, token);
    span = span_of_entries(params, entries);
    if (split >= span.splits) return;
    begin = span.begin(split), end = span.begin(split + 1);
    const int64_t first = static_cast<int64_t>(pair) * params.slots;
    keys = static_cast<const uint4*>(params.key) + first * (params.key_width / 8);
    values = static_cast<const uint4*>(params.value) + first * (params.value_width / 8);
  }
  __device__ bool gathers() const { return true; }
  // Asks for the entries of a stage.
  template <int kSlots>
  __device__ void ask(const AttentionParams& params, int stage) {
    const int rate = params.attention.compress_rate;
#pragma unroll
    for (int i = 0; i < kSlots / kRowsAtOnce; ++i) {
      const int at = stage * kSlots + i * kRowsAtOnce + static_cast<int>(threadIdx.x) / 8;
      const int slot = at >= entries.listed ? entries.low + at - entries.listed
                       : entries.list       ? entries.list[at]
                                            : (at + 1) * rate - 1;
      next[i] = at >= entries.count ? kNone : rate && at < entries.listed ? ~slot : slot;
    }
  }
  // The queries of `size` rows, zero where there are none. They are turned, so there is nothing left with `turn`.
  template <typename T, class Layout, int size, bool turn>
  __device__ void load_queries(const AttentionParams& params, uint32_t to) const {
    if constexpr (turn) return;
    const int row = static_cast<int>(threadIdx.x) / 8, lane = threadIdx.x % 8;
    const uint4* const queries = static_cast<const uint4*>(params.queries) +
                                 (queries_of(params, batch, pair, kv, 0) + first_row + row) * kEqualChunks + lane;
#pragma unroll
    for (int from = 0; from < size; from += kRowsAtOnce) {
      if (size < kRowsAtOnce && row >= size) break;
      const bool there = first_row + from + row < rows;
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile)
        copy_async16_past(to + Layout::at(from + row, lane) + tile * Layout::kTile,
                          queries + (there ? from : -row) * kEqualChunks + tile * 8, there);
    }
  }
  // The keys of a stage, zero where there are none; and asks for the entries of the next one.
  template <typename T, class Layout, int kSlots>
  __device__ void load_stage(const AttentionParams& params, int stage, uint32_t to) {
    if (stage == begin) ask<kSlots>(params, stage);
    const int row = static_cast<int>(threadIdx.x) / 8, lane = threadIdx.x % 8;
    int found[kSlots / kRowsAtOnce];
#pragma unroll
    for (int i = 0; i < kSlots / kRowsAtOnce; ++i) found[i] = next[i];
    if (stage + 1 < end) ask<kSlots>(params, stage + 1);
    const bool halves = params.attention.key_split;
#pragma unroll
    for (int i = 0; i < kSlots / kRowsAtOnce; ++i) {
      const int slot = found[i] < 0 ? ~found[i] : found[i];
      const bool seen = slot <= own_slot;
      const uint4* const cache = found[i] < 0 && !halves ? values : keys;
      const int64_t offset = static_cast<int64_t>(seen ? slot : 0) * (halves ? 32 : kEqualChunks) + lane;
      const uint4 *first = cache + offset, *second = halves ? values + offset - 32 : first;
      const uint32_t at = to + Layout::at(row, lane) + i * kRowsAtOnce * Layout::kRow;
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile)
        copy_async16_past(at + tile * Layout::kTile, (tile < kTiles / 2 ? first : second) + tile * 8, seen);
    }
  }
};

}  // namespace quantmoe
