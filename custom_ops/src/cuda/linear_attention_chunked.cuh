// GatedDelta of many tokens: 64 at a time, on tensor cores (the WY form of Yang et al., arXiv 2412.06464).
//
// Of a chunk, with S the state before it, c_i the decay of all its tokens up to i, k and q normed, q scaled:
//
//   A_ij = beta_i c_i / c_j k_i . k_j (j < i)        U = (I + A)^-1 diag(beta) (V - diag(c) K S)
//   P_ij = c_i / c_j q_i . k_j (j <= i)              O = diag(c) Q S + P U
//                                                    S = c_last S + sum_j c_last / c_j k_j U_j^T
//
// delta_chunks makes W = (I + A)^-1 diag(beta), P and the factors of each token, of all chunks at once; delta_scan has
// a head's columns in registers and goes from chunk to chunk. There the state is transposed: a warp has 16 columns,
// whose values of a key feature, and of a token, are accumulators that are the next product's left operand as they are.
//
// No operand is rounded: what T holds (q, k, v) is exact in tf32, whose mantissa has 11 bits, and what is f32 (S, R, U,
// W, P) is the sum of two tf32 numbers but for 2^-21 of it. The norms' factors are f32, and multiply sums. Decays are
// differences of sums of logarithms, in f64: in f32 those of a chunk that decays to nothing would lose what is near.
#pragma once
#include "cuda/linear_attention.cuh"

