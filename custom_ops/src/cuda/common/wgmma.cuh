// wgmma, mbarriers and proxies of sm_90a, one function an instruction.
#pragma once
#include <cuda.h>

#include "cuda/common/ptx.cuh"

namespace quantmoe {

__device__ inline void barrier_init(uint32_t barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
__device__ inline void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// When all that this thread has asked for with cp.async is there.
__device__ inline void barrier_arrive_copied(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
__device__ inline void barrier_wait(uint32_t barrier, int parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n}" ::
          "r"(barrier),
      "r"(parity)
      : "memory");
}
// Whether it is complete; does not wait.
__device__ inline bool barrier_test(uint32_t barrier, int parity) {
  uint32_t done;
  asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
               : "=r"(done)
               : "r"(barrier), "r"(parity)
               : "memory");
  return done;
}
// True in one lane of the warp, all of whose lanes are here.
__device__ inline bool one_lane() {
  uint32_t one;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(one));
  return one;
}
// More bytes that bulk copies are to bring before the barrier's phase is complete; the same and an arrival; and copies
// of them.
__device__ inline void barrier_expect(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ inline void barrier_arrive_expect(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ inline void bulk_copy(uint32_t shared, const void* global, int bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
               "l"(global), "r"(bytes), "r"(barrier)
               : "memory");
}
// First to leave L2.
__device__ inline void bulk_copy_once(uint32_t shared, const void* global, int bytes, uint32_t barrier,
                                      uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
          "r"(shared),
      "l"(global), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}
// A box of a tensor, coordinates of the innermost dimension first.
__device__ inline void tensor_copy(uint32_t shared, const CUtensorMap& map, int c0, int c1, uint32_t barrier,
                                   uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, "
      "%3}], [%4], %5;" ::"r"(shared),
      "l"(&map), "r"(c0), "r"(c1), "r"(barrier), "l"(policy)
      : "memory");
}
__device__ inline void tensor_copy(uint32_t shared, const CUtensorMap& map, int c0, int c1, int c2, uint32_t barrier,
                                   uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, "
      "%3, %4}], [%5], %6;" ::"r"(shared),
      "l"(&map), "r"(c0), "r"(c1), "r"(c2), "r"(barrier), "l"(policy)
      : "memory");
}
__device__ inline void prefetch_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}
// Two or four 8 x 8 matrices of 16-bit values, written column by column. A lane has two neighbours of row lane / 4 in a
// word of each matrix. Lane l has the address of column l % 8 of matrix l / 8.
__device__ inline void store_transposed(uint32_t at, const uint32_t (&m)[2]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1,%2};" ::"r"(at), "r"(m[0]), "r"(m[1])
               : "memory");
}
__device__ inline void store_transposed(uint32_t at, const uint32_t (&m)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(at), "r"(m[0]), "r"(m[1]),
               "r"(m[2]), "r"(m[3])
               : "memory");
}
// Makes ordinary stores and cp.async to shared memory visible to wgmma. They are this thread's, or came before a
// barrier that it has waited for.
__device__ inline void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ inline void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Counts the thread's warp, and does not wait.
__device__ inline void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// Registers of each of the warpgroup's threads from here on.
template <bool more, int registers>
__device__ inline void set_registers() {
  if constexpr (more) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
  }
}

// A block's units of work: blocks take turns, every second time from the last to the first. Units come by size
// (moe_route), so that the sums are about equal.
struct Turns {
  int unit = blockIdx.x, step = 2 * (gridDim.x - blockIdx.x) - 1;
  __device__ void next() { unit += step, step = 2 * gridDim.x - step; }
};

__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int pending>
__device__ inline void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}
// The compiler uses registers of products no earlier than here: it does not know when products are done with them.
template <int N, int M>
__device__ inline void keep_registers(float (&values)[N][M]) {
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int m = 0; m < M; ++m) asm volatile("" : "+f"(values[n][m])::"memory");
}
template <int N, int M>
__device__ inline void keep_registers(uint32_t (&values)[N][M]) {
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int m = 0; m < M; ++m) asm volatile("" : "+r"(values[n][m])::"memory");
}
// ptxas moves a wait up, past what does not depend on it. Not past this, which has the value first; no negative one.
__device__ inline void wait_after(float value) {
  asm volatile("{\n.reg .pred p;\nsetp.lt.f32 p, %0, 0f00000000;\n@p trap;\n}" ::"f"(value) : "memory");
}

