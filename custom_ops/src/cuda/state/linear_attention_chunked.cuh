// GatedDelta of many tokens: 64 at a time, on tensor cores (the WY form of Yang et al., arXiv 2412.06464).
//
// For a chunk, with S the state before it, c_i the decay of all its tokens up to i, k and q normed, q scaled:
//
//   A_ij = beta_i c_i / c_j k_i . k_j (j < i)        U = (I + A)^-1 diag(beta) (V - diag(c) K S)
//   P_ij = c_i / c_j q_i . k_j (j <= i)              O = diag(c) Q S + P U
//                                                    S = c_last S + sum_j c_last / c_j k_j U_j^T
//
// delta_chunks makes W = (I + A)^-1 diag(beta), P and the factors of each token, of all chunks at once. The scan
// (chunk_scan.cuh) goes from chunk to chunk. The norms' factors are f32, and multiply sums.
#pragma once
#include "cuda/state/chunks.cuh"
#include "cuda/state/linear_attention.cuh"

namespace quantmoe {

__device__ inline HeadRows rows_of(const DeltaParams& params, int head) {
  const qm_delta& node = params.delta;
  const int64_t keys = int64_t{node.num_k_heads} * node.k_head_size,
                query = head / (node.num_v_heads / node.num_k_heads) * node.k_head_size;
  return {params.qkv, 2 * keys + int64_t{node.num_v_heads} * node.v_head_size, keys + query, query,
          2 * keys + int64_t{head} * node.v_head_size};
}
__host__ __device__ inline int heads_of(const DeltaParams& params) { return params.delta.num_v_heads; }
__host__ __device__ inline int columns_of(const DeltaParams& params) { return params.delta.v_head_size; }

template <int K>
struct DeltaChunkShared {
  static constexpr int kStride = kChunkTokens + 4;
  struct Inverted {
    float w[kChunkTokens][kStride], half[kChunkTokens / 2][kStride];
  };
  union {
    ChunkOperands<K> read;
    Inverted inverted;  // when what was read has been multiplied
  };
  float a[kChunkTokens][kStride];
  double logs[kChunkTokens];  // of the decays, summed
  float beta[kChunkTokens], by_key[kChunkTokens], by_query[kChunkTokens];
};

// Of n tokens from `token` on: beta, and the sums of the logarithms of their decays, of each 32 tokens apart.
template <typename T, int K>
__device__ __forceinline__ void sum_decays(const DeltaParams& params, DeltaChunkShared<K>& shared, int64_t token,
                                           int head, int n, int lane) {
  const qm_delta& node = params.delta;
  double log = 0;
  if (threadIdx.x < kChunkTokens) {
    const int i = threadIdx.x;
    const T* a = static_cast<const T*>(params.a) + (token + i) * params.a_size + head;
    const T* b_of_token = static_cast<const T*>(params.b) + (token + i) * params.b_size + head;
    if (i < n) log = -expf(params.a_log[head]) * softplus(static_cast<float>(*a) + params.dt_bias[head]);
    shared.beta[i] = i < n ? node.beta_scale * sigmoid_of(static_cast<float>(*b_of_token)) : 0.f;
    shared.logs[i] = sum_logs(log, lane);
  }
}
// What the norms of keys and queries multiply by: a thread has a token's key or query.
template <typename T, int K>
__device__ __forceinline__ void find_norms(const qm_delta& node, DeltaChunkShared<K>& shared) {
  static_assert(kChunkThreads == 2 * kChunkTokens, "a thread for each key and query");
  const int i = threadIdx.x % kChunkTokens;
  const bool query = threadIdx.x >= kChunkTokens;
  const uint32_t at = shared_address(query ? shared.read.query : shared.read.key);
  float sums[4] = {};
#pragma unroll
  for (int eight = 0; eight < K / 8; ++eight) {
    const uint4 of = load16(at + eight_at(i, eight));
    const uint32_t pairs[4] = {of.x, of.y, of.z, of.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float low = Half<T>::low(pairs[j]), high = Half<T>::high(pairs[j]);
      sums[j] = fmaf(low, low, fmaf(high, high, sums[j]));
    }
  }
  const float by = rsqrtf(sums[0] + sums[1] + (sums[2] + sums[3]) + node.l2_epsilon);
  query ? shared.by_query[i] = by * node.scale : shared.by_key[i] = by;
}
// P, and A in shared memory, of these.
template <int K>
__device__ __forceinline__ void store_products(DeltaChunkShared<K>& shared, const float (&keys)[kChunkTokens / 8][4],
                                               const float (&queries)[kChunkTokens / 8][4], int warp, int lane,
                                               unsigned char* products) {
  constexpr int C = kChunkTokens;
  const int g = lane / 4, t = lane % 4;
#pragma unroll
  for (int j = 0; j < C / 8; ++j) {
    if (j > (2 * warp + 1 | 3)) break;  // P and W are multiplied by 32 tokens at least; later tokens are zero
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = warp * 16 + g + 8 * half, at = 8 * j + 2 * t;
      float p_of[2], a_of[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float decay = at + e <= i ? expf(static_cast<float>(shared.logs[i] - shared.logs[at + e])) : 0.f;
        const float by = decay * shared.by_key[at + e];
        p_of[e] = at + e <= i ? queries[j][2 * half + e] * shared.by_query[i] * by : 0.f;
        a_of[e] = at + e < i ? keys[j][2 * half + e] * shared.by_key[i] * by * shared.beta[i] : 0.f;
      }
      store_split(products, i, at, p_of[0], p_of[1]);
      *reinterpret_cast<float2*>(&shared.a[i][at]) = make_float2(a_of[0], a_of[1]);
    }
  }
}
// (I + A)^-1: of each half by columns, a thread each, then what joins them.
template <int K>
__device__ __forceinline__ void invert(DeltaChunkShared<K>& shared, int warp, int lane) {
  constexpr int C = kChunkTokens, kHalf = C / 2;
  typename DeltaChunkShared<K>::Inverted& inverted = shared.inverted;
  if (threadIdx.x < C) {
    float column[kHalf];
    const int from = warp * kHalf;
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      float sum[2] = {i == lane ? 1.f : 0.f, 0.f};
#pragma unroll
      for (int j = 0; j < i; j += 4) {
        const float4 a = *reinterpret_cast<const float4*>(&shared.a[from + i][from + j]);
        const float row_a[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
        for (int e = 0; e < 4; ++e)
          if (j + e < i) sum[e % 2] = fmaf(-row_a[e], column[j + e], sum[e % 2]);
      }
      column[i] = sum[0] + sum[1];
      inverted.w[from + i][from + lane] = column[i];
    }
  }
  __syncthreads();
  const int i = threadIdx.x / 4, from = threadIdx.x % 4 * 8;
  float sum[8] = {};
  for (int j = 0; j < kHalf; ++j)
#pragma unroll
    for (int e = 0; e < 8; ++e) sum[e] = fmaf(shared.a[kHalf + i][j], inverted.w[j][from + e], sum[e]);
#pragma unroll
  for (int e = 0; e < 8; ++e) inverted.half[i][from + e] = sum[e], sum[e] = 0;
  __syncthreads();
  for (int j = 0; j <= i; ++j)
#pragma unroll
    for (int e = 0; e < 8; ++e) sum[e] = fmaf(-inverted.w[kHalf + i][kHalf + j], inverted.half[j][from + e], sum[e]);
#pragma unroll
  for (int e = 0; e < 8; ++e) inverted.w[kHalf + i][from + e] = sum[e];
  __syncthreads();
}

