// Activations in the values of an activation format (quant_moe.def), in 16 bits, for kernels that take any weights.
//
// Codes and powers of two are exact in 16 bits, and so is e2m1 times e4m3. A stored f32 scale is left out, and
// multiplies the sums (input_scale). If the step is an f32 of its own (token, group128), the product is rounded to T.
#pragma once
#include <float.h>

#include "cuda/common/kernels.cuh"
#include "cuda/common/layout.h"
#include "cuda/common/ptx.cuh"

namespace quantmoe {

__device__ inline float max_nan(float a, float b) {
  float r;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}
__device__ inline float power_of_two(int exponent) { return __int_as_float((127 + exponent) << 23); }
// x rounded to `bits` bits after its first, or, below 2^least, after 2^least's; ties to even: in the sum those are the
// last bits.
__device__ inline float round_bits(float x, int bits, int least) {
  const float first = fmaxf(__uint_as_float(__float_as_uint(x) & 0x7f800000), power_of_two(least));
  const float large = 1.5f * power_of_two(23 - bits) * first;
  return __fsub_rn(__fadd_rn(x, large), large);
}

// The largest magnitudes of what is below and above zero, NaN if there is one.
struct Extremes {
  float low, high;

  __device__ void add(float x) { low = max_nan(low, -x), high = max_nan(high, x); }
  __device__ void add(const Extremes& other) { low = max_nan(low, other.low), high = max_nan(high, other.high); }
  __device__ void add_lanes(unsigned lanes) {  // of this many neighbours
    for (unsigned d = 1; d < lanes; d *= 2) add(Extremes{__shfl_xor_sync(~0u, low, d), __shfl_xor_sync(~0u, high, d)});
  }
  __device__ __forceinline__ void add_block() {  // of all threads of blocks of (threads, 1), else of a warp's
    add_lanes(32);
    if (blockDim.x > 32) {
      __shared__ Extremes of_warps[kRoundThreads / 32];
      if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = *this;
      __syncthreads();
      for (int w = 0; w < blockDim.x / 32; ++w) add(of_warps[w]);
    }
  }
};

// How values that share a step are rounded: round(clamp(x / step)) * factor, or of x * step for int8_token_asym.
struct Rounding {
  float step, factor, least, most;
  float power, inverse;  // power: of two, that makes step about 1; it is in step, and in its inverse

  // kept: the part of the stored scale that the values have, all or 1.
  __device__ Rounding(int format, const Extremes& of, float stored, float kept) {
    const float largest = max_nan(of.low, of.high);
    bool finite = largest <= FLT_MAX;
    step = 1.f;
    most = format == k_activation_format_nvfp4 || format == k_activation_format_mxfp4 ? 6.f : 448.f;
    least = -most;
    switch (format) {
      case k_activation_format_int8_token:
      case k_activation_format_fp8_token:
      case k_activation_format_fp8_group128:
        if (format == k_activation_format_int8_token) least = -128.f, most = 127.f;
        step = largest / (format == k_activation_format_int8_token ? 127.5f : 448.f);
        if (step == 0.f) step = 1.f;
        factor = step;
        break;
      case k_activation_format_int8_token_asym: {
        const float spread = of.high + of.low;
        finite = finite && spread <= FLT_MAX;
        step = spread == 0.f ? 1.f : 255.f / spread;
        factor = 1.f / step;
        if (isinf(step)) step = factor = 0.f;
        const float a = __fmul_rn(-of.low, step), b = __fmul_rn(of.high, step);
        const float zero =
            rintf(fminf(fmaxf((-128.f + a) + (127.f + b) > 0.f ? -128.f - a : 127.f - b, -128.f), 127.f));
        least = -128.f - zero, most = 127.f - zero;
        break;
      }
      case k_activation_format_fp8_tensor:
        step = stored;
        factor = kept;
        break;
      case k_activation_format_nvfp4:
        factor = round_bits(fminf(largest / 6.f / stored, 448.f), 3, -6);
        step = factor * stored;
        factor *= kept;
        if (step == 0.f) step = 1.f, factor = 0.f;
        break;
      case k_activation_format_mxfp8:
      case k_activation_format_mxfp4: {
        const int exponent = static_cast<int>((__float_as_uint(largest) + (1u << 21)) >> 23) -
                             (format == k_activation_format_mxfp8 ? 8 : 2);
        factor = step = __int_as_float(exponent > 0 ? exponent << 23 : 1 << 22);
        break;
      }
      default:
        factor = 1.f;
    }
    if (!finite) factor = __int_as_float(0x7fffffff);
    if (format == k_activation_format_int8_token_asym) return;
    power = power_of_two(min(max(127 - (__float_as_int(step) >> 23), -126), 126));
    step *= power;
    inverse = 1.f / step;
  }

