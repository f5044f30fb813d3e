// One grouped GEMM of the layer on wgmma (sm_90a), e4m3 weights times e4m3 activations, for many tokens.
//
// A block computes 256 rows (16 panels) x up to 128 tokens of one expert. Layout marlin's 8-bit units are the register
// A operand of wgmma.m64nNk32 as they are stored, so nothing is dequantized: a producer warpgroup copies stages of 128
// columns (codes, tokens, scales of both), two consumer warpgroups hold 128 rows each.
//
// The tensor cores keep about 14 bits of a sum of e4m3 products, and scales change every 128 columns. So products of
// 128 columns are summed there and then in f32, times the scales: while one warpgroup does that, the other has the
// tensor cores. Half of the tokens are in work at a time, with both 64 rows of a warpgroup: token scales are then read
// for two products (a lane has two rows and N / 4 tokens of each product, so that it is tokens whose scales are many).
//
// quantize.cuh stores tokens as a stage has them: groups of 128 columns, in one all rows in the order of experts.
#pragma once
#include "cuda/activation.cuh"
#include "cuda/instances.h"
#include "cuda/wgmma.cuh"

namespace quantmoe {

constexpr int kFp8Panels = 16, kFp8Tokens = 128, kFp8Stages = 4, kFp8Group = 128, kFp8PanelBytes = 16 * kFp8Group;
// A stage in shared memory, at multiples of 1024: tokens, codes, scales of rows and of tokens, two barriers.
constexpr int kFp8CodesAt = kFp8Tokens * kFp8Group, kFp8RowScalesAt = kFp8CodesAt + kFp8Panels * kFp8PanelBytes;
constexpr int kFp8TokenScalesAt = kFp8RowScalesAt + 16 * kFp8Panels * 4;
constexpr int kFp8FullAt = kFp8TokenScalesAt + kFp8Tokens * 4, kFp8EmptyAt = kFp8FullAt + 8;
constexpr int kFp8StageBytes = (kFp8EmptyAt + 8 + 1023) / 1024 * 1024;
// Columns [k_begin, k_end) * 128 of kFp8Panels panels of an expert for the tokens of a tile.
struct Fp8Work {
  int expert, panel, first, count, k_begin, k_end;
};
// Then the units of work: consumers may store one while the producer fills all stages for the next. Pairs of the tokens
// and their scales, for each warpgroup. Staging of results.
constexpr int kFp8Works = kFp8Stages + 1, kFp8WorksAt = kFp8Stages * kFp8StageBytes;
struct Fp8Tokens {
  SortedPair pairs[kFp8Tokens];
  float scales[kFp8Tokens];
};
constexpr int kFp8PairsAt = kFp8WorksAt + 128;
static_assert(kFp8Works * sizeof(Fp8Work) <= 128);
constexpr int kFp8ResultsAt = kFp8PairsAt + 2 * static_cast<int>(sizeof(Fp8Tokens));
// Sums of 16 tokens of a warpgroup at a time; four floats of padding put a warp's stores on all banks.
constexpr int kFp8StoredTokens = 16, kFp8ResultRow = 128 + 4;
constexpr int kFp8ResultBytes = kFp8StoredTokens * kFp8ResultRow * 4;
static_assert(1024 + kFp8ResultsAt + 2 * kFp8ResultBytes == kFp8SharedBytes);  // 1024: to align the first stage

__device__ inline void BulkCopy(uint32_t shared, const void* global, int bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
               "l"(global), "r"(bytes), "r"(barrier)
               : "memory");
}
__device__ inline void NamedBarrierArrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ inline void BarrierExpect(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// d[64 x N] (+)= a[64 x 32] (registers) * b[32 x N] (shared memory), e4m3.
template <int N, bool add>
__device__ inline void WgmmaE4m3(float* d, const uint32_t* a, uint64_t b) {
#define QM_F4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define QM_F8(i) QM_F4(d, i), QM_F4(d, i + 4)
#define QM_TEXT(n, d, a0, a1, a2, a3, b, add)                                                                    \
  "{\n.reg .pred p;\nsetp.ne.b32 p, %" #add ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n "k32.f32.e4m3.e4m3 {" d \
  "}, {%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #b ", p, 1, 1;\n}"
#define QM_IN "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(static_cast<int>(add))
#define QM_R0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define QM_R1 "%8, %9, %10, %11, %12, %13, %14, %15"
#define QM_R2 "%16, %17, %18, %19, %20, %21, %22, %23"
#define QM_R3 "%24, %25, %26, %27, %28, %29, %30, %31"
  if constexpr (N == 16) asm volatile(QM_TEXT(16, QM_R0, 8, 9, 10, 11, 12, 13) : QM_F8(0) : QM_IN);
  if constexpr (N == 32)
    asm volatile(QM_TEXT(32, QM_R0 ", " QM_R1, 16, 17, 18, 19, 20, 21) : QM_F8(0), QM_F8(8) : QM_IN);
  if constexpr (N == 48)
    asm volatile(QM_TEXT(48, QM_R0 ", " QM_R1 ", " QM_R2, 24, 25, 26, 27, 28, 29)
                 : QM_F8(0), QM_F8(8), QM_F8(16)
                 : QM_IN);
  if constexpr (N == 56)
    asm volatile(QM_TEXT(56, QM_R0 ", " QM_R1 ", " QM_R2 ", %24, %25, %26, %27", 28, 29, 30, 31, 32, 33)
                 : QM_F8(0), QM_F8(8), QM_F8(16), QM_F4(d, 24)
                 : QM_IN);
  if constexpr (N == 64)
    asm volatile(QM_TEXT(64, QM_R0 ", " QM_R1 ", " QM_R2 ", " QM_R3, 32, 33, 34, 35, 36, 37)
                 : QM_F8(0), QM_F8(8), QM_F8(16), QM_F8(24)
                 : QM_IN);
#undef QM_TEXT
#undef QM_IN
#undef QM_R0
#undef QM_R1
#undef QM_R2
#undef QM_R3
#undef QM_F8
}
// All products are there; sums are not read before.
__device__ inline void WgmmaWait(float (&d)[32], float (&e)[32]) {
#define QM_F16(d, i) QM_F4(d, i), QM_F4(d, i + 4), QM_F4(d, i + 8), QM_F4(d, i + 12)
  asm volatile("wgmma.wait_group.sync.aligned 0;" : QM_F16(d, 0), QM_F16(d, 16), QM_F16(e, 0), QM_F16(e, 16)::"memory");
#undef QM_F16
#undef QM_F4
}
__device__ inline void LoadShared4(uint32_t* v, uint32_t at) {
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
               : "r"(at)
               : "memory");
}
__device__ inline void LoadShared2(float* v, uint32_t at) {
  asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(v[0]), "=f"(v[1]) : "r"(at) : "memory");
}

