// What clang needs of CUDA to compile the host code of a .cu file for Windows. It parses device code and compiles none
// of it, so names of the device are declared alone. CUDA's own header takes only MSVC on Windows.
#pragma once
#include <cuda_runtime_api.h>
#include <vector_types.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <string>
#include <type_traits>

#define __host__ __attribute__((host))
#define __device__ __attribute__((device))
#define __global__ __attribute__((global))
#define __shared__ __attribute__((shared))
#define __constant__ __attribute__((constant))
#define __launch_bounds__(...) __attribute__((launch_bounds(__VA_ARGS__)))

#pragma clang force_cuda_host_device begin
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#pragma clang force_cuda_host_device end

extern const __device__ uint3 threadIdx, blockIdx;
extern const __device__ dim3 blockDim, gridDim;
__device__ float expf(float), exp2f(float), logf(float), log2f(float), log1pf(float), tanhf(float), erff(float);
__device__ float fabsf(float), sqrtf(float), rsqrtf(float), rintf(float), floorf(float), ldexpf(float, int);
__device__ float fmaf(float, float, float), fmaxf(float, float), fminf(float, float), fmax(float, float);
__device__ float fmin(float, float), __expf(float), __frcp_rn(float), __fdiv_rn(float, float), __fsqrt_rn(float);
__device__ float __fmul_rn(float, float), __fadd_rn(float, float), __fsub_rn(float, float);
__device__ float __fmaf_rn(float, float, float), __fdividef(float, float), __uint_as_float(unsigned);
__device__ float __int_as_float(int);
__device__ unsigned __float_as_uint(float), __byte_perm(unsigned, unsigned, unsigned), __activemask();
__device__ unsigned __ballot_sync(unsigned, int), __funnelshift_r(unsigned, unsigned, unsigned);
__device__ unsigned __vmaxu2(unsigned, unsigned), __vminu2(unsigned, unsigned), __vadd2(unsigned, unsigned);
__device__ unsigned __vsub2(unsigned, unsigned), __vadd4(unsigned, unsigned), __vsub4(unsigned, unsigned);
__device__ unsigned long long __double2ull_rn(double);
__device__ int __float_as_int(float), __float2int_rn(float), __popc(unsigned), __popcll(unsigned long long);
__device__ int __ffs(int), __ffsll(long long), __clz(int), __any_sync(unsigned, int), __all_sync(unsigned, int);
__device__ int __syncthreads_or(int), __syncthreads_and(int), __syncthreads_count(int);
__device__ bool isfinite(float), isnan(float), isinf(float);
__device__ void __syncthreads(), __syncwarp(unsigned = ~0u), __threadfence(), __threadfence_system();
__device__ void __threadfence_block(), __trap(), __nanosleep(unsigned), *__cvta_shared_to_generic(size_t);
__device__ size_t __cvta_generic_to_shared(const void*), __cvta_generic_to_global(const void*);
#define QM_DEVICE(T, name, ...) \
  template <class T>            \
  __device__ T name(__VA_ARGS__);
QM_DEVICE(T, min, T, T)
QM_DEVICE(T, max, T, T)
QM_DEVICE(T, __shfl_sync, unsigned, T, int, int = 32)
QM_DEVICE(T, __shfl_xor_sync, unsigned, T, int, int = 32)
QM_DEVICE(T, __shfl_up_sync, unsigned, T, unsigned, int = 32)
QM_DEVICE(T, __shfl_down_sync, unsigned, T, unsigned, int = 32)
QM_DEVICE(T, __reduce_add_sync, unsigned, T)
QM_DEVICE(T, __reduce_max_sync, unsigned, T)
QM_DEVICE(T, __reduce_min_sync, unsigned, T)
QM_DEVICE(T, __reduce_or_sync, unsigned, T)
QM_DEVICE(T, __match_any_sync, unsigned, T)
QM_DEVICE(T, __ldg, const T*)
QM_DEVICE(T, __ldcg, const T*)
QM_DEVICE(T, __ldcs, const T*)
QM_DEVICE(T, __ldcv, const T*)
QM_DEVICE(T, atomicAdd, T*, std::type_identity_t<T>)
QM_DEVICE(T, atomicMax, T*, std::type_identity_t<T>)
QM_DEVICE(T, atomicMin, T*, std::type_identity_t<T>)
QM_DEVICE(T, atomicExch, T*, std::type_identity_t<T>)
QM_DEVICE(T, atomicOr, T*, std::type_identity_t<T>)
QM_DEVICE(T, atomicCAS, T*, std::type_identity_t<T>, std::type_identity_t<T>)

// Of CUDA's header: launches and attributes of kernels by their types.
template <class... P, class... A>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(P...), A&&... arguments) {
  const auto launch = [&](P... given) {
    void* places[] = {&given...};
    return cudaLaunchKernelExC(config, reinterpret_cast<const void*>(kernel), places);
  };
  return launch(static_cast<A&&>(arguments)...);
}
template <class T>
cudaError_t cudaFuncSetAttribute(T* kernel, cudaFuncAttribute attribute, int value) {
  return cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), attribute, value);
}
extern "C" unsigned __cudaPushCallConfiguration(dim3, dim3, size_t, cudaStream_t);  // of <<<>>>
#define __CUDACC__                                                                  // what this project's headers ask