  // x / step, rounded as a division is while it is less than 2^12: quicker than the division that allows for all.
  __device__ float quotient(float x) const {
    x = fminf(fmaxf(x * power, -0x1p14f), 0x1p14f);
    const float q = x * inverse;
    return __fmaf_rn(__fmaf_rn(-q, step, x), inverse, q);
  }

  // x as an e2m1 code; of a factor that is an e4m3 number its code.
  __device__ uint32_t code(float x) const {
    const float r = fabsf(round_bits(fminf(fmaxf(quotient(x), -6.f), 6.f), 1, 0));
    const int code = r < 1.f ? static_cast<int>(2.f * r) : (__float_as_int(r) >> 22) - 2 * 126;
    return code | (x < 0.f) << 3;
  }
  __device__ uint32_t scale_code() const { return factor <= 448.f ? e4m3(factor) : 0x7f; }
  // x as an e4m3 code.
  __device__ uint32_t code_e4m3(float x) const {
    const float r = round_bits(fminf(fmaxf(quotient(x), -448.f), 448.f), 3, -6);
    return e4m3(fabsf(r)) | __float_as_uint(r) >> 31 << 7;
  }
  // The code of an e4m3 number that is not negative.
  __device__ static uint32_t e4m3(float r) {
    return r < 0x1p-6f ? static_cast<int>(r * 512.f) : (__float_as_int(r) >> 20) - 8 * 120;
  }

  __device__ float operator()(int format, float x) const {
    if (format == k_activation_format_none) return x * factor;
    const bool integer = format <= k_activation_format_int8_token_asym, e2m1 = most == 6.f;
    const float q =
        fminf(fmaxf(format == k_activation_format_int8_token_asym ? __fmul_rn(x, step) : quotient(x), least), most);
    return (integer ? rintf(q) : round_bits(q, e2m1 ? 1 : 3, e2m1 ? 0 : -6)) * factor;
  }
};

// A packed row of nvfp4: 64 bytes for 64 columns, 16 for each t of 4. These are columns 8t to 8t + 7, even columns
// first, the columns 32 further, and the four scales, which each t has. Here 8 columns of it.
__device__ inline void pack_nvfp4(uint8_t* unit, int chunk, const Rounding& how, const float (&v)[8]) {
  const int half = chunk / 4 % 2, t = chunk % 4;
  uint32_t word = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) word |= how.code(v[i]) << 4 * (i / 2 + i % 2 * 4);
  *reinterpret_cast<uint32_t*>(unit + 16 * t + 4 * half) = word;
  for (int i = 0; i < 2; ++i)  // the other two by the group's other 8 columns
    unit[16 * (2 * (t % 2) + i) + 8 + 2 * half + t / 2] = static_cast<uint8_t>(how.scale_code());
}

// A packed row of e4m3: 80 bytes for 64 columns. Each t of 4 has 16, in the order in which a lane reads a row of
// weights (FORMAT.md 3.2). Then come the step, f32, and padding. Here 8 columns of it.
__device__ inline void pack_e4m3(uint8_t* unit, int chunk, const Rounding& how, const float (&v)[8]) {
  const int half = chunk / 4 % 2, t = chunk % 4;
  uint32_t code[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) code[i] = how.code_e4m3(v[i]);
  auto word = [&](int i) { return code[i] | code[i + 2] << 8 | code[i + 1] << 16 | code[i + 3] << 24; };
  *reinterpret_cast<uint2*>(unit + 16 * t + 8 * (half ^ t % 2)) = make_uint2(word(0), word(4));
  if (chunk % 8 == 0) *reinterpret_cast<float*>(unit + 64) = how.factor;
}

// Eight columns of a row of x, times the router's weight and the pre-scales (null: none).
template <typename T>
__device__ __forceinline__ void load_eight(const RoundParams& params, const T* x, int chunk, float weight,
                                           const float* pre, float (&v)[8]) {
  uint32_t words[4] = {};
  // In the stored order (stored_column of moe_gemm_wgmma.cuh) a chunk has two columns of each eight of 32.
  const int first = params.out_stored ? chunk / 4 * 32 + chunk % 4 * 2 : chunk * 8, next = params.out_stored ? 8 : 2;
  if (params.x_stored == params.out_stored) {
    if (chunk * 8 < params.x_columns) {
      const uint4 in = reinterpret_cast<const uint4*>(x)[chunk];
      words[0] = in.x, words[1] = in.y, words[2] = in.z, words[3] = in.w;
    }
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (first + 8 * i < params.x_columns) words[i] = reinterpret_cast<const uint32_t*>(x)[first / 2 + 4 * i];
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    v[i] = weight * (i % 2 ? Half<T>::high(words[i / 2]) : Half<T>::low(words[i / 2]));
    const int column = first + i / 2 * next + i % 2;
    if (pre && column < params.features) v[i] *= pre[column];
  }
}

