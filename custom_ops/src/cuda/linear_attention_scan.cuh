// GatedDelta of many tokens: the states, from chunk to chunk, and the outputs (linear_attention_chunked.cuh), on
// mma.sync and, where a GPU has it, on wgmma.
#pragma once
#include "cuda/linear_attention_chunked.cuh"

namespace quantmoe {

template <int K>
struct DeltaScanStage {
  uint16_t key[kDeltaTokens * K], query[kDeltaTokens * K], value[kDeltaTokens * kDeltaScanColumns];
  uint16_t w[2][kDeltaTokens * kDeltaTokens], p[2][kDeltaTokens * kDeltaTokens];  // high and low parts, store_split
};
template <int K>
struct DeltaScanShared {
  static constexpr int kFactors = kDeltaMade - 2 * kDeltaTokens * kDeltaTokens;
  DeltaScanStage<K> stages[2];
  float factors[2][kFactors];
};

// A block's columns of a head of a row. A lane's values of the state are [8 m + 2t + e % 2, column + e / 2 * 8], of
// outputs those of tokens 8 i + 2t + e % 2.
template <typename T, int K>
struct DeltaScan {
  static constexpr int C = kDeltaTokens, kTiles = C / 8, kFeatures = K / 8;
  static constexpr bool kUnits = std::is_same_v<T, __half>;  // of less range than f32
  using Shared = DeltaScanShared<K>;

  const DeltaChunkParams& params;
  const qm_delta& node;
  int head, batch_row, warp, lane, t, column, count, chunks;
  int64_t token, width, state_at;
  bool from_past, any;

  __device__ explicit DeltaScan(const DeltaChunkParams& given) : params(given), node(given.delta.delta) {
    head = blockIdx.y, batch_row = blockIdx.z, warp = threadIdx.x / 32, lane = threadIdx.x % 32, t = lane % 4;
    column = blockIdx.x * kDeltaScanColumns + warp * 16 + lane / 4;
    const TokenRow row = read_token_row(params.delta.rows, batch_row, params.delta.tokens);
    count = max(0, row.count - params.delta.tail);
    chunks = min(params.chunks, (count + C - 1) / C - params.first);
    token = static_cast<int64_t>(batch_row) * params.delta.tokens + row.begin + params.first * C;
    width = 2 * node.num_k_heads * K + node.num_v_heads * node.v_head_size;
    state_at = (static_cast<int64_t>(batch_row) * node.num_v_heads + head) * K * node.v_head_size + column;
    from_past = params.first || row.from_past || !row.count;
    any = row.valid && (chunks > 0 || !params.first);
  }
  // Asks for a chunk's operands.
  __device__ void read(Shared& shared, int chunk) const {
    DeltaScanStage<K>& to = shared.stages[chunk % 2];
    const int n = min(C, count - (params.first + chunk) * C);
    const T* q = static_cast<const T*>(params.delta.qkv) + (token + chunk * C) * width +
                 head / (node.num_v_heads / node.num_k_heads) * K;
    const T* values = static_cast<const T*>(params.delta.qkv) + (token + chunk * C) * width + 2 * node.num_k_heads * K +
                      head * node.v_head_size + blockIdx.x * kDeltaScanColumns;
    copy_tokens<T, K>(shared_address(to.key), q + node.num_k_heads * K, width, n);
    copy_tokens<T, K>(shared_address(to.query), q, width, n);
    copy_tokens<T, kDeltaScanColumns>(shared_address(to.value), values, width, n);
    const float* made =
        params.made +
        ((static_cast<int64_t>(batch_row) * params.chunks + chunk) * node.num_v_heads + head) * kDeltaMade;
    constexpr int kRows = kDeltaChunkThreads / (C / 8);
    const uint32_t at = eight_at(threadIdx.x / (C / 8), threadIdx.x % (C / 8)), matrices = shared_address(to.w) + at;
    const unsigned char* own = reinterpret_cast<const unsigned char*>(made) + at;
#pragma unroll
    for (int r = 0; r < C; r += kRows)
      if (r >= 32 || threadIdx.x % (C / 8) < 4)
#pragma unroll
        for (int matrix = 0; matrix < 4; ++matrix)
          copy_async16(matrices + r * 128 + matrix * C * C * 2, own + r * 128 + matrix * C * C * 2, true);
    if (threadIdx.x < Shared::kFactors / 4)
      copy_async16(shared_address(shared.factors[chunk % 2] + 4 * threadIdx.x), made + 2 * C * C + 4 * threadIdx.x,
                   true);
    copy_async_commit();
  }
  __device__ int64_t place(int m, int e) const {
    return state_at + static_cast<int64_t>(8 * m + 2 * t + e % 2) * node.v_head_size + e / 2 * 8;
  }
  __device__ void load_state(float (&state)[kFeatures][4]) const {
    const float* past = params.first ? params.delta.present_state : params.delta.past_state;
#pragma unroll
    for (int m = 0; m < kFeatures; ++m)
#pragma unroll
      for (int e = 0; e < 4; ++e) state[m][e] = from_past ? past[place(m, e)] : 0.f;
  }
  __device__ void store_state(const float (&state)[kFeatures][4]) const {
#pragma unroll
    for (int m = 0; m < kFeatures; ++m)
#pragma unroll
      for (int e = 0; e < 4; ++e) params.delta.present_state[place(m, e)] = state[m][e];
  }
  __device__ void store_outputs(const float (&o)[kTiles][4], int chunk) const {
    const int n = min(C, count - (params.first + chunk) * C) - 2 * t;
    const int64_t stride = node.num_v_heads * node.v_head_size;
    float* to = params.delta.outputs + (token + chunk * C + 2 * t) * stride + head * node.v_head_size + column;
#pragma unroll
    for (int i = 0; i < kTiles; ++i, to += 8 * stride)
#pragma unroll
      for (int e = 0; e < 2; ++e)
        if (8 * i + e < n) to[e * stride] = o[i][e], to[e * stride + 8] = o[i][e + 2];
  }

