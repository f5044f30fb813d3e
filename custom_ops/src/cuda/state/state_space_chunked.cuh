// StateSpace of many tokens: 64 at a time, on tensor cores (Dao and Gu, arXiv 2405.21060).
//
// Of a chunk, with S the state before it, c_i the decay of all its tokens up to i, t their steps:
//
//   P_ij = c_i / c_j t_j C_i . B_j (j <= i)          O = diag(c) C S + P X + D X
//                                                    S = c_last S + sum_j c_last / c_j t_j B_j X_j^T
//
// space_chunks makes P and the factors of each token, of all chunks at once; the scan (chunk_scan.cuh) goes from chunk
// to chunk.
#pragma once
#include "cuda/state/chunks.cuh"
#include "cuda/state/state_space.cuh"

namespace quantmoe {

template <>
inline constexpr bool kRecalls<SpaceParams> = false;
__device__ inline HeadRows rows_of(const SpaceParams& params, int head) {
  const qm_space& node = params.space;
  const int64_t width = int64_t{node.num_heads} * node.head_size, operands = int64_t{node.num_groups} * node.state_size,
                key = width + head / (node.num_heads / node.num_groups) * node.state_size;
  return {params.xbc, width + 2 * operands, key, key + operands, int64_t{head} * node.head_size};
}
__host__ __device__ inline int heads_of(const SpaceParams& params) { return params.space.num_heads; }
__host__ __device__ inline int columns_of(const SpaceParams& params) { return params.space.head_size; }

template <int N>
struct SpaceChunkShared {
  ChunkOperands<N> read;
  double logs[kChunkTokens];  // of the decays, summed
  float steps[kChunkTokens];
};

// Blocks: chunks, heads, rows.
template <typename T, int N>
__global__ void __launch_bounds__(kChunkThreads) space_chunks(const __grid_constant__ ChunkParams<SpaceParams> params) {
  constexpr int C = kChunkTokens;
  extern __shared__ __align__(128) unsigned char memory[];
  SpaceChunkShared<N>& shared = *reinterpret_cast<SpaceChunkShared<N>*>(memory);
  launch_dependents();
  wait_for_previous();
  const SpaceParams& node = params.node;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, head = blockIdx.y, batch_row = blockIdx.z;
  const TokenRow row = read_token_row(node.rows, batch_row, node.tokens);
  const int first = (params.first + blockIdx.x) * C, count = min(C, row.count - node.tail - first);
  if (count <= 0) return;
  const int64_t token = static_cast<int64_t>(batch_row) * node.tokens + row.begin + first;
  copy_operands<T>(shared.read, rows_of(node, head), token, count);
  copy_async_commit();

  const int own = threadIdx.x;
  if (own < C) {
    float step = 0;
    if (own < count)
      step = softplus(static_cast<float>(static_cast<const T*>(node.dt)[(token + own) * node.dt_size + head]) +
                      node.dt_bias[head]);
    shared.steps[own] = step;
    shared.logs[own] = sum_logs(static_cast<double>(-expf(node.a_log[head])) * step, lane);
  }
  copy_async_wait<0>();
  __syncthreads();
  if (warp == 1) shared.logs[own] += shared.logs[31];
  float unused[C / 8][4], products[C / 8][4] = {};
  multiply_tokens<T, N, false>(shared.read, unused, products, warp, lane);
  __syncthreads();

  float* made = made_of(params, batch_row, blockIdx.x, head);
#pragma unroll
  for (int j = 0; j < C / 8; ++j) {
    if (j > (2 * warp + 1 | 3)) break;  // the scan multiplies 32 tokens at least; later tokens are zero
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = warp * 16 + lane / 4 + 8 * half, at = 8 * j + lane % 4 * 2;
      float of[2];
#pragma unroll
      for (int e = 0; e < 2; ++e)
        of[e] = at + e <= i ? products[j][2 * half + e] * shared.steps[at + e] *
                                  expf(static_cast<float>(shared.logs[i] - shared.logs[at + e]))
                            : 0.f;
      store_split(reinterpret_cast<unsigned char*>(made), i, at, of[0], of[1]);
    }
  }
  if (own >= C) return;
  float* factors = made + kFactorsAt<SpaceParams>;
  const float decay = expf(static_cast<float>(shared.logs[own]));
  factors[C + own] = decay;
  factors[2 * C + own] = expf(static_cast<float>(shared.logs[C - 1] - shared.logs[own])) * shared.steps[own];
  if (own == C - 1) factors[3 * C] = decay;
}

}  // namespace quantmoe