// A block takes a row; a block of (32, rows) takes a row with each warp. A thread takes 8 columns of out at a time. x
// and out may be one memory. One long function: two passes over a row share its place, and its 8 columns are in
// registers.
template <typename T>
__global__ void __launch_bounds__(kRoundThreads) moe_round(const __grid_constant__ RoundParams params) {
  launch_dependents();
  if (params.sorted_pairs) wait_for_previous();
  const int row = blockIdx.x * blockDim.y + threadIdx.y;
  int pair = row;
  if (row >= params.out_rows) return;
  if (params.sorted_pairs) {
    if (row >= params.tiles[params.max_tiles].first) return;
    pair = params.sorted_pairs[row].pair;
  }
  const uint8_t* weights = params.rows.first;
  if (params.by_expert) {
    const int expert = local_expert(params.routing, pair);
    if (expert < 0) {
      wait_for_previous();  // or, if all left, this kernel would end before the one before it, on which the next relies
      return;
    }
    weights = params.rows[expert];
  }
  const float weight = params.weight_here ? router_weight(params.routing, pair) : 1.f;
  const float stored = params.input_at ? *reinterpret_cast<const float*>(weights + params.input_at) : 1.f;
  const float kept = params.with_input_scale ? stored : 1.f;
  const float* pre = params.pre_at ? reinterpret_cast<const float*>(weights + params.pre_at) : nullptr;
  const T* x = static_cast<const T*>(params.x) + static_cast<int64_t>(row / params.x_divisor) * params.x_columns;
  uint8_t* out = static_cast<uint8_t*>(params.out) +
                 static_cast<int64_t>(row) * (params.packed ? params.columns / 64 * params.packed : params.columns * 2);
  const int chunks = params.columns / 8;
  if (!params.sorted_pairs) wait_for_previous();  // for x

  float v[8];
  auto load = [&](int chunk) { load_eight<T>(params, x, chunk, weight, pre, v); };
  const bool by_row = params.format == k_activation_format_int8_token ||
                      params.format == k_activation_format_int8_token_asym ||
                      params.format == k_activation_format_fp8_token;
  Extremes all{0.f, 0.f};
  if (by_row) {
    for (int chunk = threadIdx.x; chunk < chunks; chunk += blockDim.x) {
      load(chunk);
#pragma unroll
      for (int i = 0; i < 8; ++i) all.add(v[i]);
    }
    all.add_block();
  }
  // A group has neighbours. In the stored order a group of 16 is words 0, 1 or 2, 3 of four chunks.
  const int group = params.format == k_activation_format_fp8_group128 ? 128
                    : params.format == k_activation_format_nvfp4      ? 16
                    : params.format > k_activation_format_nvfp4       ? 32
                    : params.packed                                   ? 64  // have one step, or NaN
                                                                      : 8;
  const bool halves = params.out_stored && group == 16;
  for (int begin = threadIdx.x & ~31; begin < chunks; begin += blockDim.x) {  // whole warps
    const int chunk = begin + threadIdx.x % 32;
    load(chunk);
    Extremes first = all, second = all;
    if (!by_row) {
#pragma unroll
      for (int i = 0; i < 8; ++i) (i < 4 ? first : second).add(v[i]);
      if (!halves) first.add(second);
      first.add_lanes(halves ? 4 : group / 8);
      if (halves) second.add_lanes(4);
    }
    const Rounding low(params.format, first, stored, kept),
        high = halves ? Rounding(params.format, second, stored, kept) : low;
    if (params.packed) {
      uint8_t* unit = out + chunk / 8 * params.packed;
      if (chunk >= chunks) continue;
      if (params.format == k_activation_format_nvfp4) {
        pack_nvfp4(unit, chunk, low, v);
      } else {
        pack_e4m3(unit, chunk, low, v);
      }
      continue;
    }
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const Rounding& how = i < 2 ? low : high;
      words[i] = Half<T>::clamp(Half<T>::pack(how(params.format, v[2 * i]), how(params.format, v[2 * i + 1])));
    }
    if (chunk < chunks) reinterpret_cast<uint4*>(out)[chunk] = make_uint4(words[0], words[1], words[2], words[3]);
  }
}

}  // namespace quantmoe
