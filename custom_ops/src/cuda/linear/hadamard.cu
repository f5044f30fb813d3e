// Hadamard: a thread block has some blocks of features in shared memory, and adds and subtracts pairs of them in place.
#include <cmath>

#include "cuda/common/launcher.h"
#include "cuda/common/operators.h"
#include "cuda/common/ptx.cuh"
#include "cuda/linear/hadamard.h"

namespace quantmoe {

constexpr int kRotateThreads = 256;

struct RotateParams {
  const void* x;
  void* y;
  int64_t features;  // of all rows
  int each, size;    // features of a thread block; of a block
  float factor;
};

template <typename T>
__global__ void __launch_bounds__(kRotateThreads) rotate_blocks(const __grid_constant__ RotateParams params) {
  extern __shared__ float block[];
  launch_dependents();
  const int64_t first = static_cast<int64_t>(blockIdx.x) * params.each, left = params.features - first;
  const int count = left < params.each ? static_cast<int>(left) : params.each;
  const T* const x = static_cast<const T*>(params.x) + first;
  T* const y = static_cast<T*>(params.y) + first;
  wait_for_previous();
  for (int i = threadIdx.x; i < count; i += kRotateThreads) block[i] = static_cast<float>(x[i]);
  for (int half = 1; half < params.size; half *= 2) {
    __syncthreads();
    for (int pair = threadIdx.x; pair < count / 2; pair += kRotateThreads) {
      const int at = 2 * pair - (pair & (half - 1));  // pair's bits from half's on are one place higher
      const float a = block[at], b = block[at + half];
      block[at] = a + b;
      block[at + half] = a - b;
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < count; i += kRotateThreads) y[i] = Half<T>::from(block[i] * params.factor);
}

int launch_hadamard(const void* of, const qm_cuda_node_plan&, const qm_cuda_call& call, char* err) {
  const qm_hadamard& node = *static_cast<const qm_hadamard*>(of);
  const TensorsOf<qm_hadamard> tensors{call.inputs, call.outputs};
  const qm_tensor& x = call.inputs[Hadamard_x];
  const int64_t features = rows_of(x.shape) * node.features;
  if (features == 0) return QM_OK;
  const int each = rotated_by_block(node);
  const RotateParams params{tensors.x, tensors.y, features,
                            each,      node.size, static_cast<float>(1 / std::sqrt(static_cast<double>(node.size)))};
  Launcher launcher{static_cast<cudaStream_t>(call.stream)};
  launcher.run(x.type == QM_BF16 ? rotate_blocks<__nv_bfloat16> : rotate_blocks<__half>, params,
               dim3(blocks_for(features, each)), kRotateThreads, each * static_cast<int>(sizeof(float)), true);
  return report(launcher.error, err);
}

}  // namespace quantmoe
