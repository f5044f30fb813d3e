// Many tokens of GatedDelta and StateSpace (chunks.cuh): the states, from chunk to chunk, and the outputs. They run on
// mma.sync and, if a GPU has it, on wgmma.
//
// A block has a head's columns in registers. The state is transposed: a warp has 16 columns. Their values of a key
// feature, and of a token, are accumulators. As they are, these are the next product's left operand. The letters are
// those in linear_attention_chunked.cuh. StateSpace has B as keys and C as queries, and U are the values themselves.
#pragma once
#include <algorithm>

#include "cuda/common/launcher.h"
#include "cuda/state/chunks.cuh"

namespace quantmoe {

template <int K, bool recalls>
struct ScanStage {
  static constexpr int kMatrices = kChunkMatrices<recalls>;
  ChunkOperands<K> tokens;
  uint16_t value[kChunkTokens * kScanColumns];
  uint16_t made[kMatrices][2][kChunkTokens * kChunkTokens];  // W, if there is one, and P: high and low parts
  __device__ const auto& w() const { return made[0]; }
  __device__ const auto& p() const { return made[kMatrices - 1]; }
};
template <int K, bool recalls>
struct ScanShared {
  ScanStage<K, recalls> stages[2];
  float factors[2][kChunkFactors];
};

// A block's columns of a head of a row. A lane's values of the state are [8 m + 2t + e % 2, column + e / 2 * 8]. Its
// values of outputs are tokens 8 i + 2t + e % 2.
template <typename T, int K, class Node>
struct ChunkScan {
  static constexpr int C = kChunkTokens, kTiles = C / 8, kFeatures = K / 8;
  static constexpr bool kRecall = kRecalls<Node>;
  static constexpr bool kUnits = std::is_same_v<T, __half>;  // of less range than f32
  // Products of tokens with what was made, without the low parts' product. Values of bf16 T have no low parts.
  static constexpr int kProducts = kRecall || kUnits ? 3 : 2;
  using Stage = ScanStage<K, kRecall>;
  using Shared = ScanShared<K, kRecall>;

  const ChunkParams<Node>& params;
  const Node& node;
  HeadRows rows;
  int head, columns, batch_row, warp, lane, t, column, count, chunks;
  int64_t token, state_at;
  bool from_past, any;

