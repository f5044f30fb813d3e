// One function an instruction: what the kernels use of PTX, for f16 and bf16.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

namespace quantmoe {

// Copies 16 bytes, or writes 16 zero bytes when !valid (the address is then not read). Through L1: tokens are read
// again.
__device__ inline void copy_async16(uint32_t shared, const void* global, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(valid ? 16 : 0)
               : "memory");
}
// Weights are read once: past L1, and first to leave L2.
__device__ inline void copy_async16_once(uint32_t shared, const void* global, uint64_t policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "l"(policy)
               : "memory");
}
// copy_async16 past L1: what is read once by a block.
__device__ inline void copy_async16_past(uint32_t shared, const void* global, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(valid ? 16 : 0)
               : "memory");
}
__device__ inline void copy_async4(uint32_t shared, const void* global, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared), "l"(global), "r"(valid ? 4 : 0)
               : "memory");
}
template <int bytes>
__device__ inline void copy_async_small(uint32_t shared, const void* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared), "l"(global), "n"(bytes) : "memory");
}
__device__ inline uint64_t evict_first_policy() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ inline uint64_t evict_normal_policy() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
// Asks L2 for bytes, a multiple of 16, from an address that is one.
__device__ inline void prefetch(const void* global, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(global), "r"(bytes) : "memory");
#endif
}
__device__ inline void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int pending>
__device__ inline void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}
__device__ inline void copy_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }
__device__ inline uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }
// Reads shared memory. It keeps no pointer to it.
__device__ inline uint32_t load4(uint32_t at) {
  uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at) : "memory");
  return v;
}
__device__ inline void store4(uint32_t at, uint32_t v) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(v) : "memory");
}
__device__ inline uint2 load8(uint32_t at) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(at) : "memory");
  return v;
}
__device__ inline uint4 load16(uint32_t at) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(at)
               : "memory");
  return v;
}
__device__ inline void store8(uint32_t at, const uint2& v) {
  asm volatile("st.shared.v2.u32 [%0], {%1,%2};" ::"r"(at), "r"(v.x), "r"(v.y) : "memory");
}
__device__ inline void store16(uint32_t at, const uint4& v) {
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
__device__ inline void or_shared(uint32_t at, uint32_t bits) {
  asm volatile("red.shared.or.b32 [%0], %1;" ::"r"(at), "r"(bits) : "memory");
}
// Four 8 x 8 matrices of 16-bit values, whose rows' addresses lanes 0 to 7, 8 to 15, .. have: a lane gets the values
// 2t and 2t + 1 of row g, or, transposed, of column g.
__device__ inline void load_matrices(uint32_t (&m)[4], uint32_t at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(at)
               : "memory");
}
__device__ inline void load_transposed(uint32_t (&m)[4], uint32_t at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(at)
               : "memory");
}

// 2^x and 1 / x, within 2 ulp; what is below 2^-126 is zero.
__device__ inline float fast_exp2(float x) {
  asm("ex2.approx.ftz.f32 %0, %0;" : "+f"(x));
  return x;
}
__device__ inline float reciprocal(float x) {
  asm("rcp.approx.ftz.f32 %0, %0;" : "+f"(x));
  return x;
}
// 1 / (1 + e^-z); 0 for z below -87.3, where it is less than 2^-126.
__device__ inline float sigmoid(float z) { return reciprocal(1.f + fast_exp2(-1.44269504f * z)); }

// Programmatic dependent launch: the next kernel of the stream may start, the previous one's writes are visible.
__device__ inline void launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ inline void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ inline float warp_sum(float x) {
  for (int d = 16; d > 0; d /= 2) x += __shfl_xor_sync(~0u, x, d);
  return x;
}