// K-major B with 128-byte rows, 128-byte swizzle; 8-row groups 1024 bytes apart. A k16 step is 32 bytes, 2 of the low
// word, further.
__device__ inline uint32_t descriptor_low(uint32_t shared) { return shared >> 4 | 1 << 16; }
__device__ inline uint64_t wgmma_descriptor(uint32_t low) {
  uint64_t descriptor;
  asm("mov.b64 %0, {%1, %2};" : "=l"(descriptor) : "r"(low), "n"(64 | 1 << 30));
  return descriptor;
}

// Where 16 bytes of one of `rows` rows of D values lie as wgmma reads them: tiles of 64 values, 128-byte swizzle.
template <int rows>
__device__ inline uint32_t swizzled_tile(int row, int chunk) {
  return static_cast<uint32_t>((chunk / 8 * rows + row) * 128 + ((chunk ^ row) & 7) * 16);
}

// d[64 x N] = or, if add, += a[64 x 16] (registers) * b[16 x N] (shared memory).
template <typename T, int N>
__device__ void wgmma(float* d, const uint32_t (&a)[4], uint64_t b, bool add);

// As above for b[16 x N] with contiguous rows (K): rows of 64 values, 128-byte swizzle, 8-row groups 1024 bytes apart.
// The next 64 values of N are `step` bytes further. A k16 step is 2048 bytes.
__device__ inline uint64_t rows_descriptor(uint32_t shared, uint32_t step) {
  return wgmma_descriptor(shared >> 4 | step >> 4 << 16);
}
template <typename T, int N>
__device__ void wgmma_rows(float* d, const uint32_t (&a)[4], uint64_t b, bool add);

// d[64 x N] = or, if add, += a[64 x 16] * b[16 x N], both K-major in shared memory.
template <typename T, int N>
__device__ void wgmma_shared(float* d, uint64_t a, uint64_t b, bool add);

#define QM_F4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define QM_F8(i) QM_F4(i), QM_F4(i + 4)
#define QM_F16(i) QM_F8(i), QM_F8(i + 8)
#define QM_F32(i) QM_F16(i), QM_F16(i + 16)
#define QM_WGMMA1(name, rows, N, T, type, registers, a, add_, outputs)                                                 \
  template <>                                                                                                          \
  __device__ inline void name<T, N>(float* d, const uint32_t(&a_)[4], uint64_t b, bool add) {                          \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " add_ ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k16.f32." type \
                 "." type " {" registers "}, " a ", p, 1, 1, " #rows ";\n}"                                            \
                 : outputs                                                                                             \
                 : "r"(a_[0]), "r"(a_[1]), "r"(a_[2]), "r"(a_[3]), "l"(b), "r"(static_cast<int>(add)));                \
  }
#define QM_WGMMA2(name, rows, N, registers, a, add, ...)                                   \
  QM_WGMMA1(name, rows, N, __nv_bfloat16, "bf16", registers, a, add, QM_PASS(__VA_ARGS__)) \
  QM_WGMMA1(name, rows, N, __half, "f16", registers, a, add, QM_PASS(__VA_ARGS__))
#define QM_WGMMA(...) QM_WGMMA2(wgmma, 0, __VA_ARGS__)
#define QM_WGMMA_ROWS(...) QM_WGMMA2(wgmma_rows, 1, __VA_ARGS__)
#define QM_WGMMA_SHARED(N, T, type, registers, a, b_, add_, ...)                                                       \
  template <>                                                                                                          \
  __device__ inline void wgmma_shared<T, N>(float* d, uint64_t a_, uint64_t b, bool add) {                             \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " add_ ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k16.f32." type \
                 "." type " {" registers "}, " a ", " b_ ", p, 1, 1, 0, 0;\n}"                                         \
                 : __VA_ARGS__                                                                                         \
                 : "l"(a_), "l"(b), "r"(static_cast<int>(add)));                                                       \
  }
