// Many tokens of GatedDelta and StateSpace, 64 at a time, on tensor cores: what both share before the scan
// (chunk_scan.cuh).
//
// Products are of 16 bits. What T holds is exact. An f32 value is the sum of two values, up to 2^-16 of it. S and U,
// which meet keys and queries, are two T's. What tokens make of each other (P; R, U and W) is two bf16, which have the
// range of f32. Two f16 have 22 bits but not the range. So a column of the state is in units of a power of two, which
// changes with its largest value. Decays are differences of sums of logarithms, in f64. In f32 a chunk that decays to
// nothing would lose what is near.
#pragma once
#include <type_traits>

#include "cuda/common/wgmma.cuh"
#include "cuda/state/linear_attention.h"
#include "cuda/state/states.cuh"

namespace quantmoe {

// Node: DeltaParams or SpaceParams.
template <class Node>
struct ChunkParams {
  Node node;
  int first, chunks;  // chunks of each row: this launch's first one, and how many it has at most
  float* made;        // [batch, chunks, H, kChunkFloats]
};
// Whether a node's tokens ask the state what it recalls of their keys (W and U of linear_attention_chunked.cuh).
template <class Node>
constexpr bool kRecalls = true;
template <class Node>
__device__ inline float* made_of(const ChunkParams<Node>& params, int batch_row, int chunk, int head) {
  const int64_t chunks = static_cast<int64_t>(batch_row) * params.chunks + chunk;
  return params.made + (chunks * heads_of(params.node) + head) * kChunkFloats<kRecalls<Node>>;
}
// Where the tokens' factors begin in a chunk's operands.
template <class Node>
constexpr int kFactorsAt = kChunkMatrices<kRecalls<Node>> * kChunkMatrix;
// Where a token's row of `tokens` has a head's key, query and values.
struct HeadRows {
  const void* tokens;
  int64_t width, key, query, value;
};

// Two numbers as two of 16 bits each. Their sums are the numbers, except the last bits.
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
__device__ inline uint32_t eight_at(int row, int eight) { return swizzled_tile<kChunkTokens>(row, eight); }
// Asks for [64, width] values; rows from n on are zero.
template <typename T, int width>
__device__ inline void copy_tokens(uint32_t to, const T* from, int64_t stride, int n) {
  constexpr int kEights = width / 8, kRows = kChunkThreads / kEights;  // rows that the block copies at once
  static_assert(kRows % 8 == 0, "a thread's rows are swizzled alike");
  const int row = threadIdx.x / kEights, eight = threadIdx.x % kEights;
  to += eight_at(row, eight), from += row * stride + eight * 8;
#pragma unroll
  for (int i = 0; i < kChunkTokens; i += kRows, from += kRows * stride) copy_async16(to + i * 128, from, row + i < n);
}

template <int K>
struct ChunkOperands {
  uint16_t key[kChunkTokens * K], query[kChunkTokens * K];
};
// Asks for n tokens' words from `token` on.
template <typename T, int K>
__device__ inline void copy_operands(ChunkOperands<K>& to, const HeadRows& rows, int64_t token, int n) {
  const T* from = static_cast<const T*>(rows.tokens) + token * rows.width;
  copy_tokens<T, K>(shared_address(to.key), from + rows.key, rows.width, n);
  copy_tokens<T, K>(shared_address(to.query), from + rows.query, rows.width, n);
}

// The sums of the logarithms of a chunk's decays up to each token, of each 32 tokens apart: by a token's thread.
__device__ inline double sum_logs(double log, int lane) {
#pragma unroll
  for (int by = 1; by < 32; by *= 2) {
    const double before = __shfl_up_sync(~0u, log, by);
    if (lane >= by) log += before;
  }
  return log;
}
// A warp's 16 tokens with those up to them: q_i . k_j, and k_i . k_j if these are asked for.
template <typename T, int K, bool kKeys>
__device__ __forceinline__ void multiply_tokens(const ChunkOperands<K>& of, float (&keys)[kChunkTokens / 8][4],
                                                float (&queries)[kChunkTokens / 8][4], int warp, int lane) {
  const uint32_t key_at = shared_address(of.key), query_at = shared_address(of.query);
#pragma unroll
  for (int k = 0; k < K / 16; ++k) {
    uint32_t ak[4], aq[4];
    const int own = warp * 16 + lane % 16, own_eight = 2 * k + lane / 16;
    if (kKeys) load_matrices(ak, key_at + eight_at(own, own_eight));
    load_matrices(aq, query_at + eight_at(own, own_eight));
#pragma unroll
    for (int j = 0; j < kChunkTokens / 16; ++j) {
      if (j > warp) break;
      uint32_t other[4];  // of eight tokens two eights, of the next eight two
      load_matrices(other, key_at + eight_at(j * 16 + lane / 16 * 8 + lane % 8, 2 * k + lane / 8 % 2));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (kKeys) Half<T>::mma(keys[2 * j + half], ak, other[2 * half], other[2 * half + 1]);
        Half<T>::mma(queries[2 * j + half], aq, other[2 * half], other[2 * half + 1]);
      }
    }
  }
}
// Two values of a row as the scan reads them: the high parts of a matrix [64, 64], then the low ones.
__device__ inline void store_split(unsigned char* matrix, int row, int column, float x, float y) {
  const uint32_t at = eight_at(row, column / 8) + column % 8 * 2;
  uint32_t high, low;
  split<__nv_bfloat16>(x, y, high, low);
  *reinterpret_cast<uint32_t*>(matrix + at) = high;
  *reinterpret_cast<uint32_t*>(matrix + kChunkTokens * kChunkTokens * 2 + at) = low;
}

}  // namespace quantmoe
