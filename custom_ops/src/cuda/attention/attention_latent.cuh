// Latent attention (key_split): all heads share a key of 576 features, whose last 512 are its value. So
// rows are many, and a stage is read from global memory once for both products. New keys come from qkv. Blocks rotate
// them on the way into shared memory, and other blocks store them, so nothing waits for the cache. With many tokens a
// kernel stores them first.
//
// With `selected` (kLists) a token's list takes the place of slots 0, 1, .. A tile is then heads of one token. Rows
// that have no more tokens than a list are attended to as without lists, in the same order.
//
// A key is 36 chunks of 16 bytes in the cache of keys, then 36 in the cache of values.
//
//   features   0          64                                     575
//   key       [ rotated  |  latent                                  ]   scores: all 576
//   value                [  latent, 512                             ]   output: the last 512, the same bytes
//   cache     [ keys: 0 .. 287          | values: 288 .. 575        ]
#pragma once
#include "cuda/attention/attention.cuh"
#include "cuda/attention/attention_wgmma.cuh"

namespace quantmoe {

constexpr int kLatentChunks = kLatentKeys / 8, kLatentHalf = kLatentSplit / 8;

// Eight features of a head of a token, of queries, then of keys, turned where they turn. token: through the batch.
template <typename T>
__device__ inline uint4 latent_chunk(const AttentionParams& params, int64_t token, int head, int chunk) {
  const qm_attention& node = params.attention;
  const uint4* features =
      static_cast<const uint4*>(params.qkv) + (token * (node.num_heads + node.kv_num_heads) + head) * kLatentChunks;
  const uint4 loaded = features[chunk];
  const int d = chunk * 8, half = node.rotary_size / 2;
  if (d >= 2 * half) return loaded;
  const float *cos_of = params.cos + token * half, *sin_of = params.sin + token * half;
  float x[8], y[8];
  widen<T>(x, loaded);
  if (node.rotary_interleaved) {
    const float4 cos = reinterpret_cast<const float4*>(cos_of)[chunk],
                 sin = reinterpret_cast<const float4*>(sin_of)[chunk];
    const float c[4] = {cos.x, cos.y, cos.z, cos.w}, s[4] = {sin.x, sin.y, sin.z, sin.w};
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float across = x[j ^ 1] * s[j / 2];
      y[j] = fmaf(x[j], c[j / 2], j % 2 ? across : -across);
    }
  } else {
    const bool second = d >= half;
    float other[8], cos[8], sin[8];
    widen<T>(other, features[second ? chunk - half / 8 : chunk + half / 8]);
    load_eight(cos, cos_of + (second ? d - half : d));
    load_eight(sin, sin_of + (second ? d - half : d));
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float across = other[j] * sin[j];
      y[j] = fmaf(x[j], cos[j], second ? across : -across);
    }
  }
  return narrow<T>(y);
}

// A token's new keys, or its output where it does not count; after the tokens' blocks those that copy past.
template <typename T>
__device__ inline void append_latent(const AttentionParams& params, int block) {
  if (block >= params.token_blocks) return copy_slots(params, block - params.token_blocks);
  const qm_attention& node = params.attention;
  const int batch_row = block / params.tokens;
  const BatchRow row = read_row(params, batch_row);
  const int index = block % params.tokens - row.begin;
  if (index < 0 || index >= row.count) {
    const uint32_t outside = row.valid ? 0 : Half<T>::pack(NAN, NAN);
    const int chunks = node.num_heads * (kLatentValues / 8);
    for (int i = threadIdx.x; i < chunks; i += kLatentThreads)
      static_cast<uint4*>(params.output)[static_cast<int64_t>(block) * chunks + i] = {outside, outside, outside,
                                                                                      outside};
    return;
  }
  for (int i = threadIdx.x; i < node.kv_num_heads * kLatentChunks; i += kLatentThreads) {
    const int kv_head = i / kLatentChunks, chunk = i % kLatentChunks;
    const int64_t slot =
        (static_cast<int64_t>(batch_row) * node.kv_num_heads + kv_head) * params.slots + row.past + index;
    uint4* to = static_cast<uint4*>(chunk < kLatentHalf ? params.key : params.value) + slot * kLatentHalf;
    to[chunk % kLatentHalf] = latent_chunk<T>(params, block, node.num_heads + kv_head, chunk);
  }
}
template <typename T>
__global__ void __launch_bounds__(kLatentThreads) latent_append(const __grid_constant__ AttentionParams params) {
  wait_for_previous();
  launch_dependents();
  append_latent<T>(params, static_cast<int>(blockIdx.x));
}

