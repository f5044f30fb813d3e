// One function an instruction: what the kernels use of PTX, for f16 and bf16.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

namespace quantmoe {

// Copies 16 bytes, or writes 16 zero bytes when !valid (the address is then not read). Through L1: tokens are read
// again.
__device__ inline void CopyAsync16(uint32_t shared, const void* global, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(valid ? 16 : 0)
               : "memory");
}
// Weights are read once: past L1, and first to leave L2.
__device__ inline void CopyAsync16Once(uint32_t shared, const void* global, uint64_t policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "l"(policy)
               : "memory");
}
template <int bytes>
__device__ inline void CopyAsyncSmall(uint32_t shared, const void* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared), "l"(global), "n"(bytes) : "memory");
}
__device__ inline uint64_t EvictFirstPolicy() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ inline void CopyAsyncCommit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int pending>
__device__ inline void CopyAsyncWait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}
__device__ inline uint32_t SharedAddress(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

// Programmatic dependent launch: the next kernel of the stream may start, the previous one's writes are visible.
__device__ inline void LaunchDependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ inline void WaitForPrevious() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

template <typename T>
struct Half;  // the two 16-bit types

template <>
struct Half<__nv_bfloat16> {
  static constexpr uint32_t kInt4Or = 0x43004300;    // 128 + code: its four low mantissa bits are the code
  static constexpr uint32_t kInt4Zero = 0x43084308;  // 136
  static constexpr float kInt4ZeroValue = 136.f;
  static constexpr uint32_t kOne = 0x3f803f80;
  __device__ static uint32_t Sub(uint32_t a, uint32_t b) {
    __nv_bfloat162 r = __hsub2(reinterpret_cast<__nv_bfloat162&>(a), reinterpret_cast<__nv_bfloat162&>(b));
    return reinterpret_cast<uint32_t&>(r);
  }
  __device__ static uint32_t Mul(uint32_t a, uint32_t b) {
    __nv_bfloat162 r = __hmul2(reinterpret_cast<__nv_bfloat162&>(a), reinterpret_cast<__nv_bfloat162&>(b));
    return reinterpret_cast<uint32_t&>(r);
  }
  __device__ static uint32_t Fma(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t r;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
    return r;
  }
  __device__ static uint32_t Pack(float lo, float hi) {
    __nv_bfloat162 r = __floats2bfloat162_rn(lo, hi);
    return reinterpret_cast<uint32_t&>(r);
  }
  // Infinities become the largest numbers.
  __device__ static uint32_t Clamp(uint32_t x) {
    asm("min.NaN.bf16x2 %0, %0, %1;\nmax.NaN.bf16x2 %0, %0, %2;" : "+r"(x) : "r"(0x7f7f7f7f), "r"(0xff7fff7f));
    return x;
  }
  __device__ static __nv_bfloat16 From(float x) { return __float2bfloat16_rn(x); }
  __device__ static float Low(uint32_t x) { return __uint_as_float(x << 16); }
  __device__ static float High(uint32_t x) { return __uint_as_float(x & 0xffff0000u); }
  __device__ static void Mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
};

template <>
struct Half<__half> {
  static constexpr uint32_t kInt4Or = 0x64006400;    // 1024 + code
  static constexpr uint32_t kInt4Zero = 0x64086408;  // 1032
  static constexpr float kInt4ZeroValue = 1032.f;
  static constexpr uint32_t kOne = 0x3c003c00;
  __device__ static uint32_t Sub(uint32_t a, uint32_t b) {
    __half2 r = __hsub2(reinterpret_cast<__half2&>(a), reinterpret_cast<__half2&>(b));
    return reinterpret_cast<uint32_t&>(r);
  }
  __device__ static uint32_t Mul(uint32_t a, uint32_t b) {
    __half2 r = __hmul2(reinterpret_cast<__half2&>(a), reinterpret_cast<__half2&>(b));
    return reinterpret_cast<uint32_t&>(r);
  }
  __device__ static uint32_t Pack(float lo, float hi) {
    __half2 r = __floats2half2_rn(lo, hi);
    return reinterpret_cast<uint32_t&>(r);
  }
  __device__ static uint32_t Clamp(uint32_t x) {
    asm("min.NaN.f16x2 %0, %0, %1;\nmax.NaN.f16x2 %0, %0, %2;" : "+r"(x) : "r"(0x7bff7bff), "r"(0xfbfffbff));
    return x;
  }
  __device__ static __half From(float x) { return __float2half_rn(x); }
  __device__ static float Low(uint32_t x) { return __low2float(reinterpret_cast<__half2&>(x)); }
  __device__ static float High(uint32_t x) { return __high2float(reinterpret_cast<__half2&>(x)); }
  __device__ static void Mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
};

}  // namespace quantmoe
