// GatedDelta of many tokens: 64 at a time, on tensor cores (the WY form of Yang et al., arXiv 2412.06464).
//
// Of a chunk, with S the state before it, c_i the decay of all its tokens up to i, k and q normed, q scaled:
//
//   A_ij = beta_i c_i / c_j k_i . k_j (j < i)        U = (I + A)^-1 diag(beta) (V - diag(c) K S)
//   P_ij = c_i / c_j q_i . k_j (j <= i)              O = diag(c) Q S + P U
//                                                    S = c_last S + sum_j c_last / c_j k_j U_j^T
//
// delta_chunks makes W = (I + A)^-1 diag(beta), P and the factors of each token, of all chunks at once; delta_scan
// (linear_attention_scan.cuh) has a head's columns in registers and goes from chunk to chunk. There the state is
// transposed: a warp has 16 columns, whose values of a key feature, and of a token, are accumulators that are the next
// product's left operand as they are.
//
// Products are of 16 bits. What T holds (q, k, v) is exact. What is f32 is the sum of two values but for 2^-16 of it: S
// and U meet keys and queries, so they are two T's; R and U meet W and P as two bf16, whose range is that of f32. Two
// f16 have 22 bits but not the range, so a column of the state is in units of a power of two, which changes with the
// largest of its values. The norms' factors are f32, and multiply sums. Decays are differences of sums
// of logarithms, in f64: in f32 those of a chunk that decays to nothing would lose what is near.
#pragma once
#include <type_traits>

#include "cuda/linear_attention.cuh"
#include "cuda/wgmma.cuh"

namespace quantmoe {

struct DeltaChunkParams {
  DeltaParams delta;
  int first, chunks;  // of the chunks of each row: that of this launch, and how many it has at most
  float* made;        // [batch, chunks, H, kDeltaMade]
};

// Two numbers as two of 16 bits each, whose sums they are but for the last bits.
template <typename T>
__device__ inline void split(float x, float y, uint32_t& high, uint32_t& low) {
  high = Half<T>::pack(x, y);
  low = Half<T>::pack(x - Half<T>::low(high), y - Half<T>::high(high));
}
// Accumulators of two products side by side as the left operand of the next.
template <typename T>
__device__ inline void split(const float (&left)[4], const float (&right)[4], uint32_t (&high)[4], uint32_t (&low)[4]) {
  split<T>(left[0], left[1], high[0], low[0]), split<T>(left[2], left[3], high[1], low[1]);
  split<T>(right[0], right[1], high[2], low[2]), split<T>(right[2], right[3], high[3], low[3]);
}

// Powers of two, of each of a lane's two columns: in these units the largest value of the column is from 2^14 to 2^15.
template <int n>
__device__ inline void find_units(const float (&values)[n][4], float (&units)[2]) {
  constexpr uint32_t kMantissa = 23, kTop = 14, kLeast = 127 - 90;  // kLeast: the exponent of the smallest unit, 2^-90
#pragma unroll
  for (int side = 0; side < 2; ++side) {
    float largest = 0;
#pragma unroll
    for (int i = 0; i < n; ++i)
      largest = fmaxf(largest, fmaxf(fabsf(values[i][2 * side]), fabsf(values[i][2 * side + 1])));
#pragma unroll
    for (int by = 1; by < 4; by *= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, by));
    const uint32_t exponent = __float_as_uint(largest) >> kMantissa;
    units[side] = __uint_as_float((max(exponent, kLeast + kTop) - kTop) << kMantissa);
  }
}
__device__ inline float inverse_power(float power) { return __uint_as_float((254u << 23) - __float_as_uint(power)); }

// Where eight values of a token's row lie: ldmatrix finds eight rows' in other banks, and wgmma has them as it wants.
__device__ inline uint32_t eight_at(int row, int eight) { return swizzled_tile<kDeltaTokens>(row, eight); }
// Asks for [64, width] values; rows from n on are zero.
template <typename T, int width>
__device__ inline void copy_tokens(uint32_t to, const T* from, int64_t stride, int n) {
  constexpr int kEights = width / 8, kRows = kDeltaChunkThreads / kEights;  // rows that the block copies at once
  static_assert(kRows % 8 == 0, "a thread's rows are swizzled alike");
  const int row = threadIdx.x / kEights, eight = threadIdx.x % kEights;
  to += eight_at(row, eight), from += row * stride + eight * 8;
#pragma unroll
  for (int i = 0; i < kDeltaTokens; i += kRows, from += kRows * stride) copy_async16(to + i * 128, from, row + i < n);
}

