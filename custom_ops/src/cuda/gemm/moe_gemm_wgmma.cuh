// One grouped GEMM of the layer on wgmma (sm_90a), for many tokens: weights from registers, tokens from shared memory.
//
// A block computes 256 or 512 rows (16 or 32 panels) x up to kTokens tokens of one expert. One producer warpgroup fills
// a ring of stages of 64 columns. A stage has token rows, the panels' codes, one bulk copy each, and their scales.
// Token rows are gathered and 128-byte-swizzled. Two consumer warpgroups hold half of the rows each. A consumer warp
// dequantizes its panels' next columns while the tensor cores work on the columns before.
//
//                         64 columns of K a stage                       up to kTokens tokens
//                      +---------------------------+                  +----------------------+
//   consumer warp-     | warp 0: kPanels panels    |  registers       | rows of 128 bytes in |
//   group 0            | ...  warp 3               |  16 bits    x    | shared memory        |
//                      +---------------------------+                  +----------------------+
//   consumer warp-     | warp 0 ... warp 3         |                    the same for both
//   group 1            +---------------------------+
//   producer warpgroup   fills kStages stages {tokens, codes, scales and zero points} ahead of them
//
// The order of a lane's columns (FORMAT.md 3.2) is not memory order within 32 columns, so tokens are stored permuted.
// moe_route writes x so, and the epilogue of gate_up writes h so.
#pragma once
#include "cuda/common/activation.cuh"
#include "cuda/common/wgmma.cuh"
#include "cuda/formats/formats.h"
#include "cuda/gemm/instances.h"

namespace quantmoe {

// Block shapes. One block a multiprocessor has up to 144 tokens (an expert with 128 on average seldom has more) or 96.
// Two blocks have up to 48 tokens, and hide each other's waits when there is little to multiply. 4-bit codes also have
// 512 rows, with up to 64 or 80 tokens, or with up to 24 tokens and two blocks. The plan takes the shape that it
// expects to be done first.
template <typename F, Product product, int kTokens>
struct WgmmaTile {
  // Of rows g and g + 8: scales; and zero points.
  static constexpr int kRowBytes = F::kTwoLevels ? kTwoLevelBytes : Sizes<F>::kScaleBytes;
  static constexpr int kLaneBytes = kRowBytes + Sizes<F>::kZeroBytes;
  static constexpr WgmmaSizes kSizes = wgmma_sizes_of(kTokens, Sizes<F>::kBits, kLaneBytes, product);
  static constexpr bool kSmall = small_tile(kTokens);
  static constexpr int kPanels = kSizes.panels, kFeatures = features_of_panel(product);  // of a warp; of a panel
  static constexpr int kTilePanels = 8 * kPanels;
  static constexpr int kBlocks = kSmall ? 2 : 1;
  static constexpr int kBuffers = kSmall ? 1 : 2;                             // of dequantized weights
  static constexpr int kStages = kSizes.stages, kTokenBytes = kTokens * 128;  // of a stage
  static constexpr int kUnitBytes = 128 * Sizes<F>::kBits;                    // of a panel's codes
  static constexpr int kCodeBytes = kTilePanels * kUnitBytes;
  // For each panel 8 times the scales of rows g and g + 8; then as many zero points.
  static constexpr int kScaleBytes = kTilePanels * 8 * kRowBytes;
  static constexpr int kScaleStageBytes = kTilePanels * 8 * kLaneBytes;
  static constexpr int kResultRowBytes = kSizes.result_row_bytes;
  // Where they begin.
  static constexpr int kCodesAt = kStages * kTokenBytes, kScalesAt = kCodesAt + kStages * kCodeBytes;
  static constexpr int kResultsAt = kScalesAt + kStages * kScaleStageBytes;
  static_assert(1024 + kResultsAt + 2 * kTokens * kResultRowBytes == kSizes.shared_bytes);  // 1024: aligned
  // Static memory takes whole KiB.
  static_assert(kSizes.shared_bytes + (wgmma_static_bytes(kTokens, kStages) + 1023) / 1024 * 1024 <=
                wgmma_shared_limit(kTokens));
  static_assert(kStages >= 2);  // a consumer gives a stage back when the next has arrived
};

// What a warpgroup does next: columns [k_begin, k_end) * 64, a part of K, of its panels of an expert, for the tokens of
// a tile. Expert -1: nothing.
struct Work {
  int expert, panel, first, count, k_begin, k_end, part;
};

// Where column c of a 32-column block of tokens is stored.
__device__ inline int stored_column(int c) { return (c & ~31) | (c & 4) << 2 | (c & 2) << 2 | (c & 24) >> 2 | (c & 1); }

template <typename T, typename F, Product product, int kTokens>
struct WgmmaConsumer {
  using Shape = WgmmaTile<F, product, kTokens>;
  using Size = Sizes<F>;
  static constexpr int kStages = Shape::kStages, kPanels = Shape::kPanels, kUnitBytes = Shape::kUnitBytes;
  static constexpr int kOwnPairs = (kTokens + 127) / 128;  // that a thread takes to shared memory
  static constexpr int kGroups = F::kGroups;               // scales of a row in a unit; nvfp4: of this lane's columns
  // Panels whose scales are in registers: of formats with scales in each unit those in work.
  static constexpr bool kEachUnit = F::kTwoLevels || (kGroups == 2 && !Size::kRuntime);
  static constexpr int kHeld = kEachUnit ? 2 : kPanels;
  // With 8 bits, one panel's 64 columns are dequantized and multiplied at a time, instead of two panels' 32. The layout
  // has no smaller pieces.
  static constexpr bool kByPanel = Size::kBits == 8;
  const GemmParams& p;
  uint32_t full, empty, tokens_at;
  uint8_t* results;
  int group;                 // warpgroup 0 or 1
  int stage = 0, phase = 0;  // of the ring
  // In the first stage, in the warp's first panel; the other panels are every fourth from there. This lane's codes
  // (with 8 bits columns 0..31), then the scales of rows g and g + 8, and their zero points.
  uint32_t codes_at, scales_at, zeros_at;
  uint32_t block_mask;  // units of K in a block of scales, less one
  int lane;
  // In shared memory: the unit in work, its tokens' pairs and router's weights.
  Work* now;
  int* pairs;
  float* weights;