  // Of a token's factors, and the next one's: by what its key (0) and query (1) multiply, and what is left of its value
  // at the end (2).
  __device__ static float2 factor(const float (&factors)[Shared::kFactors], int which, int tile) {
    return *reinterpret_cast<const float2*>(factors + which * C + 8 * tile + 2 * (threadIdx.x % 4));
  }
  // r = V - diag(c) K S of what keys and the state, which is in units, give.
  __device__ void take_values(const DeltaScanStage<K>& of, const float (&factors)[Shared::kFactors],
                              const float (&units)[2], float (&r)[kTiles][4]) const {
#pragma unroll
    for (int i = 0; i < kTiles; i += 2) {
      uint32_t values[4];
      load_transposed(values,
                      shared_address(of.value) + eight_at((i + lane / 16) * 8 + lane % 8, 2 * warp + lane / 8 % 2));
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float2 by_key = factor(factors, 0, i + e);
#pragma unroll
        for (int side = 0; side < 2; ++side) {
          const uint32_t value = values[2 * e + side];
          float(&to)[4] = r[i + e];
          to[2 * side] = fmaf(-by_key.x, to[2 * side] * units[side], Half<T>::low(value));
          to[2 * side + 1] = fmaf(-by_key.y, to[2 * side + 1] * units[side], Half<T>::high(value));
        }
      }
    }
  }
  // diag(c) Q S of what queries and the state give.
  __device__ static void scale_outputs(const float (&factors)[Shared::kFactors], const float (&units)[2],
                                       float (&o)[kTiles][4]) {
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      const float2 by_query = factor(factors, 1, i);
#pragma unroll
      for (int side = 0; side < 2; ++side)
        o[i][2 * side] *= by_query.x * units[side], o[i][2 * side + 1] *= by_query.y * units[side];
    }
  }
  // u as the state takes it, and the state after its decay, both in the units of the larger one.
  __device__ void decay(const float (&factors)[Shared::kFactors], float (&units)[2], float (&u)[kTiles][4],
                        float (&state)[kFeatures][4]) const {
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      const float2 left = factor(factors, 2, i);
#pragma unroll
      for (int side = 0; side < 2; ++side) u[i][2 * side] *= left.x, u[i][2 * side + 1] *= left.y;
    }
    float decays[2] = {factors[3 * C], factors[3 * C]};
    if constexpr (kUnits) {
      float of_tokens[2];
      find_units(u, of_tokens);
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        units[side] = fmaxf(units[side], of_tokens[side]);
        const float by = inverse_power(units[side]);
        decays[side] *= by;
#pragma unroll
        for (int i = 0; i < kTiles; ++i) u[i][2 * side] *= by, u[i][2 * side + 1] *= by;
      }
    }
