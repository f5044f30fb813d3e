// Kernels enqueued one after the other.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdio>

#include "core/numbers.h"
#include "quantmoe/quant_moe.h"

namespace quantmoe {

// Of a grid: how many blocks of `each` there are for all.
constexpr unsigned blocks_for(int64_t all, int64_t each) { return static_cast<unsigned>(ceil_div(all, each)); }

struct Launcher {
  cudaStream_t stream;
  cudaError_t error = cudaSuccess;

  // dependent: it may start while the kernel before it in the stream still runs, also another call's. The first kernel
  // of a call of several lets the next one start when it has itself waited. So what came before the call is there for
  // all kernels except the first, which reads only weights before it waits. A call of one kernel lets the next one,
  // another call's first, start at once. All its blocks wait before they end, so it ends after what came before.
  template <typename Params>
  void run(void (*kernel)(Params), const Params& params, dim3 grid, dim3 threads, int shared_bytes, bool dependent,
           int cluster = 1) {
    if (error != cudaSuccess) return;
    if (shared_bytes > 48 * 1024) {
      error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
      if (error != cudaSuccess) return;
    }
    if (cluster > 8) {  // more than every GPU with clusters has
      error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
      if (error != cudaSuccess) return;
    }
    cudaLaunchAttribute attributes[2];
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = threads;
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = attributes;
    if (dependent) {
      attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
      attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
    }
    if (cluster > 1) {
      attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
      attributes[config.numAttrs].val.clusterDim.x = cluster;
      attributes[config.numAttrs].val.clusterDim.y = attributes[config.numAttrs].val.clusterDim.z = 1;
      ++config.numAttrs;
    }
    error = cudaLaunchKernelEx(&config, kernel, params);
  }
};

inline int report(cudaError_t e, char* err) {
  if (e == cudaSuccess) return QM_OK;
  std::snprintf(err, QM_ERROR_SIZE, "CUDA: %s", cudaGetErrorString(e));
  return QM_INVALID;
}

}  // namespace quantmoe
