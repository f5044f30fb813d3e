// Activations in the values of an activation format (FORMAT.md 4.1), in 16 bits, for kernels that take any weights.
//
// Codes and powers of two are exact in 16 bits, and so is e2m1 times e4m3; a stored f32 scale is left out and multiplies
// the sums (InputScale). Where the step is an f32 of its own (token, group128) the product is rounded to T.
#pragma once
#include <float.h>

#include "cuda/kernels.cuh"
#include "cuda/layout.h"
#include "cuda/ptx.cuh"

namespace quantmoe {

constexpr int kRoundThreads = 256;

// x rounded to `bits` bits after its first, or, below 2^least, after 2^least's; ties to even.
__device__ inline float RoundBits(float x, int bits, int least) {
  const int exponent = max(static_cast<int>(__float_as_uint(x) >> 23 & 255) - 127, least) - bits;
  return rintf(x * __uint_as_float((127 - exponent) << 23)) * __uint_as_float((127 + exponent) << 23);
}

// The largest magnitudes of what is below and above zero, as bits: those of infinities and NaN are larger than others.
struct Extremes {
  uint32_t low = 0, high = 0;

  __device__ void Add(float x) {
    const uint32_t bits = __float_as_uint(x);
    if (bits >> 31) {
      low = max(low, bits & 0x7fffffff);
    } else {
      high = max(high, bits);
    }
  }
  __device__ void Add(const Extremes& other) { low = max(low, other.low), high = max(high, other.high); }
  __device__ void AddLanes(unsigned lanes) {  // of this many neighbours
    for (unsigned d = 1; d < lanes; d *= 2)
      Add(Extremes{__shfl_xor_sync(~0u, low, d), __shfl_xor_sync(~0u, high, d)});
  }
};

// Rounds values that share a step.
struct Rounding {
  int format;
  bool finite;
  float step, factor, zero = 0.f;  // factor: of the rounded x / step; int8_token_asym's step is 1 / factor

  // kept: the part of the stored scale that the values have, all or 1.
  __device__ Rounding(int format, const Extremes& of, float stored, float kept) : format(format) {
    const uint32_t largest = max(of.low, of.high);
    const float m = __uint_as_float(largest);
    finite = largest < 0x7f800000;
    step = 1.f;
    switch (format) {
      case kInt8Token:
      case kFp8Token:
      case kFp8Group128:
        step = m / (format == kInt8Token ? 127.5f : 448.f);
        if (step == 0.f) step = 1.f;
        factor = step;
        break;
      case kInt8TokenAsym: {
        const float low = -__uint_as_float(of.low), high = __uint_as_float(of.high), spread = __fsub_rn(high, low);
        step = spread == 0.f ? 1.f : 255.f / spread;  // that is, its inverse
        factor = __frcp_rn(step);
        if (isinf(step)) step = factor = 0.f;
        const float a = __fmul_rn(low, step), b = __fmul_rn(high, step);
        zero = __fadd_rn(-128.f, a) + __fadd_rn(127.f, b) > 0.f ? -128.f - a : 127.f - b;
        zero = rintf(fminf(fmaxf(zero, -128.f), 127.f));
        finite = finite && !isinf(spread);
        break;
      }
      case kFp8Tensor:
        step = stored;
        factor = kept;
        break;
      case kNvfp4Groups:
        factor = RoundBits(fminf(m / 6.f / stored, 448.f), 3, -6);
        step = factor * stored;
        factor *= kept;
        if (step == 0.f) step = 1.f, factor = 0.f;
        break;
      default: {  // mx
        const int exponent = static_cast<int>((largest + (1u << 21)) >> 23) - (format == kMxfp8Groups ? 8 : 2);
        factor = step = __uint_as_float(exponent > 0 ? exponent << 23 : 1 << 22);
      }
    }
  }