#define QM_PASS(...) __VA_ARGS__
#define QM_R0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define QM_R1 "%8, %9, %10, %11, %12, %13, %14, %15"
#define QM_R2 "%16, %17, %18, %19, %20, %21, %22, %23"
#define QM_R3 "%24, %25, %26, %27, %28, %29, %30, %31"
#define QM_R4 "%32, %33, %34, %35, %36, %37, %38, %39"
#define QM_R5 "%40, %41, %42, %43, %44, %45, %46, %47"
#define QM_R6 "%48, %49, %50, %51, %52, %53, %54, %55"
#define QM_R7 "%56, %57, %58, %59, %60, %61, %62, %63"
#define QM_R8 "%64, %65, %66, %67, %68, %69, %70, %71"
#define QM_R9 "%72, %73, %74, %75, %76, %77, %78, %79"
#define QM_R10 "%80, %81, %82, %83, %84, %85, %86, %87"
#define QM_R11 "%88, %89, %90, %91, %92, %93, %94, %95"
#define QM_R12 "%96, %97, %98, %99, %100, %101, %102, %103"
#define QM_R13 "%104, %105, %106, %107, %108, %109, %110, %111"
#define QM_R14 "%112, %113, %114, %115, %116, %117, %118, %119"
#define QM_R15 "%120, %121, %122, %123, %124, %125, %126, %127"
QM_WGMMA(8, "%0, %1, %2, %3", "{%4, %5, %6, %7}, %8", "%9", QM_F4(0))
QM_WGMMA(16, QM_R0, "{%8, %9, %10, %11}, %12", "%13", QM_F8(0))
QM_WGMMA(24, QM_R0 ", %8, %9, %10, %11", "{%12, %13, %14, %15}, %16", "%17", QM_F8(0), QM_F4(8))
QM_WGMMA(32, QM_R0 ", " QM_R1, "{%16, %17, %18, %19}, %20", "%21", QM_F16(0))
QM_WGMMA(48, QM_R0 ", " QM_R1 ", " QM_R2, "{%24, %25, %26, %27}, %28", "%29", QM_F16(0), QM_F8(16))
QM_WGMMA(64, QM_R0 ", " QM_R1 ", " QM_R2 ", " QM_R3, "{%32, %33, %34, %35}, %36", "%37", QM_F32(0))
QM_WGMMA(80, QM_R0 ", " QM_R1 ", " QM_R2 ", " QM_R3 ", " QM_R4, "{%40, %41, %42, %43}, %44", "%45", QM_F32(0),
         QM_F8(32))
QM_WGMMA(96, QM_R0 ", " QM_R1 ", " QM_R2 ", " QM_R3 ", " QM_R4 ", " QM_R5, "{%48, %49, %50, %51}, %52", "%53",
         QM_F32(0), QM_F16(32))
QM_WGMMA(112, QM_R0 ", " QM_R1 ", " QM_R2 ", " QM_R3 ", " QM_R4 ", " QM_R5 ", " QM_R6, "{%56, %57, %58, %59}, %60",
         "%61", QM_F32(0), QM_F16(32), QM_F8(48))
QM_WGMMA(128, QM_R0 ", " QM_R1 ", " QM_R2 ", " QM_R3 ", " QM_R4 ", " QM_R5 ", " QM_R6 ", " QM_R7,
         "{%64, %65, %66, %67}, %68", "%69", QM_F32(0), QM_F32(32))
QM_WGMMA(144, QM_R0 ", " QM_R1 ", " QM_R2 ", " QM_R3 ", " QM_R4 ", " QM_R5 ", " QM_R6 ", " QM_R7 ", " QM_R8,
         "{%72, %73, %74, %75}, %76", "%77", QM_F32(0), QM_F32(32), QM_F8(64))
QM_WGMMA(160, QM_R0 ", " QM_R1 ", " QM_R2 ", " QM_R3 ", " QM_R4 ", " QM_R5 ", " QM_R6 ", " QM_R7 ", " QM_R8 ", " QM_R9,
         "{%80, %81, %82, %83}, %84", "%85", QM_F32(0), QM_F32(32), QM_F16(64))
QM_WGMMA(176,
         QM_R0 ", " QM_R1 ", " QM_R2 ", " QM_R3 ", " QM_R4 ", " QM_R5 ", " QM_R6 ", " QM_R7 ", " QM_R8 ", " QM_R9
               ", " QM_R10,
         "{%88, %89, %90, %91}, %92", "%93", QM_F32(0), QM_F32(32), QM_F16(64), QM_F8(80))
QM_WGMMA(192,
         QM_R0 ", " QM_R1 ", " QM_R2 ", " QM_R3 ", " QM_R4 ", " QM_R5 ", " QM_R6 ", " QM_R7 ", " QM_R8 ", " QM_R9
               ", " QM_R10 ", " QM_R11,
         "{%96, %97, %98, %99}, %100", "%101", QM_F32(0), QM_F32(32), QM_F32(64))
