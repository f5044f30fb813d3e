// The inner loop of the mma.sync kernels: a warp's private stream of weights.
//
// Every lane copies with cp.async exactly the bytes it will read itself. The layout gives each lane 16 bytes of a unit,
// twice with 8 bits, and a token's matching 16-byte pieces. So the pipeline needs no barrier. A warp waits for its own
// copies only, and runs ahead across tiles and experts. Warps meet only to add up the parts of K.
//
//   a warp's ring   | stage 0 | stage 1 | stage 2 |        copy_weights, copy_tokens run kStages - 1 stages ahead
//   of a stage      | codes of MT panels | scales | zero points | 8 NT tokens |        of consume
//   of the codes    | lane 0's 16 bytes | lane 1's | ... |   (4 bits: all of a panel's unit)
//
// Scales multiply the f32 products of a unit, not the weights. This is exact for every scale type. For the few tokens
// of a tile it is cheaper than multiplying each fragment. Scales of e2m1 codes multiply the weights where that is exact
// (formats), because nvfp4's groups of 16 are less than a step of mma. For one token tile the zero point of int4 leaves
// the inner loop, too: `sum (q - 8) x = sum (base + q) x - (base + 8) sum x`. One mma with ones gives sum x for all
// panels.
#pragma once
#include "cuda/common/kernels.cuh"
#include "cuda/formats/formats.h"

namespace quantmoe {

// What sums are to be multiplied by; nvfp4's also by the global scale.
template <typename T, typename F>
constexpr float kSumFactor = F::kPacked ? 1.f : F::template kSumFactor<T>;

// MT 16-row panels, NT 8-token tiles, weights of format F; kUnits of K a stage: 1, or 2 that share their scales.
template <typename T, typename F, int MT, int NT, int kUnits = 1, int kStages_ = stages_of(kUnits)>
struct Stream {
  using Size = Sizes<F>;
  static constexpr int kUnitBytes = 128 * Size::kBits;  // of a panel's codes
  // Scales, then zero points, of MT panels.
  static constexpr int kScalesAt = kUnits * MT * kUnitBytes, kZerosAt = kScalesAt + MT * 32 * Size::kScaleBytes,
                       kTokensAt = kZerosAt + MT * 32 * Size::kZeroBytes;
  static constexpr int kStages = kStages_;
  static constexpr int kStageBytes = stage_bytes(MT, NT, Size::kBits, Size::kLaneBytes, kUnits);
  static constexpr int kTokenUnit = F::kPacked ? F::kPackedUnitBytes / 2 : kUnit;  // of T: values, or what is packed
  static constexpr bool kCodes = F::kPacked && F::kBits == 8;
  static constexpr bool kScaledWeights = F::template kScaledWeights<T>;
  static constexpr int kHighBytes = Size::kHighBytes;

  int lane, g, t;
  uint32_t codes_at, scales_at;  // this lane's bytes in the first stage of the warp's ring
  uint32_t first_half;           // 8 bits: where columns 0..31 of a unit are in this lane's 16 bytes
  uint32_t zero_selector;        // byte_pair of its first zero point in the word it copies
  uint64_t once;
  // Groups of 32: each unit has scales of its own, side by side.
  static constexpr bool kScalesAhead = F::kGroups == 2 && !Size::kRuntime;
  // What is copied next: this lane's bytes of a unit of the first panel; of scales, with kScalesAhead.
  const uint8_t *codes, *scales, *zeros;
  const T* tokens[NT];                        // null: zero
  int k, columns_left;                        // columns_left: from the lane's first to the end of the row
  uint32_t panel_at[MT], scale_panel_at[MT];  // from the first panel to panel m

