// QuantLinear on wgmma (sm_90a), for more than a few tokens: one kernel, weights from registers, tokens from shared
// memory.
//
// A block computes 128 or 256 rows of the weights (8 or 16 panels) x up to kTokens tokens. One thread fills a ring of
// stages of 64 columns with tensor copies: tokens, codes, scales and zero points. Tokens are 128-byte-swizzled, as they
// are multiplied. Two or four consumer warpgroups, a panel a warp, dequantize a stage's weights while the tensor cores
// have products of the others. Blocks of a cluster may share K; their sums are added in the order of the parts.
//
//              K, 64 columns a stage, of a cluster's block its part        up to kTokens tokens
//             +-------------------------------------------------+        +---------------------+
//   8 or 16   | a panel a warp; four warps a warpgroup, which   |        | rows of 128 bytes   |
//   panels    | has two columns of work dequantized ahead       |   x    | in shared memory    |
//             +-------------------------------------------------+        +---------------------+
//   one more warpgroup: its first thread copies
//
// Tokens are multiplied in memory order. Layout marlin has 8 neighbouring columns in one lane (FORMAT.md 3.2), so lane
// t reads columns 2t and 2t + 1 of them itself.
#pragma once
#include "cuda/common/kernels.cuh"
#include "cuda/common/wgmma.cuh"
#include "cuda/formats/formats.h"
#include "cuda/gemm/instances.h"

namespace quantmoe {

template <class F, int kTokens>
struct LinearTile {
  static constexpr LinearSizes kSizes = linear_sizes_of(kTokens, F::kBits, F::kTwoLevels, F::kZeroBytes);
  static constexpr int kPanels = kSizes.panels, kStages = kSizes.stages, kConsumers = 32 * kPanels;  // threads
  static constexpr bool kBytes = F::kBits == 8, kFloats = F::kBits == 16;
  static constexpr int kUnitBytes = 128 * F::kBits;       // of a panel's codes
  static constexpr int kHigh = Sizes<F>::kHighBytes / 4;  // words of a lane's high bits
  static constexpr int kTokenBytes = kTokens * 128, kCodeBytes = kPanels * kUnitBytes;
  static constexpr int kScaleBytes = kPanels * linear_scale_bytes(F::kBits, F::kTwoLevels);
  static constexpr int kZeroBytes = F::kZeroBytes > 0 ? kPanels* kLinearZeroBytes : 0;
  static constexpr int kResultTokens = linear_result_tokens(kTokens);
  // Where they begin.
  static constexpr int kCodesAt = kStages * kTokenBytes, kScalesAt = kCodesAt + kStages * kCodeBytes;
  static constexpr int kZerosAt = kScalesAt + kStages * kScaleBytes;
  static constexpr int kResultsAt = kStages * (kTokenBytes + kCodeBytes + kScaleBytes + kZeroBytes);
  static_assert(1024 + kResultsAt + kPanels * 32 * kResultTokens == kSizes.shared_bytes);  // 1024: to align
  static_assert(kConsumers * kTokens * 2 <= kResultsAt);                                   // sums of a part of K
  static_assert(kResultsAt % 1024 == 0);
};

// d = or, if add, += a * tokens, a unit of K, of one of the widths of such a tile. tokens: descriptor_low.
template <typename T, int kTokens, int kLow = kLinearLeast<kTokens>, int kHigh = kTokens>
__device__ __forceinline__ void linear_products(float (&d)[kTokens / 2], uint32_t tokens, const uint32_t (&a)[4][4],
                                                int width, bool add) {
  if constexpr (kLow < kHigh) {
    constexpr int kMiddle = kLow + (kHigh - kLow) / 32 * 16;
    if (width <= kMiddle) return linear_products<T, kTokens, kLow, kMiddle>(d, tokens, a, width, add);
    linear_products<T, kTokens, kMiddle + 16, kHigh>(d, tokens, a, width, add);
  } else {
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step)
      wgmma<T, kLow>(d, a[step], wgmma_descriptor(tokens + 2 * step), add || step > 0);
    wgmma_commit();
  }
}