template <int K>
struct DeltaChunkShared {
  static constexpr int kStride = kDeltaTokens + 4;
  struct ChunkOperands {
    uint16_t key[kDeltaTokens * K], query[kDeltaTokens * K];
  };
  struct Inverted {
    float w[kDeltaTokens][kStride], half[kDeltaTokens / 2][kStride];
  };
  union {
    ChunkOperands read;
    Inverted inverted;  // when what was read has been multiplied
  };
  float a[kDeltaTokens][kStride];
  double logs[kDeltaTokens];  // of the decays, summed
  float beta[kDeltaTokens], by_key[kDeltaTokens], by_query[kDeltaTokens];
};

// Of n tokens from `token` on: beta, and the sums of the logarithms of their decays, of each 32 tokens apart.
template <typename T, int K>
__device__ __forceinline__ void sum_decays(const DeltaParams& params, DeltaChunkShared<K>& shared, int64_t token,
                                           int head, int n, int lane) {
  const qm_delta& node = params.delta;
  double log = 0;
  if (threadIdx.x < kDeltaTokens) {
    const int i = threadIdx.x;
    const T* a = static_cast<const T*>(params.a) + (token + i) * params.a_size + head;
    const T* b_of_token = static_cast<const T*>(params.b) + (token + i) * params.b_size + head;
    if (i < n) log = -expf(params.a_log[head]) * softplus(static_cast<float>(*a) + params.dt_bias[head]);
    shared.beta[i] = i < n ? node.beta_scale * sigmoid_of(static_cast<float>(*b_of_token)) : 0.f;
#pragma unroll
    for (int by = 1; by < 32; by *= 2) {
      const double before = __shfl_up_sync(~0u, log, by);
      if (lane >= by) log += before;
    }
    shared.logs[i] = log;
  }
}
// What the norms of keys and queries multiply by: a thread has a token's key or query.
template <typename T, int K>
__device__ __forceinline__ void find_norms(const qm_delta& node, DeltaChunkShared<K>& shared) {
  static_assert(kDeltaChunkThreads == 2 * kDeltaTokens, "a thread for each key and query");
  const int i = threadIdx.x % kDeltaTokens;
  const bool query = threadIdx.x >= kDeltaTokens;
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
// A warp's 16 tokens with those up to them: k_i . k_j and q_i . k_j.
template <typename T, int K>
__device__ __forceinline__ void multiply_tokens(const DeltaChunkShared<K>& shared, float (&keys)[kDeltaTokens / 8][4],
                                                float (&queries)[kDeltaTokens / 8][4], int warp, int lane) {
  const uint32_t key_at = shared_address(shared.read.key), query_at = shared_address(shared.read.query);
#pragma unroll
  for (int k = 0; k < K / 16; ++k) {
    uint32_t ak[4], aq[4];
    const int own = warp * 16 + lane % 16, own_eight = 2 * k + lane / 16;
    load_matrices(ak, key_at + eight_at(own, own_eight));
    load_matrices(aq, query_at + eight_at(own, own_eight));
#pragma unroll
    for (int j = 0; j < kDeltaTokens / 16; ++j) {
      if (j > warp) break;
      uint32_t other[4];  // of eight tokens two eights, of the next eight two
      load_matrices(other, key_at + eight_at(j * 16 + lane / 16 * 8 + lane % 8, 2 * k + lane / 8 % 2));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        Half<T>::mma(keys[2 * j + half], ak, other[2 * half], other[2 * half + 1]);
        Half<T>::mma(queries[2 * j + half], aq, other[2 * half], other[2 * half + 1]);
      }
    }
  }
}
// Two values of a row as delta_scan reads them: the high parts of a matrix [64, 64], then the low ones.
__device__ inline void store_split(unsigned char* matrix, int row, int column, float x, float y) {
  const uint32_t at = eight_at(row, column / 8) + column % 8 * 2;
  uint32_t high, low;
  split<__nv_bfloat16>(x, y, high, low);
  *reinterpret_cast<uint32_t*>(matrix + at) = high;
  *reinterpret_cast<uint32_t*>(matrix + kDeltaTokens * kDeltaTokens * 2 + at) = low;
}
// P, and A in shared memory, of these.
template <int K>
__device__ __forceinline__ void store_products(DeltaChunkShared<K>& shared, const float (&keys)[kDeltaTokens / 8][4],
                                               const float (&queries)[kDeltaTokens / 8][4], int warp, int lane,
                                               unsigned char* products) {
  constexpr int C = kDeltaTokens;
  const int g = lane / 4, t = lane % 4;
#pragma unroll
  for (int j = 0; j < C / 8; ++j) {
    if (j > (2 * warp + 1 | 3)) break;  // products of P and W are of 32 tokens at least, some of which come later: zero
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
  constexpr int C = kDeltaTokens, kHalf = C / 2;
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
__global__ void __launch_bounds__(kDeltaChunkThreads) delta_chunks(const __grid_constant__ DeltaChunkParams params) {
  constexpr int C = kDeltaTokens;
  extern __shared__ __align__(128) unsigned char memory[];
  DeltaChunkShared<K>& shared = *reinterpret_cast<DeltaChunkShared<K>*>(memory);
  typename DeltaChunkShared<K>::Inverted& inverted = shared.inverted;
  launch_dependents();
  wait_for_previous();
  const DeltaParams& delta = params.delta;
  const qm_delta& node = delta.delta;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int head = blockIdx.y, batch_row = blockIdx.z, group = head / (node.num_v_heads / node.num_k_heads);
  const TokenRow row = read_token_row(delta.rows, batch_row, delta.tokens);
  const int first = (params.first + blockIdx.x) * C, count = min(C, row.count - delta.tail - first);
  if (count <= 0) return;
  const int64_t token = static_cast<int64_t>(batch_row) * delta.tokens + row.begin + first;
  const int64_t width = 2 * node.num_k_heads * K + node.num_v_heads * node.v_head_size;
  const T* q = static_cast<const T*>(delta.qkv) + token * width + group * K;
  copy_tokens<T, K>(shared_address(shared.read.key), q + node.num_k_heads * K, width, count);
  copy_tokens<T, K>(shared_address(shared.read.query), q, width, count);
  copy_async_commit();

  sum_decays<T>(delta, shared, token, head, count, lane);
  copy_async_wait<0>();
  __syncthreads();
  if (warp == 1) shared.logs[threadIdx.x] += shared.logs[31];
  find_norms<T>(node, shared);

  float keys[C / 8][4] = {}, queries[C / 8][4] = {};
  multiply_tokens<T>(shared, keys, queries, warp, lane);
  __syncthreads();
  float* made = params.made +
                ((static_cast<int64_t>(batch_row) * params.chunks + blockIdx.x) * node.num_v_heads + head) * kDeltaMade;
  unsigned char* const matrices = reinterpret_cast<unsigned char*>(made);
  store_products(shared, keys, queries, warp, lane, matrices + C * C * 4);
  if (threadIdx.x < C) {
    const int i = threadIdx.x;
    const float decay = expf(static_cast<float>(shared.logs[i])),
                left = expf(static_cast<float>(shared.logs[C - 1] - shared.logs[i]));
    float* factors = made + 2 * C * C;
    factors[i] = decay * shared.by_key[i], factors[C + i] = decay * shared.by_query[i],
    factors[2 * C + i] = left * shared.by_key[i];
    if (i == C - 1) factors[3 * C] = decay;
  }
  __syncthreads();

  invert(shared, warp, lane);
  for (int at = threadIdx.x; at < C * C / 2; at += kDeltaChunkThreads) {
    const int r = at / (C / 2), j = at % (C / 2) * 2;
    const auto w = [&](int column) { return column <= r ? inverted.w[r][column] * shared.beta[column] : 0.f; };
    if (j <= (r | 31)) store_split(matrices, r, j, w(j), w(j + 1));
  }
}

}  // namespace quantmoe