  __device__ Stream(uint8_t* rings, const Weights& weights) {
    lane = threadIdx.x % 32;
    g = lane / 4;
    t = lane % 4;
    const uint32_t ring = shared_address(rings) + (threadIdx.x / 32) * kStages * kStageBytes;
    codes_at = ring + Size::lane_at(lane);
    scales_at = ring + kScalesAt + lane * Size::kScaleBytes;
    once = evict_first_policy();
    // Opaque from here on, or the compiler derives them from threadIdx again in every turn.
    asm volatile("" : "+r"(codes_at), "+r"(scales_at), "+r"(lane), "+r"(g), "+r"(t));
    first_half = lane % 2 * 8;
    if constexpr (Size::kBits == 8) asm volatile("" : "+r"(first_half));
    // One group in a unit: zero points of rows g and g + 8 are two bytes, and a word serves two g.
    zero_selector = byte_pair(two_groups(weights) ? 0 : 2 * (g % 2));
  }
  // Points at unit k_ of panels [panel, panel + MT) of an expert; panels past the end repeat the last.
  __device__ void seek_weights(const Weights& weights, const uint8_t* expert, int panel, int k_) {
    k = k_;
    panel = min(panel, weights.panels - 1);
    const int scale_bytes = scale_lane_bytes(weights);
#pragma unroll
    for (int m = 1; m < MT; ++m) {
      const int at = min(m, weights.panels - 1 - panel);
      panel_at[m] = at * weights.units * kUnitBytes, scale_panel_at[m] = at * weights.blocks * 8 * scale_bytes;
    }
    codes = expert + (static_cast<int64_t>(panel) * weights.units + k) * kUnitBytes + Size::from_at(lane);
    if constexpr (F::kTwoLevels) {
      scales = expert + weights.scales_at + panel * weights.blocks * F::kBlockBytes + F::level_at(g, t);
    } else {
      scales = expert + weights.scales_at + ((panel * weights.blocks + (kScalesAhead ? k : 0)) * 8 + g) * scale_bytes;
    }
    if constexpr (Size::kZeroBytes > 0)
      zeros = expert + weights.zeros_at + panel * weights.blocks * weights.zero_bytes +
              (two_groups(weights) ? 4 * g : 2 * g & ~3);
  }
  __device__ static bool two_groups(const Weights& weights) {
    return Size::kRuntime ? weights.two_groups : F::kGroups == 2;
  }
  // Bytes of rows g and g + 8 in a block.
  __device__ static int scale_lane_bytes(const Weights& weights) {
    return Size::kRuntime || F::kTwoLevels ? weights.scale_bytes : Size::kScaleBytes;
  }

  __device__ void seek_tokens(int n, const T* row, int x_columns) {
    tokens[n] = row == nullptr ? nullptr : row + k * kTokenUnit + t * 8;
    columns_left = x_columns - k * kTokenUnit - t * 8;
  }

  __device__ void copy_weights(int stage, const Weights& weights) {
    const uint32_t to = codes_at + stage * kStageBytes, scales_to = scales_at + stage * kStageBytes;
    const int block = k >> weights.block_shift;
    const uint8_t* first = kScalesAhead ? scales : scales + block * (8 * scale_lane_bytes(weights));
    if constexpr (F::kTwoLevels) first += t / 2 * (k % 4 * F::kUnitLevels);
#pragma unroll
    for (int m = 0; m < MT; ++m) {
      const uint8_t *c = m ? codes + panel_at[m] : codes, *s = m ? first + scale_panel_at[m] : first;
#pragma unroll
      for (int u = 0; u < kUnits; ++u)
#pragma unroll
        for (int i = 0; i + 512 <= kUnitBytes; i += 512)
          if (u == 0 || k + u < weights.units)  // else: any codes, the tokens there are zero
            copy_async16_once(to + (u * MT + m) * kUnitBytes + i, c + u * kUnitBytes + Size::piece_at(i), once);
      if constexpr (kHighBytes > 0) copy_async_small<kHighBytes>(high_at(stage, m), c + high_from_codes());
      if constexpr (Size::kScaleBytes == 0) continue;
      if (Size::kScaleBytes == 4 || (Size::kRuntime && weights.scale_bytes == 4)) {
        copy_async_small<4>(scales_to + m * 32 * Size::kScaleBytes, s);
      } else {
        copy_async_small<8>(scales_to + m * 32 * Size::kScaleBytes, s);
      }
    }
    if constexpr (Size::kZeroBytes > 0) {
      const uint8_t* z = zeros + block * weights.zero_bytes;
      const int shift =
          Size::kRuntime && weights.scale_type == k_scale_type_f32 ? 2 : 1;  // a byte where scales have two, f32's four
#pragma unroll
      for (int m = 0; m < MT; ++m) copy_async_small<4>(zero_at(stage, m), m ? z + (scale_panel_at[m] >> shift) : z);
    }
    codes += kUnits * kUnitBytes;
    if constexpr (kScalesAhead) scales += 8 * Size::kScaleBytes;
  }
  __device__ uint32_t zero_at(int stage, int m) const {
    return scales_at + stage * kStageBytes + (kZerosAt - kScalesAt) - lane * (Size::kScaleBytes - 4) + m * 128;
  }
  // High bits of 5- and 6-bit codes: from a lane's 16 bytes of a unit, which they follow.
  __device__ int high_from_codes() const { return 512 - lane * (16 - kHighBytes); }
  __device__ uint32_t high_at(int stage, int m) const {
    return codes_at + stage * kStageBytes + m * kUnitBytes + high_from_codes();
  }
  __device__ void copy_tokens(int stage, int n_tiles) {
    const uint32_t to = codes_at + stage * kStageBytes + kTokensAt;
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      if (NT > 1 && n >= n_tiles) break;
      // A null row stays near null and is never read.
      const bool valid = reinterpret_cast<uintptr_t>(tokens[n]) >= kNullEnd;
#pragma unroll
      for (int i = 0; i < (F::kPacked ? 1 : 2 * kUnits); ++i)
        copy_async16(to + n * kUnits * 1024 + i * 512, tokens[n] + i * 32, valid && columns_left > i * 32);
      if constexpr (kCodes) copy_async4(step_at(stage, n), tokens[n] + (32 - 8 * t), valid);
      tokens[n] += kUnits * kTokenUnit;
    }
    columns_left -= kUnits * kTokenUnit;
    k += kUnits;
  }
  // e4m3: where a lane has the step of its column of tile n.
  __device__ uint32_t step_at(int stage, int n) const {
    return scales_at + stage * kStageBytes + (kTokensAt - kScalesAt) + n * 1024 + 512;
  }
  static constexpr uintptr_t kNullEnd = 1 << 20;

