// One grouped GEMM of the layer on wgmma (sm_90a), e4m3 activations times e4m3 weights, for many tokens.
//
// A block computes up to 128 tokens of one expert x 256 rows of its weights (16 panels). Tokens are wgmma's M, rows its
// N. Both come from shared memory as they are stored. fp8_activations.cuh writes tokens in stages of 128 columns, all
// rows in the order of experts. Layout marlin's 8-bit units (FORMAT.md 3.2) are two K-major operands of eight rows, g
// and g + 8 of a panel. 16 panels make N = 128: gate and up of one set of features. A producer warpgroup copies, and
// two consumer warpgroups multiply.
//
// The tensor cores keep about 14 bits of a sum of e4m3 products, and scales change every 128 columns. So products of
// 128 columns are summed there, and then in f32, times the scales, while the other warpgroup has the tensor cores. With
// tokens as M a lane has two of them, and rows of 128-blocks share a scale. Two products give all scales of a sum.
//
//                      256 rows: 16 panels                    at most 64 tokens: panels are shared out instead
//                  rows g (128)   rows g + 8 (128)                  panels 0..7          panels 8..15
//   64 tokens    +--------------+------------------+   64 tokens  +--------------------+--------------------+
//   64 tokens    | consumer 0   | its second       |              | consumer 0         | consumer 1         |
//                +--------------+ product, N = 128 +              | twice N = 64       | twice N = 64       |
//                | consumer 1   |                  |              +--------------------+--------------------+
//                +--------------+------------------+
#pragma once
#include "cuda/common/activation.cuh"
#include "cuda/common/e4m3.cuh"
#include "cuda/common/fp8_activations.cuh"
#include "cuda/common/wgmma.cuh"
#include "cuda/gemm/instances.h"