#pragma unroll
    for (int m = 0; m < kFeatures; ++m)
#pragma unroll
      for (int e = 0; e < 4; ++e) state[m][e] *= decays[e / 2];
  }
  // 16 features of the state, the m-th, as a left operand in units.
  __device__ static void split_state(const float (&state)[kFeatures][4], const float (&units)[2], int m,
                                     uint32_t (&high)[4], uint32_t (&low)[4]) {
    float in_units[2][4];
#pragma unroll
    for (int e = 0; e < 4; ++e)
      in_units[0][e] = state[2 * m][e] * inverse_power(units[e / 2]),
      in_units[1][e] = state[2 * m + 1][e] * inverse_power(units[e / 2]);
    split<T>(in_units[0], in_units[1], high, low);
  }
  __device__ static void out_of_units(const float (&units)[2], float (&state)[kFeatures][4]) {
    if constexpr (kUnits)
#pragma unroll
      for (int m = 0; m < kFeatures; ++m)
#pragma unroll
        for (int e = 0; e < 4; ++e) state[m][e] *= units[e / 2];
  }
};

// Blocks: columns of a head, heads, rows.
template <typename T, int K>
__global__ void __launch_bounds__(kDeltaChunkThreads) delta_scan(const __grid_constant__ DeltaChunkParams params) {
  using Scan = DeltaScan<T, K>;
  constexpr int C = kDeltaTokens, kTiles = Scan::kTiles, kFeatures = Scan::kFeatures;
  extern __shared__ __align__(128) unsigned char memory[];
  DeltaScanShared<K>& shared = *reinterpret_cast<DeltaScanShared<K>*>(memory);
  launch_dependents();
  wait_for_previous();
  const Scan scan(params);
  if (!scan.any) return;
  const int lane = threadIdx.x % 32;
  float state[kFeatures][4];
  if (scan.chunks > 0) scan.read(shared, 0);
  scan.load_state(state);
  for (int chunk = 0; chunk < scan.chunks; ++chunk) {
    copy_async_wait<0>();
    __syncthreads();  // the chunk is there for all threads, and the last one is read
    if (chunk + 1 < scan.chunks) scan.read(shared, chunk + 1);
    const DeltaScanStage<K>& of = shared.stages[chunk % 2];
    const auto& factors = shared.factors[chunk % 2];
    const uint32_t key_at = shared_address(of.key), query_at = shared_address(of.query);
    // Where a lane's row of two matrices of eight tokens by eight, side by side, and of the next eight tokens' lies.
    const int own_row = lane / 16 * 8 + lane % 8, own_eight = lane / 8 % 2;

    float r[kTiles][4] = {}, o[kTiles][4] = {}, u[kTiles][4] = {}, units[2] = {1.f, 1.f};
    if constexpr (Scan::kUnits) find_units(state, units);
#pragma unroll
    for (int m = 0; m < kFeatures; m += 2) {
      uint32_t high[4], low[4];
      Scan::split_state(state, units, m / 2, high, low);
#pragma unroll
      for (int i = 0; i < kTiles; i += 4) {
        uint32_t keys[2][4], queries[2][4];
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
          const uint32_t at = eight_at((i + 2 * pair) * 8 + own_row, m + own_eight);
          load_matrices(keys[pair], key_at + at);
          load_matrices(queries[pair], query_at + at);
        }
        // A sum's next product comes seven others later: a warp is alone on its tensor core.
#pragma unroll
        for (int part = 0; part < 2; ++part)
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const int at = e % 2 * 2;
            Half<T>::mma(r[i + e], part ? low : high, keys[e / 2][at], keys[e / 2][at + 1]);
            Half<T>::mma(o[i + e], part ? low : high, queries[e / 2][at], queries[e / 2][at + 1]);
          }
      }
    }
    scan.take_values(of, factors, units, r);
    Scan::scale_outputs(factors, units, o);

    // Adds products of 16 tokens, the j-th, to all from these on.
    const auto add = [&](float(&to)[kTiles][4], const float(&tokens)[kTiles][4], const uint16_t(&with)[2][C * C],
                         int j) {
      uint32_t high[4], low[4], parts[2][kTiles / 2][4];
      split<__nv_bfloat16>(tokens[2 * j], tokens[2 * j + 1], high, low);
#pragma unroll
      for (int part = 0; part < 2; ++part)
#pragma unroll
        for (int i = j; i < kTiles / 2; ++i)
          load_matrices(parts[part][i], shared_address(with[part]) + eight_at(i * 16 + own_row, 2 * j + own_eight));
#pragma unroll
      for (int product = 0; product < 3; ++product)  // all but that of the low parts
#pragma unroll
        for (int i = 2 * j; i < kTiles; ++i) {
          const uint32_t(&of_tokens)[4] = parts[product == 1][i / 2];
          Half<__nv_bfloat16>::mma(to[i], product == 2 ? low : high, of_tokens[i % 2 * 2], of_tokens[i % 2 * 2 + 1]);
        }
    };