  // acc += scales * (codes x tokens) * factor of the column (2t, 2t + 1) of a stage, for the first N token tiles.
  // kSumFactor multiplies it later.
  template <int N, bool kFactor = false, bool kShift = false>
  __device__ void consume(int stage, float (&acc)[MT][NT][4], const Weights& weights,
                          const float* factor = nullptr) const {
    if constexpr (kCodes) {
      consume_e4m3<N, kFactor>(stage, acc, weights, factor);
    } else if constexpr (F::kPacked) {
      consume_nvfp4<N, kFactor>(stage, acc, factor);
    } else if constexpr (F::kTwoLevels) {
      consume_levels<N, kFactor>(stage, acc, factor);
    } else {
      consume_values<N, kFactor, kShift>(stage, acc, weights, factor);
    }
  }
  // One long function: its sums and codes are registers, and a lambda around the scales alone makes other machine code.
  template <int N, bool kFactor, bool kShift>
  __device__ void consume_values(int stage, float (&acc)[MT][NT][4], const Weights& weights,
                                 const float* factor) const {
    // Not for all tiles of one token tile: a token must not depend on how many are in its tile.
    constexpr bool kSums = F::kZerosLater && NT == 1;
    constexpr bool kDirect = kScaledWeights && !kFactor;  // into acc
    constexpr int kWords = Size::kScaleBytes / 4;         // none: floats
    const uint32_t base = codes_at + stage * kStageBytes;
    uint4 codes[MT], x[N][2];
    uint32_t scale[MT][kWords + !kWords], zero[MT];
#pragma unroll
    for (int m = 0; m < MT; ++m) {
#pragma unroll
      for (int s = 0; s < kWords; ++s)
        scale[m][s] = load4(scales_at + stage * kStageBytes + m * 32 * Size::kScaleBytes + 4 * s);
      if constexpr (Size::kZeroBytes > 0) zero[m] = load4(zero_at(stage, m));
    }
    // Groups of 32 known at compile time: sums start again at the second half.
    constexpr bool kTwo = F::kGroups == 2 && !Size::kRuntime && !kScaledWeights;
    const bool two_groups = Size::kRuntime ? weights.two_groups : kTwo;
    float part[MT][N][4], sum[4];
    static_assert(kUnits == 1 || (F::kGroups == 1 && !Size::kRuntime && Size::kBits == 4));
#pragma unroll
    for (int part_of_k = 0; part_of_k < 2 * kUnits; ++part_of_k) {
      const int half = part_of_k % 2, u = part_of_k / 2;
      if (half == 0) {
#pragma unroll
        for (int m = 0; m < MT; ++m)
          if constexpr (Size::kBits == 4) codes[m] = load16(base + (u * MT + m) * 512);
#pragma unroll
        for (int n = 0; n < N; ++n) {
          x[n][0] = load16(base + kTokensAt + (n * kUnits + u) * 1024);
          x[n][1] = load16(base + kTokensAt + (n * kUnits + u) * 1024 + 512);
        }
      }
      if (part_of_k == 0 || kTwo) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          sum[i] = 0.f;
#pragma unroll
          for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int n = 0; n < N; ++n) part[m][n][i] = 0.f;
        }
      }
      if constexpr (kSums) {
        constexpr uint32_t one = Half<T>::kOne;
        const uint32_t ones[4] = {one, one, one, one};
        Half<T>::mma(sum, ones, x[0][half].x, x[0][half].y);
        Half<T>::mma(sum, ones, x[0][half].z, x[0][half].w);
      }
      // Zero points of this half's group.
      const uint32_t selector = Size::kZeroBytes > 0 ? zero_selector + (half && two_groups ? 0x0202 : 0) : 0;
