// A kernel, launched as all kernels are.
#include <cuda_runtime.h>

#include <cstdio>
#include <vector>

#include "cuda/common/launcher.h"
#include "scale.h"

template <typename T>
__global__ void scale(Scale p) {
  const long long i = blockIdx.x * 256ll + threadIdx.x;
  if (i < p.n) static_cast<T*>(p.y)[i] *= p.by;
}

int main() {
  std::vector<float> y(1000, 3);
  quantmoe::Launcher launcher{reinterpret_cast<cudaStream_t>(16)};
  launcher.run(scale<float>, Scale{y.data(), 1000, 2}, dim3(4), dim3(256), 50000, false);
  std::printf("error %d, y %g\n", launcher.error, y[999]);
}
