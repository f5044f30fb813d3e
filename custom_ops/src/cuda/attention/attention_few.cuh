// Attention of few query rows, all of it. A block prepares the queries, stores the new keys and values of its slots,
// and attends to its slots. Its warps share a stage's slots, 16 each, and the values' columns. If the splits are a
// cluster, its blocks send what they found to each other's shared memory. Each block adds up some columns of the
// output.
//
//   rows: query heads of a kv head (16)     slots of the block's split, kKeys a stage
//                                         | 16 slots    | 16 slots    | ...
//   scores = queries x keys               | warps 0, KW | warps 1, .. |       KW warps share a stage's slots,
//   output += weights x values            |             |             |       VW = 8 / KW of them the values' columns
//
// With `selected` (kLists) a row that reads lists has a block, or splits, for each token. The places of the token's
// list take the place of slots 0, 1, .. A new key lies where the list has it; the first split also stores the token's
// own in the cache. Blocks whose lists have a new slot store it, too, the same bytes.
//
// What the block needs comes in the order of the waits for it. All that does not depend on inputs is done before the
// earlier kernel has ended: a step of decode is latency.
#pragma once
#include "cuda/attention/attention.cuh"

namespace quantmoe {

// Stores at an address of cluster_address.
__device__ inline void store_remote(uint32_t at, const float2& v) {
#if __CUDA_ARCH__ >= 900
  asm volatile("st.shared::cluster.v2.f32 [%0], {%1,%2};" ::"r"(at), "f"(v.x), "f"(v.y) : "memory");
#endif
}
__device__ inline void store_remote(uint32_t at, const float4& v) {
#if __CUDA_ARCH__ >= 900
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(at), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
               : "memory");
#endif
}

// A head of a token that a block has: `queries` query rows, from a token's on, then the tokens' keys, then their
// values.
struct FewItem {
  bool query, key;
  int index, head;  // of the tokens that count; of HeadPart
  __device__ FewItem(const AttentionParams& params, int kv_head, int item, int queries, int first_token) {
    const int more = item - queries;
    query = more < 0, key = !query && more < params.row_tokens;
    index = query ? first_token + item / params.group : key ? more : more - params.row_tokens;
    head = query ? kv_head * params.group + item % params.group
                 : params.attention.num_heads + (key ? 0 : params.attention.kv_num_heads) + kv_head;
  }
};

// Where 16 codes of a row of D lie in shared memory: eight rows' same chunk in eight different groups of banks.
template <int D>
__device__ inline uint32_t swizzled_codes(int row, int chunk) {
  constexpr int kChunks = D / 16;
  const int turn = kChunks % 8 == 0 ? row & 7 : kChunks % 4 == 0 ? row >> 1 & 3 : row >> 2 & 1;
  return static_cast<uint32_t>(row * kChunks + (chunk ^ turn)) * 16;
}
// Of four codes of e4m3, 1 in the bytes of those that are no numbers.
__device__ inline uint32_t no_numbers(uint32_t codes) { return ((codes & 0x7f7f7f7f) + 0x01010101 & 0x80808080) >> 7; }

// attend_stage of NT * 8 slots of codes. A lane gets four codes side by side, and widens them in registers. Of 16
// features, 4 t and 4 t + 1 are at 2 t in the product. 4 t + 2 and 4 t + 3 are at 2 t + 8. `query` has this order, too.
// Of 16 columns of the values, a tile of acc has the even ones, and the next tile the odd ones.
template <int DK, int DV, int NT, int M>
__device__ __forceinline__ void attend_codes(const AttentionParams& params, uint32_t k_at, uint32_t v_at, int first_key,
                                             int slot, int first_n, bool masked, bool mixed,
                                             const uint32_t (&query)[DK / 16][4], AttentionSums<1, M>& sums) {
  static_assert(DK % 32 == 0 && M % 2 == 0, "two chunks of keys, one of values");
  const int lane = threadIdx.x % 32, t = lane % 4;
  const bool e4m3 = params.attention.cache_format == k_cache_format_fp8_e4m3;
  auto widen = [&](uint32_t codes) { return e4m3 ? widen_e4m3(codes) : widen_int8(codes); };
  float scores[NT][4];
#pragma unroll
  for (int n = 0; n < NT; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) scores[n][i] = 0;
#pragma unroll
  for (int d = 0; d < DK / 16; d += 2)
#pragma unroll
    for (int n = 0; n < NT; n += 2) {
      uint32_t k[4];
      load_matrices(k, k_at + swizzled_codes<DK>(first_key + n * 8 + lane % 8 + lane / 16 * 8, d + lane / 8 % 2));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint2 numbers = widen(k[i]);
        Half<__half>::mma(scores[n + i / 2], query[d + i % 2], numbers.x, numbers.y);
      }
    }
  scale_scores(params, scores);
  softcap_scores(params, scores);
  if (masked) mask_scores(params, scores, sums.slot_of[0], slot);
  weigh(scores, sums.acc[0], sums.most[0], sums.sum[0]);

  const int chunk = first_n / 2;
  bool odd = false;  // as attend_stage's
  if (masked && mixed && e4m3)
    for (int at = lane; at < NT * 4 * M; at += 32) {
      const uint4 v = load16(v_at + swizzled_codes<DV>(first_key + at / (M / 2), chunk + at % (M / 2)));
      odd |= (no_numbers(v.x) | no_numbers(v.y) | no_numbers(v.z) | no_numbers(v.w)) != 0;
    }
  odd = __any_sync(~0u, odd);