QM_WGMMA(208,
         QM_R0 ", " QM_R1 ", " QM_R2 ", " QM_R3 ", " QM_R4 ", " QM_R5 ", " QM_R6 ", " QM_R7 ", " QM_R8 ", " QM_R9
               ", " QM_R10 ", " QM_R11 ", " QM_R12,
         "{%104, %105, %106, %107}, %108", "%109", QM_F32(0), QM_F32(32), QM_F32(64), QM_F8(96))
QM_WGMMA(224,
         QM_R0 ", " QM_R1 ", " QM_R2 ", " QM_R3 ", " QM_R4 ", " QM_R5 ", " QM_R6 ", " QM_R7 ", " QM_R8 ", " QM_R9
               ", " QM_R10 ", " QM_R11 ", " QM_R12 ", " QM_R13,
         "{%112, %113, %114, %115}, %116", "%117", QM_F32(0), QM_F32(32), QM_F32(64), QM_F16(96))
QM_WGMMA(240,
         QM_R0 ", " QM_R1 ", " QM_R2 ", " QM_R3 ", " QM_R4 ", " QM_R5 ", " QM_R6 ", " QM_R7 ", " QM_R8 ", " QM_R9
               ", " QM_R10 ", " QM_R11 ", " QM_R12 ", " QM_R13 ", " QM_R14,
         "{%120, %121, %122, %123}, %124", "%125", QM_F32(0), QM_F32(32), QM_F32(64), QM_F16(96), QM_F8(112))
QM_WGMMA(256,
         QM_R0 ", " QM_R1 ", " QM_R2 ", " QM_R3 ", " QM_R4 ", " QM_R5 ", " QM_R6 ", " QM_R7 ", " QM_R8 ", " QM_R9
               ", " QM_R10 ", " QM_R11 ", " QM_R12 ", " QM_R13 ", " QM_R14 ", " QM_R15,
         "{%128, %129, %130, %131}, %132", "%133", QM_F32(0), QM_F32(32), QM_F32(64), QM_F32(96))
QM_WGMMA_ROWS(64, QM_R0 ", " QM_R1 ", " QM_R2 ", " QM_R3, "{%32, %33, %34, %35}, %36", "%37", QM_F32(0))
QM_WGMMA_ROWS(128, QM_R0 ", " QM_R1 ", " QM_R2 ", " QM_R3 ", " QM_R4 ", " QM_R5 ", " QM_R6 ", " QM_R7,
              "{%64, %65, %66, %67}, %68", "%69", QM_F32(0), QM_F32(32))
QM_WGMMA_SHARED(32, __nv_bfloat16, "bf16", QM_R0 ", " QM_R1, "%16", "%17", "%18", QM_F16(0))
QM_WGMMA_SHARED(32, __half, "f16", QM_R0 ", " QM_R1, "%16", "%17", "%18", QM_F16(0))
QM_WGMMA_SHARED(64, __nv_bfloat16, "bf16", QM_R0 ", " QM_R1 ", " QM_R2 ", " QM_R3, "%32", "%33", "%34", QM_F32(0))
QM_WGMMA_SHARED(64, __half, "f16", QM_R0 ", " QM_R1 ", " QM_R2 ", " QM_R3, "%32", "%33", "%34", QM_F32(0))
QM_WGMMA_SHARED(128, __nv_bfloat16, "bf16",
                QM_R0 ", " QM_R1 ", " QM_R2 ", " QM_R3 ", " QM_R4 ", " QM_R5 ", " QM_R6 ", " QM_R7, "%64", "%65", "%66",
                QM_F32(0), QM_F32(32))
QM_WGMMA_SHARED(128, __half, "f16", QM_R0 ", " QM_R1 ", " QM_R2 ", " QM_R3 ", " QM_R4 ", " QM_R5 ", " QM_R6 ", " QM_R7,
                "%64", "%65", "%66", QM_F32(0), QM_F32(32))
#undef QM_WGMMA_SHARED
#undef QM_WGMMA
#undef QM_WGMMA_ROWS
#undef QM_WGMMA1
#undef QM_WGMMA2
#undef QM_PASS
#undef QM_F4
#undef QM_F8
#undef QM_F16
#undef QM_F32
#undef QM_R0
#undef QM_R1
#undef QM_R2
#undef QM_R3
#undef QM_R4
#undef QM_R5
#undef QM_R6
#undef QM_R7
#undef QM_R8
#undef QM_R9
#undef QM_R10
#undef QM_R11
#undef QM_R12
#undef QM_R13
#undef QM_R14
#undef QM_R15

}  // namespace quantmoe