// One long function: what a consumer loads, dequantizes and multiplies are registers of three columns of work at once.
// With its producer as a function ptxas spills others of them.
//
//   begin      barriers; the block's tiles and part of K
//   producer   one thread: weights before the previous kernel ends, then tokens, then both as stages become empty
//   consumers  load, dequantize and multiply a unit; the next unit's codes are loaded during the products
//   result     one part: factor, bias, 16 bits, through shared memory. A cluster: each block adds up some tokens first
template <typename T, class F, int kTokens>
__global__ void __launch_bounds__(linear_threads(LinearTile<F, kTokens>::kPanels),
                                  LinearTile<F, kTokens>::kSizes.blocks)
    linear_wgmma(const __grid_constant__ LinearParams params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Shape = LinearTile<F, kTokens>;
  constexpr int kStages = Shape::kStages, kUnitBytes = Shape::kUnitBytes;
  constexpr bool kBytes = Shape::kBytes, kFloats = Shape::kFloats;
  extern __shared__ __align__(1024) uint8_t raw_shared[];
  __shared__ uint64_t barriers[2 * kStages];
  uint8_t* shared = raw_shared + (1024 - shared_address(raw_shared) % 1024) % 1024;
  const uint32_t base = shared_address(shared);
  const uint32_t full = shared_address(barriers), empty = full + 8 * kStages;
  if (threadIdx.x == 0) {
    for (const CUtensorMap* map : {&params.codes, &params.tokens}) prefetch_map(*map);
    if constexpr (!kFloats) prefetch_map(params.scales);
    for (int i = 0; i < kStages; ++i) {
      barrier_init(full + 8 * i, 1);
      barrier_init(empty + 8 * i, Shape::kConsumers);  // each consumer for what it has read itself
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  const Weights& weights = params.weights;
  const int parts = params.parts, part = static_cast<int>(blockIdx.x) % parts;
  const int k_begin = part * weights.units / parts, k_end = (part + 1) * weights.units / parts;
  const int first_tile = blockIdx.x / parts, tile_step = gridDim.x / parts;
  if (threadIdx.x >= Shape::kConsumers) {
    set_registers<false, kTokens == 64 ? 32 : kTokens == 128 ? 24 : 40>();
    if (threadIdx.x != Shape::kConsumers) return;
    // Weights that are read once leave L2 first.
    const uint64_t often = evict_normal_policy(),
                   once = params.tiles == params.row_tiles ? evict_first_policy() : often;
    const int zero_bytes = Shape::kZeroBytes ? weights.zero_bytes : 0;
    const int scale_bytes = kFloats ? 0 : F::kTwoLevels ? 8 * kTwoLevelBytes : 8 * weights.scale_bytes;
    const int stage_bytes = params.width * 128 + Shape::kCodeBytes + Shape::kPanels * (scale_bytes + zero_bytes);
    auto copy_weights = [&](int stage, int k, int panel) {
      const int block = k >> weights.block_shift;
      const uint32_t barrier = full + 8 * stage;
      barrier_arrive_expect(barrier, stage_bytes);
      tensor_copy(base + Shape::kCodesAt + stage * Shape::kCodeBytes, params.codes, 0, k * (kUnitBytes / 128), panel,
                  barrier, once);
      const uint32_t scales_to = base + Shape::kScalesAt + stage * Shape::kScaleBytes;
      if constexpr (F::kTwoLevels) {  // two lines of each panel's block: the factors; the unit's levels
        const int lines = block * (F::kBlockBytes / kLevelLine), levels = 8 * F::kFactorBytes / kLevelLine + k % 4 * 2;
        tensor_copy(scales_to, params.scales, 0, lines, panel, barrier, often);
        tensor_copy(scales_to + Shape::kScaleBytes / 2, params.scales, 0, lines + levels, panel, barrier, often);
      } else if constexpr (!kFloats) {
        tensor_copy(scales_to, params.scales, 0, block, panel, barrier, often);
      }
      if constexpr (Shape::kZeroBytes > 0)
        tensor_copy(base + Shape::kZerosAt + stage * Shape::kZeroBytes, params.zeros, 0, block, panel, barrier, often);
    };
    auto copy_tokens = [&](int stage, int k, int first_token) {
      tensor_copy(base + stage * Shape::kTokenBytes, params.tokens, k * kUnit, first_token, full + 8 * stage, often);
    };
    // Weights do not depend on the kernel before this one.
    const int filled = min(kStages, k_end - k_begin);
    for (int i = 0; i < filled; ++i) copy_weights(i, k_begin + i, first_tile % params.row_tiles * Shape::kPanels);
    wait_for_previous();
    launch_dependents();
    for (int i = 0; i < filled; ++i) copy_tokens(i, k_begin + i, first_tile / params.row_tiles * params.width);
    int stage = filled, phase = 1, k = k_begin + filled;
    for (int tile = first_tile; tile < params.tiles; tile += tile_step, k = k_begin) {
      const int panel = tile % params.row_tiles * Shape::kPanels, first_token = tile / params.row_tiles * params.width;
#pragma unroll 1
      for (; k < k_end; ++k, ++stage) {
        if (stage == kStages) stage = 0, phase ^= 1;
        barrier_wait(empty + 8 * stage, phase);
        copy_weights(stage, k, panel);
        copy_tokens(stage, k, first_token);
      }
    }
    return;
  }
  set_registers<true, kTokens == 64 ? 104 : kTokens == 128 ? 112 : 232>();
  constexpr int kHigh = Shape::kHigh;
  constexpr int kWords = kBytes || kFloats ? 2 : 1;  // of a lane's codes of 8 columns
  constexpr int kGroups = F::kUnitGroups;            // at most, of scales in a unit
  const int lane = threadIdx.x % 32, own_panel = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  // In the first stage: the word with columns 2t and 2t + 1 of a unit's first 8 in row g; load() reads all of them.
  // With 4 bits lane 4g + t' has chunk t', swizzled by the copy. With 8 bits see FORMAT.md 3.2. With 16 bits a lane has
  // what ldmatrix asks it for, of 16 columns; the copy swizzles.
  uint32_t codes_at = base + Shape::kCodesAt + own_panel * kUnitBytes;
  // What the copy swizzles one of its lines of 128 bytes by.
  const auto swizzle_of = [&](int line) {
    return kHigh > 0 ? (own_panel * (kUnitBytes / 128) + line) % 8 : own_panel % 2 * 4 + line;
  };
  if constexpr (kFloats) {
    codes_at += lane % 16 * 128 + ((lane / 16 ^ lane % 8) << 4);
  } else if constexpr (kBytes) {
    codes_at += g * 64 + (g / 2 << 4) + t / 2 * 4;
  } else {
    codes_at += g / 2 * 128 + ((g % 2 * 4 ^ swizzle_of(g / 2)) << 4) + t / 2 * 4;
  }
  // Shuffled, or ptxas derives them from threadIdx again for every 64 columns.
  codes_at = __shfl_sync(~0u, codes_at, lane);
  const uint32_t scales_at =
      F::kTwoLevels ? base + Shape::kScalesAt
                    : __shfl_sync(~0u, base + Shape::kScalesAt + (own_panel * 8 + g) * weights.scale_bytes, lane);
  // Codes' high bits come after the unit's low bits. Row g's four lanes have 16 bytes of them, or 32.
  [[maybe_unused]] uint32_t high_at = 0;
  if constexpr (kHigh > 0) {
    const int line = 4 + kHigh * g / 8;
    high_at = base + Shape::kCodesAt + own_panel * kUnitBytes + line * 128 + ((kHigh * g % 8 ^ swizzle_of(line)) << 4);
    high_at = __shfl_sync(~0u, high_at, lane);
  }
  const int shift = __shfl_sync(~0u, t % 2 * (kBytes ? 8 : 4), lane);  // of the word
  const uint32_t zeros_at =
      base + Shape::kZerosAt + own_panel * weights.zero_bytes + (weights.two_groups ? 4 * g : 2 * g & ~3);
  const int width = __shfl_sync(~0u, params.width, 0);
  const uint32_t tokens_at = __shfl_sync(~0u, descriptor_low(base), 0);
  const uint32_t block_mask = (1u << weights.block_shift) - 1;

  uint32_t words[8][kWords], scale_words[2], zero_words = 0;
  [[maybe_unused]] uint4 high_words[2];
  auto load = [&](int stage, bool scales) {
    const uint32_t at = codes_at + stage * Shape::kCodeBytes;
    if constexpr (kFloats) {
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        uint32_t m[4];
        load_matrices(m, at ^ step << 5);
#pragma unroll
        for (int i = 0; i < 4; ++i) words[2 * step + i / 2][i % 2] = m[i];
      }
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int half = i / 4, chunk = i % 4;
      if constexpr (kFloats) {
        break;
      } else if constexpr (kBytes) {
        const uint32_t from = at ^ (chunk << 4 | ((chunk & 1) ^ half) << 3);
        words[i][0] = load4(from), words[i][1] = load4(from + 512);
      } else {
        words[i][0] = load4((at ^ chunk << 4) + 8 * half);
      }
    }
#pragma unroll
    for (int i = 0; i < kHigh; ++i) high_words[i] = load16((high_at + stage * Shape::kCodeBytes) ^ i << 4);
    if (kFloats || !scales) return;
    const uint32_t from = scales_at + stage * Shape::kScaleBytes;
    if constexpr (F::kTwoLevels) {
      const uint32_t factors = from + own_panel * 64 + g * F::kFactorBytes;
      const uint2 levels = load8(from + Shape::kScaleBytes / 2 + own_panel * 64 + g * 8);
      scale_words[0] = F::template own_level<T>(
          make_uint4(load4(factors), F::kMinima ? load4(factors + 4) : 0, levels.x, levels.y), t);
      return;
    }
    scale_words[0] = scale_words[1] = load4(from);
    if (weights.scale_bytes == 8) scale_words[1] = load4(from + 4);
    if constexpr (Shape::kZeroBytes > 0)
      zero_words = __byte_perm(load4(zeros_at + stage * Shape::kZeroBytes), 0,
                               weights.two_groups ? 0x3210
                               : g % 2            ? 0x3232
                                                  : 0x1010);
  };
  // What codes are multiplied by.
  uint32_t factors[kGroups][2];
  [[maybe_unused]] uint32_t rest[kGroups][2] = {};
  auto read_scales = [&] {
    auto each = [&](auto factor) {  // factor(words, group, row)
#pragma unroll
      for (int i = 0; i < kGroups; ++i)
#pragma unroll
        for (int row = 0; row < 2; ++row) factors[i][row] = factor(scale_words, i, row);
    };
    if constexpr (F::kTwoLevels) {
#pragma unroll
      for (int i = 0; i < kGroups; ++i) F::factors(scale_words[0], i, factors[i], rest[i]);
    } else if constexpr (F::kScaleFactors) {
      each([](const uint32_t(&from)[2], int i, int row) { return F::template group_factor<T>(from, i, row); });
    } else {
      with_scale_type<F>(weights.scale_type, [&](auto type) {
        each([](const uint32_t(&from)[2], int i, int row) {
          constexpr int kType = decltype(type)::value;
          [[maybe_unused]] const uint32_t word =
              from[kGroups == 2 ? i : 0];  // the same twice where a unit has one group
          if constexpr (kType == k_scale_type_bf16) return code_factor<T, F, __nv_bfloat16>(word, row);
          if constexpr (kType == k_scale_type_f16) return code_factor<T, F, __half>(word, row);
          if constexpr (kType == k_scale_type_f32) return code_factor<T, F>(__uint_as_float(from[row]));
          if constexpr (kType == k_scale_type_e8m0) return code_factor<T, F>(e8m0(from[0], 2 * i + row));
        });
      });
    }
  };
  // High bits of lane `lane_of_row`, whose step t / 2 and half t % 2 come first.
  [[maybe_unused]] auto high_of = [&](int lane_of_row) {
    const uint4& v = high_words[kHigh * lane_of_row / 4];
    const int right = kHigh * (t / 2 * 4 + t % 2);
    if constexpr (kHigh == 2)
      return lane_of_row % 2 ? make_uint2(v.z >> right, v.w >> right) : make_uint2(v.x >> right, v.y >> right);
    return make_uint2((lane_of_row == 0 ? v.x : lane_of_row == 1 ? v.y : lane_of_row == 2 ? v.z : v.w) >> right, 0);
  };
  auto dequantize = [&](uint32_t(&a)[4][4]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int half = i / 4;
      const uint32_t(&factor)[2] = factors[kGroups == 4 ? i / 2 : half];
      uint32_t two[4];  // of rows g and g + 8; the rest is not made
      uint32_t low = 0, high = 0;
      if constexpr (Shape::kZeroBytes > 0) {
        low = zero_point<T, true>(zero_words, byte_pair(2 * half));
        high = zero_point<T, true>(zero_words, byte_pair(2 * half + 1));
      }
      if constexpr (kFloats) {
        two[0] = words[i][0], two[1] = words[i][1];
      } else if constexpr (F::kTwoLevels) {
        F::template dequant_levels<T>(words[i][0] >> shift, high_of(i % 4), 2 * half, factor,
                                      rest[kGroups == 4 ? i / 2 : half], two);
      } else {
        F::template dequant_scaled<T>(words[i][0] >> shift, words[i][kWords - 1] >> shift, factor, low, high, two);
      }
      a[i / 2][i % 2 * 2] = two[0], a[i / 2][i % 2 * 2 + 1] = two[1];
    }
  };

  const int group = own_panel / 4, thread = threadIdx.x % 128;
  int stage = 0, phase = 0;
  // Warpgroups start one after the other, so that the tensor cores have products while one stores results.
  if (parts == 1) barrier_wait(full + 8 * min(group, min(kStages, k_end) - 1), 0);
  for (int tile = first_tile; tile < params.tiles; tile += tile_step) {
    float acc[kTokens / 2];
    int k = k_begin;
    barrier_wait(full + 8 * stage, phase);
    load(stage, true);
    bool starts = true;  // the loaded unit a block of scales
#pragma unroll 1
    while (true) {
      uint32_t a[4][4];
      // By votes: of uniform values ptxas makes a predicate anew wherever it is used.
      const bool add = __any_sync(~0u, k != k_begin), more = __any_sync(~0u, ++k < k_end);
      if (!kFloats && starts) read_scales();
      dequantize(a);
      linear_products<T, kTokens>(acc, tokens_at + stage * (Shape::kTokenBytes / 16), a, width, add);
      const int used = stage;
      if (++stage == kStages) stage = 0, phase ^= 1;
      if (more) {
        starts = F::kTwoLevels || (k & block_mask) == 0;
        barrier_wait(full + 8 * stage, phase);
        load(stage, starts);
      }
      wgmma_wait<0>();
      // The products read `a` until here: what was loaded meanwhile must not have its registers.
      for (const auto& step : a) asm volatile("" ::"r"(step[0]), "r"(step[1]), "r"(step[2]), "r"(step[3]));
      barrier_arrive(empty + 8 * used);
      if (!more) break;
    }

    const int first_token = tile / params.row_tiles * params.width,
              count = min(params.width, params.rows - first_token);
    const int panel = tile % params.row_tiles * Shape::kPanels + own_panel;
    float2 factor;
    factor.x = factor.y = F::template kProductFactor<T> * input_scale<F>(weights, weights.rows.first);
    if constexpr (F::kGlobalBytes > 0) {
      const float2 global = *reinterpret_cast<const float2*>(weights.rows.first + weights.globals_at);
      factor.x *= global.x, factor.y *= global.y;
    }
    float2 bias = make_float2(0.f, 0.f);  // of rows g and g + 8
    if (weights.bias_at && panel < weights.panels) {
      const float* from = reinterpret_cast<const float*>(weights.rows.first + weights.bias_at) + panel * 16 + g;
      bias = make_float2(from[0], from[8]);
    }
    // The warpgroup's 64 results of a token lie side by side, swizzled; tokens [0, kResultTokens) of those from `from`.
    const uint32_t results = base + Shape::kResultsAt + group * (128 * Shape::kResultTokens);
    const uint32_t result_to =
        results + (lane / 16 * 8 + lane % 8) * 128 + ((2 * (own_panel % 4) + lane / 8 % 2 ^ lane % 8) << 4);
    auto result = [&](float low, float high, bool second) {
      return second ? Half<T>::pack(fmaf(factor.y, low, bias.y), fmaf(factor.y, high, bias.y))
                    : Half<T>::pack(fmaf(factor.x, low, bias.x), fmaf(factor.x, high, bias.x));
    };
    auto store = [&](int from, int tokens) {
      named_barrier(2 + group, 128);
      const int chunk = thread % 8, column = (panel - own_panel % 4) * 16 + chunk * 8;
      const uint32_t at = results + ((chunk ^ thread / 8 % 8) << 4);
      T* to = static_cast<T*>(params.out) + static_cast<int64_t>(first_token + from) * params.out_columns + column;
#pragma unroll 4
      for (int row = thread / 8; row < tokens; row += 16) {
        const uint4 v = load16(at + row * 128);
        T* y = to + static_cast<int64_t>(row) * params.out_columns;
        if (column + 8 <= params.out_columns && params.out_columns % 8 == 0) {
          *reinterpret_cast<uint4*>(y) = v;
        } else {
          const uint32_t pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
          for (int j = 0; j < 8; ++j)
            if (column + j < params.out_columns)
              reinterpret_cast<uint16_t*>(y)[j] = static_cast<uint16_t>(pairs[j / 2] >> (j % 2 * 16));
        }
      }
      named_barrier(2 + group, 128);
    };
    if (parts == 1) {
#pragma unroll
      for (int from = 0; from < kTokens; from += Shape::kResultTokens) {
        if (from >= count) break;
#pragma unroll
        for (int i = 0; i < Shape::kResultTokens / 16; ++i) {
          const float* sums = acc + from / 2 + 8 * i;
          const uint32_t m[4] = {result(sums[0], sums[1], false), result(sums[2], sums[3], true),
                                 result(sums[4], sums[5], false), result(sums[6], sums[7], true)};
          store_transposed(result_to + i * 2048, m);
        }
        store(from, min(count - from, Shape::kResultTokens));
      }
      continue;
    }
    // Each block adds up its share of the cluster's sums, which lie over the stages.
    named_barrier(1, Shape::kConsumers);
    constexpr int kPieceBytes = 16 * Shape::kConsumers;  // of 8 tokens
    const int pieces = params.width / 8;
    const uint32_t mine = base + threadIdx.x * 16;
#pragma unroll
    for (int i = 0; i < kTokens / 8; ++i)
      if (i < pieces)
        asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(mine + i * kPieceBytes), "f"(acc[4 * i]),
                     "f"(acc[4 * i + 1]), "f"(acc[4 * i + 2]), "f"(acc[4 * i + 3])
                     : "memory");
    cluster_barrier();
    const int first_piece = part * pieces / parts, last_piece = (part + 1) * pieces / parts;
    int piece = first_piece, rank = 0;
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 1
    while (piece < last_piece) {
      constexpr int kAtOnce = kTokens == 256 ? 16 : 8;  // it is latency that this takes
      float4 v[kAtOnce];
      int from = piece, of = rank;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        v[i] = load_remote16(mine + min(from, last_piece - 1) * kPieceBytes, of);
        if (++of == parts) of = 0, ++from;
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (piece >= last_piece) break;
        sum.x += v[i].x, sum.y += v[i].y, sum.z += v[i].z, sum.w += v[i].w;
        if (++rank < parts) continue;
        const uint32_t m[2] = {result(sum.x, sum.y, false), result(sum.z, sum.w, true)};
        store_transposed(result_to + (piece - first_piece) * 1024, m);
        sum = make_float4(0.f, 0.f, 0.f, 0.f);
        rank = 0, ++piece;
      }
    }
    store(8 * first_piece, min(count, 8 * last_piece) - 8 * first_piece);
    cluster_barrier();  // no block ends while others read its sums
  }
#else
  __trap();  // the plan is of sm_90a, this library was compiled without it
#endif
}

}  // namespace quantmoe
