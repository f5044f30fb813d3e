// AddRMSNorm: a block a row.
#pragma once
#include "cuda/between.h"
#include "cuda/ptx.cuh"

namespace quantmoe {

struct NormParams {
  const void *x, *residual;  // T [rows, columns]
  const void* weight;        // T [columns]
  void *y, *sum;
  int columns;
  float epsilon;
};

// kEach: values that a thread reads at once; columns are a multiple. Pieces after a thread's first are read again.
template <typename T, int kEach>
__global__ void __launch_bounds__(kMostNormThreads) add_norm(const __grid_constant__ NormParams params) {
  struct alignas(sizeof(T) * kEach) Piece {
    T of[kEach];
  };
  __shared__ float parts[32];
  launch_dependents();
  const int pieces = params.columns / kEach, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * pieces;
  const Piece* weight = static_cast<const Piece*>(params.weight);
  Piece* sums = static_cast<Piece*>(params.sum) + row;
  const int first = threadIdx.x;
  Piece w{}, kept{};
  if (first < pieces) w = weight[first];
  wait_for_previous();
  float squares = 0.f;
  for (int at = first; at < pieces; at += blockDim.x) {
    const Piece x = static_cast<const Piece*>(params.x)[row + at],
                residual = static_cast<const Piece*>(params.residual)[row + at];
    Piece sum;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      sum.of[i] = Half<T>::from(static_cast<float>(x.of[i]) + static_cast<float>(residual.of[i]));
      const float value = static_cast<float>(sum.of[i]);
      squares = fmaf(value, value, squares);
    }
    sums[at] = sum;
    if (at == first) kept = sum;
  }
  squares = warp_sum(squares);
  if (lane == 0) parts[threadIdx.x / 32] = squares;
  __syncthreads();
  const float all = warp_sum(lane < warps ? parts[lane] : 0.f);
  const float factor = 1.f / sqrtf(all / static_cast<float>(params.columns) + params.epsilon);
  for (int at = first; at < pieces; at += blockDim.x) {
    if (at != first) kept = sums[at], w = weight[at];
    Piece y;
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      y.of[i] = Half<T>::from(static_cast<float>(kept.of[i]) * factor * static_cast<float>(w.of[i]));
    static_cast<Piece*>(params.y)[row + at] = y;
  }
}

}  // namespace quantmoe