namespace quantmoe {

struct DeltaChunkParams {
  DeltaParams delta;
  int first, chunks;  // of the chunks of each row: that of this launch, and how many it has at most
  float* made;        // [batch, chunks, H, kDeltaMade]
};

// c += a * b, 16 x 8 times 8 x 8. Of the fragments (PTX ISA, mma.m16n8k8) lanes have a's columns t and t + 4 and b's
// rows t and t + 4; here these are 2t and 2t + 1, as c has them, which changes nothing but the order of the sum.
__device__ inline void mma_tf32(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
template <typename T>
__device__ inline void widen(uint32_t pair, uint32_t (&to)[2]) {
  to[0] = __float_as_uint(Half<T>::low(pair)), to[1] = __float_as_uint(Half<T>::high(pair));
}
constexpr uint32_t kTf32 = 0xffffe000;
__device__ inline void split_tf32(float x, uint32_t& high, uint32_t& low) {
  high = __float_as_uint(x) & kTf32;
  low = __float_as_uint(x - __uint_as_float(high)) & kTf32;
}
// An accumulator as the left operand of the next product.
__device__ inline void split_tf32(const float (&c)[4], uint32_t (&high)[4], uint32_t (&low)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) split_tf32(c[(i % 2) * 2 + i / 2], high[i], low[i]);
}

// Bytes from the beginning of rows of `width` 16-bit values to eight of them; which eight lie where differs by row, so
// that eight rows' are in other banks.
template <int width>
__device__ inline uint32_t eight_at(int row, int eight) {
  return row * width * 2 + (eight ^ (row & 7)) * 16;
}
// Asks for [64, width] values; rows from n on are zero.
template <typename T, int width>
__device__ inline void copy_tokens(uint32_t to, const T* from, int64_t stride, int n) {
  for (int i = threadIdx.x; i < kDeltaTokens * width / 8; i += kDeltaChunkThreads) {
    const int row = i / (width / 8), eight = i % (width / 8);
    copy_async16(to + eight_at<width>(row, eight), from + (row < n ? row * stride + eight * 8 : 0), row < n);
  }
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
// What the norms of keys and queries multiply by.
template <typename T, int K>
__device__ __forceinline__ void find_norms(const qm_delta& node, DeltaChunkShared<K>& shared, int warp, int lane) {
  for (int i = warp; i < kDeltaTokens; i += kDeltaChunkThreads / 32) {
    constexpr int kEach = K / 32;
    const uint32_t at = eight_at<K>(i, lane * kEach / 8) / 2 + lane * kEach % 8;
    float keys = 0, queries = 0;
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const float k = static_cast<float>(reinterpret_cast<const T*>(shared.read.key)[at + j]);
      const float q = static_cast<float>(reinterpret_cast<const T*>(shared.read.query)[at + j]);
      keys = fmaf(k, k, keys), queries = fmaf(q, q, queries);
    }
    keys = warp_sum(keys), queries = warp_sum(queries);
    if (lane == 0)
      shared.by_key[i] = rsqrtf(keys + node.l2_epsilon),
      shared.by_query[i] = rsqrtf(queries + node.l2_epsilon) * node.scale;
  }
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
    load_matrices(ak, key_at + eight_at<K>(own, own_eight));
    load_matrices(aq, query_at + eight_at<K>(own, own_eight));
#pragma unroll
    for (int j = 0; j < kDeltaTokens / 16; ++j) {
      if (j > warp) break;
      uint32_t other[4];  // of eight tokens two eights, of the next eight two
      load_matrices(other, key_at + eight_at<K>(j * 16 + lane / 16 * 8 + lane % 8, 2 * k + lane / 8 % 2));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        Half<T>::mma(keys[2 * j + half], ak, other[2 * half], other[2 * half + 1]);
        Half<T>::mma(queries[2 * j + half], aq, other[2 * half], other[2 * half + 1]);
      }
    }
  }
}
// P, and A in shared memory, of these.
template <int K>
__device__ __forceinline__ void store_products(DeltaChunkShared<K>& shared, const float (&keys)[kDeltaTokens / 8][4],
                                               const float (&queries)[kDeltaTokens / 8][4], int warp, int lane,
                                               float* products) {
  constexpr int C = kDeltaTokens;
  const int g = lane / 4, t = lane % 4;
#pragma unroll
  for (int j = 0; j < C / 8; ++j) {
    if (j > 2 * warp + 1) break;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = warp * 16 + g + 8 * half, at = 8 * j + 2 * t;
      float2 p_of{}, a_of{};
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float decay = at + e <= i ? expf(static_cast<float>(shared.logs[i] - shared.logs[at + e])) : 0.f;
        const float by = decay * shared.by_key[at + e];
        const float product = at + e <= i ? queries[j][2 * half + e] * shared.by_query[i] * by : 0.f;
        const float a = at + e < i ? keys[j][2 * half + e] * shared.by_key[i] * by * shared.beta[i] : 0.f;
        (e ? p_of.y : p_of.x) = product, (e ? a_of.y : a_of.x) = a;
      }
      *reinterpret_cast<float2*>(products + i * C + at) = p_of;
      *reinterpret_cast<float2*>(&shared.a[i][at]) = a_of;
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
  find_norms<T>(node, shared, warp, lane);

  float keys[C / 8][4] = {}, queries[C / 8][4] = {};
  multiply_tokens<T>(shared, keys, queries, warp, lane);
  __syncthreads();
  float* made = params.made +
                ((static_cast<int64_t>(batch_row) * params.chunks + blockIdx.x) * node.num_v_heads + head) * kDeltaMade;
  store_products(shared, keys, queries, warp, lane, made + C * C);
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
  for (int at = threadIdx.x; at < C * C; at += kDeltaChunkThreads) {
    const int r = at / C, j = at % C;
    if (j <= (r | 7)) made[at] = j <= r ? inverted.w[r][j] * shared.beta[j] : 0.f;
  }
}

template <int K>
struct DeltaScanStage {
  static constexpr int kStride = kDeltaTokens + 8;
  uint16_t key[kDeltaTokens * K], query[kDeltaTokens * K], value[kDeltaTokens * kDeltaScanColumns];
  float w[kDeltaTokens][kStride], p[kDeltaTokens][kStride];
  float factors[kDeltaMade - 2 * kDeltaTokens * kDeltaTokens];
};