  __device__ explicit ChunkScan(const ChunkParams<Node>& given) : params(given), node(given.node) {
    head = blockIdx.y, batch_row = blockIdx.z, warp = threadIdx.x / 32, lane = threadIdx.x % 32, t = lane % 4;
    rows = rows_of(node, head), columns = columns_of(node);
    column = blockIdx.x * kScanColumns + warp * 16 + lane / 4;
    const TokenRow row = read_token_row(node.rows, batch_row, node.tokens);
    count = max(0, row.count - node.tail);
    chunks = min(params.chunks, (count + C - 1) / C - params.first);
    token = static_cast<int64_t>(batch_row) * node.tokens + row.begin + params.first * C;
    state_at = (static_cast<int64_t>(batch_row) * heads_of(node) + head) * K * columns + column;
    from_past = params.first || row.from_past || !row.count;
    any = row.valid && (chunks > 0 || !params.first);
  }
  // Asks for a chunk's operands.
  __device__ void read(Shared& shared, int chunk) const {
    Stage& to = shared.stages[chunk % 2];
    const int n = min(C, count - (params.first + chunk) * C);
    const int64_t from = token + chunk * C;
    copy_operands<T>(to.tokens, rows, from, n);
    copy_tokens<T, kScanColumns>(
        shared_address(to.value),
        static_cast<const T*>(rows.tokens) + from * rows.width + rows.value + blockIdx.x * kScanColumns, rows.width, n);
    const float* made = made_of(params, batch_row, chunk, head);
    constexpr int kRows = kChunkThreads / (C / 8), kParts = 2 * Stage::kMatrices;
    const uint32_t at = eight_at(threadIdx.x / (C / 8), threadIdx.x % (C / 8)), matrices = shared_address(to.made) + at;
    const unsigned char* own = reinterpret_cast<const unsigned char*>(made) + at;
#pragma unroll
    for (int r = 0; r < C; r += kRows)
      if (r >= 32 || threadIdx.x % (C / 8) < 4)
#pragma unroll
        for (int part = 0; part < kParts; ++part)
          copy_async16(matrices + r * 128 + part * C * C * 2, own + r * 128 + part * C * C * 2, true);
    if (threadIdx.x < kChunkFactors / 4)
      copy_async16(shared_address(shared.factors[chunk % 2] + 4 * threadIdx.x),
                   made + kFactorsAt<Node> + 4 * threadIdx.x, true);
    copy_async_commit();
  }
  __device__ int64_t place(int m, int e) const {
    return state_at + static_cast<int64_t>(8 * m + 2 * t + e % 2) * columns + e / 2 * 8;
  }
  __device__ void load_state(float (&state)[kFeatures][4]) const {
    const float* past = params.first ? node.present_state : node.past_state;
#pragma unroll
    for (int m = 0; m < kFeatures; ++m)
#pragma unroll
      for (int e = 0; e < 4; ++e) state[m][e] = from_past ? past[place(m, e)] : 0.f;
  }
  __device__ void store_state(const float (&state)[kFeatures][4]) const {
#pragma unroll
    for (int m = 0; m < kFeatures; ++m)
#pragma unroll
      for (int e = 0; e < 4; ++e) node.present_state[place(m, e)] = state[m][e];
  }
  __device__ void store_outputs(const float (&o)[kTiles][4], int chunk) const {
    const int n = min(C, count - (params.first + chunk) * C) - 2 * t;
    const int64_t stride = int64_t{heads_of(node)} * columns;
    float* to = node.outputs + (token + chunk * C + 2 * t) * stride + head * columns + column;
#pragma unroll
    for (int i = 0; i < kTiles; ++i, to += 8 * stride)
#pragma unroll
      for (int e = 0; e < 2; ++e)
        if (8 * i + e < n) to[e * stride] = o[i][e], to[e * stride + 8] = o[i][e + 2];
  }