// The order of rows of keys in shared memory. It is a tile of 64 values of all rows after the other, as wgmma
// reads them, or a row after the other. In both, one chunk of eight rows is in eight different groups of banks. at: the
// place of chunk `chunk` of a row's first tile. The next tile's chunk is kTile bytes further. The chunk of the row 32
// below is 32 kRow further.
template <int rows>
struct TileLayout {
  static constexpr uint32_t kTile = rows * 128, kRow = 128;
  __device__ static uint32_t at(int row, int chunk) { return swizzled_tile<rows>(row, chunk); }
};
template <int kKeys>
struct WholeRowLayout {
  static constexpr uint32_t kTile = 128, kRow = kKeys * 2;
  __device__ static uint32_t at(int row, int chunk) { return swizzled<kKeys>(row, chunk); }
};

// A block's tile of rows, and its part of the slots that they see. Of what it copies, eight threads have a row's tile
// of 64 values.
template <bool kLists>
struct LatentTile {
  static constexpr int kKeys = kLatentKeys, kTiles = kKeys / 64, kRowsAtOnce = kLatentThreads / 8;
  static constexpr bool kAppends = true;                // blocks behind the tiles store new keys
  int pair, b, kv, split, first_row, rows, begin, end;  // rows: of all tiles; end: begin of a block without a part
  int old;                                              // slots that are in a cache
  const uint4 *keys, *values;                           // of the pair, in that cache
  BatchRow batch;
  Span span;                  // of a list: of its places
  const int* list = nullptr;  // slots that the tile sees
  int own_slot;               // of a list's token
  int next[2];                // of a list: the slots of the next stage that the thread copies

