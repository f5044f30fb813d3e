// MoERouter: the router's product in f32, and MoERouting of it. AddRMSNormRouter: the norm before it, too.
#pragma once
#include <cstring>

#include "cuda/router/norm.cuh"
#include "cuda/router/router.h"
#include "cuda/router/select_experts.cuh"

namespace quantmoe {

struct RouterParams {
  const void* x;            // T [tokens, columns]
  const void* weight;       // T [logits, columns]
  const float* bias;        // [logits], null: none
  const float* correction;  // [experts], null: none
  int* topk_ids;
  float* topk_weights;
  float* logits;  // [tokens, logits] for moe_select
  int tokens, columns;
  qm_routing routing;
};

// sum += the eight products of two 16-byte words.
template <typename T>
__device__ inline void dot8(float& sum, const uint4& a, const uint4& b) {
  const uint32_t x[] = {a.x, a.y, a.z, a.w}, y[] = {b.x, b.y, b.z, b.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sum = fmaf(Half<T>::low(x[i]), Half<T>::low(y[i]), sum);
    sum = fmaf(Half<T>::high(x[i]), Half<T>::high(y[i]), sum);
  }
}

struct NormRouterParams {
  RouterParams router;  // x is not read
  NormParams norm;
};

// Eight values of T in a 16-byte word.
template <typename T>
__device__ inline NormPiece<T, 8> piece_of(const uint4& word) {
  NormPiece<T, 8> piece;
  memcpy(&piece, &word, sizeof(piece));
  return piece;
}
template <typename T>
__device__ inline uint4 word_of(const NormPiece<T, 8>& piece) {
  uint4 word;
  memcpy(&word, &piece, sizeof(word));
  return word;
}

// AddRMSNorm within router_cluster: every block norms the cluster's tokens, and stores its part of them.
template <typename T>
struct ClusterNorm {
  const uint4 *x, *residual, *weight;  // of the cluster's first token
  uint4 *y, *sum;
  float (*squares)[kRouterTokens];  // [kRouterWarps], shared memory
  int columns;
  float epsilon;
  __device__ uint4 add(int64_t at, float& of_squares) const {
    return word_of(add_pieces(piece_of<T>(x[at]), piece_of<T>(residual[at]), of_squares));
  }
  __device__ uint4 normed(const uint4& sum, float factor, const uint4& by) const {
    return word_of(quantmoe::normed(piece_of<T>(sum), factor, piece_of<T>(by)));
  }
  __device__ float factor(int token) const {
    float all = 0.f;
#pragma unroll
    for (int w = 0; w < kRouterWarps; ++w) all += squares[w][token];
    return 1.f / sqrtf(all / static_cast<float>(columns) + epsilon);
  }
};

// columns: a multiple of 8. A cluster takes up to eight tokens, mma's columns. A block has kTiles of 16 experts. A warp
// has every kRouterWarps-th piece of 32 columns of all the block's experts. Lane t of four reads eight of them: what
// mma takes as columns 2t, 2t + 1, 2t + 8, 2t + 9 of two products. kAhead pieces are read before the kernel waits for
// x. A shared gate's row would need a tile of its own. The last block has it besides its experts: a thread has 8
// columns. The sums go to the token's block, which selects. Dynamic shared memory: router_shared.
//
// With kNormed a thread adds the residual to what it multiplies, and takes what a warp adds up of the squares from all
// others. The sums stay in registers where the pieces that are read ahead are all.
template <typename T, int kTiles, int kAhead, bool kNormed>
__device__ __forceinline__ void router_in_cluster(const RouterParams& params, const NormParams* norm_params) {
#if __CUDA_ARCH__ >= 900
  constexpr int kRows = 16 * kTiles;
  extern __shared__ __align__(128) float parts[];  // [warps, rows, kRouterTokens]
  __shared__ float biases[kRows], gate_parts[kRouterWarps][kRouterTokens];
  launch_dependents();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4, rank = blockIdx.x;
  const int rows = params.routing.num_experts, blocks = gridDim.x, each = (rows + blocks - 1) / blocks;
  const bool gate = params.routing.shared_gate && rank == blocks - 1;
  const int first = min(rank * each, rows), count = min(each, rows - first), words = params.columns / 8;
  const int token0 = blockIdx.y * kRouterTokens, tokens = min(kRouterTokens, params.tokens - token0);
  float* logits = parts + kRouterWarps * kRows * kRouterTokens;
  const uint4* weights = static_cast<const uint4*>(params.weight) + static_cast<int64_t>(first) * words;
  const uint4* gate_row = static_cast<const uint4*>(params.weight) + static_cast<int64_t>(rows) * words;
  const uint4* tokens_at = static_cast<const uint4*>(params.x) + static_cast<int64_t>(token0) * words;
  const uint4* x = tokens_at + static_cast<int64_t>(g) * words;
  const auto word_at = [&](int at, int piece) { return 4 * (at + piece * kRouterWarps) + t; };
  [[maybe_unused]] const bool stores = warp % blocks == rank;  // blocks divide kRouterWarps
  [[maybe_unused]] __shared__ float squares[kNormed ? kRouterWarps : 1][kRouterTokens];
  [[maybe_unused]] ClusterNorm<T> norm;
  if constexpr (kNormed) {
    const int64_t begin = static_cast<int64_t>(token0) * words;
    norm = {static_cast<const uint4*>(norm_params->x) + begin,
            static_cast<const uint4*>(norm_params->residual) + begin,
            static_cast<const uint4*>(norm_params->weight),
            static_cast<uint4*>(norm_params->y) + begin,
            static_cast<uint4*>(norm_params->sum) + begin,
            squares,
            params.columns,
            norm_params->epsilon};
  }
  uint4 weight[kAhead][kTiles][2];  // rows g and g + 8
  [[maybe_unused]] uint4 by[kNormed ? kAhead : 1];
  const auto read = [&](int at) {
    if constexpr (kNormed)
#pragma unroll
      for (int i = 0; i < kAhead; ++i) by[i] = word_at(at, i) < words ? norm.weight[word_at(at, i)] : uint4{};
#pragma unroll
    for (int i = 0; i < kAhead; ++i)
#pragma unroll
      for (int row = g; row < kRows; row += 8) {
        const int word = word_at(at, i);
        weight[i][row / 16][row / 8 % 2] =
            row < count && word < words ? weights[static_cast<unsigned>(row * words + word)] : uint4{};
      }
  };
  read(warp);
  const int own = threadIdx.x;  // of the gate's words
  const uint4 own_weight = gate && own < words ? gate_row[own] : uint4{};
  if (threadIdx.x < kRows)
    biases[threadIdx.x] = params.bias && threadIdx.x < count ? params.bias[first + threadIdx.x] : 0.f;
  cluster_arrive();  // all blocks are there before one stores to another
  wait_for_previous();
  uint4 v[kAhead];
  const int64_t own_token = static_cast<int64_t>(g) * words;
  [[maybe_unused]] float factor = 0.f;
  if constexpr (kNormed) {
    float of_squares = 0.f;
#pragma unroll 1
    for (int at = warp; 4 * at < words; at += kRouterWarps * kAhead)
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const bool there = g < tokens && word_at(at, i) < words;
        v[i] = there ? norm.add(own_token + word_at(at, i), of_squares) : uint4{};
        if (there && stores) norm.sum[own_token + word_at(at, i)] = v[i];
      }
    of_squares += __shfl_xor_sync(~0u, of_squares, 1);
    of_squares += __shfl_xor_sync(~0u, of_squares, 2);
    if (t == 0) squares[warp][g] = of_squares;
    __syncthreads();
    factor = norm.factor(g);
  }
  float sums[kTiles][4] = {};
#pragma unroll 1
  for (int at = warp; 4 * at < words; at += kRouterWarps * kAhead) {
    if (at != warp) read(at);
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const bool there = g < tokens && word_at(at, i) < words;
      if constexpr (kNormed) {
        float again = 0.f;
        if (there && words > 4 * kRouterWarps * kAhead) v[i] = norm.add(own_token + word_at(at, i), again);
        v[i] = norm.normed(v[i], factor, by[i]);
        if (there && stores) norm.y[own_token + word_at(at, i)] = v[i];
      } else {
        v[i] = there ? x[word_at(at, i)] : uint4{};
      }
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i)
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
        const uint4 &low = weight[i][m][0], &high = weight[i][m][1];
        const uint32_t even[] = {low.x, high.x, low.y, high.y}, odd[] = {low.z, high.z, low.w, high.w};
        Half<T>::mma(sums[m], even, v[i].x, v[i].y);
        Half<T>::mma(sums[m], odd, v[i].z, v[i].w);
      }
  }
  for (int token = 0; gate && token < tokens; ++token) {
    const int64_t first_word = static_cast<int64_t>(token) * words;
    [[maybe_unused]] float of_token = 0.f, again = 0.f;
    if constexpr (kNormed) of_token = norm.factor(token);
    const auto word = [&](int i) {
      if constexpr (kNormed) return norm.normed(norm.add(first_word + i, again), of_token, norm.weight[i]);
      return tokens_at[first_word + i];
    };
    float sum = 0.f;
    if (own < words) dot8<T>(sum, word(own), own_weight);
    for (int i = own + kRouterThreads; i < words; i += kRouterThreads) dot8<T>(sum, word(i), gate_row[i]);
    sum = warp_sum(sum);
    if (lane == 0) gate_parts[warp][token] = sum;
  }
