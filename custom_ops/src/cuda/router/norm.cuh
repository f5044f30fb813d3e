// AddRMSNorm: a block a row.
#pragma once
#include "core/tensors.h"
#include "cuda/common/ptx.cuh"
#include "cuda/router/router.h"

namespace quantmoe {

struct NormParams {
  const void *x, *residual;  // T [rows, columns]
  const void* weight;        // T [columns]
  void *y, *sum;
  int columns;
  float epsilon;
};

inline NormParams norm_params(const qm_norm& norm, const qm_cuda_call& call) {
  const TensorsOf<qm_norm> tensors{call.inputs, call.outputs};
  return {tensors.x,        tensors.residual, tensors.weight,
          tensors.y,        tensors.sum,      static_cast<int>(call.inputs[AddRMSNorm_weight].shape.sizes[0]),
          norm.norm_epsilon};
}

// Values that a thread reads at once.
template <typename T, int kEach>
struct alignas(sizeof(T) * kEach) NormPiece {
  T of[kEach];
};

// The sum of two pieces. Its squares are added to the thread's.
template <typename T, int kEach>
__device__ NormPiece<T, kEach> add_pieces(const NormPiece<T, kEach>& x, const NormPiece<T, kEach>& residual,
                                          float& squares) {
  NormPiece<T, kEach> sum;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    sum.of[i] = Half<T>::from(static_cast<float>(x.of[i]) + static_cast<float>(residual.of[i]));
    const float value = static_cast<float>(sum.of[i]);
    squares = fmaf(value, value, squares);
  }
  return sum;
}

// 1 / sqrt(mean(sum^2) + epsilon) of the row whose squares the block's threads have. There is a barrier between calls.
__device__ inline float norm_factor(const NormParams& params, float squares) {
  __shared__ float parts[32];
  const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
  squares = warp_sum(squares);
  if (lane == 0) parts[threadIdx.x / 32] = squares;
  __syncthreads();
  const float all = warp_sum(lane < warps ? parts[lane] : 0.f);
  return 1.f / sqrtf(all / static_cast<float>(params.columns) + params.epsilon);
}

template <typename T, int kEach>
__device__ NormPiece<T, kEach> normed(const NormPiece<T, kEach>& sum, float factor, const NormPiece<T, kEach>& weight) {
  NormPiece<T, kEach> y;
#pragma unroll
  for (int i = 0; i < kEach; ++i)
    y.of[i] = Half<T>::from(static_cast<float>(sum.of[i]) * factor * static_cast<float>(weight.of[i]));
  return y;
}

// Columns are a multiple of kEach. Pieces after a thread's first are read again.
template <typename T, int kEach>
__global__ void __launch_bounds__(kMostNormThreads) add_norm(const __grid_constant__ NormParams params) {
  using Piece = NormPiece<T, kEach>;
  launch_dependents();
  const int pieces = params.columns / kEach;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * pieces;
  const Piece* weight = static_cast<const Piece*>(params.weight);
  Piece* sums = static_cast<Piece*>(params.sum) + row;
  const int first = threadIdx.x;
  Piece w{}, kept{};
  if (first < pieces) w = weight[first];
  wait_for_previous();
  float squares = 0.f;
  for (int at = first; at < pieces; at += blockDim.x) {
    const Piece sum = add_pieces(static_cast<const Piece*>(params.x)[row + at],
                                 static_cast<const Piece*>(params.residual)[row + at], squares);
    sums[at] = sum;
    if (at == first) kept = sum;
  }
  const float factor = norm_factor(params, squares);
  for (int at = first; at < pieces; at += blockDim.x) {
    if (at != first) kept = sums[at], w = weight[at];
    static_cast<Piece*>(params.y)[row + at] = normed(kept, factor, w);
  }
}

}  // namespace quantmoe