// grouped: activations have a scale of each 128 columns, else one a row, by which the sums are multiplied at the end.
template <typename T, bool down, bool grouped>
struct Fp8Consumer {
  const GemmParams& p;
  uint32_t base;             // of stage 0
  int lane_at;               // this lane's codes in those of a stage: panel * 2048 + lane * 16
  int stage = 0, phase = 0;  // bytes to the stage read next
  int slot = 0;              // of the unit in work

  // No pointers are kept while products are made.
  __device__ uint8_t* Shared(uint32_t at) const { return static_cast<uint8_t*>(__cvta_shared_to_generic(base + at)); }
  __device__ const Fp8Work& Now() const { return reinterpret_cast<const Fp8Work*>(Shared(kFp8WorksAt))[slot]; }
  __device__ Fp8Tokens& Own(int group) const { return reinterpret_cast<Fp8Tokens*>(Shared(kFp8PairsAt))[group]; }

  __device__ __forceinline__ void ReadCodes(uint32_t (&a)[16], int b) const {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      LoadShared4(a + 4 * i, base + stage + lane_at + kFp8CodesAt + b * (4 * kFp8PanelBytes) + i * 512);
  }
  // Scales of rows g and g + 8 of this warp's panels.
  __device__ __forceinline__ void ReadRowScales(float (&row)[2][2]) const {
    const uint32_t at =
        base + stage + kFp8RowScalesAt + (lane_at >> 11 << 3 | lane_at >> 6 & 7) * p.weights.scale_bytes;
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      if (p.weights.scale_type == 0) {
        LoadShared2(row[b], at + b * 4 * 64);
      } else {
        uint32_t both;
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(both) : "r"(at + b * 4 * 32) : "memory");
        const bool bf16 = p.weights.scale_type == 2;
        row[b][0] = bf16 ? Half<__nv_bfloat16>::Low(both) : Half<__half>::Low(both);
        row[b][1] = bf16 ? Half<__nv_bfloat16>::High(both) : Half<__half>::High(both);
      }
    }
  }
  template <int N>
  __device__ __forceinline__ void Products(float (&sum)[32], const uint32_t (&a)[16], uint64_t tokens) {
    WgmmaE4m3<N, false>(sum, a, tokens);
    WgmmaE4m3<N, true>(sum, a + 4, tokens + 2);
    WgmmaE4m3<N, true>(sum, a + 8, tokens + 4);
    WgmmaE4m3<N, true>(sum, a + 12, tokens + 6);
  }
  // The 128 rows times N of the tokens of a half.
  template <int N>
  __device__ __forceinline__ void Products(float (&sum)[2][32], const uint32_t (&a)[2][16], uint64_t tokens, int turn) {
    // Warpgroups take turns; without, their products share the tensor cores and end together, and so do their sums.
    NamedBarrier(2 + turn, 256);
    WgmmaFence();
    Products<N>(sum[0], a[0], tokens);
    Products<N>(sum[1], a[1], tokens);
    WgmmaCommit();
    NamedBarrierArrive(5 - turn, 256);
    WgmmaWait(sum[0], sum[1]);
  }
  // acc += sum * scales.
  template <int half, int N>
  __device__ __forceinline__ void Add(float (&acc)[2][64], const float (&sum)[2][32]) {
    float row[2][2];
    ReadRowScales(row);
    const uint32_t scales = base + stage + kFp8TokenScalesAt + (lane_at >> 1 & 24);
#pragma unroll
    for (int i = 0; i < N / 8; ++i) {
      float token[2];
      if constexpr (grouped) LoadShared2(token, scales + half * 256 + i * 32);
#pragma unroll
      for (int b = 0; b < 2; ++b)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float scale = grouped ? row[b][j / 2] * token[j % 2] : row[b][j / 2];
          float& to = acc[b][32 * half + 4 * i + j];
          to = fmaf(sum[b][4 * i + j], scale, to);
        }
    }
  }
  // Of N tokens.
  template <int N>
  __device__ __forceinline__ void Multiply(float (&acc)[2][64], int steps, int turn) {
    constexpr int kFirst = N < 64 ? N : 64, kSecond = N - kFirst;
#pragma unroll
    for (int b = 0; b < 2; ++b)
#pragma unroll
      for (int i = 0; i < 64; ++i) acc[b][i] = 0.f;
    float sum[2][32];
    uint32_t a[2][16];
#pragma unroll 1
    for (; steps > 0; --steps) {
      BarrierWait(base + stage + kFp8FullAt, phase);
      const uint64_t tokens = Descriptor(base + stage);
      ReadCodes(a[0], 0);
      ReadCodes(a[1], 1);
      Products<kFirst>(sum, a, tokens, turn);
      Add<0, kFirst>(acc, sum);
      if constexpr (kSecond > 0) {
        ReadCodes(a[1], 1);  // again: not enough registers while sums are added
        Products<kSecond>(sum, a, tokens + 64 * kFp8Group / 16, turn);
        Add<1, kSecond>(acc, sum);
      }
      if (threadIdx.x % 32 == 0) BarrierArrive(base + stage + kFp8EmptyAt);
      stage += kFp8StageBytes;
      if (stage == kFp8Stages * kFp8StageBytes) stage = 0, phase ^= 1;
    }
  }

  // Results of this warpgroup by way of shared memory, where a thread finds 16 rows of a token. As in
  // moe_gemm_wgmma.cuh places come from an opaque thread number.
  __device__ __forceinline__ void Store(const float (&acc)[2][64]) const {
    const Weights& w = p.weights;
    int thread = threadIdx.x;
    asm volatile("" : "+r"(thread));
    const int group = thread / 128 - 1, lane = thread % 32, warp = thread / 32 % 4;
    const Fp8Work work = Now();
    const int parts = p.shape.warps_k, groups = (w.units + 1) / 2, part = (work.k_begin * parts + parts - 1) / groups;
    float* sums = reinterpret_cast<float*>(Shared(kFp8ResultsAt) + group * kFp8ResultBytes);
    float* to = sums + lane % 4 * 2 * kFp8ResultRow + warp * 16 + lane / 4;
    const int own_panel = warp * 2 + lane % 2, panel = work.panel + group * 8 + own_panel;
    constexpr int kColumns = down ? 16 : 8;
#pragma unroll
    for (int before = 0; before < kFp8Tokens; before += kFp8StoredTokens) {
      if (before >= work.count) break;
#pragma unroll
      for (int i = 0; i < kFp8StoredTokens / 2; ++i)  // tile i / 4, and as a lane has its sums
#pragma unroll
        for (int b = 0; b < 2; ++b)
          to[(i / 4 * 8 + i % 2) * kFp8ResultRow + b * 64 + i / 2 % 2 * 8] = acc[b][before / 2 + i];
      NamedBarrier(1 + group, 128);
      const int token = before + lane / 2, column = panel * kColumns;
      if (token < work.count && column < p.out_columns) {
        const SortedPair pair = Own(group).pairs[token];
        const float weight = p.weight_here ? pair.weight : 1.f;
        const float scale = grouped ? weight : weight * Own(group).scales[token];
        float v[16];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float4 four = reinterpret_cast<const float4*>(sums + lane / 2 * kFp8ResultRow + own_panel * 16)[i];
          float4 bias = make_float4(0.f, 0.f, 0.f, 0.f);
          if (w.bias_at && work.k_begin == 0 && panel < w.panels)
            bias = reinterpret_cast<const float4*>(w.rows + work.expert * w.row_bytes + w.bias_at)[panel * 4 + i];
          const float by = down ? weight : 1.f;
          v[4 * i] = fmaf(scale, four.x, by * bias.x), v[4 * i + 1] = fmaf(scale, four.y, by * bias.y);
          v[4 * i + 2] = fmaf(scale, four.z, by * bias.z), v[4 * i + 3] = fmaf(scale, four.w, by * bias.w);
        }
        if constexpr (!down) {
          // Panels past the end (padding of K for the next GEMM) are zero.
#pragma unroll
          for (int i = 0; i < 8; ++i) v[i] = panel < w.panels ? Activate(p.activation, v[i], v[8 + i]) : 0.f;
        }
        const int64_t row = down ? pair.pair * parts + part : work.first + token;
        uint4* out = reinterpret_cast<uint4*>(static_cast<T*>(p.out) + row * p.out_columns + column);
#pragma unroll
        for (int i = 0; i < kColumns; i += 8)
          if (column + i < p.out_columns)
            out[i / 8] = make_uint4(Half<T>::Pack(v[i], v[i + 1]), Half<T>::Pack(v[i + 2], v[i + 3]),
                                    Half<T>::Pack(v[i + 4], v[i + 5]), Half<T>::Pack(v[i + 6], v[i + 7]));
      }
      NamedBarrier(1 + group, 128);
    }
  }

  __device__ __forceinline__ void Run() {
    BarrierWait(base + stage + kFp8FullAt, phase);  // Now() is there
    const int count = Now().count, steps = Now().k_end - Now().k_begin;
    {
      const int thread = threadIdx.x % 128;
      Fp8Tokens& own = Own(threadIdx.x / 128 - 1);
      if (thread < count) {
        CopyAsyncSmall<8>(SharedAddress(own.pairs + thread), p.sorted_pairs + Now().first + thread);
        if (!grouped) CopyAsyncSmall<4>(SharedAddress(own.scales + thread), p.x_scales + Now().first + thread);
      }
    }
    CopyAsyncCommit();
    float acc[2][64];
    const int turn = threadIdx.x / 128;  // warpgroup 1 or 2
    // The widths are what ptxas 13.0 has registers for.
    if (count <= 64) {
      Multiply<64>(acc, steps, turn);
    } else if (count <= 96) {
      Multiply<96>(acc, steps, turn);
    } else if (count <= 112) {
      Multiply<112>(acc, steps, turn);
    } else if (count <= 120) {
      Multiply<120>(acc, steps, turn);
    } else {
      Multiply<128>(acc, steps, turn);
    }
    CopyAsyncWait<0>();
    NamedBarrier(threadIdx.x / 128, 128);
    Store(acc);
    if (++slot == kFp8Works) slot = 0;
  }
};