  // A token's factors, and the next token's. Its key (0) and query (1) multiply by the first two. The third is what is
  // left of its value at the end (2).
  __device__ static float2 factor(const float (&factors)[kChunkFactors], int which, int tile) {
    return *reinterpret_cast<const float2*>(factors + which * C + 8 * tile + 2 * (threadIdx.x % 4));
  }
  // r = V - diag(c) K S of what keys and the state, which is in units, give; where nothing is recalled, V.
  __device__ void take_values(const Stage& of, const float (&factors)[kChunkFactors], const float (&units)[2],
                              float (&r)[kTiles][4]) const {
#pragma unroll
    for (int i = 0; i < kTiles; i += 2) {
      uint32_t values[4];
      load_transposed(values,
                      shared_address(of.value) + eight_at((i + lane / 16) * 8 + lane % 8, 2 * warp + lane / 8 % 2));
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float2 by_key = kRecall ? factor(factors, 0, i + e) : float2{};
#pragma unroll
        for (int side = 0; side < 2; ++side) {
          const float low = Half<T>::low(values[2 * e + side]), high = Half<T>::high(values[2 * e + side]);
          float(&to)[4] = r[i + e];
          to[2 * side] = kRecall ? fmaf(-by_key.x, to[2 * side] * units[side], low) : low;
          to[2 * side + 1] = kRecall ? fmaf(-by_key.y, to[2 * side + 1] * units[side], high) : high;
        }
      }
    }
  }
  // diag(c) Q S of what queries and the state give.
  __device__ static void scale_outputs(const float (&factors)[kChunkFactors], const float (&units)[2],
                                       float (&o)[kTiles][4]) {
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      const float2 by_query = factor(factors, 1, i);
#pragma unroll
      for (int side = 0; side < 2; ++side)
        o[i][2 * side] *= by_query.x * units[side], o[i][2 * side + 1] *= by_query.y * units[side];
    }
  }
  // Adds D times the values, of StateSpace.
  __device__ void skip(const float (&values)[kTiles][4], float (&o)[kTiles][4]) const {
    const float d = node.d[head];
#pragma unroll
    for (int i = 0; i < kTiles; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e) o[i][e] = fmaf(d, values[i][e], o[i][e]);
  }
  // u as the state takes it, and the state after its decay, both in the units of the larger one.
  __device__ void decay(const float (&factors)[kChunkFactors], float (&units)[2], float (&u)[kTiles][4],
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
template <typename T, int K, class Node>
__global__ void __launch_bounds__(kChunkThreads) chunk_scan(const __grid_constant__ ChunkParams<Node> params) {
  using Scan = ChunkScan<T, K, Node>;
  constexpr int C = kChunkTokens, kTiles = Scan::kTiles, kFeatures = Scan::kFeatures;
  extern __shared__ __align__(128) unsigned char memory[];
  typename Scan::Shared& shared = *reinterpret_cast<typename Scan::Shared*>(memory);
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
    const typename Scan::Stage& of = shared.stages[chunk % 2];
    const auto& factors = shared.factors[chunk % 2];
    const uint32_t key_at = shared_address(of.tokens.key), query_at = shared_address(of.tokens.query);
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
          if (Scan::kRecall) load_matrices(keys[pair], key_at + at);
          load_matrices(queries[pair], query_at + at);
        }
        // A sum's next product comes seven others later: a warp is alone on its tensor core.
#pragma unroll
        for (int part = 0; part < 2; ++part)
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const int at = e % 2 * 2;
            if (Scan::kRecall) Half<T>::mma(r[i + e], part ? low : high, keys[e / 2][at], keys[e / 2][at + 1]);
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
      for (int product = 0; product < Scan::kProducts; ++product)
#pragma unroll
        for (int i = 2 * j; i < kTiles; ++i) {
          const uint32_t(&of_tokens)[4] = parts[product == 1][i / 2];
          Half<__nv_bfloat16>::mma(to[i], product == 2 ? low : high, of_tokens[i % 2 * 2], of_tokens[i % 2 * 2 + 1]);
        }
    };
    if constexpr (Scan::kRecall) {
#pragma unroll
      for (int j = 0; j < kTiles / 2; ++j) add(u, r, of.w(), j);
    } else {
      scan.skip(r, o);
    }
    float(&added)[kTiles][4] = Scan::kRecall ? u : r;
#pragma unroll
    for (int j = 0; j < kTiles / 2; ++j) add(o, added, of.p(), j);
    scan.decay(factors, units, added, state);
#pragma unroll
    for (int j = 0; j < kTiles / 2; ++j) {
      uint32_t high[4], low[4];
      split<T>(added[2 * j], added[2 * j + 1], high, low);
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
// Adds tokens' products with all tokens up to each one. Of 32 tokens, 16 need not come before; they are zeros.
template <int products>
__device__ __forceinline__ void add_tokens(float (&to)[kChunkTokens / 8][4], const uint32_t (&high)[4][4],
                                           const uint32_t (&low)[4][4],
                                           const uint16_t (&with)[2][kChunkTokens * kChunkTokens]) {
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int j = 0; j < 2 + 2 * half; ++j)
#pragma unroll
      for (int product = 0; product < products; ++product)
        wgmma<__nv_bfloat16, 32>(
            to[4 * half], product == 2 ? low[j] : high[j],
            wgmma_descriptor(descriptor_low(shared_address(with[product == 1]) + half * 32 * 128 + j * 32)), true);
}

