#include "ranks/trap.h"

namespace quantmoe {
namespace {

__global__ void trap(bool armed) {
  if (armed) __trap();
}

}  // namespace

cudaError_t launch_trap(bool armed, cudaStream_t stream) {
  trap<<<1, 1, 0, stream>>>(armed);
  return cudaGetLastError();
}

}  // namespace quantmoe