template <typename T, bool down, bool grouped>
__global__ void __launch_bounds__(kWgmmaThreads, 1) MoeGemmFp8(const __grid_constant__ GemmParams p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) uint8_t raw[];
  LaunchDependents();
  uint8_t* shared = raw + (1024 - SharedAddress(raw) % 1024) % 1024;
  const uint32_t base = SharedAddress(shared);
  if (threadIdx.x < kFp8Stages) {
    BarrierInit(base + threadIdx.x * kFp8StageBytes + kFp8FullAt, 33);
    BarrierInit(base + threadIdx.x * kFp8StageBytes + kFp8EmptyAt, 8);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  WaitForPrevious();
  const Weights& w = p.weights;
  const int blocks = (w.panels + kFp8Panels - 1) / kFp8Panels, groups = (w.units + 1) / 2;
  const int parts = down ? p.shape.warps_k : 1;  // of K; MoeCombine adds them up
  const int units = p.tiles[p.max_tiles].count * blocks * parts;
  Fp8Work* works = reinterpret_cast<Fp8Work*>(shared + kFp8WorksAt);
  const int warpgroup = threadIdx.x / 128;
  if (warpgroup == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    // Of warp 0 a thread copies tokens and their scales, of warps 1 and 2 codes of eight panels each; warp 3 copies the
    // rows' scales, 16 bytes a thread.
    uint32_t thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    const int lane = thread % 32, warp = thread / 32;
    if (warp < 3 && lane > 0) return;
    // What other kernels wrote becomes visible to bulk copies.
    asm volatile("fence.proxy.async;" ::: "memory");
    int stage = 0, phase = 1, slot = 0;
    // stages(work, its expert's row) gives what copies stage k of it.
    auto produce = [&](auto stages) {
      for (int unit = blockIdx.x; unit < units; unit += gridDim.x) {
        // The tiles of a group take turns with the same rows: the weights are then read from memory once for all.
        const int part = unit % parts, piece = unit / parts;
        const Tile any = p.tiles[piece / blocks];
        const int local = piece - any.group_first * blocks, panel = local / any.group_size * kFp8Panels;
        const Tile tile = p.tiles[any.group_first + local % any.group_size];
        const Fp8Work work{
            tile.expert, panel, tile.first, tile.count, part * groups / parts, (part + 1) * groups / parts};
        auto copy = stages(work, w.rows + work.expert * w.row_bytes);
#pragma unroll 1
        for (int k = work.k_begin; k < work.k_end; ++k) {
          BarrierWait(base + stage + kFp8EmptyAt, phase);
          copy(k, base + stage, base + stage + kFp8FullAt);
          stage = stage == (kFp8Stages - 1) * kFp8StageBytes ? 0 : stage + kFp8StageBytes;
          if (stage == 0) phase ^= 1;
        }
      }
    };
    if (warp == 0) {
      produce([&](const Fp8Work& work, const uint8_t*) {
        const int rows = (work.count + 7) / 8 * 8;
        int64_t row = static_cast<int64_t>(work.k_begin) * p.x_rows + work.first;
        return [&, work, rows, row](int k, uint32_t to, uint32_t full) mutable {
          if (k == work.k_begin) {
            works[slot] = work;
            if (++slot == kFp8Works) slot = 0;
          }
          BarrierExpect(full, kFp8Panels * kFp8PanelBytes + rows * (kFp8Group + (grouped ? 4 : 0)));
          BulkCopy(to, static_cast<const uint8_t*>(p.x) + row * kFp8Group, rows * kFp8Group, full);
          if (grouped) BulkCopy(to + kFp8TokenScalesAt, p.x_scales + row, rows * 4, full);
          row += p.x_rows;
        };
      });
    } else if (warp < 3) {
      const int first = (warp - 1) * 8;
      const int64_t panel_bytes = static_cast<int64_t>(w.units) * 1024;
      produce([&](const Fp8Work& work, const uint8_t* expert) {
        // Panels past the end repeat the last.
        const uint8_t* from = expert + min(work.panel + first, w.panels - 1) * panel_bytes + work.k_begin * 2048;
        const int panels = w.panels - 1 - work.panel - first;
        return [&, from, panels](int k, uint32_t to, uint32_t full) mutable {
          to += kFp8CodesAt + first * kFp8PanelBytes;
          const uint8_t* codes = from;
          from += 2048;
          const bool whole = 2 * k + 1 < w.units;
#pragma unroll
          for (int i = 0; i < 8; ++i, to += kFp8PanelBytes) {
            BulkCopy(to, codes, whole ? 2048 : 1024, full);
            if (!whole) BulkCopy(to + 1024, codes, 1024, full);  // past the end, where tokens are zero: any codes
            if (i < panels) codes += panel_bytes;
          }
        };
      });
    } else {
      const int pieces = w.scale_bytes / 2, row_scale_bytes = 8 * w.scale_bytes;  // of a panel: in 16 bytes, bytes
      produce([&](const Fp8Work& work, const uint8_t* expert) {
        const uint8_t* from[2];
#pragma unroll
        for (int i = 0; i < 2; ++i)
          from[i] = expert + w.scales_at + lane % pieces * 16 +
                    static_cast<int64_t>(min(work.panel + (lane + 32 * i) / pieces, w.panels - 1)) * w.blocks *
                        row_scale_bytes;
        return [&, from0 = from[0], from1 = from[1]](int k, uint32_t to, uint32_t full) {
          const int at = (2 * k >> w.block_shift) * row_scale_bytes;
          to += kFp8RowScalesAt + lane * 16;
          CopyAsync16(to, from0 + at, true);
          if (pieces == 4) CopyAsync16(to + 512, from1 + at, true);
          asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(full) : "memory");
        };
      });
      CopyAsyncWait<0>();
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
    Fp8Consumer<T, down, grouped> c{p};
    const int panel = (warpgroup - 1) * 8 + warp;
    c.base = base;
    c.lane_at = panel * kFp8PanelBytes + lane * 16;
    asm volatile("" : "+r"(c.base), "+r"(c.lane_at));
    if (warpgroup == 2) NamedBarrierArrive(3, 256);  // the other warpgroup has the first turn
    for (int unit = blockIdx.x; unit < units; unit += gridDim.x) c.Run();
  }
#endif
}

}  // namespace quantmoe