  __device__ explicit LatentTile(const AttentionParams& params) {
    const int block = static_cast<int>(blockIdx.x) / params.splits;
    split = static_cast<int>(blockIdx.x) % params.splits, pair = block % params.pairs;
    b = pair / params.attention.kv_num_heads, kv = pair % params.attention.kv_num_heads;
    first_row = (params.tiles - 1 - block / params.pairs) * params.tile_rows;  // those with most slots first
    batch = read_row(params, b);
    rows = batch.count * params.group, begin = end = 0;
    if (kLists && has_lists(params, batch)) {
      find_list(params, params.tiles - 1 - block / params.pairs);
    } else {
      if (first_row >= rows) return;
      span = span_of(params, batch, first_row);
    }
    if (split >= span.splits) return;
    begin = span.begin(split), end = span.begin(split + 1);
    old = params.appended ? batch.past + batch.count : batch.past;
    const int64_t first =
        static_cast<int64_t>(pair) * (params.appended ? params.slots : params.past_slots) * kLatentHalf;
    keys = static_cast<const uint4*>(params.appended ? params.key : params.past_key) + first;
    values = static_cast<const uint4*>(params.appended ? params.value : params.past_value) + first;
  }
  // Whether all rows see the same places.
  __device__ bool gathers() const { return kLists && list; }
  // A tile of a token's heads. No splits: there is no such token.
  __device__ void find_list(const AttentionParams& params, int tile) {
    const int token = tile / params.tiles_per_token;
    span.splits = 0;
    if (token >= batch.count) return;
    first_row = token * params.group + tile % params.tiles_per_token * params.tile_rows;
    rows = (token + 1) * params.group, own_slot = batch.past + token;
    list = list_of(params, batch, b, kv, token);
    span = span_of_list(params, own_slot);
    span.first_slot = span.last_slot = length_of(list, span.last_slot + 1) - 1;
  }
  // Asks for the slots of a stage of a list, -1 after its end.
  template <int kSlots>
  __device__ void ask(int stage) {
#pragma unroll
    for (int i = 0; i < kSlots / kRowsAtOnce; ++i) {
      const int at = stage * kSlots + i * kRowsAtOnce + static_cast<int>(threadIdx.x) / 8;
      next[i] = at <= span.last_slot ? list[at] : -1;
    }
  }
  // Loads the stage of a list, and asks for the slots of the next stage.
  template <typename T, class Layout, int kSlots>
  __device__ void load_list(const AttentionParams& params, int stage, uint32_t to) {
    if (stage == begin) ask<kSlots>(stage);
    const int row = static_cast<int>(threadIdx.x) / 8, lane = threadIdx.x % 8;
    int slots[kSlots / kRowsAtOnce];
#pragma unroll
    for (int i = 0; i < kSlots / kRowsAtOnce; ++i) slots[i] = next[i];
    if (stage + 1 < end) ask<kSlots>(stage + 1);
#pragma unroll
    for (int i = 0; i < kSlots / kRowsAtOnce; ++i) {
      const int slot = slots[i];
      const bool seen = slot >= 0 && slot <= own_slot;
      const uint32_t at = to + Layout::at(row, lane) + i * kRowsAtOnce * Layout::kRow;
      if (seen && slot >= old) {
#pragma unroll 1
        for (int tile = 0; tile < kTiles; ++tile)
          store16(at + tile * Layout::kTile, latent_chunk<T>(params, token_of(params, slot - batch.past),
                                                             params.attention.num_heads + kv, tile * 8 + lane));
        continue;
      }
      const int64_t offset = static_cast<int64_t>(seen ? slot : 0) * kLatentHalf + lane;
      const uint4 *key = keys + offset, *value = values + offset - kLatentHalf;
      const uint4* middle = lane < kLatentHalf % 8 ? key : value;
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile)
        copy_async16_past(at + tile * Layout::kTile,
                          (tile < kLatentHalf / 8   ? key
                           : tile > kLatentHalf / 8 ? value
                                                    : middle) +
                              tile * 8,
                          seen);
    }
  }
  __device__ int64_t token_of(const AttentionParams& params, int index) const {
    return static_cast<int64_t>(b) * params.tokens + batch.begin + index;
  }
  // The queries of `size` rows, zero where there are none: copies those that do not turn, if !turn; else stores those
  // that do.
  template <typename T, class Layout, int size, bool turn>
  __device__ void load_queries(const AttentionParams& params, uint32_t to) const {
    const int heads = params.attention.num_heads, turning = params.attention.rotary_size / 8, lane = threadIdx.x % 8;
#pragma unroll
    for (int from = 0; from < size; from += kRowsAtOnce) {
      const int row = from + static_cast<int>(threadIdx.x) / 8, query = first_row + row;
      if (size < kRowsAtOnce && row >= size) break;
      const bool there = query < rows;
      const int64_t token = token_of(params, there ? query / params.group : 0);
      const int head = kv * params.group + query % params.group;
      const uint32_t at = to + Layout::at(row, lane);
      if constexpr (turn) {
#pragma unroll 1
        for (int chunk = lane; there && chunk < turning; chunk += 8)
          store16(at + chunk / 8 * Layout::kTile, latent_chunk<T>(params, token, head, chunk));
      } else {
        const uint4* features = static_cast<const uint4*>(params.qkv) +
                                (token * (heads + params.attention.kv_num_heads) + head) * kLatentChunks + lane;
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile)
          if (!there || tile * 8 + lane >= turning)
            copy_async16_past(at + tile * Layout::kTile, features + tile * 8, there);
      }
    }
  }
  // The keys of a stage of kSlots slots, zero where no row sees them.
  template <typename T, class Layout, int kSlots>
  __device__ void load_stage(const AttentionParams& params, int stage, uint32_t to) {
    if constexpr (kLists)
      if (list) return load_list<T, Layout, kSlots>(params, stage, to);
    static_assert(kSlots % kRowsAtOnce == 0 && kRowsAtOnce % 8 == 0, "each thread copies as many");
    const int row = static_cast<int>(threadIdx.x) / 8, lane = threadIdx.x % 8, first = stage * kSlots + row;
    const int64_t offset = static_cast<int64_t>(first) * kLatentHalf + lane;
    const uint4 *key = keys + offset, *value = values + offset - kLatentHalf;
    const uint4* middle = lane < kLatentHalf % 8 ? key : value;  // of the tile that both caches have a part of
    const uint32_t at = to + Layout::at(row, lane);
    auto from = [&](int tile) { return tile < kLatentHalf / 8 ? key : tile > kLatentHalf / 8 ? value : middle; };
    if (stage * kSlots >= span.low && (stage + 1) * kSlots <= min(old, span.last_slot + 1)) {
#pragma unroll
      for (int below = 0; below < kSlots; below += kRowsAtOnce)
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile)
          copy_async16_past(at + below * Layout::kRow + tile * Layout::kTile,
                            from(tile) + below * kLatentHalf + tile * 8, true);
      return;
    }
#pragma unroll 1
    for (int below = 0; below < kSlots; below += kRowsAtOnce)