// Blocks: columns of a head, heads, rows.
//
// One long function: the state and a chunk's products are a lane's registers from its first line to its last, and each
// product's operands are the sums of the one before.
template <typename T, int K>
__global__ void __launch_bounds__(kDeltaChunkThreads) delta_scan(const __grid_constant__ DeltaChunkParams params) {
  constexpr int C = kDeltaTokens, kTiles = C / 8;
  extern __shared__ __align__(128) unsigned char memory[];
  using Stage = DeltaScanStage<K>;
  Stage* const stages = reinterpret_cast<Stage*>(memory);
  launch_dependents();
  wait_for_previous();
  const DeltaParams& delta = params.delta;
  const qm_delta& node = delta.delta;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int head = blockIdx.y, batch_row = blockIdx.z, group = head / (node.num_v_heads / node.num_k_heads),
            v_head_size = node.v_head_size;
  const int column = blockIdx.x * kDeltaScanColumns + warp * 16 + g;  // and eight further
  const TokenRow row = read_token_row(delta.rows, batch_row, delta.tokens);
  if (!row.valid) return;
  const int count = max(0, row.count - delta.tail), chunks = min(params.chunks, (count + C - 1) / C - params.first);
  if (chunks <= 0 && params.first) return;

  // [8 m + 2t + e % 2, column + e / 2 * 8] of the state.
  float state[K / 8][4];
  const int64_t state_at = (static_cast<int64_t>(batch_row) * node.num_v_heads + head) * K * v_head_size + column;
  const auto place = [&](int m, int e) {
    return state_at + static_cast<int64_t>(8 * m + 2 * t + e % 2) * v_head_size + e / 2 * 8;
  };
  const float* past = params.first ? delta.present_state : delta.past_state;
  const bool from_past = params.first || row.from_past || !row.count;
#pragma unroll
  for (int m = 0; m < K / 8; ++m)
#pragma unroll
    for (int e = 0; e < 4; ++e) state[m][e] = from_past ? past[place(m, e)] : 0.f;

  const int64_t token = static_cast<int64_t>(batch_row) * delta.tokens + row.begin + params.first * C;
  const int64_t width = 2 * node.num_k_heads * K + node.num_v_heads * v_head_size;
  const auto read = [&](int chunk) {
    Stage& to = stages[chunk % 2];
    const int n = min(C, count - (params.first + chunk) * C);
    const T* q = static_cast<const T*>(delta.qkv) + (token + chunk * C) * width;
    copy_tokens<T, K>(shared_address(to.key), q + (node.num_k_heads + group) * K, width, n);
    copy_tokens<T, K>(shared_address(to.query), q + group * K, width, n);
    const T* values = q + 2 * node.num_k_heads * K + head * v_head_size + blockIdx.x * kDeltaScanColumns;
    copy_tokens<T, kDeltaScanColumns>(shared_address(to.value), values, width, n);
    const float* made =
        params.made +
        ((static_cast<int64_t>(batch_row) * params.chunks + chunk) * node.num_v_heads + head) * kDeltaMade;
    for (int i = threadIdx.x; i < C * C / 4; i += kDeltaChunkThreads) {
      const int r = i / (C / 4), j = i % (C / 4) * 4;
      if (j > (r | 7)) continue;
      copy_async16(shared_address(&to.w[r][j]), made + i * 4, true);
      copy_async16(shared_address(&to.p[r][j]), made + C * C + i * 4, true);
    }
    for (int i = threadIdx.x; i < static_cast<int>(sizeof(to.factors) / 16); i += kDeltaChunkThreads)
      copy_async16(shared_address(to.factors + 4 * i), made + 2 * C * C + 4 * i, true);
    copy_async_commit();
  };
  if (chunks > 0) read(0);
  for (int chunk = 0; chunk < chunks; ++chunk) {
    if (chunk + 1 < chunks) {
      read(chunk + 1);
      copy_async_wait<1>();
    } else {
      copy_async_wait<0>();
    }
    __syncthreads();
    const Stage& of = stages[chunk % 2];
    const uint32_t key_at = shared_address(of.key), query_at = shared_address(of.query);
    const uint32_t value_at = shared_address(of.value);
    const auto factor = [&](int which, int tile) {
      return *reinterpret_cast<const float2*>(of.factors + which * C + 8 * tile + 2 * t);
    };

    // Keys and queries with the state: r, o of tokens 8 i + 2t + e % 2, columns as the state's.
    float r[kTiles][4] = {}, o[kTiles][4] = {}, u[kTiles][4] = {};
#pragma unroll
    for (int m = 0; m < K / 8; ++m) {
      uint32_t high[4], low[4];
      split_tf32(state[m], high, low);
#pragma unroll
      for (int i = 0; i < kTiles; i += 4) {
        uint32_t keys[4], queries[4];
        load_matrices(keys, key_at + eight_at<K>(i * 8 + lane, m));
        load_matrices(queries, query_at + eight_at<K>(i * 8 + lane, m));
        // A sum's next product comes seven others later: a warp is alone on its tensor core.
        uint32_t k[4][2], q[4][2];
#pragma unroll
        for (int e = 0; e < 4; ++e) widen<T>(keys[e], k[e]), widen<T>(queries[e], q[e]);
#pragma unroll
        for (int part = 0; part < 2; ++part)
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            mma_tf32(r[i + e], part ? low : high, k[e]);
            mma_tf32(o[i + e], part ? low : high, q[e]);
          }
      }
    }
#pragma unroll
    for (int i = 0; i < kTiles; i += 2) {
      uint32_t values[4];
      load_transposed(values,
                      value_at + eight_at<kDeltaScanColumns>((i + lane / 16) * 8 + lane % 8, 2 * warp + lane / 8 % 2));
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float2 by_key = factor(0, i + e), by_query = factor(1, i + e);
#pragma unroll
        for (int side = 0; side < 2; ++side) {
          const uint32_t value = values[2 * e + side];
          float(&to)[4] = r[i + e], (&out)[4] = o[i + e];
          to[2 * side] = fmaf(-by_key.x, to[2 * side], Half<T>::low(value));
          to[2 * side + 1] = fmaf(-by_key.y, to[2 * side + 1], Half<T>::high(value));
          out[2 * side] *= by_query.x, out[2 * side + 1] *= by_query.y;
        }
      }
    }

    const float decay = of.factors[3 * C];