  __device__ const uint8_t* expert_at(int expert) const { return p.weights.rows[expert]; }
  __device__ bool two_groups() const { return Size::kRuntime ? p.weights.two_groups : kGroups == 2; }

  // Scales of a stage, of panels from `panel` on.
  struct Scales {
    uint32_t words[kHeld][2], zeros[kHeld];
  };
  __device__ __forceinline__ void load_scales(int stage, int panel, Scales& raw) const {
    const uint32_t at = scales_at + stage * Shape::kScaleStageBytes;
#pragma unroll
    for (int b = 0; b < kHeld; ++b) {
      const int from = (panel + b) * 32;  // rows of scales in between
      if constexpr (F::kTwoLevels) {
        raw.words[b][0] = F::template own_level<T>(load16(at + from * kTwoLevelBytes), lane % 4);
      } else if constexpr (Size::kScaleBytes == 8) {
        const uint2 v = load8(at + from * 8);
        raw.words[b][0] = v.x, raw.words[b][1] = v.y;
      } else {
        raw.words[b][0] = load4(at + from * 4);
      }
      if constexpr (Size::kZeroBytes > 0) raw.zeros[b] = load4(zeros_at + stage * Shape::kScaleStageBytes + from * 4);
    }
  }
  // As what codes are multiplied by.
  __device__ __forceinline__ void read_scales(const Scales& raw, uint32_t (&scale)[kHeld][kGroups][2],
                                              uint32_t (&zeros)[kHeld]) const {
    if constexpr (Size::kZeroBytes > 0) {
#pragma unroll
      for (int b = 0; b < kHeld; ++b)  // {row g, row g + 8} of each half
        zeros[b] = __byte_perm(raw.zeros[b], 0, two_groups() ? 0x3210 : lane & 4 ? 0x3232 : 0x1010);
    }
    auto each = [&](auto factor) {  // factor(words, half, row)
#pragma unroll
      for (int b = 0; b < kHeld; ++b)
#pragma unroll
        for (int half = 0; half < kGroups; ++half)
#pragma unroll
          for (int row = 0; row < 2; ++row) scale[b][half][row] = factor(raw.words[b], half, row);
    };
    if constexpr (F::kTwoLevels) {  // dequantize asks the lanes that have them
    } else if constexpr (F::kScaleFactors) {
      each(
          [&](const uint32_t* words, int half, int row) { return F::template half_factor<T>(words, half, row, lane); });
    } else {
      // Scales of a type; `groups` in a unit.
      auto of_type = [&](auto type, int groups) {
        each([&](const uint32_t* words, int half, int row) {
          constexpr int kType = decltype(type)::value;
          const uint32_t first = words[0], second = words[1];  // no index that is known at run time only
          [[maybe_unused]] const uint32_t word = half && groups == 2 ? second : first;
          if constexpr (kType == k_scale_type_bf16) return code_factor<T, F, __nv_bfloat16>(word, row);
          if constexpr (kType == k_scale_type_f16) return code_factor<T, F, __half>(word, row);
          if constexpr (kType == k_scale_type_f32) return code_factor<T, F>(__uint_as_float(words[row]));
          if constexpr (kType == k_scale_type_e8m0) return code_factor<T, F>(e8m0(words[0], 2 * half + row));
        });
      };
      if constexpr (F::kScaleType >= 0) {
        of_type(std::integral_constant<int, F::kScaleType>(), kGroups);
      } else {
        with_scale_type<F>(p.weights.scale_type, [&](auto type) { of_type(type, 1 + two_groups()); });
      }
    }
  }
  // One panel and 64 columns, a[half][k16], or two from `panel` on and 32, a[panel][k16]. `tokens`: descriptor_low;
  // wide: count is more than kTokens - 16.
  template <int N>
  __device__ __forceinline__ void products(float (&acc)[kPanels][kTokens / 2], int panel, uint32_t tokens,
                                           uint32_t (&a)[2][2][4], int count, bool wide, bool add) {
    constexpr int kLess = N <= 16 ? N - 8 : N - 16;
    if constexpr (N > 8 && N != 24) {
      if (N == kTokens ? !wide : count <= kLess) return products<kLess>(acc, panel, tokens, a, count, wide, add);
    }
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        if constexpr (kByPanel) {
          wgmma<T, N>(acc[panel], a[i][j], wgmma_descriptor(tokens + 4 * i + 2 * j), add || i > 0 || j > 0);
        } else {
          wgmma<T, N>(acc[panel + j], a[j][i], wgmma_descriptor(tokens + 2 * i), add || i > 0);
        }
      }
    wgmma_commit();
  }
  // One long function: codes, scales and operands of a step are registers. The next step's loads and the tensor cores
  // use them at the same time.
  template <int N>
  __device__ __forceinline__ void multiply(float (&acc)[kPanels][N / 2], int count, int k_begin, int k_end) {
    // Codes: [panel of two][step], of 8 bits [row g, row g + 8][step]. Scales of rows g and g + 8, as factors on codes,
    // twice in a word.
    uint32_t q[2][4], scale[kHeld][kGroups][2];
    [[maybe_unused]] uint2 high[2];  // bits of codes of 5 and 6
    uint32_t zeros[kHeld];
    // A operands as products takes them: [buffer][panel or half][k16].
    constexpr int kBuffers = Shape::kBuffers;
    constexpr bool kAhead =
        !Shape::kSmall && kPanels == 2;  // scales are loaded with the codes; others lack the registers
    uint32_t a[kBuffers][2][2][4];
    Scales raw;
    // Half of the columns of two panels, or all of one.
    auto dequantize = [&](int panel, int half, uint32_t(&a)[2][2][4]) {
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        if constexpr (kByPanel) half = b;
        const int from = (kByPanel ? panel : panel + b) % kHeld;
        if constexpr (F::kTwoLevels) {
          uint32_t scales[2], rest[2] = {};
          F::factors(raw.words[from][0], F::kMinima ? half : 2 * half + lane / 2 % 2, scales, rest);
#pragma unroll
          for (int step = 0; step < 2; ++step)
            F::template dequant_levels<T>(q[b][2 * half + step], high[b], 2 * half + step, scales, rest, a[b][step]);
        } else {
          const uint32_t(&factor)[2] = scale[from][kGroups == 2 ? half : 0];
          uint32_t low = 0, high = 0;
          if constexpr (Size::kZeroBytes > 0) {
            low = zero_point<T, true>(zeros[from], byte_pair(2 * half));
            high = zero_point<T, true>(zeros[from], byte_pair(2 * half + 1));
          }
#pragma unroll
          for (int step = 0; step < 2; ++step) {
            uint32_t(&to)[4] = a[b][step];
            const int s = 2 * half + step;
            F::template dequant_scaled<T>(kByPanel ? q[0][s] : q[b][s], q[1][s], factor, low, high, to);
          }
        }
      }
    };
    auto load = [&](int stage, int panel) {
      const uint32_t at = codes_at + stage * Shape::kCodeBytes + panel * 4 * kUnitBytes;
      if constexpr (kByPanel) {
#pragma unroll
        for (int row = 0; row < 2; ++row)
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const uint2 v = load8((at ^ 8 * half) + 512 * row);
            q[row][2 * half] = v.x, q[row][2 * half + 1] = v.y;
          }
      } else {
#pragma unroll
        for (int b = 0; b < 2; ++b) {
          const uint4 v = load16(at + b * 4 * kUnitBytes);
          q[b][0] = v.x, q[b][1] = v.y, q[b][2] = v.z, q[b][3] = v.w;
          const uint32_t high_from = at + b * 4 * kUnitBytes + 512 - lane * (16 - Size::kHighBytes);
          if constexpr (Size::kHighBytes == 4) high[b].x = load4(high_from);
          if constexpr (Size::kHighBytes == 8) high[b] = load8(high_from);
        }
      }
    };
    bool starts = true;  // the next unit a block of scales
    auto load_first = [&](int stage) {
      load(stage, 0);
      if (kAhead && starts) load_scales(stage, 0, raw);
    };
    // By a vote, as others below: of uniform values ptxas makes a predicate anew, 30 cycles, wherever it is used.
    const bool wide = __any_sync(~0u, count > kTokens - 16);
    barrier_wait(full + 8 * stage, phase);
    fence_async_proxy();
    load_first(stage);
    int used = 0;  // stage to give back
    int k = k_begin;
