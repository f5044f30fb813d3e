// QuantLinear of a few rows on mma.sync. A block takes panels, MT at a time, and its warps take parts of K. End to end
// these parts are one stream of weights:
//
//   warp 0  | panels 0, K part 0 | panels 1, K part 0 | ..     copies run kStages - 1 turns ahead, across panels
//   warp 1  | panels 0, K part 1 | panels 1, K part 1 | ..
//   ..                           sum                  sum      in shared memory
//
// A warp's part of a row is a few turns. So blocks of one panel each would be filled and drained most of the time.
// Without atomics and a second pass, every call gives equal bytes.
#pragma once
#include "cuda/gemm/moe_gemm_mma.cuh"

namespace quantmoe {

template <typename T, typename F, int MT, int kUnits, int kStages>
__global__ void __launch_bounds__(kThreads, linear_blocks(F::kBits, MT))
    linear_decode(const __grid_constant__ GemmParams params) {
  using S = Stream<T, F, MT, 1, kUnits, kStages>;
  extern __shared__ __align__(128) uint8_t shared[];
  S stream(shared, params.weights);
  auto sums_of = [&](int warp) {
    return reinterpret_cast<float4*>(shared + kWarps * kStages * S::kStageBytes) + warp * MT * 32;
  };
  const int warp = threadIdx.x / 32, lane = stream.lane, g = stream.g, t = stream.t, columns = params.routing.tokens;
  const uint8_t* const row = params.weights.rows.first;
  // Groups of MT panels, and units of K.
  const int groups = (params.weights.panels + MT - 1) / MT,
            first = static_cast<int>(blockIdx.x) * groups / static_cast<int>(gridDim.x),
            last = static_cast<int>(blockIdx.x + 1) * groups / static_cast<int>(gridDim.x);
  const int k_units = (params.weights.units + kUnits - 1) / kUnits;
  const int k_begin = warp * k_units / kWarps * kUnits, k_end = (warp + 1) * k_units / kWarps * kUnits;

  struct Place {
    int group, k;
  };
  const Place start{k_begin < k_end ? first : last, k_begin};
  Place ahead = start;  // what is copied next
  auto advance = [&] {
    if ((ahead.k += kUnits) >= k_end) ++ahead.group, ahead.k = k_begin;
  };
  auto copy_weights = [&](int stage) {
    if (ahead.k == k_begin) stream.seek_weights(params.weights, row, ahead.group * MT, k_begin);
    stream.k = ahead.k;
    stream.copy_weights(stage, params.weights);
  };
  const T* const tokens = g < columns ? static_cast<const T*>(params.x) + g * params.x_columns : nullptr;
  auto copy_tokens = [&](int stage) {
    stream.k = ahead.k;
    if (ahead.k == k_begin) stream.seek_tokens(0, tokens, params.x_columns);
    stream.copy_tokens(stage, 1);
  };
  // Weights do not depend on the kernel before this one: fill the ring, then wait for it, then ask for its output.
#pragma unroll 1
  for (int s = 0; s < kStages - 1 && ahead.group < last; ++s, advance()) copy_weights(s);
  wait_for_previous();
  launch_dependents();
  ahead = start;
#pragma unroll 1
  for (int s = 0; s < kStages - 1; ++s) {
    if (ahead.group < last) copy_tokens(s), advance();
    copy_async_commit();
  }

  // Where a row has fewer tokens than columns of the product, these are columns of zeros.
  float weight[2], factor[2];  // factor: what sums are multiplied by
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    weight[i] = 2 * t + i < columns ? 1.f : 0.f;
    factor[i] = weight[i] * sum_factors<T, F>(params.weights, row).x;
  }
  int turn = 0;
#pragma unroll 1
  for (int group = first; group < last; ++group) {
    const int panel = group * MT;
    float acc[MT][1][4] = {};
    if (params.weights.bias_at && k_begin == 0 && k_begin < k_end) {
      const float* bias = reinterpret_cast<const float*>(row + params.weights.bias_at) + g;
#pragma unroll
      for (int m = 0; m < MT; ++m) {
        const int at = min(panel + m, params.weights.panels - 1) * 16;
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[m][0][i] = fmaf(weight[i % 2], bias[at + (i < 2 ? 0 : 8)], 0.f);
      }
    }
#pragma unroll 1
    for (int k = k_begin; k < k_end; k += kUnits, ++turn) {
      copy_async_wait<kStages - 2>();
      if (ahead.group < last) {
        const int stage = (turn + kStages - 1) % kStages;
        copy_weights(stage);
        copy_tokens(stage);
        advance();
      }
      copy_async_commit();
      stream.template consume<1, true, kUnits == 1>(turn % kStages, acc, params.weights, factor);
    }
    if (group > first) __syncthreads();  // the sums before these have been read
#pragma unroll
    for (int m = 0; m < MT; ++m)
      sums_of(warp)[m * 32 + lane] = make_float4(acc[m][0][0], acc[m][0][1], acc[m][0][2], acc[m][0][3]);
    __syncthreads();
    if (threadIdx.x >= MT * 32) continue;
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
    for (int w = 0; w < kWarps; ++w) {
      const float4 v = sums_of(w)[threadIdx.x];
      sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
    }
    const int at = (panel + warp) * 16 + g;  // MT <= 8: warp m holds panel m
    const float low[2] = {sum.x, sum.y}, high[2] = {sum.z, sum.w};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int token = 2 * t + i;
      if (token >= columns) continue;
      T* out = static_cast<T*>(params.out) + static_cast<int64_t>(token) * params.out_columns;
      if (at < params.out_columns) out[at] = Half<T>::from(low[i]);
      if (at + 8 < params.out_columns) out[at + 8] = Half<T>::from(high[i]);
    }
  }
}

}  // namespace quantmoe