#pragma unroll
    for (int m = 0; m < K / 8; ++m)
#pragma unroll
      for (int e = 0; e < 4; ++e) state[m][e] *= decay;
    // Adds products of eight tokens, the j-th, to all from these on.
    const auto add = [&](float(&to)[kTiles][4], const float(&tokens)[4], const float(*with)[Stage::kStride], int j) {
      uint32_t high[4], low[4], factors[kTiles][2], small[kTiles][2];
      split_tf32(tokens, high, low);
#pragma unroll
      for (int i = j; i < kTiles; ++i) {
        const float2 pair = *reinterpret_cast<const float2*>(&with[8 * i + g][8 * j + 2 * t]);
        split_tf32(pair.x, factors[i][0], small[i][0]), split_tf32(pair.y, factors[i][1], small[i][1]);
      }
#pragma unroll
      for (int i = j; i < kTiles; ++i) mma_tf32(to[i], high, factors[i]);
#pragma unroll
      for (int i = j; i < kTiles; ++i) mma_tf32(to[i], low, factors[i]);
#pragma unroll
      for (int i = j; i < kTiles; ++i) mma_tf32(to[i], high, small[i]);
    };
    // u of eight tokens is whole when r of those up to them has been added.
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      add(u, r[j], of.w, j);
      add(o, u[j], of.p, j);
      const float2 left = factor(2, j);
      const float scaled[4] = {u[j][0] * left.x, u[j][1] * left.y, u[j][2] * left.x, u[j][3] * left.y};
      uint32_t high[4], low[4];
      split_tf32(scaled, high, low);
#pragma unroll
      for (int m = 0; m < K / 8; m += 8) {
        uint32_t keys[8][2];
#pragma unroll
        for (int half = 0; half < 8; half += 4) {
          uint32_t four[4];
          load_transposed(four, key_at + eight_at<K>(j * 8 + lane % 8, m + half + lane / 8));
#pragma unroll
          for (int e = 0; e < 4; ++e) widen<T>(four[e], keys[half + e]);
        }
#pragma unroll
        for (int part = 0; part < 2; ++part)
#pragma unroll
          for (int e = 0; e < 8; ++e) mma_tf32(state[m + e], part ? low : high, keys[e]);
      }
    }
    const int n = min(C, count - (params.first + chunk) * C);
#pragma unroll
    for (int i = 0; i < kTiles; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int own = 8 * i + 2 * t + e % 2;
        if (own < n)
          delta.outputs[((token + chunk * C + own) * node.num_v_heads + head) * v_head_size + column + e / 2 * 8] =
              o[i][e];
      }
    __syncthreads();
  }
#pragma unroll
  for (int m = 0; m < K / 8; ++m)
#pragma unroll
    for (int e = 0; e < 4; ++e) delta.present_state[place(m, e)] = state[m][e];
}

}  // namespace quantmoe