#pragma unroll 1
    while (true) {
      int next = stage + 1, next_phase = phase;
      if (next == kStages) next = 0, next_phase ^= 1;
      const bool add = __any_sync(~0u, k != k_begin);
      const bool last = __any_sync(~0u, k + 1 == k_end), ready = barrier_test(full + 8 * next, next_phase);
      uint32_t tokens;  // volatile: early, not where it is used
      asm volatile("mad.lo.u32 %0, %1, %2, %3;"
                   : "=r"(tokens)
                   : "r"(stage), "n"(Shape::kTokenBytes / 16), "r"(descriptor_low(tokens_at)));
      if (starts) {
        if (!kAhead) load_scales(stage, 0, raw);
        read_scales(raw, scale, zeros);
      }
      starts = kEachUnit || __any_sync(~0u, (k + 1 & block_mask) == 0);
      // Codes are loaded as soon as those before are dequantized.
      auto load_next = [&] {
        if (last) return;
        if (!ready) {
          asm volatile("" : "+r"(next_phase));  // or ptxas moves what barrier_test made of it to a uniform register
          barrier_wait(full + 8 * next, next_phase);
        }
        fence_async_proxy();  // tokens are written by cp.async, read by wgmma
        load_first(next);
      };
#pragma unroll
      for (int pair = 0; pair < kPanels / 2; ++pair) {
        if (pair > 0 && kHeld < kPanels) {
          load_scales(stage, 2 * pair, raw);
          read_scales(raw, scale, zeros);
        }
        dequantize(2 * pair, 0, a[0]);
        if (kByPanel) load(stage, 1);
        products<kTokens>(acc, kByPanel ? 0 : 2 * pair, tokens, a[0], count, wide, add);
        wgmma_wait<kBuffers - 1>();  // the other buffer is free, and the stage it was multiplied with
        if (kBuffers == 2 && pair == 0 && k > k_begin) barrier_arrive(empty + 8 * used);
        dequantize(kByPanel ? 1 : 2 * pair, 1, a[kBuffers - 1]);
        if (pair < kPanels / 2 - 1) load(stage, 2 * pair + 2);
        products<kTokens>(acc, kByPanel ? 1 : 2 * pair, kByPanel ? tokens : tokens + 4, a[kBuffers - 1], count, wide,
                          !kByPanel || add);
        if (pair == kPanels / 2 - 1) load_next();
        wgmma_wait<kBuffers - 1>();  // a[0] is free
      }
      if (kBuffers == 1) barrier_arrive(empty + 8 * stage);
      used = stage, stage = next, phase = next_phase;
      if (last) break;
      ++k;
    }
    if (kBuffers == 1) return;
    wgmma_wait<0>();
    barrier_arrive(empty + 8 * used);
  }

  // Results of this warpgroup, a row per token. Nothing here is kept in registers while the products are made. Places
  // come from an opaque thread number: otherwise the compiler computes them once, for every N, and wgmma lacks the
  // registers.
  template <int N>
  __device__ __forceinline__ void store(float (&acc)[kPanels][N / 2]) {
    const Weights& matrix = p.weights;
    int thread = threadIdx.x % 128;
    asm volatile("" : "+r"(thread));
    const int g = thread % 32 / 4, t = thread % 4, warp = thread / 32;
    uint8_t* stage = results + group * kTokens * Shape::kResultRowBytes;
    const Work work = *now;
    float bias[kPanels][2] = {};
    const float one_factor = F::template kProductFactor<T> * input_scale<F>(matrix, expert_at(work.expert));
    float2 factor = make_float2(one_factor, one_factor);
    if constexpr (F::kGlobalBytes > 0) {
      const float2 global = *reinterpret_cast<const float2*>(expert_at(work.expert) + matrix.globals_at);
      factor.x *= global.x, factor.y *= global.y;
    }
    if (matrix.bias_at && work.k_begin == 0) {
#pragma unroll
      for (int b = 0; b < kPanels; ++b) {
        const int row = min(work.panel + 4 * b + warp, matrix.panels - 1) * 16 + g;
        const float* from = reinterpret_cast<const float*>(expert_at(work.expert) + matrix.bias_at) + row;
        bias[b][0] = from[0], bias[b][1] = from[8];
      }
    }
    // Of a panel and token what rows g and g + 8 give: store(to, local, low, high).
    const auto each = [&](auto store) {
#pragma unroll
      for (int i = 0; i < N / 4; ++i) {
        if (8 * (i / 2) >= work.count) break;
        const int token = 8 * (i / 2) + 2 * t + i % 2;
        const float weight = weights[token];  // of columns past the end: anything, they are not stored
        T* to = reinterpret_cast<T*>(stage + token * Shape::kResultRowBytes);
#pragma unroll
        for (int b = 0; b < kPanels; ++b) {
          const float low = acc[b][i / 2 * 4 + i % 2], high = acc[b][i / 2 * 4 + 2 + i % 2];
          if constexpr (product == Product::kDown) {
            store(to, 4 * b + warp, weight * fmaf(factor.x, low, bias[b][0]),
                  weight * fmaf(factor.y, high, bias[b][1]));
          } else {
            store(to, 4 * b + warp, fmaf(weight * factor.x, low, bias[b][0]),
                  fmaf(weight * factor.y, high, bias[b][1]));
          }
        }
      }
    };
    // Panels past the end (padding of K for the next GEMM) are zero.
    const auto padded = [&](int local, float h) { return Half<T>::from(work.panel + local < matrix.panels ? h : 0.f); };
    const Activation& activation = p.activation;
    const auto gated = [&](auto activate) {
      each([&](T* to, int local, float gate, float up) {
        to[stored_column(local * 8 + g)] = padded(local, activate(gate, up));
      });
    };
    const auto ungated = [&](auto activate) {
      each([&](T* to, int local, float low, float high) {
        to[stored_column(local * 16 + g)] = padded(local, activate(low));
        to[stored_column(local * 16 + g + 8)] = padded(local, activate(high));
      });
    };
    // The activations of known models are inlined, each in its own loops. A call would save hundreds of registers, and
    // a choice in the loops costs up to 7 % of a layer.
    if constexpr (product == Product::kDown) {
      each([&](T* to, int local, float low, float high) {
        to[local * 16 + g] = Half<T>::from(low), to[local * 16 + g + 8] = Half<T>::from(high);
      });
    } else if constexpr (product == Product::kUp) {
      if (activation.kind == k_activation_relu2) {
        ungated([](float up) { return relu2(up); });
      } else {
        ungated([&](float up) { return activate1(activation.kind, up); });
      }
    } else {
      if (activation.kind == k_activation_silu) {
        gated([](float gate, float up) { return silu(gate) * up; });
      } else if (activation.kind == k_activation_swiglu_oai) {
        gated([&](float gate, float up) { return swiglu_oai(activation, gate, up); });
      } else {
        gated([&](float gate, float up) { return activate_other(activation, gate, up); });
      }
    }
    named_barrier(1 + group, 128);
    // 16 bytes of a token a thread, always the same columns.
    constexpr bool down = product == Product::kDown;
    constexpr int kRow = 4 * Shape::kFeatures * kPanels, kChunks = kRow / 8;
    const int c = thread % kChunks * 8, column = work.panel * Shape::kFeatures + c;
    if (column < p.out_columns) {
      T* out = static_cast<T*>(p.out) + column;
#pragma unroll Shape::kSmall ? 2 : 4
      for (int token = thread / kChunks; token < work.count; token += 128 / kChunks) {
        const int at = down ? pairs[token] * p.warps_k + work.part : work.first + token;
        *reinterpret_cast<uint4*>(out + static_cast<int64_t>(at) * p.out_columns) =
            *reinterpret_cast<const uint4*>(stage + token * Shape::kResultRowBytes + c * 2);
      }
    }
    named_barrier(1 + group, 128);
  }

  __device__ __forceinline__ void run(int count, int k_begin, int k_end, const SortedPair (&own)[kOwnPairs]) {
    float acc[kPanels][kTokens / 2];
    multiply<kTokens>(acc, count, k_begin, k_end);
    const int thread = threadIdx.x % 128;
#pragma unroll
    for (int i = 0; i < kOwnPairs; ++i)
      if (thread + 128 * i < count) {
        pairs[thread + 128 * i] = own[i].pair;
        weights[thread + 128 * i] = p.weight_here ? own[i].weight : 1.f;
      }
    named_barrier(1 + group, 128);  // pairs, weights and *now are there
    store<kTokens>(acc);
  }
};