namespace quantmoe {

constexpr int kFp8Panels = 16, kFp8Tokens = 128, kFp8Stages = 4, kFp8Group = 128, kFp8PanelBytes = 16 * kFp8Group;
// A stage in shared memory, at multiples of 1024: tokens, codes, scales of rows and of tokens (f32), two barriers.
constexpr int kFp8CodesAt = kFp8Tokens * kFp8Group, kFp8RowScalesAt = kFp8CodesAt + kFp8Panels * kFp8PanelBytes;
constexpr int kFp8TokenScalesAt = kFp8RowScalesAt + 16 * kFp8Panels * 4;
constexpr int kFp8FullAt = kFp8TokenScalesAt + kFp8Tokens * 4, kFp8EmptyAt = kFp8FullAt + 8;
constexpr int kFp8StageBytes = (kFp8EmptyAt + 8 + 1023) / 1024 * 1024;
// Columns [k_begin, k_end) * 128 of kFp8Panels panels of an expert for the tokens of a tile.
struct Fp8Work {
  int expert, panel, first, count, k_begin, k_end;
};
// Then the units of work: consumers may store one while the producer fills all stages for the next. The largest
// magnitudes of h of a token that both warpgroups have features of, in turns.
constexpr int kFp8Works = kFp8Stages + 1, kFp8WorksAt = kFp8Stages * kFp8StageBytes;
constexpr int kFp8MostAt = kFp8WorksAt + 128, kFp8MostBytes = 2 * 2 * 64 * 4;
static_assert(kFp8Works * sizeof(Fp8Work) <= 128);
static_assert(1024 + kFp8MostAt + kFp8MostBytes == kFp8SharedBytes);  // 1024: to align the first stage

// K-major operand of 64-byte rows, 64-byte swizzle: eight rows of all panels, kFp8PanelBytes apart.
__device__ inline uint64_t codes_descriptor(uint32_t shared) {
  return static_cast<uint64_t>((shared & 0x3ffff) >> 4) | 1ull << 16 |
         static_cast<uint64_t>(kFp8PanelBytes >> 4) << 32 | 2ull << 62;
}

// d[64 x N] (+)= a[64 x 32] * b[32 x N], e4m3, both in shared memory.
template <int N, bool add>
__device__ inline void wgmma_e4m3(float* d, uint64_t a, uint64_t b) {
#define QM_F4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define QM_F16(d, i) QM_F4(d, i), QM_F4(d, i + 4), QM_F4(d, i + 8), QM_F4(d, i + 12)
#define QM_TEXT(n, d, a, b, add)                                                                                 \
  "{\n.reg .pred p;\nsetp.ne.b32 p, %" #add ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n "k32.f32.e4m3.e4m3 {" d \
  "}"                                                                                                            \
  ", %" #a ", %" #b ", p, 1, 1;\n}"
#define QM_IN "l"(a), "l"(b), "n"(static_cast<int>(add))
#define QM_R32                                                                                                \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, " \
  "%23, %24, %25, %26, %27, %28, %29, %30, %31"
#define QM_R64                                                                                            \
  QM_R32                                                                                                  \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51," \
  " %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
  if constexpr (N == 64) asm volatile(QM_TEXT(64, QM_R32, 32, 33, 34) : QM_F16(d, 0), QM_F16(d, 16) : QM_IN);
  if constexpr (N == 128)
    asm volatile(QM_TEXT(128, QM_R64, 64, 65, 66) : QM_F16(d, 0), QM_F16(d, 16), QM_F16(d, 32), QM_F16(d, 48) : QM_IN);
#undef QM_TEXT
#undef QM_IN
#undef QM_R32
#undef QM_R64
}
// All products are there; sums are not read before.
template <int N>
__device__ inline void wgmma_wait(float (&d)[N / 2]) {
  if constexpr (N == 64)
    asm volatile("wgmma.wait_group.sync.aligned 0;" : QM_F16(d, 0), QM_F16(d, 16)::"memory");
  else
    asm volatile("wgmma.wait_group.sync.aligned 0;"
                 : QM_F16(d, 0), QM_F16(d, 16), QM_F16(d, 32), QM_F16(d, 48)::"memory");
}
#undef QM_F16
#undef QM_F4
__device__ inline float2 load_float2(uint32_t at) {
  const uint2 v = load8(at);
  return make_float2(__uint_as_float(v.x), __uint_as_float(v.y));
}
// i of a vector, known at compile time.
__device__ inline float element(const float4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// Four scales of a panel, of type `type` (f32, f16, bf16): rows g and g + 8 of two rows g.
__device__ inline float4 four_scales(const uint8_t* scales, int type, int64_t four) {
  if (type == k_scale_type_f32) return reinterpret_cast<const float4*>(scales)[four];
  const uint2 v = reinterpret_cast<const uint2*>(scales)[four];
  if (type == k_scale_type_f16)
    return make_float4(Half<__half>::low(v.x), Half<__half>::high(v.x), Half<__half>::low(v.y),
                       Half<__half>::high(v.y));
  return make_float4(Half<__nv_bfloat16>::low(v.x), Half<__nv_bfloat16>::high(v.x), Half<__nv_bfloat16>::low(v.y),
                     Half<__nv_bfloat16>::high(v.y));
}

// Lane t of four has 32-bit word t of four rows of 16 bytes; it gets row t.
__device__ inline uint4 transpose4(uint32_t a, uint32_t b, uint32_t c, uint32_t d, int t) {
  const bool odd = t & 1, upper = t & 2;
  const uint32_t ab = __shfl_xor_sync(~0u, odd ? a : b, 1), cd = __shfl_xor_sync(~0u, odd ? c : d, 1);
  const uint2 first = odd ? make_uint2(ab, b) : make_uint2(a, ab), second = odd ? make_uint2(cd, d) : make_uint2(c, cd);
  const uint2 keep = upper ? second : first, send = upper ? first : second;
  const uint32_t x = __shfl_xor_sync(~0u, send.x, 2), y = __shfl_xor_sync(~0u, send.y, 2);
  return upper ? make_uint4(x, y, keep.x, keep.y) : make_uint4(keep.x, keep.y, x, y);
}

// by_row: weights have scales of each row and a multiple of 128 columns. Otherwise scales are of 128 rows, or of whole
// rows, which multiply the results at the end.
template <typename T, bool down, bool by_row>
struct Fp8Consumer {
  const GemmParams& p;
  uint32_t base;             // of stage 0
  int stage = 0, phase = 0;  // bytes to the stage read next
  int slot = 0, turn = 0;    // of the unit in work; of the magnitudes

  // No pointers are kept while products are made.
  __device__ uint8_t* shared_at(uint32_t at) const {
    return static_cast<uint8_t*>(__cvta_shared_to_generic(base + at));
  }
  __device__ const Fp8Work& current() const { return reinterpret_cast<const Fp8Work*>(shared_at(kFp8WorksAt))[slot]; }

  // N = 128: 64 tokens of this warpgroup times all panels. N = 64: all, at most 64, tokens times half of the panels.
  // acc[r]: sums of rows g + 8 * r of panels.
  template <int N>
  __device__ __forceinline__ void multiply(float (&acc)[2][N / 2], int steps) {
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int i = 0; i < N / 2; ++i) acc[r][i] = 0.f;
    int thread = threadIdx.x;
    asm volatile("" : "+r"(thread));
    const int group = thread / 128 - 1, lane = thread % 32, warp = thread / 32 % 4;
    const int token_at = (N == 128 ? group * 64 : 0) + warp * 16 + lane / 4;
    const int tokens_at = N == 128 ? group * 64 * kFp8Group : 0, panel = N == 128 ? 0 : group * 8;
    float sum[N / 2];
#pragma unroll 1
    for (; steps > 0; --steps) {
      const uint32_t now = base + stage;
      barrier_wait(now + kFp8FullAt, phase);
      const uint64_t tokens = wgmma_descriptor(descriptor_low(now + tokens_at));
      const uint64_t codes = codes_descriptor(now + kFp8CodesAt + panel * kFp8PanelBytes);
      const float low = __uint_as_float(load4(now + kFp8TokenScalesAt + token_at * 4)),
                  high = __uint_as_float(load4(now + kFp8TokenScalesAt + token_at * 4 + 32));
      const float2 block = load_float2(now + kFp8RowScalesAt);  // !by_row
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        wgmma_fence();
        constexpr int kUnitStep = 1024 / 16, kRowsStep = 512 / 16;
        wgmma_e4m3<N, false>(sum, tokens, codes + r * kRowsStep);
        wgmma_e4m3<N, true>(sum, tokens + 2, codes + r * kRowsStep + 2);
        wgmma_e4m3<N, true>(sum, tokens + 4, codes + r * kRowsStep + kUnitStep);
        wgmma_e4m3<N, true>(sum, tokens + 6, codes + r * kRowsStep + kUnitStep + 2);
        wgmma_commit();
        wgmma_wait<N>(sum);
        if (!by_row && r == 1) barrier_arrive(now + kFp8EmptyAt);
#pragma unroll
        for (int i = 0; i < N / 8; ++i) {  // panels
          float2 rows;
          if constexpr (by_row) {
            rows = load_float2(now + kFp8RowScalesAt + (panel + i) * 64 + lane % 4 * 16 + r * 8);
          } else {
            const float one = !down      ? (r ? block.y : block.x)
                              : N == 128 ? (i < 8 ? block.x : block.y)
                                         : (group ? block.y : block.x);
            rows = make_float2(one, one);
          }
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            float& to = acc[r][4 * i + j];
            to = fmaf(sum[4 * i + j], (j < 2 ? low : high) * (j % 2 ? rows.y : rows.x), to);
          }
        }
        if (by_row && r == 1) barrier_arrive(now + kFp8EmptyAt);
      }
      stage += kFp8StageBytes;
      if (stage == kFp8Stages * kFp8StageBytes) stage = 0, phase ^= 1;
    }
  }

  // Codes of 64 features of h. A lane has two of each eight: lane t gets 16 bytes of a unit (FORMAT.md 3.2).
  __device__ static uint4 codes_of(const E4m3Step& step, const float (&h)[16], int t) {
    const bool odd = t & 1, upper = t & 2;
    uint32_t two[8];  // in their bytes of a word
#pragma unroll
    for (int i = 0; i < 8; ++i) two[i] = __byte_perm(step.pair_of(h[2 * i], h[2 * i + 1]), 0, odd ? 0x1404 : 0x4140);
    uint2 eight[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t words[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t even_t = two[4 * half + 2 * i], odd_t = two[4 * half + 2 * i + 1];
        words[i] = (odd ? odd_t : even_t) | __shfl_xor_sync(~0u, odd ? even_t : odd_t, 1);
      }
      const uint32_t keep = upper ? words[1] : words[0];
      const uint32_t other = __shfl_xor_sync(~0u, upper ? words[0] : words[1], 2);
      eight[half] = upper ? make_uint2(other, keep) : make_uint2(keep, other);
    }
    return odd ? make_uint4(eight[1].x, eight[1].y, eight[0].x, eight[0].y)
               : make_uint4(eight[0].x, eight[0].y, eight[1].x, eight[1].y);
  }

  // Sums times the scales of whole rows, plus biases. Branches are outside of loops, so that loads are asked for
  // together.
  template <int N>
  __device__ __forceinline__ void scale_and_add_bias(float (&acc)[2][N / 2], const Fp8Work& work, int panel, int t,
                                                     const float (&weight)[2], const float (&factor)[2]) {
    const Weights& weights = p.weights;
    const uint8_t* expert = weights.rows[work.expert];
    constexpr int kPanels = N / 8;
    auto times = [&](auto rows_of) {
#pragma unroll
      for (int i = 0; i < kPanels; ++i) {
        const float4 rows = rows_of(min(panel + i, weights.panels - 1) * 4 + t);
#pragma unroll
        for (int j = 0; j < 8; ++j) acc[j / 4][4 * i + j % 4] *= factor[j % 4 / 2] * element(rows, j % 2 * 2 + j / 4);
      }
    };
    const uint8_t* scales = expert + weights.scales_at;
    if (weights.block_shift != 31) {
      times([](int) { return make_float4(1.f, 1.f, 1.f, 1.f); });
    } else if (weights.scale_type == k_scale_type_f32) {
      times([&](int four) { return four_scales(scales, k_scale_type_f32, four); });
    } else if (weights.scale_type == k_scale_type_f16) {
      times([&](int four) { return four_scales(scales, k_scale_type_f16, four); });
    } else {
      times([&](int four) { return four_scales(scales, k_scale_type_bf16, four); });
    }
    if (weights.bias_at && work.k_begin == 0) {
      const float2* biases = reinterpret_cast<const float2*>(expert + weights.bias_at) + t;
#pragma unroll
      for (int i = 0; i < kPanels; ++i) {
        const int at = min(panel + i, weights.panels - 1) * 8;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float2 bias = biases[at + 4 * r];
#pragma unroll
          for (int j = 0; j < 4; ++j)
            acc[r][4 * i + j] = fmaf(down ? weight[j / 2] : 1.f, j % 2 ? bias.y : bias.x, acc[r][4 * i + j]);
        }
      }
    }
  }

  // As in moe_gemm_wgmma.cuh places come from an opaque thread number.
  template <int N>
  __device__ __forceinline__ void store(float (&acc)[2][N / 2]) {
    const Weights& weights = p.weights;
    int thread = threadIdx.x;
    asm volatile("" : "+r"(thread));
    const int group = thread / 128 - 1, lane = thread % 32, warp = thread / 32 % 4, t = lane % 4;
    const Fp8Work work = current();
    const int parts = p.warps_k, groups = (weights.units + 1) / 2;
    const int part = down ? (work.k_begin * parts + parts - 1) / groups : 0;
    const int token = (N == 128 ? group * 64 : 0) + warp * 16 + lane / 4;  // and token + 8
    const int panel = work.panel + (N == 128 ? 0 : group * 8);
    constexpr int kPanels = N / 8;
    float weight[2], factor[2];
    int pair[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      SortedPair own{-1, 1.f};
      if (token + 8 * i < work.count) own = p.sorted_pairs[work.first + token + 8 * i];
      pair[i] = own.pair;
      weight[i] = p.weight_here ? own.weight : 1.f;
      factor[i] = weight[i];
      if (!p.x_grouped && own.pair >= 0) factor[i] *= p.x_scales[work.first + token + 8 * i];
    }
    scale_and_add_bias<N>(acc, work, panel, t, weight, factor);
    if constexpr (!down) {
      if (p.activation.kind == k_activation_silu) {
#pragma unroll
        for (int i = 0; i < N / 2; ++i) acc[0][i] = silu(acc[0][i]) * acc[1][i];
      } else {
#pragma unroll
        for (int i = 0; i < N / 2; ++i) acc[0][i] = activate_other(p.activation, acc[0][i], acc[1][i]);
      }
      // Panels past the end (padding of K for the next GEMM) are zero.
#pragma unroll
      for (int i = 0; i < kPanels; ++i)
        if (panel + i >= weights.panels)
          acc[0][4 * i] = acc[0][4 * i + 1] = acc[0][4 * i + 2] = acc[0][4 * i + 3] = 0.f;
      if (p.h_scales) return store_codes<N>(acc[0], work, token, group, t, pair);
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {  // token, token + 8
      const int64_t row = down ? static_cast<int64_t>(pair[j]) * parts + part : work.first + token + 8 * j;
      T* out = static_cast<T*>(p.out) + row * p.out_columns;
#pragma unroll
      for (int i = 0; i < kPanels; i += down ? 2 : 4) {  // 32 columns
        uint32_t v[4];
#pragma unroll
        for (int q = 0; q < 4; ++q) {
          const float* from = down ? acc[q % 2] + 4 * (i + q / 2) : acc[0] + 4 * (i + q);
          v[q] = Half<T>::pack(from[2 * j], from[2 * j + 1]);
        }
        const uint4 eight = transpose4(v[0], v[1], v[2], v[3], t);
        const int column = (panel + i) * (down ? 16 : 8) + 8 * t;
        if (pair[j] >= 0 && column < p.out_columns) *reinterpret_cast<uint4*>(out + column) = eight;
      }
    }
  }
  // h as the next product reads it: this block's rows are one group of 128 features. A value that is not finite makes
  // codes, and so all results of its token, not a number.
  template <int N>
  __device__ __forceinline__ void store_codes(const float (&h)[N / 2], const Fp8Work& work, int token, int group, int t,
                                              const int (&pair)[2]) {
    uint32_t most[2] = {};  // bits of magnitudes are ordered as they are, NaN above infinity above others
#pragma unroll
    for (int i = 0; i < N / 2; ++i) most[i / 2 % 2] = max(most[i / 2 % 2], __float_as_uint(h[i]) & 0x7fffffff);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
      for (int d = 1; d < 4; d *= 2) most[j] = max(most[j], __shfl_xor_sync(~0u, most[j], d));
    }
    if constexpr (N == 64) {  // the other half of the features is the other warpgroup's
      uint32_t* all = reinterpret_cast<uint32_t*>(shared_at(kFp8MostAt)) + turn * 128;
      turn ^= 1;
      if (t < 2) all[group * 64 + token + 8 * t] = t ? most[1] : most[0];
      named_barrier(1, 256);
      most[0] = max(most[0], all[(1 - group) * 64 + token]), most[1] = max(most[1], all[(1 - group) * 64 + token + 8]);
    }
    const float stored = p.h_input_at ? *reinterpret_cast<const float*>(p.h_rows[work.expert] + p.h_input_at) : 0.f;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const E4m3Step step(__uint_as_float(most[j]), stored);
      const int64_t row = work.first + token + 8 * j;
      const int64_t at = work.panel / kFp8Panels * static_cast<int64_t>(p.x_rows) + row;
#pragma unroll
      for (int u = 0; u < N / 64; ++u) {
        float v[16];
#pragma unroll
        for (int i = 0; i < 16; ++i) v[i] = h[32 * u + i / 2 * 4 + 2 * j + i % 2];
        const uint4 codes = codes_of(step, v, t);
        const int place = ((N == 128 ? u : group) * 4 + t) ^ static_cast<int>(row & 7);
        if (pair[j] >= 0) *reinterpret_cast<uint4*>(static_cast<uint8_t*>(p.out) + at * kFp8Group + place * 16) = codes;
      }
      if (pair[j] >= 0 && t == 0 && (N == 128 || group == 0)) {
        if (!p.h_input_at) p.h_scales[at] = step.step;
        if (p.h_input_at && work.panel == 0) p.h_scales[row] = stored;
      }
    }
  }

  __device__ __forceinline__ void run() {
    barrier_wait(base + stage + kFp8FullAt, phase);  // current() is there
    const int count = current().count, steps = current().k_end - current().k_begin;
    if (count <= 64) {
      float acc[2][32];
      multiply<64>(acc, steps);
      store<64>(acc);
    } else {
      float acc[2][64];
      multiply<128>(acc, steps);
      store<128>(acc);
    }
    if (++slot == kFp8Works) slot = 0;
  }
};