#pragma unroll
      for (int m = 0; m < MT; ++m) {
        uint4 q8{};  // 16 bits: of row g + 8
        if constexpr (Size::kBits == 16) {
          codes[m] = load16(base + m * kUnitBytes + half * 512), q8 = load16(base + m * kUnitBytes + 1024 + half * 512);
        }
        if constexpr (Size::kBits == 8) {
          const uint32_t at = (base + first_half ^ 8 * half) + m * kUnitBytes;
          const uint2 low = load8(at), high = load8(at + 512);
          codes[m] = make_uint4(low.x, high.x, low.y, high.y);
        }
        // Zero points, or scales of weights, of rows g and g + 8.
        uint2 pair{};
        if constexpr (!kSums) pair = F::template pair_of<T>(scale[m], zero[m], selector, half, t);
#pragma unroll
        for (int step = 0; step < 2; ++step) {
          uint32_t a[4];
          if constexpr (Size::kBits == 16) {
            a[0] = step ? codes[m].z : codes[m].x, a[1] = step ? q8.z : q8.x;
            a[2] = step ? codes[m].w : codes[m].y, a[3] = step ? q8.w : q8.y;
          } else if constexpr (Size::kBits == 8) {
            const uint32_t q_low = step ? codes[m].z : codes[m].x, q_high = step ? codes[m].w : codes[m].y;
            F::template dequant<T, kShift, !kSums>(q_low, q_high, pair.x, pair.y, a);
          } else {
            const uint32_t code = half ? (step ? codes[m].w : codes[m].z) : (step ? codes[m].y : codes[m].x);
            F::template dequant<T, kShift, !kSums>(code, 0, pair.x, pair.y, a);
          }
#pragma unroll
          for (int n = 0; n < N; ++n) {
            float(&to)[4] = kDirect ? acc[m][n] : part[m][n];
            if (step) {
              Half<T>::mma(to, a, x[n][half].z, x[n][half].w);
            } else {
              Half<T>::mma(to, a, x[n][half].x, x[n][half].y);
            }
          }
        }
      }
      if (kDirect || !(part_of_k == 2 * kUnits - 1 || two_groups)) continue;
      // acc += scale * part, the scales given by row(m): {of row g, of row g + 8}.
      auto add = [&](auto row) {
#pragma unroll
        for (int m = 0; m < MT; ++m) {
          const float2 s = row(m);
          [[maybe_unused]] float zeros[2] = {};
          if constexpr (kSums) {
            const float2 z = F::template zeros<T>(zero[m], selector);
            zeros[0] = z.x, zeros[1] = z.y;
          }
#pragma unroll
          for (int n = 0; n < N; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              float p = part[m][n][i];
              if constexpr (kSums) p = fmaf(-zeros[i / 2], sum[i % 2], p);
              if constexpr (kFactor) p *= factor[i % 2];
              acc[m][n][i] = fmaf(i < 2 ? s.x : s.y, p, acc[m][n][i]);
              if constexpr (Size::kRuntime) part[m][n][i] = 0.f;
            }
          }
        }
        if constexpr (Size::kRuntime) sum[0] = sum[1] = sum[2] = sum[3] = 0.f;
      };
      // Not through with_scale_type: a lambda around these makes other machine code of them.
      if constexpr (kScaledWeights || kWords == 0) {
        add([](int) { return make_float2(1.f, 1.f); });
      } else if constexpr (F::kScaleType == k_scale_type_e8m0) {
        add([&](int m) {
          return make_float2(e8m0_normal(scale[m][0], 2 * half), e8m0_normal(scale[m][0], 2 * half + 1));
        });
      } else if constexpr (F::kScaleType >= 0) {
        using Scale = std::conditional_t<F::kScaleType == k_scale_type_f16, __half, __nv_bfloat16>;
        add([&](int m) {
          const uint32_t s = scale[m][kTwo ? half : 0];
          return make_float2(Half<Scale>::low(s), Half<Scale>::high(s));
        });
      } else {
        auto word = [&](int m) { return half && two_groups ? scale[m][kWords - 1] : scale[m][0]; };
        if (weights.scale_type == k_scale_type_bf16) {
          add([&](int m) {
            return make_float2(Half<__nv_bfloat16>::low(word(m)), Half<__nv_bfloat16>::high(word(m)));
          });
        } else if (!kTakes<F, k_scale_type_f32> || weights.scale_type == k_scale_type_f16) {
          add([&](int m) { return make_float2(Half<__half>::low(word(m)), Half<__half>::high(word(m))); });
        } else if (!kTakes<F, k_scale_type_e8m0> || weights.scale_type == k_scale_type_f32) {
          add([&](int m) { return make_float2(__uint_as_float(scale[m][0]), __uint_as_float(scale[m][kWords - 1])); });
        } else {
          add([&](int m) { return make_float2(e8m0(scale[m][0], 2 * half), e8m0(scale[m][0], 2 * half + 1)); });
        }
      }
    }
  }

  // As above for scales of two levels. They multiply the products of a group's codes. The minima multiply the sums of
  // its tokens' values, which one more product has, exact up to f32 sums. In groups of 16, lanes t = 0, 1 have the
  // columns of one group, and t = 2, 3 the columns of the other. So each group is multiplied with zeros for the other.
  template <int N, bool kFactor>
  __device__ void consume_levels(int stage, float (&acc)[MT][NT][4], const float* factor) const {
    constexpr int kOfHalf = 32 / F::kGroup;  // groups
    const uint32_t base = codes_at + stage * kStageBytes;
    uint32_t words[MT][4];
#pragma unroll
    for (int m = 0; m < MT; ++m) {
      const uint32_t own = load4(scales_at + stage * kStageBytes + m * 32 * Size::kScaleBytes);
#pragma unroll
      for (int i = 0; i < 4; ++i) words[m][i] = __shfl_sync(~0u, own, 4 * g + i);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint4 x[N];
      float sum[N][4];
#pragma unroll
      for (int n = 0; n < N; ++n) {
        x[n] = load16(base + kTokensAt + n * 1024 + half * 512);
        sum[n][0] = sum[n][1] = sum[n][2] = sum[n][3] = 0.f;
        if constexpr (F::kMinima) {
          constexpr uint32_t one = Half<T>::kOne;
          const uint32_t ones[4] = {one, one, one, one};
          Half<T>::mma(sum[n], ones, x[n].x, x[n].y);
          Half<T>::mma(sum[n], ones, x[n].z, x[n].w);
        }
      }
#pragma unroll
      for (int m = 0; m < MT; ++m) {
        const uint2 q = load8(base + m * kUnitBytes + half * 8);
        uint2 high{};
        if constexpr (kHighBytes == 4) high.x = load4(high_at(stage, m));
        if constexpr (kHighBytes == 8) high = load8(high_at(stage, m));
        uint32_t a[2][4];
        F::template dequant<T>(q.x, high, 2 * half, a[0]);
        F::template dequant<T>(q.y, high, 2 * half + 1, a[1]);
#pragma unroll
        for (int group = 0; group < kOfHalf; ++group) {
          float scale[2], minimum[2];
          F::template levels<T>(words[m], half * kOfHalf + group, scale, minimum);
          const bool here = kOfHalf == 1 || t / 2 == group;
#pragma unroll
          for (int n = 0; n < N; ++n) {
            float part[4] = {};
            const uint4 of_group = here ? x[n] : make_uint4(0, 0, 0, 0);
            Half<T>::mma(part, a[0], of_group.x, of_group.y);
            Half<T>::mma(part, a[1], of_group.z, of_group.w);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              float p = scale[i / 2] * part[i];
              if constexpr (F::kMinima) p = fmaf(-minimum[i / 2], sum[n][i % 2], p);
              acc[m][n][i] = kFactor ? fmaf(factor[i % 2], p, acc[m][n][i]) : acc[m][n][i] + p;
            }
          }
        }
      }
    }
  }

  // The same of codes on both sides: a lane has 8 neighbouring columns of both rows in two words.
  template <int N, bool kFactor>
  __device__ void consume_nvfp4(int stage, float (&acc)[MT][NT][4], const float* factor) const {
    const uint32_t base = codes_at + stage * kStageBytes;
#pragma unroll
    for (int m = 0; m < MT; ++m) {
      const uint4 q = load16(base + m * 512);
      const uint32_t at = scales_at + stage * kStageBytes + m * 32 * Size::kScaleBytes;
      const uint32_t scale = __byte_perm(load4(at), load4(at + 4), t % 2 ? 0x7531 : 0x6420);
      const uint32_t a[4] = {__byte_perm(q.x, q.y, 0x6240), __byte_perm(q.x, q.y, 0x7351),
                             __byte_perm(q.z, q.w, 0x6240), __byte_perm(q.z, q.w, 0x7351)};
#pragma unroll
      for (int n = 0; n < N; ++n) {
        const uint4 x = load16(base + kTokensAt + n * 1024);
        if constexpr (kFactor) {
          float part[4] = {};
          mma_nvfp4(part, a, x.x, x.y, scale, x.z);
#pragma unroll
          for (int i = 0; i < 4; ++i) acc[m][n][i] = fmaf(factor[i % 2], part[i], acc[m][n][i]);
        } else {
          mma_nvfp4(acc[m][n], a, x.x, x.y, scale, x.z);
        }
      }
    }
  }

  // Of e4m3: a lane's 16 bytes of a row of weights, and of a token, are its words of two products. It has the step of
  // column g, and sums of columns 2t and 2t + 1.
  template <int N, bool kFactor>
  __device__ void consume_e4m3(int stage, float (&acc)[MT][NT][4], const Weights& weights, const float* factor) const {
    const uint32_t base = codes_at + stage * kStageBytes;
    uint4 x[N];
    float step[N][2], part[MT][N][4];
#pragma unroll
    for (int n = 0; n < N; ++n) {
      x[n] = load16(base + kTokensAt + n * 1024);
      const uint32_t mine = load4(step_at(stage, n));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        step[n][i] = __uint_as_float(__shfl_sync(~0u, mine, 8 * t + 4 * i));
        if constexpr (kFactor) step[n][i] *= factor[i];
      }
    }