  __device__ float operator()(float x) const {
    if (format == kNoFormat) return x;
    if (!finite) return __int_as_float(0x7fffffff);
    if (format == kInt8TokenAsym)
      return (fminf(fmaxf(rintf(__fmul_rn(x, step)) + zero, -128.f), 127.f) - zero) * factor;
    const float q = x / step;
    if (format == kInt8Token) return fminf(fmaxf(rintf(q), -128.f), 127.f) * factor;
    const bool e2m1 = format == kNvfp4Groups || format == kMxfp4Groups;
    const float most = e2m1 ? 6.f : 448.f;
    return RoundBits(fminf(fmaxf(q, -most), most), e2m1 ? 1 : 3, e2m1 ? 0 : -6) * factor;
  }
};

// A block a row, 8 columns a thread at a time; x and out may be the same.
template <typename T>
__global__ void __launch_bounds__(kRoundThreads) MoeRound(const __grid_constant__ RoundParams p) {
  LaunchDependents();
  WaitForPrevious();
  const int64_t row = blockIdx.x;
  int pair = blockIdx.x;
  const bool stored_order = p.sorted_pairs != nullptr;
  if (stored_order) {
    const int tiles = p.tiles[p.max_tiles].count;
    if (tiles == 0) return;
    const Tile last = p.tiles[tiles - 1];
    if (row >= last.first + last.count) return;
    pair = p.sorted_pairs[row].pair;
  }
  const uint8_t* weights = p.rows;
  if (p.by_expert) {
    const int expert = LocalExpert(p.routing, pair);
    if (expert < 0) return;
    weights += expert * p.row_bytes;
  }
  const float weight = p.weight_here ? RouterWeight(p.routing, pair) : 1.f;
  const float stored = p.input_at ? *reinterpret_cast<const float*>(weights + p.input_at) : 1.f;
  const float kept = p.with_input_scale ? stored : 1.f;
  const float* pre = p.pre_at ? reinterpret_cast<const float*>(weights + p.pre_at) : nullptr;
  const T* x = static_cast<const T*>(p.x) + row / p.x_divisor * p.columns;
  const int chunks = p.columns / 8;

  float v[8];
  auto load = [&](int chunk) {
    const uint4 in = chunk < chunks ? reinterpret_cast<const uint4*>(x)[chunk] : make_uint4(0, 0, 0, 0);
    const uint32_t words[4] = {in.x, in.y, in.z, in.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      v[i] = weight * (i % 2 ? Half<T>::High(words[i / 2]) : Half<T>::Low(words[i / 2]));
      // As StoredColumn of moe_gemm_wgmma.cuh has them.
      const int column = stored_order ? chunk / 4 * 32 + i / 2 * 8 + chunk % 4 * 2 + i % 2 : chunk * 8 + i;
      if (pre && column < p.features) v[i] *= pre[column];
    }
  };
  // Of words 0 and 1 of a chunk, and of 2 and 3.
  auto extremes = [&](Extremes& first, Extremes& second) {
#pragma unroll
    for (int i = 0; i < 8; ++i) (i < 4 ? first : second).Add(v[i]);
  };

  const bool by_row = p.format == kInt8Token || p.format == kInt8TokenAsym || p.format == kFp8Token;
  Extremes all;
  if (by_row) {
    for (int chunk = threadIdx.x; chunk < chunks; chunk += blockDim.x) {
      load(chunk);
      extremes(all, all);
    }
    __shared__ Extremes of_warps[kRoundThreads / 32];
    all.AddLanes(32);
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = all;
    __syncthreads();
    for (int w = 0; w < blockDim.x / 32; ++w) all.Add(of_warps[w]);
  }
  // Groups of 16 are words 0, 1 or 2, 3 of four chunks in the stored order, two chunks else; groups of others are alike.
  const int group = p.format == kFp8Group128 ? 128 : p.format == kNvfp4Groups ? 16 : p.format > kNvfp4Groups ? 32 : 8;
  const bool halves = stored_order && group == 16;
  for (int begin = threadIdx.x & ~31; begin < chunks; begin += blockDim.x) {  // whole warps
    const int chunk = begin + threadIdx.x % 32;
    load(chunk);
    Extremes first = all, second = all;
    if (!by_row) {
      extremes(first, second);
      if (!halves) first.Add(second);
      first.AddLanes(halves ? 4 : group / 8);
      if (halves) second.AddLanes(4);
    }
    const Rounding low(p.format, first, stored, kept), high = halves ? Rounding(p.format, second, stored, kept) : low;
    // What an f16 lacks at the top of x.
    constexpr float most = kBf16<T> ? 0x1.fep127f : 65504.f;
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float r[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        r[j] = (i < 2 ? low : high)(v[2 * i + j]);
        if (isfinite(r[j])) r[j] = fminf(fmaxf(r[j], -most), most);
      }
      words[i] = Half<T>::Pack(r[0], r[1]);
    }
    if (chunk < chunks)
      reinterpret_cast<uint4*>(static_cast<T*>(p.out) + row * p.columns)[chunk] =
          make_uint4(words[0], words[1], words[2], words[3]);
  }
}

}  // namespace quantmoe