// Fills the stages of all of the block's work. row_scales: a stage has some. One long function: it is
// three, what tokens, codes and scales are copied by, that go through the same work.
template <typename T, bool down, bool by_row>
__device__ __forceinline__ void fp8_produce(const GemmParams& params, uint8_t* shared, int units, bool row_scales) {
  const Weights& weights = params.weights;
  const uint32_t base = shared_address(shared);
  const int blocks = (weights.panels + kFp8Panels - 1) / kFp8Panels, groups = (weights.units + 1) / 2;
  const int parts = down ? params.warps_k : 1;
  Fp8Work* works = reinterpret_cast<Fp8Work*>(shared + kFp8WorksAt);
  // A thread of warp 0 copies tokens and their scales. Threads of warps 1 and 2 copy codes of eight panels each. Warp 3
  // copies the rows' scales.
  uint32_t thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  const int lane = thread % 32, warp = thread / 32;
  if (warp < 3 && lane > 0) return;
  if (warp == 3 && !row_scales) return;
  // What other kernels wrote becomes visible to bulk copies.
  asm volatile("fence.proxy.async;" ::: "memory");
  int stage = 0, phase = 1, slot = 0;
  // stages(work, its expert's row) gives what copies stage k of it.
  auto produce = [&](auto stages) {
    for (Turns turn; turn.unit < units; turn.next()) {
      // The tiles of a group take turns with the same rows: the weights are then read from memory once for all.
      const int part = turn.unit % parts, piece = turn.unit / parts;
      const Tile any = params.tiles[piece / blocks];
      const int local = piece - any.group_first * blocks, panel = local / any.group_size * kFp8Panels;
      const Tile tile = params.tiles[any.group_first + local % any.group_size];
      const Fp8Work work{
          tile.expert, panel, tile.first, tile.count, part * groups / parts, (part + 1) * groups / parts};
      auto copy = stages(work, weights.rows[work.expert]);
#pragma unroll 1
      for (int k = work.k_begin; k < work.k_end; ++k) {
        copy(k, base + stage, [&] { barrier_wait(base + stage + kFp8EmptyAt, phase); });
        stage = stage == (kFp8Stages - 1) * kFp8StageBytes ? 0 : stage + kFp8StageBytes;
        if (stage == 0) phase ^= 1;
      }
    }
  };
  if (warp == 0) {
    produce([&](const Fp8Work& work, const uint8_t*) {
      const int rows = (work.count + 7) / 8 * 8;
      int64_t row = static_cast<int64_t>(work.k_begin) * params.x_rows + work.first;
      return [&, work, rows, row](int k, uint32_t to, auto wait) mutable {
        wait();
        if (k == work.k_begin) {
          works[slot] = work;
          if (++slot == kFp8Works) slot = 0;
        }
        const uint32_t full = to + kFp8FullAt;
        barrier_arrive_expect(full, kFp8Panels * kFp8PanelBytes + rows * (kFp8Group + (params.x_grouped ? 4 : 0)));
        bulk_copy(to, static_cast<const uint8_t*>(params.x) + row * kFp8Group, rows * kFp8Group, full);
        if (params.x_grouped) bulk_copy(to + kFp8TokenScalesAt, params.x_scales + row, rows * 4, full);
        row += params.x_rows;
      };
    });
  } else if (warp < 3) {
    const int first = (warp - 1) * 8;
    const int64_t panel_bytes = static_cast<int64_t>(weights.units) * 1024;
    produce([&](const Fp8Work& work, const uint8_t* expert) {
      // Panels past the end repeat the last.
      const uint8_t* from = expert + min(work.panel + first, weights.panels - 1) * panel_bytes + work.k_begin * 2048;
      const int panels = weights.panels - 1 - work.panel - first;
      return [&, from, panels](int k, uint32_t to, auto wait) mutable {
        wait();
        const uint32_t full = to + kFp8FullAt;
        to += kFp8CodesAt + first * kFp8PanelBytes;
        const uint8_t* codes = from;
        from += 2048;
        const bool whole = 2 * k + 1 < weights.units;
#pragma unroll
        for (int i = 0; i < 8; ++i, to += kFp8PanelBytes) {
          bulk_copy(to, codes, whole ? 2048 : 1024, full);
          if (!whole) bulk_copy(to + 1024, codes, 1024, full);  // past the end, where tokens are zero: any codes
          if (i < panels) codes += panel_bytes;
        }
      };
    });
  } else {
    produce([&](const Fp8Work& work, const uint8_t* expert) {
      // by_row: a lane has half a panel's scales. Else: two of a panel, of rows g and g + 8, or (down) of two blocks.
      const int panel = min(work.panel + (by_row ? lane / 2 : down ? lane * 8 : 0), weights.panels - 1);
      const int64_t four = static_cast<int64_t>(panel) * weights.blocks * 4 + (by_row ? lane % 2 * 2 : 0);
      const uint8_t* scales = expert + weights.scales_at;
      return [&, scales, four](int k, uint32_t to, auto wait) {
        const int64_t at = four + (2 * k >> weights.block_shift) * 4;
        const bool mine = by_row || lane < (down ? 2 : 1);
        float4 v[2];
#pragma unroll
        for (int i = 0; i < 1 + by_row; ++i)
          if (mine) v[i] = four_scales(scales, weights.scale_type, at + i);
        wait();
        if (mine) {
          float* row = reinterpret_cast<float*>(shared + (to - base) + kFp8RowScalesAt);
          if constexpr (by_row) {
#pragma unroll
            for (int i = 0; i < 2; ++i)  // rows 2t and 2t + 1 of gate, then of up
              reinterpret_cast<float4*>(row)[2 * lane + i] = make_float4(v[i].x, v[i].z, v[i].y, v[i].w);
          } else if constexpr (down) {
            row[lane] = v[0].x;
          } else {
            row[0] = v[0].x, row[1] = v[0].y;
          }
        }
        barrier_arrive(to + kFp8FullAt);
      };
    });
  }
}