#pragma unroll
    for (int m = 0; m < MT; ++m) {
      const uint4 low = load16(base + m * kUnitBytes), high = load16(base + m * kUnitBytes + 512);
      const uint32_t first[4] = {low.x, high.x, low.y, high.y}, second[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
      for (int n = 0; n < N; ++n) {
        part[m][n][0] = part[m][n][1] = part[m][n][2] = part[m][n][3] = 0.f;
        mma_e4m3(part[m][n], first, x[n].x, x[n].y);
        mma_e4m3(part[m][n], second, x[n].z, x[n].w);
      }
    }
    auto add = [&](auto scale) {  // of rows g and g + 8, from where this lane has them
#pragma unroll
      for (int m = 0; m < MT; ++m) {
        const uint32_t at = scales_at + stage * kStageBytes + m * 32 * Size::kScaleBytes;
        const float2 s = scale(at);
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i)
            acc[m][n][i] = fmaf((i < 2 ? s.x : s.y) * step[n][i % 2], part[m][n][i], acc[m][n][i]);
      }
    };
    if (weights.scale_type == k_scale_type_f32) {
      add([](uint32_t at) { return make_float2(__uint_as_float(load4(at)), __uint_as_float(load4(at + 4))); });
    } else if (weights.scale_type == k_scale_type_f16) {
      add([](uint32_t at) { return make_float2(Half<__half>::low(load4(at)), Half<__half>::high(load4(at))); });
    } else {
      add([](uint32_t at) {
        return make_float2(Half<__nv_bfloat16>::low(load4(at)), Half<__nv_bfloat16>::high(load4(at)));
      });
    }
  }
};

}  // namespace quantmoe
