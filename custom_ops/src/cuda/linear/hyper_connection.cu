// HyperConnection: the last block of a token makes post and comb in a warp, whose lane has one number of comb. Each of
// the others adds 1,024 features of the streams.
#include "core/attributes.h"
#include "cuda/common/launcher.h"
#include "cuda/common/operators.h"
#include "cuda/common/ptx.cuh"
#include "cuda/linear/hyper_connection.h"

namespace quantmoe {

struct ConnectParams {
  const void* streams;
  const float *mixes, *base, *scale;
  void* collapsed;
  float *post, *comb;
  int n, hidden_size, iterations;
  float epsilon;
};

__device__ inline float logit(const ConnectParams& params, const float* mixes, int k, int group) {
  return mixes[k] * params.scale[group] + params.base[k];
}
__device__ inline float exact_sigmoid(float z) { return 1.f / (1.f + expf(-z)); }

// The sum of n lanes' numbers, in ascending order: of the lanes from `first` on, `step` apart.
__device__ inline float sum_lanes(float x, int first, int step, int n) {
  float sum = __shfl_sync(~0u, x, first);
  for (int i = 1; i < n; ++i) sum += __shfl_sync(~0u, x, first + i * step);
  return sum;
}

// Lanes from n * n on have the last number, too: they do not change what the others sum.
__device__ inline void balance(const ConnectParams& params, const float* mixes, int64_t token) {
  const int n = params.n, lane = threadIdx.x, own = lane < n * n ? lane : n * n - 1;
  const int row = own / n * n, column = own % n;
  if (lane < n) params.post[token * n + lane] = 2.f * exact_sigmoid(logit(params, mixes, n + lane, 1));
  const float z = logit(params, mixes, 2 * n + own, 2);
  float most = __shfl_sync(~0u, z, row);
  for (int i = 1; i < n; ++i) most = fmaxf(most, __shfl_sync(~0u, z, row + i));
  float x = expf(z - most);
  x = x / sum_lanes(x, row, 1, n) + params.epsilon;
  x /= sum_lanes(x, column, n, n) + params.epsilon;
  for (int i = 1; i < params.iterations; ++i) {
    x /= sum_lanes(x, row, 1, n) + params.epsilon;
    x /= sum_lanes(x, column, n, n) + params.epsilon;
  }
  if (lane < n * n) params.comb[token * n * n + lane] = x;
}

template <typename T>
__device__ inline void collapse(const ConnectParams& params, const float* mixes, int64_t token) {
  const int n = params.n, at = static_cast<int>(blockIdx.y) * kCollapsed + 8 * static_cast<int>(threadIdx.x);
  if (at >= params.hidden_size) return;
  const T* const streams = static_cast<const T*>(params.streams) + token * n * params.hidden_size + at;
  float sums[8] = {};
  for (int i = 0; i < n; ++i) {
    const float pre = exact_sigmoid(logit(params, mixes, i, 0)) + params.epsilon;
    const uint4 words = *reinterpret_cast<const uint4*>(streams + static_cast<int64_t>(i) * params.hidden_size);
    const uint32_t pairs[4] = {words.x, words.y, words.z, words.w};
    for (int j = 0; j < 4; ++j) {
      sums[2 * j] += pre * Half<T>::low(pairs[j]);
      sums[2 * j + 1] += pre * Half<T>::high(pairs[j]);
    }
  }
  T* const out = static_cast<T*>(params.collapsed) + token * params.hidden_size + at;
  *reinterpret_cast<uint4*>(out) = {Half<T>::pack(sums[0], sums[1]), Half<T>::pack(sums[2], sums[3]),
                                    Half<T>::pack(sums[4], sums[5]), Half<T>::pack(sums[6], sums[7])};
}

template <typename T>
__global__ void __launch_bounds__(kCollapseThreads) connect_streams(const __grid_constant__ ConnectParams params) {
  launch_dependents();
  const int64_t token = blockIdx.x;
  const float* const mixes = params.mixes + token * params.n * (2 + params.n);
  wait_for_previous();
  if (blockIdx.y + 1 < gridDim.y)
    collapse<T>(params, mixes, token);
  else if (threadIdx.x < 32)
    balance(params, mixes, token);
}

int launch_hyper_connection(const void* of, const qm_cuda_node_plan&, const qm_cuda_call& call, char* err) {
  const qm_hyper_connection& node = *static_cast<const qm_hyper_connection*>(of);
  const TensorsOf<qm_hyper_connection> tensors{call.inputs, call.outputs};
  const int64_t tokens = rows_of(call.inputs[HyperConnection_mixes].shape);
  if (tokens == 0) return QM_OK;
  const ConnectParams params{tensors.streams,   tensors.mixes,   tensors.base, tensors.scale,
                             tensors.collapsed, tensors.post,    tensors.comb, node.num_streams,
                             node.hidden_size,  node.iterations, node.epsilon};
  Launcher launcher{static_cast<cudaStream_t>(call.stream)};
  const dim3 grid(static_cast<unsigned>(tokens), blocks_for(node.hidden_size, kCollapsed) + 1);
  launcher.run(
      call.inputs[HyperConnection_streams].type == QM_BF16 ? connect_streams<__nv_bfloat16> : connect_streams<__half>,
      params, grid, kCollapseThreads, 0, true);
  return report(launcher.error, err);
}

}  // namespace quantmoe