// Blocks: chunks, heads, rows.
template <typename T, int K>
__global__ void __launch_bounds__(kChunkThreads) delta_chunks(const __grid_constant__ ChunkParams<DeltaParams> params) {
  constexpr int C = kChunkTokens;
  extern __shared__ __align__(128) unsigned char memory[];
  DeltaChunkShared<K>& shared = *reinterpret_cast<DeltaChunkShared<K>*>(memory);
  typename DeltaChunkShared<K>::Inverted& inverted = shared.inverted;
  launch_dependents();
  wait_for_previous();
  const DeltaParams& delta = params.node;
  const qm_delta& node = delta.delta;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int head = blockIdx.y, batch_row = blockIdx.z;
  const TokenRow row = read_token_row(delta.rows, batch_row, delta.tokens);
  const int first = (params.first + blockIdx.x) * C, count = min(C, row.count - delta.tail - first);
  if (count <= 0) return;
  const int64_t token = static_cast<int64_t>(batch_row) * delta.tokens + row.begin + first;
  copy_operands<T>(shared.read, rows_of(delta, head), token, count);
  copy_async_commit();

  sum_decays<T>(delta, shared, token, head, count, lane);
  copy_async_wait<0>();
  __syncthreads();
  if (warp == 1) shared.logs[threadIdx.x] += shared.logs[31];
  find_norms<T>(node, shared);

  float keys[C / 8][4] = {}, queries[C / 8][4] = {};
  multiply_tokens<T, K, true>(shared.read, keys, queries, warp, lane);
  __syncthreads();
  float* made = made_of(params, batch_row, blockIdx.x, head);
  unsigned char* const matrices = reinterpret_cast<unsigned char*>(made);
  store_products(shared, keys, queries, warp, lane, matrices + C * C * 4);
  if (threadIdx.x < C) {
    const int i = threadIdx.x;
    const float decay = expf(static_cast<float>(shared.logs[i])),
                left = expf(static_cast<float>(shared.logs[C - 1] - shared.logs[i]));
    float* factors = made + kFactorsAt<DeltaParams>;
    factors[i] = decay * shared.by_key[i], factors[C + i] = decay * shared.by_query[i],
    factors[2 * C + i] = left * shared.by_key[i];
    if (i == C - 1) factors[3 * C] = decay;
  }
  __syncthreads();

  invert(shared, warp, lane);
  for (int at = threadIdx.x; at < C * C / 2; at += kChunkThreads) {
    const int r = at / (C / 2), j = at % (C / 2) * 2;
    const auto w = [&](int column) { return column <= r ? inverted.w[r][column] * shared.beta[column] : 0.f; };
    if (j <= (r | 31)) store_split(matrices, r, j, w(j), w(j + 1));
  }
}

}  // namespace quantmoe