// Of the blocks of a cluster.
__device__ inline void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
__device__ inline void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
// All threads of the cluster that have not ended, before any goes on.
__device__ inline void cluster_barrier() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
// Where block `rank` has this address of its shared memory; and a store there.
__device__ inline uint32_t cluster_address(uint32_t shared, int rank) {
  uint32_t at = shared;
#if __CUDA_ARCH__ >= 900
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(shared), "r"(rank));
#endif
  return at;
}
__device__ inline void cluster_store(const float* shared, int rank, float value) {
#if __CUDA_ARCH__ >= 900
  const uint32_t at = cluster_address(shared_address(shared), rank);
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(at), "f"(value) : "memory");
#endif
}
// 16 bytes of what block `rank` of the cluster has at this address of its shared memory.
__device__ inline float4 load_remote16(uint32_t shared, int rank) {
  float4 v{};
#if __CUDA_ARCH__ >= 900
  asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(cluster_address(shared, rank))
               : "memory");
#endif
  return v;
}

#if __CUDA_ARCH__ == 900
// mma_nvfp4 from shuffles. No plan for this architecture takes it: it is for tests of the kernels around it.
static __device__ __noinline__ void slow_mma_nvfp4(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                                   uint32_t b0, uint32_t b1, uint32_t scale_a, uint32_t scale_b) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  auto twice = [](uint32_t code) {
    const int m = code & 7, v = m < 4 ? m : (2 | (m & 1)) << (m / 2 - 1);
    return code & 8 ? -v : v;
  };
  auto e4m3 = [](uint32_t scales, int i) {
    const uint32_t code = scales >> 8 * i & 0xff;
    return code == 0x7f ? __int_as_float(0x7fffffff) : __uint_as_float(code << 20) * 0x1p120f;
  };
