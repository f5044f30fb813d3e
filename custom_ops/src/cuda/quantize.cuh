// Activations as e4m3 codes for moe_gemm_fp8.cuh (FORMAT.md 4.1).
#pragma once
#include "cuda/kernels.cuh"
#include "cuda/ptx.cuh"

namespace quantmoe {

constexpr int kQuantizeThreads = 256;

struct QuantizeParams {
  Routing routing;
  const void* x;   // T [rows, columns], columns a multiple of 8
  uint8_t* codes;  // [groups, x_rows, 128]
  float* scales;   // [groups, x_rows], or [x_rows]
  int columns, groups, x_rows;
  int x_divisor;        // 0: row r of x is row r of the codes; else pair / x_divisor of the sorted pair
  bool weight_here;     // x times the router's weight
  const uint8_t* rows;  // of the weights, for a stored scale
  uint64_t row_bytes;
  uint32_t input_at;  // 0: none
  const SortedPair* sorted_pairs;
  const Tile* tiles;
  int max_tiles;
};

// Rows as sorted_pairs has them, a block each; 8 columns a thread at a time, 16 threads a group. A row's 128 bytes of a
// group are those of B in shared memory, swizzled, with columns in the order in which a lane has those of weights
// (FORMAT.md 3.2): word q of a thread's eight columns c is word 4 * q + c / 8 % 4 of its 32, bytes 0, 2, 1, 3.
// A row or group with a value that is not finite has the scale NaN.
template <typename T, bool grouped>
__global__ void __launch_bounds__(kQuantizeThreads) MoeQuantize(const __grid_constant__ QuantizeParams p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)  // only moe_gemm_fp8.cuh needs it
  constexpr int kAhead = 4;
  LaunchDependents();
  WaitForPrevious();
  const int row = blockIdx.x;
  const int tiles = p.tiles[p.max_tiles].count;
  if (tiles == 0) return;
  const Tile last = p.tiles[tiles - 1];
  if (row >= last.first + last.count) return;
  const SortedPair pair = p.sorted_pairs[row];
  if (pair.pair < 0) return;  // between two experts
  const int from = p.x_divisor > 0 ? pair.pair / p.x_divisor : row;
  const float weight = p.weight_here ? pair.weight : 1.f;
  const uint4* x = reinterpret_cast<const uint4*>(static_cast<const T*>(p.x) + static_cast<int64_t>(from) * p.columns);
  const int chunks = p.columns / 8, stored_chunks = p.groups * 16;
  uint4 in[kAhead];
  auto load = [&](int begin) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int chunk = begin + i * kQuantizeThreads + static_cast<int>(threadIdx.x);
      in[i] = chunk < chunks ? x[chunk] : make_uint4(0, 0, 0, 0);
    }
  };
  auto value = [&](const uint4& v, int i) {
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
    return weight * (i % 2 ? Half<T>::High(words[i / 2]) : Half<T>::Low(words[i / 2]));
  };
  // Bits of magnitudes are ordered as they are, NaN above infinity above others; of both halves of the words.
  auto largest = [&](const uint4& v) {
    constexpr uint32_t kMagnitudes = 0x7fff7fff;
    return __vmaxu2(__vmaxu2(v.x & kMagnitudes, v.y & kMagnitudes), __vmaxu2(v.z & kMagnitudes, v.w & kMagnitudes));
  };
  float stored = 0.f;
  if (!grouped && p.input_at)
    stored = *reinterpret_cast<const float*>(p.rows + LocalExpert(p.routing, pair.pair) * p.row_bytes + p.input_at);
  // step, and its inverse for the quotients below: 0 where that does not serve.
  auto step_of = [&](uint32_t most, float* inverse) {
    const float m = fabsf(weight * Half<T>::Low(max(most & 0xffff, most >> 16)));
    float step = stored != 0.f ? stored : __fdiv_rn(m, 448.f);
    if (step == 0.f) step = 1.f;
    if (!(m < __int_as_float(0x7f800000))) step = __int_as_float(0x7fffffff);
    *inverse = step > 0x1p-100f && step < 0x1p100f ? __frcp_rn(step) : 0.f;
    return step;
  };
  float step = 1.f, inverse = 1.f;
  if constexpr (!grouped) {
    __shared__ uint32_t of_warps[kQuantizeThreads / 32];
    uint32_t most = 0;
    for (int begin = 0; begin < stored_chunks; begin += kAhead * kQuantizeThreads) {
      load(begin);
#pragma unroll
      for (int i = 0; i < kAhead; ++i) most = __vmaxu2(most, largest(in[i]));
    }
    for (int d = 1; d < 32; d *= 2) most = __vmaxu2(most, __shfl_xor_sync(~0u, most, d));
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = most;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kQuantizeThreads / 32; ++i) most = __vmaxu2(most, of_warps[i]);
    step = step_of(most, &inverse);
    if (threadIdx.x == 0) p.scales[row] = step;
  }
  for (int begin = 0; begin < stored_chunks; begin += kAhead * kQuantizeThreads) {
    if (grouped || stored_chunks > kAhead * kQuantizeThreads) load(begin);
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int chunk = begin + i * kQuantizeThreads + static_cast<int>(threadIdx.x);
      if (grouped) {
        uint32_t most = largest(in[i]);
#pragma unroll
        for (int d = 1; d < 16; d *= 2) most = __vmaxu2(most, __shfl_xor_sync(~0u, most, d));
        step = step_of(most, &inverse);
      }
      if (chunk >= stored_chunks) continue;
      if (grouped && chunk % 16 == 0) p.scales[static_cast<int64_t>(chunk / 16) * p.x_rows + row] = step;
      // x / step, rounded: an estimate and what is left of x correct it to the nearest (Markstein); steps at the edge
      // of f32 and those that are not a number divide.
      auto quotient = [&](int at) {
        const float v = value(in[i], at);
        if (inverse == 0.f) return __fdiv_rn(v, step);
        const float q = v * inverse;
        return fmaf(fmaf(-q, step, v), inverse, q);
      };
      uint32_t words[2];
#pragma unroll
      for (int q = 0; q < 2; ++q) {
        auto pair = [&](int low, int high) {
          uint16_t codes;
          asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;"
              : "=h"(codes)
              : "f"(quotient(4 * q + high)), "f"(quotient(4 * q + low)));
          return static_cast<uint32_t>(codes);
        };
        words[q] = pair(0, 2) | pair(1, 3) << 16;
      }
      uint8_t* out = p.codes + (static_cast<int64_t>(chunk / 16) * p.x_rows + row) * 128 + chunk % 4 * 4;
#pragma unroll
      for (int q = 0; q < 2; ++q)
        *reinterpret_cast<uint32_t*>(out + (((chunk / 4 % 4 * 2 + q) ^ (row & 7)) << 4)) = words[q];
    }
  }
#endif
}

}  // namespace quantmoe