#pragma unroll
  for (int m = 0; m < kTiles; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half)
      *reinterpret_cast<float2*>(parts + (warp * kRows + m * 16 + half * 8 + g) * kRouterTokens + 2 * t) =
          make_float2(sums[m][2 * half], sums[m][2 * half + 1]);
  __syncthreads();
  cluster_wait();
  for (int i = threadIdx.x; i < count * kRouterTokens; i += kRouterThreads) {
    const int row = i / kRouterTokens, token = i % kRouterTokens;
    if (token >= tokens) continue;
    float sum = biases[row];
#pragma unroll
    for (int w = 0; w < kRouterWarps; ++w) sum += parts[w * kRows * kRouterTokens + i];
    cluster_store(logits + first + row, token, sum);
  }
  if (gate && threadIdx.x < tokens) {
    float sum = params.bias ? params.bias[rows] : 0.f;
#pragma unroll
    for (int w = 0; w < kRouterWarps; ++w) sum += gate_parts[w][threadIdx.x];
    cluster_store(logits + rows, threadIdx.x, sum);
  }
  __syncwarp();
  cluster_arrive();
  cluster_wait();
  if (rank < tokens && warp == 0) {
    const int64_t at = static_cast<int64_t>(token0 + rank) * slots_of(params.routing);
    select(params.routing, reinterpret_cast<unsigned*>(logits), params.correction, params.topk_ids + at,
           params.topk_weights + at);
  }