#pragma unroll 1
  for (int i = 0; i < 8; ++i) {  // lane of a quad, half of the columns
    const int from = i / 2, half = i % 2;
#pragma unroll 1
    for (int out = 0; out < 4; ++out) {
      const int row = out / 2, column = 4 * (2 * t + out % 2);
      const uint32_t low = __shfl_sync(~0u, row ? a1 : a0, 4 * g + from),
                     high = __shfl_sync(~0u, row ? a3 : a2, 4 * g + from);
      const uint32_t q = half ? high : low, b = __shfl_sync(~0u, half ? b1 : b0, column + from);
      const float scale = e4m3(__shfl_sync(~0u, scale_a, 4 * g + row), 2 * half + from / 2) *
                          e4m3(__shfl_sync(~0u, scale_b, column), 2 * half + from / 2);
      int sum = 0;
#pragma unroll 1
      for (int n = 0; n < 32; n += 4) sum += twice(q >> n & 15) * twice(b >> n & 15);
      c[out] += 0.25f * static_cast<float>(sum) * scale;
    }
  }
}
#endif
// c += a * b, 16 x 64 times 64 x 8 e2m1 codes with e4m3 scales of 16. scale_a has the four scales of row g in lanes of
// even t, and of row g + 8 in lanes of odd t. scale_b has column g's. The fragments (PTX ISA, mma.m16n8k64): a[0] is
// row g, columns 8t to 8t + 7, low nibble first; a[1] is row g + 8. a[2] and a[3] are the columns 32 further. b0 and b1
// are column g, with these rows.
__device__ inline void mma_nvfp4(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, uint32_t scale_a,
                                 uint32_t scale_b) {
#if defined(__CUDA_ARCH_FEAT_SM120_ALL) || defined(__CUDA_ARCH_FEAT_SM121_ALL)
  constexpr uint16_t zero = 0;  // the bytes and threads that scales come from
  asm("mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3}, {%10}, {%11,%11}, {%12}, {%11,%11};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(scale_a), "h"(zero), "r"(scale_b));
#elif __CUDA_ARCH__ == 900
  slow_mma_nvfp4(c, a[0], a[1], a[2], a[3], b0, b1, scale_a, scale_b);
#endif
}

// c += a * b, 16 x 32 times 32 x 8 e4m3 codes. The fragments (PTX ISA, mma.m16n8k32): a[0] is row g, columns 4t to 4t +
// 3; a[1] is row g + 8. a[2] and a[3] are the columns 16 further. b0 and b1 are column g, with these rows. sm_90 and
// sm_100 make two products of f16 of it, which holds the codes exactly.
__device__ inline void mma_e4m3(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 890
  asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
  __trap();  // code for 80 on sm_89, which has the plans: CMakeLists.txt
#endif
}

template <typename T>
struct Half;  // the two 16-bit types

template <>
struct Half<__nv_bfloat16> {
  static constexpr uint32_t kInt4Or = 0x42004200;    // 32 + code / 4: its four low mantissa bits are the code
  static constexpr uint32_t kInt4Zero = 0x42084208;  // 34
  static constexpr float kInt4ZeroValue = 34.f;
  static constexpr uint32_t kOne = 0x3f803f80;
  __device__ static uint32_t sub(uint32_t a, uint32_t b) {
    __nv_bfloat162 r = __hsub2(reinterpret_cast<__nv_bfloat162&>(a), reinterpret_cast<__nv_bfloat162&>(b));
    return reinterpret_cast<uint32_t&>(r);
  }
  __device__ static uint32_t mul(uint32_t a, uint32_t b) {
    __nv_bfloat162 r = __hmul2(reinterpret_cast<__nv_bfloat162&>(a), reinterpret_cast<__nv_bfloat162&>(b));
    return reinterpret_cast<uint32_t&>(r);
  }
  __device__ static uint32_t fma(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t r;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
    return r;
  }
  __device__ static uint32_t pack(float lo, float hi) {
    __nv_bfloat162 r = __floats2bfloat162_rn(lo, hi);
    return reinterpret_cast<uint32_t&>(r);
  }
  // Infinities become the largest numbers.
  __device__ static uint32_t clamp(uint32_t x) {
    asm("min.NaN.bf16x2 %0, %0, %1;\nmax.NaN.bf16x2 %0, %0, %2;" : "+r"(x) : "r"(0x7f7f7f7f), "r"(0xff7fff7f));
    return x;
  }
  __device__ static __nv_bfloat16 from(float x) { return __float2bfloat16_rn(x); }
  __device__ static float low(uint32_t x) { return __uint_as_float(x << 16); }
  __device__ static float high(uint32_t x) { return __uint_as_float(x & 0xffff0000u); }
  __device__ static void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
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
  __device__ static uint32_t sub(uint32_t a, uint32_t b) {
    __half2 r = __hsub2(reinterpret_cast<__half2&>(a), reinterpret_cast<__half2&>(b));
    return reinterpret_cast<uint32_t&>(r);
  }
  __device__ static uint32_t mul(uint32_t a, uint32_t b) {
    __half2 r = __hmul2(reinterpret_cast<__half2&>(a), reinterpret_cast<__half2&>(b));
    return reinterpret_cast<uint32_t&>(r);
  }
  __device__ static uint32_t fma(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t r;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
    return r;
  }
  __device__ static uint32_t pack(float lo, float hi) {
    __half2 r = __floats2half2_rn(lo, hi);
    return reinterpret_cast<uint32_t&>(r);
  }
  __device__ static uint32_t clamp(uint32_t x) {
    asm("min.NaN.f16x2 %0, %0, %1;\nmax.NaN.f16x2 %0, %0, %2;" : "+r"(x) : "r"(0x7bff7bff), "r"(0xfbfffbff));
    return x;
  }
  __device__ static __half from(float x) { return __float2half_rn(x); }
  __device__ static float low(uint32_t x) { return __low2float(reinterpret_cast<__half2&>(x)); }
  __device__ static float high(uint32_t x) { return __high2float(reinterpret_cast<__half2&>(x)); }
  __device__ static void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
};

}  // namespace quantmoe