template <typename T, bool down, bool by_row>
__global__ void __launch_bounds__(kWgmmaThreads, 1) moe_gemm_fp8(const __grid_constant__ GemmParams params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) uint8_t raw[];
  launch_dependents();
  uint8_t* shared = raw + (1024 - shared_address(raw) % 1024) % 1024;
  const uint32_t base = shared_address(shared);
  const Weights& weights = params.weights;
  const bool row_scales = weights.block_shift != 31;  // a stage has some
  if (threadIdx.x < kFp8Stages) {
    barrier_init(base + threadIdx.x * kFp8StageBytes + kFp8FullAt, row_scales ? 33 : 1);
    barrier_init(base + threadIdx.x * kFp8StageBytes + kFp8EmptyAt, 256);  // each consumer for what it has read itself
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  // Scales that no stage has.
  for (int i = threadIdx.x; i < kFp8Stages * kFp8Tokens; i += kWgmmaThreads) {
    float* stage = reinterpret_cast<float*>(shared + i / kFp8Tokens * kFp8StageBytes + kFp8RowScalesAt);
    if (!row_scales) stage[i % kFp8Tokens] = stage[kFp8Tokens + i % kFp8Tokens] = 1.f;
    if (!params.x_grouped) stage[2 * kFp8Tokens + i % kFp8Tokens] = 1.f;
  }
  __syncthreads();
  wait_for_previous();
  const int blocks = (weights.panels + kFp8Panels - 1) / kFp8Panels;
  const int parts = down ? params.warps_k : 1;  // of K; moe_combine adds them up
  const int units = params.tiles[params.max_tiles].count * blocks * parts;
  const int warpgroup = threadIdx.x / 128;
  if (warpgroup == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    fp8_produce<T, down, by_row>(params, shared, units, row_scales);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    Fp8Consumer<T, down, by_row> c{params};
    c.base = base;
    asm volatile("" : "+r"(c.base));
    for (Turns turn; turn.unit < units; turn.next()) c.run();
  }
#else
  __trap();  // the plan is of sm_90a, this library was compiled without it
#endif
}

}  // namespace quantmoe