#pragma unroll 1
  for (int key = 0; odd && key < NT * 8; ++key) {
#pragma unroll
    for (int n = 0; n < M; ++n) {
      const uint32_t bad = no_numbers(load4(v_at + swizzled_codes<DV>(first_key + key, chunk + n / 2) + 4 * t));
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const bool sees =
            slot + key <= sums.slot_of[0][h] && slot + key >= first_visible_slot(params, sums.slot_of[0][h]);
#pragma unroll
        for (int i = 0; i < 2; ++i)
          if (sees && bad >> (2 * i + n % 2) * 8 & 1) sums.acc[0][n][2 * h + i] += NAN;
      }
    }
  }
#pragma unroll
  for (int k = 0; k < NT; k += 2) {
    uint32_t weight[4];
    pack_weights<__half>(weight, scores, k);
#pragma unroll
    for (int n = 0; n < M; n += 4) {
      uint32_t v[4];
      const bool both = n + 2 < M;
      const int row = first_key + k * 8 + lane % 16;
      load_transposed(v, v_at + swizzled_codes<DV>(row, chunk + n / 2 + (both ? lane / 16 : 0)));
      uint2 numbers[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (odd) v[i] &= ~(no_numbers(v[i]) * 0xff);
        numbers[i] = widen(__byte_perm(v[i], 0, 0x3120));
      }
      Half<__half>::mma(sums.acc[0][n], weight, numbers[0].x, numbers[1].x);
      Half<__half>::mma(sums.acc[0][n + 1], weight, numbers[0].y, numbers[1].y);
      if (both) {
        Half<__half>::mma(sums.acc[0][n + 2], weight, numbers[2].x, numbers[3].x);
        Half<__half>::mma(sums.acc[0][n + 3], weight, numbers[2].y, numbers[3].y);
      }
    }
  }
}