#endif
}

template <typename T, int kTiles, int kAhead>
__global__ void __launch_bounds__(kRouterThreads, 1) router_cluster(const __grid_constant__ RouterParams params) {
  router_in_cluster<T, kTiles, kAhead, false>(params, nullptr);
}
template <typename T, int kTiles, int kAhead>
__global__ void __launch_bounds__(kRouterThreads, 1)
    norm_router_cluster(const __grid_constant__ NormRouterParams params) {
  router_in_cluster<T, kTiles, kAhead, true>(params.router, &params.norm);
}

// Any columns. kWords: they are a multiple of 8.
template <typename T, bool kWords>
__global__ void __launch_bounds__(kRouterRowsThreads) router_rows(const __grid_constant__ RouterParams params) {
  launch_dependents();
  const int lane = threadIdx.x % 32, e = blockIdx.y * (kRouterRowsThreads / 32) + threadIdx.x / 32;
  const bool there = e < logits_of(params.routing);
  const int64_t token = blockIdx.x, row = static_cast<int64_t>(e) * params.columns;
  if (kWords && there && lane == 0 && token == 0)
    prefetch(static_cast<const T*>(params.weight) + row, 2 * params.columns);
  wait_for_previous();
  if (!there) return;
  float sum = 0.f;
  if constexpr (kWords) {
    const uint4* x = static_cast<const uint4*>(params.x) + token * (params.columns / 8);
    const uint4* w = static_cast<const uint4*>(params.weight) + row / 8;
#pragma unroll 4
    for (int i = lane; i < params.columns / 8; i += 32) dot8<T>(sum, x[i], w[i]);
  } else {
    const T* x = static_cast<const T*>(params.x) + token * params.columns;
    const T* w = static_cast<const T*>(params.weight) + row;
    for (int i = lane; i < params.columns; i += 32) sum = fmaf(static_cast<float>(x[i]), static_cast<float>(w[i]), sum);
  }
  sum = warp_sum(sum);
  if (lane == 0) params.logits[token * logits_of(params.routing) + e] = params.bias ? sum + params.bias[e] : sum;
}