#pragma unroll
    for (int j = 0; j < kTiles / 2; ++j) add(u, r, of.w, j);
#pragma unroll
    for (int j = 0; j < kTiles / 2; ++j) add(o, u, of.p, j);
    scan.decay(factors, units, u, state);
#pragma unroll
    for (int j = 0; j < kTiles / 2; ++j) {
      uint32_t high[4], low[4];
      split<T>(u[2 * j], u[2 * j + 1], high, low);
#pragma unroll
      for (int m = 0; m < kFeatures; m += 8) {
        uint32_t keys[4][4];
#pragma unroll
        for (int pair = 0; pair < 4; ++pair)
          load_transposed(keys[pair], key_at + eight_at(j * 16 + lane % 16, m + 2 * pair + lane / 16));
#pragma unroll
        for (int part = 0; part < 2; ++part)
#pragma unroll
          for (int e = 0; e < 8; ++e)
            Half<T>::mma(state[m + e], part ? low : high, keys[e / 2][e % 2 * 2], keys[e / 2][e % 2 * 2 + 1]);
      }
    }
    Scan::out_of_units(units, state);
    scan.store_outputs(o, chunk);
  }
  scan.store_state(state);
}

// Registers that wgmma wrote or read asynchronously: nothing moves them over a wait. Sums begin with zeros, as ptxas
// serializes wgmma where they begin with nothing.
template <typename V, int n>
__device__ inline void keep(V (&values)[n][4]) {
#pragma unroll
  for (int i = 0; i < n; ++i)
    if constexpr (std::is_same_v<V, float>)
      asm volatile("" : "+f"(values[i][0]), "+f"(values[i][1]), "+f"(values[i][2]), "+f"(values[i][3])::"memory");
    else
      asm volatile("" : "+r"(values[i][0]), "+r"(values[i][1]), "+r"(values[i][2]), "+r"(values[i][3])::"memory");
}
// Adds tokens' products with those up to each: of 32 tokens, 16 of which need not come before, zeros; all but that of
// the low parts.
__device__ __forceinline__ void add_tokens(float (&to)[kDeltaTokens / 8][4], const uint32_t (&high)[4][4],
                                           const uint32_t (&low)[4][4],
                                           const uint16_t (&with)[2][kDeltaTokens * kDeltaTokens]) {
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int j = 0; j < 2 + 2 * half; ++j)
#pragma unroll
      for (int product = 0; product < 3; ++product)
        wgmma<__nv_bfloat16, 32>(
            to[4 * half], product == 2 ? low[j] : high[j],
            wgmma_descriptor(descriptor_low(shared_address(with[product == 1]) + half * 32 * 128 + j * 32)), true);
}