#pragma unroll 1
      for (int tile = 0; tile < kTiles; ++tile) {
        const int slot = first + below;
        const bool seen = slot >= span.low && slot <= span.last_slot;
        const uint32_t place = at + below * Layout::kRow + tile * Layout::kTile;
        if (seen && slot >= old)
          store16(place, latent_chunk<T>(params, token_of(params, slot - batch.past), params.attention.num_heads + kv,
                                         tile * 8 + lane));
        else
          copy_async16_past(place, from(tile) + below * kLatentHalf + tile * 8, seen);
      }
  }
};

// Scores from their two sides' parts; score_at(side, h, key): where two are.
template <int NT, class ScoreAt>
__device__ __forceinline__ void add_sides(ScoreAt score_at, float (&s)[NT][4]) {
#pragma unroll
  for (int n = 0; n < NT; ++n)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint2 one = load8(score_at(0, h, n * 8)), two = load8(score_at(1, h, n * 8));
      s[n][2 * h] = __uint_as_float(one.x) + __uint_as_float(two.x);
      s[n][2 * h + 1] = __uint_as_float(one.y) + __uint_as_float(two.y);
    }
}

// A tile of 16 rows on mma.sync, bound by memory. 4 warps share a stage's slots, two the features of their scores,
// eight the values' columns. Tile: LatentTile or EqualTile.
template <typename T, int kRing, class Tile>
__global__ void __launch_bounds__(kLatentThreads, 1) attend_latent(const __grid_constant__ AttentionParams params) {
  constexpr int kKeys = Tile::kKeys, kFirstValue = (kKeys - kLatentValues) / 8;  // tile of eight columns
  constexpr int kStage = kLatentSlots * kKeys * 2, NT = kLatentSlots / 8, M = kLatentValues / 8 / 8;
  constexpr int kHalf = kKeys / 16, kSteps = kHalf / 2;  // a warp's chunks, and steps of 16 features
  using Layout = WholeRowLayout<kKeys>;
  extern __shared__ uint4 shared[];
  const uint32_t ring_at = shared_address(shared), scores_at = ring_at + kRing * kStage;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  wait_for_previous();
  launch_dependents();
  if constexpr (Tile::kAppends)
    if (const int blocks = params.tiles * params.pairs * params.splits; static_cast<int>(blockIdx.x) >= blocks)
      return append_latent<T>(params, static_cast<int>(blockIdx.x) - blocks);
  Tile tile(params);
  if (tile.begin == tile.end) return;
  const Span& span = tile.span;

  auto at_stage = [&](int stage) { return ring_at + static_cast<uint32_t>(stage - tile.begin) % kRing * kStage; };
  auto load = [&](int stage) {  // a group of copies, which may be empty
    if (stage < tile.end) tile.template load_stage<T, Layout, kLatentSlots>(params, stage, at_stage(stage));
    copy_async_commit();
  };
  // The queries lie where the last stage will, until warps have them in registers.
  const uint32_t queries_at = ring_at + (kRing - 1) * kStage;
  tile.template load_queries<T, Layout, kFewRows, false>(params, queries_at);
  copy_async_commit();
  for (int i = 0; i < kRing - 1; ++i) load(tile.begin + i);
  tile.template load_queries<T, Layout, kFewRows, true>(params, queries_at);
  copy_async_wait<kRing - 1>();
  __syncthreads();
  const int first_key = warp % 4 * 8, part = warp / 4, first_chunk = part * kHalf;
  uint32_t query[kSteps][4];
#pragma unroll
  for (int d = 0; d < kSteps; ++d)
    load_matrices(query[d], queries_at + swizzled<kKeys>(lane % 16, first_chunk + 2 * d + lane / 16));

  AttentionSums<1, M> sums(params, tile.batch, tile.first_row);
  if (tile.gathers()) sums.slot_of[0][0] = sums.slot_of[0][1] = span.last_slot;
  const int first_n = warp * M;
  for (int stage = tile.begin; stage < tile.end; ++stage) {
    copy_async_wait<kRing - 2>();
    __syncthreads();  // the stage is there for all threads, and the last one is read
    load(stage + kRing - 1);
    const uint32_t k_at = at_stage(stage);
    float sides[2][4] = {};
#pragma unroll
    for (int d = 0; d < kSteps; d += 2) {
      uint32_t k[4];
      load_matrices(k, k_at + swizzled<kKeys>(first_key + lane % 8, first_chunk + 2 * d + lane / 8));
      Half<T>::mma(sides[0], query[d], k[0], k[1]);
      Half<T>::mma(sides[1], query[d + 1], k[2], k[3]);
    }
    auto score_at = [&](int part, int h, int key) {
      return scores_at + ((part * kFewRows + g + 8 * h) * kLatentScoreRow + key + 2 * t) * 4;
    };
#pragma unroll
    for (int h = 0; h < 2; ++h)
      store8(score_at(part, h, first_key), {__float_as_uint(sides[0][2 * h] + sides[1][2 * h]),
                                            __float_as_uint(sides[0][2 * h + 1] + sides[1][2 * h + 1])});
    __syncthreads();
    float scores[1][NT][4], (&s)[NT][4] = scores[0];
    add_sides(score_at, s);
    const int slot = stage * kLatentSlots;
    const bool masked = is_masked(span, slot, kLatentSlots);
    scale_scores(params, s);
    softcap_scores(params, s);
    if (masked) mask_scores(params, s, sums.slot_of[0], slot);
    float factor[2], largest[2] = {sums.most[0][0], sums.most[0][1]};
    find_largest(s, largest);
    weigh(s, largest, sums.most[0], sums.sum[0], factor);
    if (__any_sync(~0u, factor[0] != 1 || factor[1] != 1)) rescale(sums.acc[0], factor);
    add_stage_values<T, kKeys>(k_at, 0, kFirstValue + first_n, masked && span.first_slot != span.last_slot,
                               SlotsBefore<1>{params, sums.slot_of, slot}, scores, sums);
  }
  add_quads(sums.sum[0]);
#pragma unroll
  for (int h = 0; h < 2; ++h)
    if (const int row = tile.first_row + h * 8 + g; row < tile.rows)
      store_row<T, M, kLatentValues / 8>(params, sums.acc[0], h, sums.most[0][h], sums.sum[0][h],
                                         place_of(params, tile.batch, tile.b, tile.kv, row), tile.split, first_n);
}