// One long function: a step of decode is latency. So loads of one part are asked for in the middle of another part, and
// what waits for them is in registers from there on. With parts as functions ptxas orders it otherwise.
//
//   before the previous kernel ends  query rows that no head fills become 0
//   after it                         `rows`, the thread's first head, its angles and sinks are asked for together
//   no work                          tokens that do not count get 0 or NaN; a block without rows ends
//   first stages                     copies of old slots begin
//   heads                            queries to shared memory; new keys and values to the cache and to a stage
//   each stage                       scores, softmax, sums; the copy of a later stage begins
//   warps                            their sums meet in shared memory
//   splits                           none: the output. A cluster: blocks exchange sums, each adds up some columns.
//                                    Else: for attend_merge
template <typename T, int DK, int DV, bool kCodes, bool kLists>
__global__ void __launch_bounds__(kFewThreads, is_wide(DK, DV) ? 1 : 2)
    attend_few(const __grid_constant__ AttentionParams params) {
  using Number = typename Cached<T, kCodes>::Number;
  using Element = typename Cached<T, kCodes>::Element;
  constexpr int kChunk = Cached<T, kCodes>::kChunk;
  constexpr int kKeys = few_keys(DK, DV, kCodes), kWarpKeys = kCodes ? 32 : 16, kWarps = kFewThreads / 32;
  constexpr int KW = kKeys / kWarpKeys, VW = kWarps / KW, M = DV / 8 / VW;  // warps that share slots, columns
  constexpr int kKeyBytes = kKeys * DK * sizeof(Element), kStage = kKeys * (DK + DV) * sizeof(Element);
  constexpr int kLanes = is_wide(DK, DV) ? 32 : 16, kAtOnce = kFewThreads / kLanes;
  extern __shared__ uint4 shared[];
  const uint32_t kv_at = shared_address(shared);
  // Queries, what heads turn in and sums of squares lie where the last stage will.
  constexpr int kTurning = kFewRows * DK * 2, kSquares = kTurning + kFewThreads * 32;
  static_assert(kSquares + 2 * kFewRows * 4 <= kStage, "fits in a stage");
  const int stages = params.deep ? kDeepStages : kFewStages;
  uint4* last_stage = shared + (stages - 1) * (kStage / 16);
  const uint32_t queries_at = shared_address(last_stage);
  float4* of_head = reinterpret_cast<float4*>(last_stage) + kTurning / 16 + threadIdx.x / kLanes * 2 * kLanes;
  float* squares = reinterpret_cast<float*>(last_stage) + kSquares / 4;  // of each token's row: all queries; all keys

  const qm_attention& node = params.attention;
  const int split = static_cast<int>(blockIdx.x) % params.splits, block = static_cast<int>(blockIdx.x) / params.splits;
  const int blocks_of_pair = kLists ? params.row_tokens : 1, pair = kLists ? block / blocks_of_pair : block;
  const int own_token = kLists ? block % blocks_of_pair : 0;  // of those that count; of a row without lists 0 has all
  const int batch_row = pair / node.kv_num_heads, kv_head = pair % node.kv_num_heads, lane = threadIdx.x % 32,
            warp = threadIdx.x / 32;
  const int64_t old_slots = first_slot_of(params, pair, kv_head, params.past_slots),
                new_slots = first_slot_of(params, pair, kv_head, params.slots);
  const Element* old_keys = static_cast<const Element*>(params.past_key) + old_slots * DK;
  const Element* old_values = static_cast<const Element*>(params.past_value) + old_slots * DV;
  Element* keys = static_cast<Element*>(params.key) + new_slots * DK;
  Element* values = static_cast<Element*>(params.value) + new_slots * DV;
  const int slot_stride = slot_step(params), packed_first = static_cast<int>(first_token(params, batch_row));
  const volatile int* rows_at = params.rows + 3 * batch_row;
  const bool attends = pair < params.pairs;
  if (params.cluster && attends) cluster_arrive();
  int all_rows = params.row_tokens * params.group;
  for (int i = all_rows * (DK / 8) + threadIdx.x; i < kFewRows * (DK / 8); i += kFewThreads)
    store16(queries_at + swizzled<DK>(i / (DK / 8), i % (DK / 8)), uint4{});
  FewItem item(params, kv_head, threadIdx.x / kLanes, all_rows, 0);
  HeadPart<T, kLanes> part(params, item.head, threadIdx.x % kLanes);
  int head_of[2];  // of the rows that the warp adds up: warp, warp + 8
  for (int k = 0; k < 2; ++k) head_of[k] = kv_head * params.group + (warp + k * kWarps) % params.group;
  const int columns = (DV / 4 + params.splits - 1) / params.splits;  // fours of them that a block of a cluster adds up
  wait_for_previous();
  launch_dependents();
  if (!attends) return copy_slots(params, static_cast<int>(blockIdx.x) - params.pairs * blocks_of_pair * params.splits);

  const int said[] = {rows_at[0], rows_at[1], rows_at[2]};
  uint4 loaded;
  HeadTurn turn;
  auto ask = [&](int first, int past) {  // first: token that counts
    const int token = packed_first + min(first + item.index, params.tokens - 1);
    loaded = part.there ? row_of(params, token)[part.chunk] : uint4{};
    part.load_turn(params, angles_of(params, token, past, item.index), turn);
    part.load_weights(params);
  };
  if (params.tokens == 1 && !params.block_table)
    ask(0, 0);  // does not wait for `rows`
  else
    ask(min(max(said[0], 0), params.tokens - 1), said[2]);
  float sinks[2];
  for (int k = 0; k < 2; ++k) sinks[k] = params.sinks[head_of[k]];
  issue_loads();

  const BatchRow batch = check_row(params, batch_row, said[0], said[1], said[2]);
  const bool listed = kLists && has_lists(params, batch);
  int rows = is_mine(params, batch) ? batch.count * params.group : 0;
  if (listed)
    rows = own_token < batch.count ? params.group : 0;
  else if (own_token)
    rows = 0;
  // The output of tokens that do not count. All packed tokens count, and attention_append finds tokens without a row.
  if (split == 0 && own_token == 0 &&
      (params.block_table ? !batch.valid && params.all_tokens == params.batch : batch.count < params.tokens)) {
    const uint32_t outside = batch.valid ? 0 : Half<T>::pack(NAN, NAN);
    const int first = params.block_table ? batch_row : 0;
    for (int i = threadIdx.x; i < all_rows * (DV / 8); i += kFewThreads) {
      const int row = i / (DV / 8), token = first + row / params.group;
      if (token >= batch.begin && token < batch.begin + batch.count) continue;
      const int64_t place =
          (first_token(params, batch_row) + token) * node.num_heads + kv_head * params.group + row % params.group;
      static_cast<uint4*>(params.output)[place * (DV / 8) + i % (DV / 8)] = {outside, outside, outside, outside};
    }
  }
  if (rows == 0) {
    if (params.cluster) cluster_wait();
    return;
  }
  if (listed && params.row_tokens > 1) {  // its own token's heads take the place of all tokens' heads
    for (int i = params.group * (DK / 8) + threadIdx.x; i < all_rows * (DK / 8); i += kFewThreads)
      store16(queries_at + swizzled<DK>(i / (DK / 8), i % (DK / 8)), uint4{});
    all_rows = params.group;
    item = FewItem(params, kv_head, threadIdx.x / kLanes, all_rows, own_token);
    part = HeadPart<T, kLanes>(params, item.head, threadIdx.x % kLanes);
    ask(batch.begin, batch.past);
  }
  const int all_items = all_rows + 2 * params.row_tokens, own_slot = batch.past + own_token;
  const int* list = listed ? list_of(params, batch, batch_row, kv_head, own_token) : nullptr;
  Span span = listed ? span_of_list(params, own_slot) : span_of(params, batch, 0, batch.count - 1);
  const bool active = split < span.splits;
  if (!active && !params.cluster) return;
  const int begin = active ? span.begin(split) : 0, end = active ? span.begin(split + 1) : 0;

  const int last_place = span.last_slot;  // of a list, which may end before
  auto at_stage = [&](int stage) {
    const uint32_t place = stage - begin;
    return kv_at + (params.deep ? place % kDeepStages : place % kFewStages) * kStage;
  };
  // A group of copies, which may be empty; at first without the new slots, which this block is about to have.
  auto load = [&](int stage, bool at_first) {
    const int first = stage * kKeys;
    if (listed) {
      static_assert(!kLists || DK == DV, "a slot has as many chunks of a key as of a value");
      constexpr int kOfRow = DK / kChunk, kTurns = kKeys * kOfRow / kFewThreads;
      int slots[kTurns];
#pragma unroll
      for (int i = 0; i < kTurns; ++i) {
        const int place = first + (static_cast<int>(threadIdx.x) + i * kFewThreads) / kOfRow;
        slots[i] = stage < end && place <= last_place ? list[place] : -1;
      }
#pragma unroll
      for (int i = 0; stage < end && i < kTurns; ++i) {
        const uint32_t at = threadIdx.x + i * kFewThreads, key = at / kOfRow, chunk = at % kOfRow;
        const bool seen = slots[i] >= 0 && slots[i] <= own_slot, is_new = slots[i] >= batch.past;
        if (at_first && seen && is_new) continue;
        const int64_t from = static_cast<int64_t>(seen ? slots[i] : 0) * DK + chunk * kChunk;
        const uint32_t to = at_stage(stage) + (kCodes ? swizzled_codes<DK>(key, chunk) : swizzled<DK>(key, chunk));
        copy_async16_past(to, (is_new ? keys : old_keys) + from, seen);
        copy_async16_past(to + kKeyBytes, (is_new ? values : old_values) + from, seen);
      }
      return copy_async_commit();
    }
    const bool old_only = first >= span.low && first + kKeys <= batch.past;
    const Place place = stage < end ? find_slot(params, batch_row, first) : Place{0, false};
    auto rows_of = [&](auto width, const Element* old, const Element* present, uint32_t to) {
      constexpr int D = decltype(width)::value, kChunks = kKeys * D / kChunk;
      old += place.at * D, present += place.at * D;
#pragma unroll
      for (int i = 0; i < (kChunks + kFewThreads - 1) / kFewThreads; ++i) {
        const uint32_t at = threadIdx.x + i * kFewThreads, key = at / (D / kChunk), chunk = at % (D / kChunk);
        if (kChunks % kFewThreads && at >= kChunks) break;
        const uint32_t there = to + (kCodes ? swizzled_codes<D>(key, chunk) : swizzled<D>(key, chunk));
        const int slot = first + key, from = key * slot_stride * D + chunk * kChunk;
        if (old_only)
          copy_async16_past(there, old + from, place.there);
        else if (!at_first || slot < batch.past || slot > span.last_slot)
          copy_async16_past(there, (slot < batch.past ? old : present) + from,
                            place.there && slot >= span.low && slot <= span.last_slot);
      }
    };
    if (stage < end) {
      rows_of(Width<DK>{}, old_keys, keys, at_stage(stage));
      rows_of(Width<DV>{}, old_values, values, at_stage(stage) + kKeyBytes);
    }
    copy_async_commit();
  };
  for (int i = 0; i < stages - 1; ++i) load(begin + i, true);

  if (node.qk_norm == k_qk_norm_row) {
    for (int i = warp; i < 2 * batch.count; i += kWarps) {
      const int index = i / 2, chunks = (i % 2 ? node.kv_num_heads : node.num_heads) * (DK / 8);
      const int64_t token = first_token(params, batch_row) + batch.begin + index;
      const uint4* from = row_of(params, token) + (i % 2 ? node.num_heads * (DK / 8) : 0);
      float sum = 0;
      for (int at = lane; at < chunks; at += 32) sum = add_squares<T>(from[at], sum);
      for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
      if (lane == 0) squares[i % 2 * kFewRows + index] = sum;
    }
    __syncthreads();
  }
  // Places of the new slots, which are the last ones of a list that has them.
  int new_places = batch.past, end_places = batch.past + batch.count;
  if (listed) {
    end_places = length_of(list, last_place + 1), new_places = max(end_places - batch.count, 0);
    span.first_slot = span.last_slot = end_places - 1;
  }
  auto place_of_slot = [&](int slot) {
    if constexpr (kLists)
      if (listed) {
        for (int place = end_places - 1; place >= new_places; --place)
          if (list[place] == slot) return place;
        return -1;
      }
    return slot;
  };
  const bool stores = listed && split == 0;
  const bool appends = stores || max(new_places, begin * kKeys) < min(end_places, end * kKeys);
  const int items = !active ? 0 : appends ? all_items : all_rows;
  for (int first = 0; first < items;) {
    float x[8];
    widen<T>(x, loaded);
    part.apply(params, turn, part.by_row ? squares[(item.query ? 0 : kFewRows) + min(item.index, kFewRows - 1)] : 0.f,
               of_head, x);
    const int number = first + static_cast<int>(threadIdx.x) / kLanes;
    const bool counts = item.index < batch.count;
    if (part.there && item.query) {
      const uint4 v = counts ? narrow<Number>(x) : uint4{};
      if constexpr (kCodes) {  // in attend_codes' order
        const int half = part.d % 16, chunk = part.d / 16 * 2;
        store8(queries_at + swizzled<DK>(number, chunk) + half, {v.x, v.z});
        store8(queries_at + swizzled<DK>(number, chunk + 1) + half, {v.y, v.w});
      } else {
        store16(queries_at + swizzled<DK>(number, part.d / 8), v);
      }
    } else if (part.there && number < all_items && counts) {
      const int slot = batch.past + item.index, own_place = place_of_slot(slot), stage = own_place / kKeys;
      const bool here = own_place >= 0 && stage >= begin && stage < end;
      if (here || (stores && item.index == own_token)) {
        const Place place = find_slot(params, batch_row, slot);
        void* to = (item.key ? keys : values) + place.at * part.size + part.d;
        if (place.there) store_eight<T, kCodes>(node, item.key, x, to);
        const bool soon = here && stage < begin + stages - 1;
        const int row = own_place % kKeys;
        if constexpr (kCodes) {
          const int chunk = part.d / 16;
          const uint32_t at = item.key ? swizzled_codes<DK>(row, chunk) : kKeyBytes + swizzled_codes<DV>(row, chunk);
          uint8_t* there = reinterpret_cast<uint8_t*>(shared) + (at_stage(stage) - kv_at) + at + part.d % 16;
          if (soon) store_eight<T, kCodes>(node, item.key, x, there);
        } else {
          const uint32_t at = item.key ? swizzled<DK>(row, part.d / 8) : kKeyBytes + swizzled<DV>(row, part.d / 8);
          if (soon) store16(at_stage(stage) + at, narrow<T>(x));
        }
      }
    }
    first += kAtOnce;
    if (first >= items) break;
    item = FewItem(params, kv_head, first + static_cast<int>(threadIdx.x) / kLanes, all_rows, own_token);
    part = HeadPart<T, kLanes>(params, item.head, threadIdx.x % kLanes);
    ask(batch.begin, batch.past);
    issue_loads();
  }
  __syncthreads();
  uint32_t own[DK / 16][4];
#pragma unroll
  for (int d = 0; d < DK / 16; ++d) load_matrices(own[d], queries_at + swizzled<DK>(lane % 16, 2 * d + lane / 16));

  AttentionSums<1, M> found(params, batch, 0);
  if (listed) found.slot_of[0][0] = found.slot_of[0][1] = span.last_slot;
  auto query = [&](int d, int, uint32_t(&q)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) q[i] = own[d][i];
  };
  const int key_warp = warp % KW, value_warp = warp / KW;
  const bool mixed = span.first_slot != span.last_slot;
  for (int stage = begin; stage < end; ++stage) {
    if (params.deep)
      copy_async_wait<kDeepStages - 2>();
    else
      copy_async_wait<kFewStages - 2>();
    __syncthreads();
    load(stage + stages - 1, false);
    const uint32_t k_at = at_stage(stage);
    const int first_key = key_warp * kWarpKeys, slot = stage * kKeys + first_key;
    const bool masked = is_masked(span, stage * kKeys, kKeys);
    if constexpr (kCodes)
      attend_codes<DK, DV, kWarpKeys / 8>(params, k_at, k_at + kKeyBytes, first_key, slot, value_warp * M, masked,
                                          mixed, own, found);
    else
      attend_stage<Number, DK, DV, kWarpKeys / 8, kCodes>(params, k_at, k_at + kKeyBytes, first_key, value_warp * M,
                                                          masked, mixed, query,
                                                          SlotsBefore<1>{params, found.slot_of, slot}, found);
  }
  add_quads(found.sum[0]);

  // The warps' results, over the stages: [KW][16][kStride], then pairs of largest score and sum.
  constexpr int kStride = DV + 4;
  static_assert(KW * kFewRows * (kStride + 2) * 4 <= kFewStages * kStage, "fits in the stages");
  float* of_warps = reinterpret_cast<float*>(shared);
  float2* sums = reinterpret_cast<float2*>(of_warps + KW * kFewRows * kStride);
  // Of a cluster, after the stages: pairs [16 blocks][16 rows], then fours of columns [blocks][16 rows][columns].
  const uint32_t received = kv_at + stages * kStage, received_columns = received + kMostCluster * kFewRows * 8;
  __syncthreads();
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = key_warp * kFewRows + h * 8 + lane / 4;
    if (lane % 4 == 0 && value_warp == 0) sums[row] = {found.most[0][h], found.sum[0][h]};
    if constexpr (kCodes) {
#pragma unroll
      for (int n = 0; n < M; n += 2)
        *reinterpret_cast<float4*>(of_warps + row * kStride + (value_warp * M + n) * 8 + lane % 4 * 4) = {
            found.acc[0][n][2 * h], found.acc[0][n + 1][2 * h], found.acc[0][n][2 * h + 1],
            found.acc[0][n + 1][2 * h + 1]};
    } else {
#pragma unroll
      for (int n = 0; n < M; ++n)
        *reinterpret_cast<float2*>(of_warps + row * kStride + (value_warp * M + n) * 8 + lane % 4 * 2) = {
            found.acc[0][n][2 * h], found.acc[0][n][2 * h + 1]};
    }
  }
  __syncthreads();
  if (params.cluster) cluster_wait();  // all its blocks have begun
  int64_t place_of[2];
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    const int row = warp + k * kWarps;
    if (row >= rows) break;
    const int token = listed ? own_token : row / params.group;
    place_of[k] = (first_token(params, batch_row) + batch.begin + token) * node.num_heads + head_of[k];
    if (!active) continue;
    const float own_score = params.splits > 1 ? -INFINITY : sinks[k] * kLog2e;
    float largest = own_score, factors[KW];