// The same on wgmma: the four warps' 64 columns are its rows.
//
// One long function: what runs beside the tensor cores stands between a product and its wait.
template <typename T, int K>
__global__ void __launch_bounds__(kDeltaChunkThreads)
    delta_scan_wgmma(const __grid_constant__ DeltaChunkParams params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Scan = DeltaScan<T, K>;
  constexpr int kTiles = Scan::kTiles, kFeatures = Scan::kFeatures, kTile = kDeltaTokens * 128;
  extern __shared__ __align__(128) unsigned char memory[];
  DeltaScanShared<K>& shared =
      *reinterpret_cast<DeltaScanShared<K>*>(memory + (1024 - shared_address(memory) % 1024) % 1024);
  launch_dependents();
  wait_for_previous();
  const Scan scan(params);
  if (!scan.any) return;
  float state[kFeatures][4];
  if (scan.chunks > 0) scan.read(shared, 0);
  scan.load_state(state);
  for (int chunk = 0; chunk < scan.chunks; ++chunk) {
    copy_async_wait<0>();
    fence_async_proxy();
    __syncthreads();  // the chunk is there for all threads, and the last one is read
    if (chunk + 1 < scan.chunks) scan.read(shared, chunk + 1);
    const DeltaScanStage<K>& of = shared.stages[chunk % 2];
    const auto& factors = shared.factors[chunk % 2];
    const uint32_t key_at = shared_address(of.key), query_at = shared_address(of.query);

    float r[kTiles][4] = {}, o[kTiles][4] = {}, u[kTiles][4] = {}, units[2] = {1.f, 1.f};
    if constexpr (Scan::kUnits) find_units(state, units);
    uint32_t high[K / 16][4], low[K / 16][4];
    const auto multiply = [&](float(&to)[kTiles][4], uint32_t rows_at) {
      wgmma_fence();
#pragma unroll
      for (int m = 0; m < K / 16; ++m) {
        const uint64_t rows = wgmma_descriptor(descriptor_low(rows_at + m / 4 * kTile + m % 4 * 32));
        wgmma<T, kDeltaTokens>(to[0], high[m], rows, true);
        wgmma<T, kDeltaTokens>(to[0], low[m], rows, true);
      }
      wgmma_commit();
    };
#pragma unroll
    for (int m = 0; m < K / 16; ++m) Scan::split_state(state, units, m, high[m], low[m]);
    multiply(r, key_at);
    wgmma_wait<0>();
    keep(r);
    multiply(o, query_at);
    scan.take_values(of, factors, units, r);
    uint32_t token_high[4][4], token_low[4][4];
#pragma unroll
    for (int j = 0; j < 4; ++j) split<__nv_bfloat16>(r[2 * j], r[2 * j + 1], token_high[j], token_low[j]);
    wgmma_wait<0>();
    keep(o), keep(high), keep(low);
    Scan::scale_outputs(factors, units, o);

    wgmma_fence();
    add_tokens(u, token_high, token_low, of.w);
    wgmma_commit();
    wgmma_wait<0>();
    keep(u), keep(token_high), keep(token_low);
#pragma unroll
    for (int j = 0; j < 4; ++j) split<__nv_bfloat16>(u[2 * j], u[2 * j + 1], token_high[j], token_low[j]);
    wgmma_fence();
    add_tokens(o, token_high, token_low, of.p);
    wgmma_commit();

    uint32_t left_high[4][4], left_low[4][4];
    scan.decay(factors, units, u, state);
#pragma unroll
    for (int j = 0; j < 4; ++j) split<T>(u[2 * j], u[2 * j + 1], left_high[j], left_low[j]);
    wgmma_fence();
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint64_t keys = rows_descriptor(key_at + j * 16 * 128, kTile);
      wgmma_rows<T, K>(state[0], left_high[j], keys, true);
      wgmma_rows<T, K>(state[0], left_low[j], keys, true);
    }
    wgmma_commit();
    wgmma_wait<1>();
    keep(o), keep(token_high), keep(token_low);
    scan.store_outputs(o, chunk);
    wgmma_wait<0>();
    keep(state), keep(left_high), keep(left_low);
    Scan::out_of_units(units, state);
  }
  scan.store_state(state);
#endif
}

}  // namespace quantmoe