// Asks the tensor cores for a warpgroup's half of a stage's scores.
template <typename T, int kRows, int kSlots, int kKeys>
__device__ __forceinline__ void wide_scores(uint32_t q_low, uint32_t k_low, float (&s)[kSlots / 16][4]) {
  constexpr int kOwn = kSlots / 2, kTile = kSlots * 128;
  wgmma_fence();
#pragma unroll
  for (int d = 0; d < kKeys / 16; ++d)
    wgmma_shared<T, kOwn>(s[0], wgmma_descriptor(q_low + (d / 4 * kRows * 128 + d % 4 * 32) / 16),
                          wgmma_descriptor(k_low + (d / 4 * kTile + d % 4 * 32) / 16), d > 0);
  wgmma_commit();
}
// The weights of all of a stage's slots. A warpgroup has made half of them. weights_of(group): the place of its
// thread's.
template <typename T, int NT, class WeightsOf>
__device__ __forceinline__ void share_weights(const float (&s)[NT][4], WeightsOf weights_of, int group,
                                              int pair_barrier, uint32_t (&weights)[NT][4]) {
#pragma unroll
  for (int k = 0; k < NT / 2; ++k) {
    uint32_t own[4];
    pack_weights<T>(own, s, 2 * k);
    store16(weights_of(group) + k * kLatentThreads * 16, {own[0], own[1], own[2], own[3]});
  }
  named_barrier(pair_barrier, 64);
#pragma unroll
  for (int k = 0; k < NT; ++k) {
    const uint4 w = load16(weights_of(k / (NT / 2)) + k % (NT / 2) * kLatentThreads * 16);
    weights[k][0] = w.x, weights[k][1] = w.y, weights[k][2] = w.z, weights[k][3] = w.w;
  }
}