// One long function: with its producer and its consumers as functions ptxas gives both other registers and addresses.
//
//   begin      barriers; after the previous kernel, `locate` gives a unit of work
//   producer   warpgroup 0: tokens by 16 bytes, codes in bulk by one lane a warp, scales where a block of them begins
//   consumers  two warpgroups, half of the panels each: pairs asked for first, `run` multiplies and stores
template <typename T, typename F, Product product, int kTokens>
__global__ void __launch_bounds__(kWgmmaThreads, WgmmaTile<F, product, kTokens>::kBlocks)
    moe_gemm_wgmma(const __grid_constant__ GemmParams params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Shape = WgmmaTile<F, product, kTokens>;
  constexpr bool down = product == Product::kDown;
  using Size = Sizes<F>;
  constexpr int kStages = Shape::kStages, kUnitBytes = Shape::kUnitBytes;
  extern __shared__ __align__(1024) uint8_t raw[];
  launch_dependents();
  uint8_t* shared = raw + (1024 - shared_address(raw) % 1024) % 1024;
  __shared__ uint64_t barriers[2 * kStages];
  __shared__ Work now[2];
  __shared__ int pairs[2][kTokens];
  __shared__ float router_weights[2][kTokens];
  const uint32_t full = shared_address(barriers), empty = full + 8 * kStages;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(full + 8 * i, 128);
      barrier_init(empty + 8 * i, 256);  // each consumer for what it has read itself
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  wait_for_previous();
  const Weights& weights = params.weights;
  const int blocks = (weights.panels + Shape::kTilePanels - 1) / Shape::kTilePanels;
  const int parts = down ? params.warps_k : 1;  // of K; moe_combine adds them up
  const int units = params.tiles[params.max_tiles].count * blocks * parts;
  // The tiles of a group take turns with the same rows: the weights are then read from memory once for all of them.
  auto locate = [&](int unit, int group) {
    Work work{-1};
    if (unit >= units) return work;
    const int part = unit % parts;
    unit /= parts;
    const Tile any = params.tiles[unit / blocks];
    const int local = unit - any.group_first * blocks;
    const Tile tile = params.tiles[any.group_first + local % any.group_size];
    return Work{tile.expert,
                local / any.group_size * Shape::kTilePanels + group * (Shape::kTilePanels / 2),
                tile.first,
                tile.count,
                part * weights.units / parts,
                (part + 1) * weights.units / parts,
                part};
  };
  const int warpgroup = threadIdx.x / 128;
  if (warpgroup == 0) {
    if constexpr (Shape::kSmall) {
      asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
    } else {
      asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    }
    const int chunk = threadIdx.x % 8, first_row = threadIdx.x / 8;
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    const uint32_t base = shared_address(shared);
    const uint32_t tokens_to = base + first_row * 128 + ((chunk ^ (first_row & 7)) << 4);
    const uint8_t* x = static_cast<const uint8_t*>(params.x) + chunk * 16;
    const uint64_t once = evict_first_policy();
    constexpr int kRows = (kTokens + 15) / 16;  // that a thread copies
    const int scale_bytes =
        Size::kRuntime ? weights.scale_bytes : Size::kScaleBytes;  // of the scales of rows g and g + 8
    const bool two_groups = Size::kRuntime ? weights.two_groups : F::kGroups == 2;
    int stage = 0, phase = 1;
    for (Turns turn; turn.unit < units; turn.next()) {
      const Work work = locate(turn.unit, 0);
      const uint8_t* expert = weights.rows[work.expert];
      uint32_t rows[kRows];  // in pieces of 16 bytes: plan.cc has the limit
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const int row = min(first_row + 16 * i, work.count - 1);  // rows past the end repeat the last
        const int at = down ? work.first + row : params.sorted_pairs[work.first + row].pair / params.x_divisor;
        rows[i] = static_cast<uint32_t>(at) * (params.x_columns / 8);
      }
      // The warp's panels are every fourth. None past the end: what is there is not stored.
      const int64_t panel_bytes = static_cast<int64_t>(weights.units) * kUnitBytes;
      const uint8_t* codes =
          expert + (work.panel + warp) * panel_bytes + static_cast<int64_t>(work.k_begin) * kUnitBytes;
      const uint8_t* tokens = x + work.k_begin * (2 * kUnit);
      const int panels = min((weights.panels - work.panel - warp + 3) / 4, Shape::kTilePanels / 4);
#pragma unroll 1
      for (int k = work.k_begin; k < work.k_end; ++k) {
        barrier_wait(empty + 8 * stage, phase);
        if (panels > 0 && one_lane()) {
          const uint32_t codes_to = base + Shape::kCodesAt + stage * Shape::kCodeBytes + warp * kUnitBytes;
          barrier_expect(full + 8 * stage, panels * kUnitBytes);
#pragma unroll
          for (int i = 0; i < Shape::kTilePanels / 4; ++i)
            if (i < panels)
              bulk_copy_once(codes_to + i * 4 * kUnitBytes, codes + i * 4 * panel_bytes, kUnitBytes, full + 8 * stage,
                             once);
        }
        codes += kUnitBytes;
        const uint32_t stage_to = tokens_to + stage * Shape::kTokenBytes;
        // Addresses first, volatile: ptxas would put one after the other into the same registers, which copies read
        // late.
        uint64_t from[kRows];
#pragma unroll
        for (int i = 0; i < kRows; ++i)
          asm volatile("mad.wide.u32 %0, %1, 16, %2;" : "=l"(from[i]) : "r"(rows[i]), "l"(tokens));
#pragma unroll
        for (int i = 0; i < kRows; ++i)
          if (16 * i < work.count && (kTokens % 16 == 0 || first_row + 16 * i < kTokens))
            copy_async16(stage_to + i * 2048, reinterpret_cast<const void*>(from[i]), true);
        tokens += 2 * kUnit;
        const int block = k >> weights.block_shift;
        if (F::kTwoLevels || k == work.k_begin || k == block << weights.block_shift) {
          const uint32_t scales_to = base + Shape::kScalesAt + stage * Shape::kScaleStageBytes;
#pragma unroll
          for (int i = 0; i < Shape::kTilePanels / 16; ++i) {
            const int local = first_row + 16 * i, panel = min(work.panel + local, weights.panels - 1);
            const int64_t at = static_cast<int64_t>(panel) * weights.blocks + block;
            const uint32_t scale_to = scales_to + (local * 8 + chunk) * Shape::kRowBytes;
            if constexpr (F::kTwoLevels) {
              const uint8_t* factors = expert + weights.scales_at + at * F::kBlockBytes;
              copy_async_small<F::kFactorBytes>(scale_to, factors + chunk * F::kFactorBytes);
              copy_async_small<8>(scale_to + 8, factors + 8 * F::kFactorBytes + k % 4 * F::kUnitLevels + chunk * 8);
              continue;
            }
            const uint8_t* scales = expert + weights.scales_at + (at * 8 + chunk) * scale_bytes;
            if (scale_bytes == 4) {
              copy_async_small<4>(scale_to, scales);
            } else {
              copy_async_small<8>(scale_to, scales);
            }
            if constexpr (Size::kZeroBytes > 0)
              copy_async_small<4>(
                  scales_to + Shape::kScaleBytes + (local * 8 + chunk) * 4,
                  expert + weights.zeros_at + at * weights.zero_bytes + (two_groups ? 4 * chunk : 2 * chunk & ~3));
          }
        }
        barrier_arrive_copied(full + 8 * stage);
        if (++stage == kStages) stage = 0, phase ^= 1;
      }
    }
    copy_async_wait_all();
  } else {
    if constexpr (Shape::kSmall) {
      asm volatile("setmaxnreg.inc.sync.aligned.u32 104;");
    } else {
      asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    }
    WgmmaConsumer<T, F, product, kTokens> consumer{params};
    const int thread = threadIdx.x % 128, lane = thread % 32, warp = thread / 32;
    consumer.group = warpgroup - 1;
    consumer.tokens_at = shared_address(shared);
    const int panel = consumer.group * (Shape::kTilePanels / 2) + warp;
    consumer.codes_at = consumer.tokens_at + Shape::kCodesAt + panel * kUnitBytes + Size::lane_at(lane) +
                        (consumer.kByPanel ? lane % 2 * 8 : 0);
    consumer.scales_at = consumer.tokens_at + Shape::kScalesAt + (panel * 8 + lane / 4) * Shape::kRowBytes;
    consumer.zeros_at = consumer.tokens_at + Shape::kScalesAt + Shape::kScaleBytes + (panel * 8 + lane / 4) * 4;
    consumer.lane = lane;
    consumer.results = shared + Shape::kResultsAt;
    consumer.full = full, consumer.empty = empty;
    // Opaque from here on, or the compiler derives them from threadIdx again for every 64 columns.
    asm volatile("" : "+r"(consumer.codes_at), "+r"(consumer.scales_at));
    asm volatile("" : "+r"(consumer.full), "+r"(consumer.empty));
    consumer.block_mask = (1u << weights.block_shift) - 1;
    consumer.now = now + consumer.group, consumer.pairs = pairs[consumer.group],
    consumer.weights = router_weights[consumer.group];
    Work next = locate(blockIdx.x, consumer.group);
    for (Turns turn; turn.unit < units;) {
      const int count = next.count, k_begin = next.k_begin, k_end = next.k_end;
      if (thread == 0) *consumer.now = next;
      SortedPair own[consumer.kOwnPairs] = {};  // asked for here, used after the products
#pragma unroll
      for (int i = 0; i < consumer.kOwnPairs; ++i)
        if (thread + 128 * i < count) own[i] = params.sorted_pairs[next.first + thread + 128 * i];
      turn.next();
      next = locate(turn.unit, consumer.group);
      consumer.run(count, k_begin, k_end, own);
    }
  }
#else
  __trap();  // the plan is of sm_90a, this library was compiled without it
#endif
}

}  // namespace quantmoe