#pragma unroll
    for (int w = 0; w < KW; ++w) largest = fmaxf(largest, sums[w * kFewRows + row].x);
    const float base = largest == -INFINITY ? 0.f : largest;
    float all = fast_exp2(own_score - base);
#pragma unroll
    for (int w = 0; w < KW; ++w) {
      factors[w] = fast_exp2(sums[w * kFewRows + row].x - base);
      all = fmaf(sums[w * kFewRows + row].y, factors[w], all);
    }
    const float inverse = 1.f / all * node.v_scale;
    const int64_t part_of = place_of[k] * params.splits + split;
    if (params.cluster && lane < params.splits)
      store_remote(cluster_address(received + (split * kFewRows + row) * 8, lane), float2{largest, all});
    else if (params.splits > 1 && !params.cluster && lane == 0)
      params.sums[part_of] = {largest, all};
#pragma unroll
    for (int c = lane; c < DV / 4; c += 32) {
      float4 y{0, 0, 0, 0};
#pragma unroll
      for (int w = 0; w < KW; ++w) {
        const float4 x = *reinterpret_cast<const float4*>(of_warps + (w * kFewRows + row) * kStride + c * 4);
        y.x = fmaf(x.x, factors[w], y.x), y.y = fmaf(x.y, factors[w], y.y);
        y.z = fmaf(x.z, factors[w], y.z), y.w = fmaf(x.w, factors[w], y.w);
      }
      if (params.cluster)
        store_remote(
            cluster_address(received_columns + ((split * kFewRows + row) * columns + c % columns) * 16, c / columns),
            y);
      else if (params.splits > 1)
        reinterpret_cast<float4*>(params.partial)[part_of * (DV / 4) + c] = y;
      else
        store_four<T>(params, place_of[k], c * 4, y, inverse);
    }
  }
  if (!params.cluster) return;

  const auto gate_of = [&](int k, int feature) {
    const float2 gates = gates_of<T>(params, place_of[k], feature & ~1);
    return feature % 2 ? gates.y : gates.x;
  };
  const int first_feature = split * columns * 4 + lane;
  float first_gates[2];  // asked for before the wait