// A tile of 64 rows on wgmma: two warpgroups share a stage's slots for the scores, and the values' columns for the
// sums. A thread and its counterpart in the other warpgroup have the same rows. The two exchange the largest scores,
// and weights. One long function: scores, weights and sums are registers from one stage to the next.
template <typename T, class Tile>
__global__ void __launch_bounds__(kLatentThreads, 1)
    attend_latent_wide(const __grid_constant__ AttentionParams params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  constexpr int kRows = kLatentWideRows, kSlots = kLatentWideSlots, kOwn = kSlots / 2, NT = kOwn / 8;
  constexpr int kKeys = Tile::kKeys, kFirstValue = (kKeys - kLatentValues) / 8;
  constexpr int kTile = kSlots * 128, kStage = kSlots * kKeys * 2, M = kLatentValues / 8 / 2;
  extern __shared__ uint4 shared[];
  const uint32_t q_at = (shared_address(shared) + 1023) / 1024 * 1024, ring_at = q_at + kRows * kKeys * 2;
  const uint32_t weights_at = ring_at + kLatentWideStages * kStage, largest_at = weights_at + kLatentThreads * 32;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, group = threadIdx.x / 128;
  const int row_of = threadIdx.x % 128 / 32 * 16 + g, pair_barrier = 1 + static_cast<int>(threadIdx.x) % 128 / 32;
  wait_for_previous();
  launch_dependents();
  if constexpr (Tile::kAppends)
    if (const int blocks = params.tiles * params.pairs * params.splits; static_cast<int>(blockIdx.x) >= blocks)
      return append_latent<T>(params, static_cast<int>(blockIdx.x) - blocks);
  Tile tile(params);
  if (tile.begin == tile.end) return;
  const Span& span = tile.span;

  auto at_stage = [&](int stage) { return ring_at + (stage - tile.begin) % kLatentWideStages * kStage; };
  auto load = [&](int stage) {
    if (stage < tile.end) tile.template load_stage<T, TileLayout<kSlots>, kSlots>(params, stage, at_stage(stage));
  };
  tile.template load_queries<T, TileLayout<kRows>, kRows, false>(params, q_at);
  load(tile.begin);
  tile.template load_queries<T, TileLayout<kRows>, kRows, true>(params, q_at);

  float acc[M][4], most[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0};
#pragma unroll
  for (int n = 0; n < M; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) acc[n][i] = 0;
  int slot_of[1][2] = {{tile.batch.past + (tile.first_row + row_of) / params.group,
                        tile.batch.past + (tile.first_row + row_of + 8) / params.group}};
  if (tile.gathers()) slot_of[0][0] = slot_of[0][1] = span.last_slot;
  auto largest_of = [&](int group, int h) { return largest_at + (group * kRows + row_of + 8 * h) * 4; };
  auto weights_of = [&](int group) { return weights_at + (group * 128 + threadIdx.x % 128) * 16; };
  for (int stage = tile.begin; stage < tile.end; ++stage) {
    copy_async_wait_all();
    fence_async_proxy();
    __syncthreads();  // the stage is there for all threads, and the last one is read
    const uint32_t k_at = at_stage(stage), v_at = k_at + (kFirstValue / 8 + group * M / 8) * kTile;
    float s[NT][4];
    wide_scores<T, kRows, kSlots, kKeys>(descriptor_low(q_at), descriptor_low(k_at + group * kOwn * 128), s);
    load(stage + 1);
    wgmma_wait<0>();
    const int slot = stage * kSlots;
    const bool masked = is_masked(span, slot, kSlots);
    scale_scores(params, s);
    softcap_scores(params, s);
    if (masked) mask_scores(params, s, slot_of[0], slot + group * kOwn);
    float largest[2] = {most[0], most[1]};
    find_largest(s, largest);
    if (t < 2) store4(largest_of(group, t), __float_as_uint(t == 0 ? largest[0] : largest[1]));
    named_barrier(pair_barrier, 64);
#pragma unroll
    for (int h = 0; h < 2; ++h) largest[h] = fmaxf(largest[h], __uint_as_float(load4(largest_of(1 - group, h))));
    float factor[2];
    weigh(s, largest, most, sum, factor);
    if (__any_sync(~0u, factor[0] != 1 || factor[1] != 1)) rescale(acc, factor);
    uint32_t weights[kSlots / 16][4];
    share_weights<T>(s, weights_of, group, pair_barrier, weights);
    if (masked && span.first_slot != span.last_slot)
      take_out<T, kSlots, M, kLatentThreads, kSlots * kLatentValues * 2>(k_at + kFirstValue / 8 * kTile, v_at,
                                                                         SlotsBefore<1>{params, slot_of, slot}, t, acc);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kSlots / 16; ++k) add_values<T, kLatentValues / 2>(acc[0], weights[k], v_at + k * 2048, kTile);
    wgmma_commit();
    wgmma_wait<0>();
  }
  add_quads(sum);
  if (t < 2) store4(largest_of(group, t), __float_as_uint(t == 0 ? sum[0] : sum[1]));
  named_barrier(pair_barrier, 64);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    sum[h] += __uint_as_float(load4(largest_of(1 - group, h)));
    if (const int row = tile.first_row + row_of + h * 8; row < tile.rows)
      store_row<T, M, kLatentValues / 8>(params, acc, h, most[h], sum[h],
                                         place_of(params, tile.batch, tile.b, tile.kv, row), tile.split, group * M);
  }
#endif
}

}  // namespace quantmoe