// columns: a multiple of 8. A warp has all tokens of the tile, 16 experts and half of each stage's columns. A row of a
// stage is 128 bytes, whose 16-byte words are exchanged by its number, so that eight rows' words are in other banks.
template <typename T>
__global__ void __launch_bounds__(kRouterTileThreads) router_tiles(const __grid_constant__ RouterParams params) {
  constexpr int kTokens = kRouterTileTokens, kRows = kTokens + kRouterTileExperts, kWords = kRouterTileColumns / 8;
  extern __shared__ __align__(128) uint8_t shared[];
  launch_dependents();
  constexpr int kPieces = kRouterTileExperts / 16, kSteps = kRouterTileColumns / 16 / 2;
  static_assert(kRouterTileThreads == 2 * kPieces * 32);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % kPieces, half = threadIdx.x / 32 / kPieces;
  const int token0 = blockIdx.x * kTokens, expert0 = blockIdx.y * kRouterTileExperts;
  const int experts = logits_of(params.routing), words = params.columns / 8, steps = (words + kWords - 1) / kWords;
  const uint32_t base = shared_address(shared);
  const auto at = [&](int stage, int row, int word) {
    return base + ((stage * kRows + row) * kWords + (word ^ row % 8)) * 16;
  };
  // A thread copies a word of every kEach-th row: tokens' first, then experts'.
  constexpr int kEach = kRouterTileThreads / kWords, kCopies = kRows / kEach, kTokenCopies = kTokens / kEach;
  static_assert(kRows % kEach == 0 && kTokens % kEach == 0 && kEach % 8 == 0);
  const int own_row = threadIdx.x / kWords, own_word = threadIdx.x % kWords;
  const uint4* source[kCopies];
  bool there[kCopies];
#pragma unroll
  for (int i = 0; i < kCopies; ++i) {
    const bool token = i < kTokenCopies;
    const int row = token ? token0 + own_row + i * kEach : expert0 + own_row + (i - kTokenCopies) * kEach;
    source[i] =
        static_cast<const uint4*>(token ? params.x : params.weight) + static_cast<int64_t>(row) * words + own_word;
    there[i] = row < (token ? params.tokens : experts);
  }
  const auto load = [&](int step, bool tokens, bool weights) {
    const uint32_t to = at(step % kRouterStages, own_row, own_word);
    const bool inside = step * kWords + own_word < words;
#pragma unroll
    for (int i = 0; i < kCopies; ++i)
      if (i < kTokenCopies ? tokens : weights)
        copy_async16_past(to + i * kEach * kWords * 16, source[i] + step * kWords, inside && there[i]);
  };
  // Weights of the first stages, then, after the wait, the tokens'.
  for (int step = 0; step < min(kRouterStages - 1, steps); ++step) load(step, false, true);
  wait_for_previous();
  for (int step = 0; step < kRouterStages - 1; ++step) {
    if (step < steps) load(step, true, false);
    copy_async_commit();
  }
  float sums[2][2][4] = {};
  for (int step = 0; step < steps; ++step) {
    copy_async_wait<kRouterStages - 2>();
    __syncthreads();
    if (step + kRouterStages - 1 < steps) load(step + kRouterStages - 1, true, true);
    copy_async_commit();
    const int stage = step % kRouterStages;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int k = half * kSteps + i;
      uint32_t a[2][4], b[4];
      for (int m = 0; m < 2; ++m) load_matrices(a[m], at(stage, m * 16 + lane % 16, 2 * k + lane / 16));
      load_matrices(b, at(stage, kTokens + warp * 16 + lane % 8 + lane / 16 * 8, 2 * k + lane / 8 % 2));
#pragma unroll
      for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int n = 0; n < 2; ++n) Half<T>::mma(sums[m][n], a[m], b[2 * n], b[2 * n + 1]);
    }
  }
  __syncthreads();  // the stages have been read
  float* other = reinterpret_cast<float*>(shared) + warp * 512 + lane;
  if (half)
#pragma unroll
    for (int i = 0; i < 16; ++i) other[i * 32] = sums[i / 8][i / 4 % 2][i % 4];
  __syncthreads();
  if (half) return;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const int m = i / 8, n = i / 4 % 2, c = i % 4;
    sums[m][n][c] += other[i * 32];
    const int token = token0 + m * 16 + c / 2 * 8 + lane / 4, e = expert0 + warp * 16 + n * 8 + lane % 4 * 2 + c % 2;
    if (token < params.tokens && e < experts)
      params.logits[static_cast<int64_t>(token) * experts + e] =
          params.bias ? sums[m][n][c] + params.bias[e] : sums[m][n][c];
  }
}

}  // namespace quantmoe
