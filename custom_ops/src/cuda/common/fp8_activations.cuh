// Activations as e4m3 codes for moe_gemm_fp8.cuh (quant_moe.def, Activations).
#pragma once
#include "cuda/common/e4m3.cuh"
#include "cuda/common/kernels.cuh"
#include "cuda/common/ptx.cuh"

namespace quantmoe {

// Of a row's 128 bytes: where codes of columns [8 * eight, 8 * eight + 8) of a group are.
__device__ inline int token_byte(int eight, int row) {
  const int unit = eight / 8, half = eight / 4 % 2, t = eight % 4;
  return ((unit * 4 + t) ^ (row & 7)) << 4 | (half ^ (t & 1)) << 3;
}

struct QuantizeParams {
  RoutedPairs routing;
  const void* x;   // T [rows, columns], columns a multiple of 8
  uint8_t* codes;  // [groups, x_rows, 128]
  float* scales;   // [groups, x_rows], or [x_rows]
  int from_rows, columns, groups, x_rows;
  const int* positions;  // rows of the codes of a token's pairs, -1: none; null: row r of x is row r of the codes
  bool weight_here;      // x times the router's weight
  ExpertRows rows;       // of the weights, for a stored scale
  uint32_t input_at;     // 0: none
  const SortedPair* sorted_pairs;
  const Tile* tiles;
  int max_tiles;
};

// Bits of magnitudes are ordered as they are, NaN above infinity above others; of both halves of the words.
__device__ __forceinline__ uint32_t largest_bits(const uint4& v) {
  constexpr uint32_t kMagnitudes = 0x7fff7fff;
  return __vmaxu2(__vmaxu2(v.x & kMagnitudes, v.y & kMagnitudes), __vmaxu2(v.z & kMagnitudes, v.w & kMagnitudes));
}
// The largest of a row, whose threads have `most` of what they read.
__device__ __forceinline__ uint32_t largest_of_row(uint32_t most) {
  const int threads = blockDim.x, thread = threadIdx.x;
  for (int d = 1; d < 32; d *= 2) most = __vmaxu2(most, __shfl_xor_sync(~0u, most, d));
  if (threads > 32) {
    __shared__ uint32_t of_warps[kQuantizeThreads / 32];
    uint32_t* of_row = of_warps + threadIdx.y * threads / 32;
    if (thread % 32 == 0) of_row[thread / 32] = most;
    __syncthreads();
    for (int i = 0; i < threads / 32; ++i) most = __vmaxu2(most, of_row[i]);
  }
  return most;
}

// blockDim.x threads take a row of x; a thread takes 8 columns at a time, and 16 threads a group. A row's 128 bytes of
// a group have the order of wgmma's operand in shared memory, with the 128-byte swizzle. Its columns have the order of
// a unit of weights (FORMAT.md 3.2). A row or group with a value that is not finite has the scale NaN.
template <typename T, bool grouped>
__global__ void __launch_bounds__(kQuantizeThreads) moe_quantize(const __grid_constant__ QuantizeParams params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)  // only moe_gemm_fp8.cuh needs it
  constexpr int kAhead = 4;
  launch_dependents();
  wait_for_previous();
  const int from = blockIdx.x * blockDim.y + threadIdx.y, copies = params.positions ? params.routing.top_k : 1;
  const int threads = blockDim.x, thread = threadIdx.x;
  const bool alike = !params.weight_here && !params.input_at;  // codes of all copies
  if (from >= params.from_rows) return;
  if (!params.positions && (from >= params.tiles[params.max_tiles].first || params.sorted_pairs[from].pair < 0))
    return;  // no pair's
  const uint4* x =
      reinterpret_cast<const uint4*>(static_cast<const T*>(params.x) + static_cast<int64_t>(from) * params.columns);
  const int chunks = params.columns / 8, stored_chunks = params.groups * 16;
  uint4 in[kAhead];
  auto load = [&](int begin) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int chunk = begin + i * threads + thread;
      in[i] = chunk < chunks ? x[chunk] : make_uint4(0, 0, 0, 0);
    }
  };
  uint32_t most = 0;  // of the row
  if constexpr (!grouped) {
    for (int begin = 0; begin < stored_chunks; begin += kAhead * threads) {
      load(begin);
#pragma unroll
      for (int i = 0; i < kAhead; ++i) most = __vmaxu2(most, largest_bits(in[i]));
    }
    most = largest_of_row(most);
  }
  for (int begin = 0; begin < stored_chunks; begin += kAhead * threads) {
    if (grouped || stored_chunks > kAhead * threads) load(begin);
    uint2 codes[kAhead];
    E4m3Step steps[kAhead];
    bool made = false;
    for (int copy = 0; copy < copies; ++copy) {
      const int row = params.positions ? params.positions[from * copies + copy] : from;
      if (row < 0) continue;
      if (!made || !alike) {
        made = true;
        const int pair = params.positions ? from * copies + copy : params.sorted_pairs[row].pair;
        const float weight = params.weight_here ? router_weight(params.routing, pair) : 1.f;
        float stored = 0.f;
        if (!grouped && params.input_at)
          stored = *reinterpret_cast<const float*>(params.rows[local_expert(params.routing, pair)] + params.input_at);
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
          if (grouped) {
            most = largest_bits(in[i]);
#pragma unroll
            for (int d = 1; d < 16; d *= 2) most = __vmaxu2(most, __shfl_xor_sync(~0u, most, d));
          }
          steps[i] = E4m3Step(fabsf(weight * Half<T>::low(max(most & 0xffff, most >> 16))), stored);
          auto word = [&](uint32_t low, uint32_t high) {  // of four columns: bytes 0, 2, 1, 3
            return __byte_perm(steps[i].pair_of(weight * Half<T>::low(low), weight * Half<T>::high(low)),
                               steps[i].pair_of(weight * Half<T>::low(high), weight * Half<T>::high(high)), 0x5140);
          };
          codes[i] = make_uint2(word(in[i].x, in[i].y), word(in[i].z, in[i].w));
        }
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int chunk = begin + i * threads + thread;
        if (chunk >= stored_chunks) continue;
        if (grouped ? chunk % 16 == 0 : chunk == 0)
          params.scales[(grouped ? static_cast<int64_t>(chunk / 16) * params.x_rows : 0) + row] = steps[i].step;
        *reinterpret_cast<uint2*>(params.codes + (static_cast<int64_t>(chunk / 16) * params.x_rows + row) * 128 +
                                  token_byte(chunk % 16, row)) = codes[i];
      }
    }
  }
#else
  __trap();  // the plan is of sm_90a, this library was compiled without it
#endif
}

}  // namespace quantmoe