#pragma unroll
  for (int k = 0; k < 2; ++k)
    first_gates[k] = warp + k * kWarps < rows && first_feature < DV ? gate_of(k, first_feature) : 1.f;
  cluster_arrive();
  cluster_wait();
  const float2* of_blocks = reinterpret_cast<const float2*>(shared + stages * (kStage / 16));
  const float* columns_of = reinterpret_cast<const float*>(of_blocks + kMostCluster * kFewRows);
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    const int row = warp + k * kWarps;
    if (row >= rows) break;
    const float2 s = lane < span.splits ? of_blocks[lane * kFewRows + row] : float2{-INFINITY, 0};
    const float sink = sinks[k] * kLog2e;
    float largest = fmaxf(sink, s.x);
    for (int d = kMostCluster / 2; d > 0; d /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, d));
    largest = __shfl_sync(~0u, largest, 0);
    const float base = largest == -INFINITY ? 0.f : largest, weight = fast_exp2(s.x - base);
    float all = s.y * weight;
    for (int d = kMostCluster / 2; d > 0; d /= 2) all += __shfl_xor_sync(~0u, all, d);
    const float inverse = 1.f / (__shfl_sync(~0u, all, 0) + fast_exp2(sink - base)) * node.v_scale;
    for (int first = 0; first < columns * 4; first += 32) {
      const int column = first + lane, to = split * columns * 4 + column;
      const bool there = column < columns * 4 && to < DV;
      float y = 0;
#pragma unroll 8
      for (int r = 0; r < span.splits; ++r) {
        const float of_block = __shfl_sync(~0u, weight, r);
        if (there) y = fmaf(columns_of[(r * kFewRows + row) * columns * 4 + column], of_block, y);
      }
      if (!there) continue;
      const float gate = first == 0 ? first_gates[k] : gate_of(k, to);
      static_cast<T*>(params.output)[place_of[k] * DV + to] = Half<T>::from(y * inverse * gate);
    }
  }
}

}  // namespace quantmoe
