// The kernels before and after attend and attend_wide: new keys and values to the cache, and the sum of the splits.
#pragma once
#include "cuda/attention/attention.cuh"
#include "cuda/attention/attention_equal.cuh"

namespace quantmoe {

// Sum over the block; every thread calls it.
__device__ inline float block_sum(float x, float* scratch) {
  for (int d = 16; d > 0; d /= 2) x += __shfl_xor_sync(~0u, x, d);
  __syncthreads();
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
  __syncthreads();
  x = 0;
  for (int i = 0; i < static_cast<int>(blockDim.x) / 32; ++i) x += scratch[i];
  return x;
}

// kLanes lanes a head of a token. A block has heads_per_block heads of some tokens; what `rows` does not decide is
// asked for before it is there.
template <typename T, int kLanes, bool kCodes>
__global__ void __launch_bounds__(kAppendThreads, 4) attention_append(const __grid_constant__ AttentionParams params) {
  constexpr int kHeads = kAppendThreads / kLanes;
  __shared__ float4 features[kHeads][2 * kLanes];
  __shared__ float scratch[kAppendThreads / 32];
  wait_for_previous();
  launch_dependents();
  const int block = static_cast<int>(blockIdx.x);
  if (block >= params.token_blocks) return copy_slots(params, block - params.token_blocks);
  const qm_attention& node = params.attention;
  const int heads = node.num_heads, kv_heads = node.kv_num_heads;
  const int local = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const int steps = params.token_blocks / params.blocks_per_token;
  int token = block / params.blocks_per_token;
  const int own = block % params.blocks_per_token * params.heads_per_block + local;
  HeadPart<T, kLanes> part(params, local < params.heads_per_block ? own : heads + 2 * kv_heads, lane);
  part.load_weights(params);
  const int kv_head = part.query ? part.head / params.group : part.head;
  const int of_group = part.query ? part.head % params.group : 0;
  auto load = [&](int token) {
    return part.there && token < params.all_tokens ? row_of(params, token)[part.chunk] : uint4{};
  };
  uint4 next = load(token);

  BatchRow row{};
  int batch_row = 0, row_end = 0;  // of the last token; the first token after the row's
  for (; token < params.all_tokens; token += steps) {
    HeadTurn turn;
    if (!params.block_table) part.load_turn(params, token, turn);
    const uint4 loaded = next;
    next = load(token + steps);
    issue_loads();
    if (token >= row_end) {
      batch_row = row_of_token(params, token);
      row = read_row(params, batch_row);
      row_end = !params.block_table            ? (batch_row + 1) * params.tokens
                : batch_row + 1 < params.batch ? params.rows[3 * (batch_row + 1)]
                                               : params.all_tokens;
    }
    const int index = token - static_cast<int>(first_token(params, batch_row)) - row.begin;
    if (params.block_table) part.load_turn(params, angles_of(params, token, row.past, index), turn);
    if (row.count && !is_mine(params, row)) continue;
    if (index < 0 || index >= row.count) {
      const uint32_t outside = row.valid ? 0 : Half<T>::pack(NAN, NAN);
      if (part.query && part.d < node.v_head_size)
        static_cast<uint4*>(
            params.output)[((static_cast<int64_t>(token) * heads + part.head) * node.v_head_size + part.d) / 8] = {
            outside, outside, outside, outside};
      continue;
    }

    float squares = 0;
    if (part.by_row) {  // of all heads
      const int queries = heads * (node.head_size / 8), keys = kv_heads * (node.head_size / 8);
      float sums[2] = {0, 0};
      for (int i = threadIdx.x; i < queries + keys; i += static_cast<int>(blockDim.x)) {
        const float sum = add_squares<T>(row_of(params, token)[i], 0);
        sums[i >= queries] += sum;
      }
      const float q = block_sum(sums[0], scratch), k = block_sum(sums[1], scratch);
      squares = part.query ? q : k;
    }
    float x[8];
    widen<T>(x, loaded);
    part.apply(params, turn, squares, features[local], x);
    if (!part.there) continue;
    const int pair = batch_row * kv_heads + kv_head;
    const Place slot = find_slot(params, batch_row, row.past + index);
    if (!part.query && !slot.there) continue;
    const int64_t at = part.query ? queries_of(params, row, pair, kv_head, index) + of_group
                                  : first_slot_of(params, pair, kv_head, params.slots) + slot.at;
    const int64_t place = at * part.size + part.d;
    if (part.query) {
      static_cast<uint4*>(params.queries)[place / 8] = narrow<typename Cached<T, kCodes>::Number>(x);
    } else {
      using Element = typename Cached<T, kCodes>::Element;
      store_eight<T, kCodes>(node, part.key, x, static_cast<Element*>(part.key ? params.key : params.value) + place);
    }
  }
}

// Adds up the splits of 128 features of a head of a token: a block, whose warps take splits in turn; lanes have four
// features. kMost: of the splits.
template <typename T, int kMost>
__global__ void __launch_bounds__(kAttendThreads) attend_merge(const __grid_constant__ AttentionParams params) {
  constexpr int kWarps = kAttendThreads / 32;
  __shared__ float4 results[kWarps][32];
  launch_dependents();
  const int heads = params.attention.num_heads, place = blockIdx.x, head = place % heads, token = place / heads;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, features = params.attention.v_head_size / 4;
  const int column = static_cast<int>(blockIdx.y) * 32 + lane;
  const int batch_row = row_of_token(params, token);
  const BatchRow row = read_row(params, batch_row);
  const int index = token - static_cast<int>(first_token(params, batch_row)) - row.begin;
  const float sink = params.sinks[head] * kLog2e;
  if (index < 0 || index >= row.count || !is_mine(params, row)) return wait_for_previous();
  const int first_row = (index * params.group + head % params.group) / params.tile_rows * params.tile_rows;
  const bool listed = params.gathers && has_lists(params, row);
  if (params.equal) wait_for_previous();  // equal_append says what the token sees
  const Span span = params.equal
                        ? span_of_entries(params, entries_of(params, row, batch_row, head / params.group, index))
                    : listed ? span_of_list(params, row.past + index)
                             : span_of(params, row, first_row);
  const int splits = span.splits;
  wait_for_previous();

  const int64_t first = static_cast<int64_t>(place) * params.splits;
  constexpr int kLanes = kMost / 32;  // splits of a lane
  float2 sums[kLanes];
  float4 parts[kLanes][32 / kWarps];
#pragma unroll
  for (int i = 0; i < kLanes; ++i) {
    sums[i] = lane + 32 * i < splits ? params.sums[first + lane + 32 * i] : float2{-INFINITY, 0};
#pragma unroll
    for (int j = 0; j < 32 / kWarps; ++j) {
      const int split = 32 * i + j * kWarps + warp;
      parts[i][j] = float4{0, 0, 0, 0};
      if (split < splits && column < features)
        parts[i][j] = reinterpret_cast<const float4*>(params.partial)[(first + split) * features + column];
    }
  }
  issue_loads();
  float largest = sink;
#pragma unroll
  for (int i = 0; i < kLanes; ++i) largest = fmaxf(largest, sums[i].x);
  for (int d = 16; d > 0; d /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, d));
  const float base = largest == -INFINITY ? 0.f : largest;
  float weights[kLanes], all = 0;
#pragma unroll
  for (int i = 0; i < kLanes; ++i) weights[i] = fast_exp2(sums[i].x - base), all = fmaf(sums[i].y, weights[i], all);
  for (int d = 16; d > 0; d /= 2) all += __shfl_xor_sync(~0u, all, d);
  all += fast_exp2(sink - base);

  float4 y{0, 0, 0, 0};
#pragma unroll
  for (int i = 0; i < kLanes; ++i)
#pragma unroll
    for (int j = 0; j < 32 / kWarps; ++j) {
      const float4 x = parts[i][j];
      const float weight = __shfl_sync(~0u, weights[i], j * kWarps + warp);
      y.x = fmaf(x.x, weight, y.x), y.y = fmaf(x.y, weight, y.y);
      y.z = fmaf(x.z, weight, y.z), y.w = fmaf(x.w, weight, y.w);
    }
  results[warp][lane] = y;
  __syncthreads();
  if (warp || column >= features) return;
  for (int w = 1; w < kWarps; ++w) {
    const float4 x = results[w][lane];
    y.x += x.x, y.y += x.y, y.z += x.z, y.w += x.w;
  }
  const float inverse = 1.f / all * params.attention.v_scale;
  store_four<T>(params, place, column * 4, y, inverse);
}

}  // namespace quantmoe