// The same on wgmma: the four warps' 64 columns are its rows.
//
// One long function: what runs beside the tensor cores stands between a product and its wait.
template <typename T, int K, class Node>
__global__ void __launch_bounds__(kChunkThreads) chunk_scan_wgmma(const __grid_constant__ ChunkParams<Node> params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Scan = ChunkScan<T, K, Node>;
  constexpr int kTiles = Scan::kTiles, kFeatures = Scan::kFeatures, kTile = kChunkTokens * 128;
  extern __shared__ __align__(128) unsigned char memory[];
  typename Scan::Shared& shared =
      *reinterpret_cast<typename Scan::Shared*>(memory + (1024 - shared_address(memory) % 1024) % 1024);
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
    const typename Scan::Stage& of = shared.stages[chunk % 2];
    const auto& factors = shared.factors[chunk % 2];
    const uint32_t key_at = shared_address(of.tokens.key), query_at = shared_address(of.tokens.query);

    float r[kTiles][4] = {}, o[kTiles][4] = {}, u[kTiles][4] = {}, units[2] = {1.f, 1.f};
    if constexpr (Scan::kUnits) find_units(state, units);
    uint32_t high[K / 16][4], low[K / 16][4];
    const auto multiply = [&](float(&to)[kTiles][4], uint32_t rows_at) {
      wgmma_fence();
#pragma unroll
      for (int m = 0; m < K / 16; ++m) {
        const uint64_t rows = wgmma_descriptor(descriptor_low(rows_at + m / 4 * kTile + m % 4 * 32));
        wgmma<T, kChunkTokens>(to[0], high[m], rows, true);
        wgmma<T, kChunkTokens>(to[0], low[m], rows, true);
      }
      wgmma_commit();
    };
#pragma unroll
    for (int m = 0; m < K / 16; ++m) Scan::split_state(state, units, m, high[m], low[m]);
    if constexpr (Scan::kRecall) {
      multiply(r, key_at);
      wgmma_wait<0>();
      keep(r);
    }
    multiply(o, query_at);
    scan.take_values(of, factors, units, r);
    uint32_t token_high[4][4], token_low[4][4];
#pragma unroll
    for (int j = 0; j < 4; ++j) split<__nv_bfloat16>(r[2 * j], r[2 * j + 1], token_high[j], token_low[j]);
    wgmma_wait<0>();
    keep(o), keep(high), keep(low);
    Scan::scale_outputs(factors, units, o);

    if constexpr (Scan::kRecall) {
      wgmma_fence();
      add_tokens<3>(u, token_high, token_low, of.w());
      wgmma_commit();
      wgmma_wait<0>();
      keep(u), keep(token_high), keep(token_low);
#pragma unroll
      for (int j = 0; j < 4; ++j) split<__nv_bfloat16>(u[2 * j], u[2 * j + 1], token_high[j], token_low[j]);
    } else {
      scan.skip(r, o);
    }
    float(&added)[kTiles][4] = Scan::kRecall ? u : r;
    wgmma_fence();
    add_tokens<Scan::kProducts>(o, token_high, token_low, of.p());
    wgmma_commit();

    uint32_t left_high[4][4], left_low[4][4];
    scan.decay(factors, units, added, state);
#pragma unroll
    for (int j = 0; j < 4; ++j) split<T>(added[2 * j], added[2 * j + 1], left_high[j], left_low[j]);
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

// The launches of a call: for every kMostChunks chunks their operands, by `make`, and the scan.
template <typename T, int K, class Node>
void launch_chunks(const Node& node, int batch, float* made, void (*make)(ChunkParams<Node>), int make_shared,
                   bool wgmma, Launcher& launcher) {
  constexpr int kShared = sizeof(ScanShared<K, kRecalls<Node>>) + 1024;
  static_assert(kShared <= kScanShared, "what the plan looks for");
  const int all = (node.tokens + kChunkTokens - 1) / kChunkTokens;
  ChunkParams<Node> params{node, 0, 0, made};
  for (; params.first < all; params.first += kMostChunks) {
    params.chunks = std::min(kMostChunks, all - params.first);
    const auto grid = [&](int x) { return dim3(x, heads_of(node), static_cast<unsigned>(batch)); };
    launcher.run(make, params, grid(params.chunks), kChunkThreads, make_shared, params.first > 0);
    launcher.run(wgmma ? chunk_scan_wgmma<T, K, Node> : chunk_scan<T, K, Node>, params,
                 grid(columns_of(node) / kScanColumns), kChunkThreads, kShared, true);
  }
}

}  // namespace quantmoe
