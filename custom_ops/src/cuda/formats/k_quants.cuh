// q4_k, q5_k and q6_k: codes of 4 to 6 bits, and scales (and minima) that are an f16 times an int8.
#pragma once
#include "core/numbers.h"
#include "cuda/formats/format.h"

namespace quantmoe {

template <int32_t format>
struct KFacts : FormatFacts {
  static constexpr int kBits = code_bits(format);
  static constexpr bool kTwoLevels = true;
  static constexpr int scale_bytes(int) { return 4; }  // mma.sync: one of four words, which the lanes of a row share
  static constexpr int kUnitGroups = 64 / k_group(format);
  static constexpr int group_size(int32_t) { return 256; }
  static constexpr bool is(const qm_projection& w) { return w.format == format; }
  static constexpr bool takes_scales(int32_t type) { return takes_k_scales(format, 256, type); }
};
using Q4KFacts = KFacts<k_format_q4_k>;
using Q5KFacts = KFacts<k_format_q5_k>;
using Q6KFacts = KFacts<k_format_q6_k>;

}  // namespace quantmoe

#ifdef __CUDACC__
#include "cuda/formats/int4.cuh"

namespace quantmoe {

// Stream::consume_levels takes kGroup, kMinima, level_at, dequant and levels. The kernels on wgmma take what stands
// after them.
template <int32_t format>
struct KTrait : KFacts<format>, Trait {
  static constexpr int kGroups = 1;  // whose scales are numbers
  static constexpr bool kMinima = format != k_format_q6_k;
  static constexpr int kGroup = kMinima ? 32 : 16;  // columns
  static constexpr int kHigh = KTrait::kBits - 4;   // high bits of a code
  // In a panel's block of 256 columns: the factors of rows g and g + 8, before the levels of its units.
  static constexpr int kFactorBytes = kMinima ? 8 : 4, kUnitLevels = 64,
                       kBlockBytes = 8 * kFactorBytes + 4 * kUnitLevels;
  template <typename T>
  static constexpr float kSumFactor = 1.f;

  // The place of lane t's word in row g of a block, in its first unit. 0 and 1 are the factors, 2 and 3 the levels.
  __device__ static int level_at(int g, int t) {
    return t < 2 ? g * kFactorBytes + (kMinima ? 4 * t : 0) : 8 * kFactorBytes + 8 * g + 4 * (t - 2);
  }
  // Codes of a step of a unit, less the code of zero, times kInt4Bits; high: the lane's high bits of the unit.
  template <typename T>
  __device__ static void dequant(uint32_t q, uint2 high, int step, uint32_t (&a)[4]) {
    constexpr uint32_t zero = Half<T>::kInt4Or | (kMinima ? 0 : 0x00200020);
    dequant_int4<T, true>(q, a);
    add_high(high, step, a);
    center<T>(a, zero, zero);
  }
  __device__ static void add_high(uint2 high, int step, uint32_t (&a)[4]) {
    constexpr uint32_t mask = ((1u << kHigh) - 1) * 0x00100010;
#pragma unroll
    for (int i = 0; i < (kHigh > 0 ? 4 : 0); ++i) {
      const int at = kHigh * (4 * step + i % 2 * 2 + i / 2);  // a[1] is nibbles 2 and 6, a[2] nibbles 1 and 5
      const uint32_t word = at < 16 ? high.x : high.y, place = at % 16;
      a[i] = mask_or<mask>(place < 4 ? word << (4 - place) : word >> (place - 4), a[i]);
    }
  }
  // Of rows g and g + 8, exact: the scales of a group of the unit, for dequant's values, and the minima.
  template <typename T>
  __device__ static void levels(const uint32_t (&words)[4], int group, float (&scale)[2], float (&minimum)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const auto level = [&](int i) { return static_cast<float>(static_cast<int8_t>(words[2 + r] >> 8 * i)); };
      const float d = kMinima || r == 0 ? Half<__half>::low(words[r]) : Half<__half>::high(words[0]);
      scale[r] = d * level(group) * (1 / kInt4Bits<T>);
      minimum[r] = kMinima ? Half<__half>::high(words[r]) * level(2 + group) : 0.f;
    }
  }

  // On wgmma (code - kMiddle) * scale + rest, rounded once, times kResult. The rest is kMiddle * scale - minimum:
  // small, so that what it loses in 16 bits is. In bf16 a code in bits 0..5 of a zero word is code * 2^-133, as Int4's.
  static constexpr int kMiddle = 1 << (KTrait::kBits - 1);
  template <typename T>
  static constexpr float kResult = !kBf16<T> ? 1.f
                                   : kMinima ? 0x1p-6f
                                             : 0x1p-69f;
  template <typename T>
  static constexpr float kProductFactor = 1 / kResult<T>;
  // The four lanes of a row share a unit's levels: lane t makes a number of rows g and g + 8. With minima it is of
  // group t % 2: its scale, or its rest. Else it is the scale of group t. own: the rows' factors, then their levels.
  template <typename T>
  __device__ static uint32_t own_level(uint4 own, int t) {
    const auto number = [&](uint32_t factors, uint32_t levels) {
      const auto level = [&](int i) {
        int number;  // the byte, and its sign in the bytes above
        asm("prmt.b32 %0, %1, 0, %2;" : "=r"(number) : "r"(levels), "r"(i * 0x1111 + 0x8880));
        return static_cast<float>(number);
      };
      const float scale = Half<__half>::low(factors) * level(kMinima ? t % 2 : t);
      if constexpr (!kMinima) return scale;
      const float d_min = Half<__half>::high(factors) * -kResult<T>;
      return t / 2 ? fmaf(d_min, level(2 + t % 2), scale * (kMiddle * kResult<T>)) : scale;
    };
    const uint32_t two = Half<T>::pack(number(own.x, own.z), number(kMinima ? own.y : own.x >> 16, own.w));
    return !kMinima && kBf16<T> ? Half<T>::mul(two, 0x5f805f80) : two;  // 2^64
  }
  // A group's scale and rest, from the four lanes' numbers: twice in a word of row g, twice in one of row g + 8.
  __device__ static void factors(uint32_t own, int group, uint32_t (&scale)[2], uint32_t (&rest)[2]) {
    spread(own, group, scale);
    if constexpr (kMinima) spread(own, 2 + group, rest);
  }
  __device__ static void spread(uint32_t own, int lane_of_row, uint32_t (&rows)[2]) {
    const uint32_t two = __shfl_sync(~0u, own, lane_of_row, 4);
    asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %2;\nmov.b32 %0, {a, a};\nmov.b32 %1, {b, b};\n}"
        : "=r"(rows[0]), "=r"(rows[1])
        : "r"(two));
  }
  template <typename T>
  __device__ static void dequant_levels(uint32_t q, uint2 high, int step, const uint32_t (&scale)[2],
                                        const uint32_t (&rest)[2], uint32_t (&a)[4]) {
    if constexpr (kBf16<T> && kHigh == 0) {
      const uint32_t q8 = q >> 8;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        a[i] = Half<T>::fma((i ? q8 : q) & 0x000f000f, 0x7f007f00, kNoMiddle<T>);      // 2^127
        a[i + 2] = Half<T>::fma((i ? q8 : q) & 0x00f000f0, 0x7d007d00, kNoMiddle<T>);  // 2^123
      }
    } else if constexpr (kBf16<T>) {
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = q >> (i % 2 * 8 + i / 2 * 4) & 0x000f000f;
      add_high(high, step, a);
      if constexpr (!kMinima) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
          a[i] = Half<T>::fma(a[i], scale[i % 2], Half<T>::mul(scale[i % 2], 0x80208020));  // minus code 32
        return;
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = Half<T>::fma(a[i], 0x7f007f00, kNoMiddle<T>);
    } else {
      dequant_int4<T, true>(q, a);
      add_high(high, step, a);
      center<T>(a, kNoMiddle<T>, kNoMiddle<T>);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
      a[i] = kMinima ? Half<T>::fma(a[i], scale[i % 2], rest[i % 2]) : Half<T>::mul(a[i], scale[i % 2]);
  }
  // What takes kMiddle off: in bf16 -kMiddle * 2^-6, in f16 1024 + kMiddle.
  template <typename T>
  static constexpr uint32_t kNoMiddle =
      kBf16<T> ? (KTrait::kBits == 4 ? 0xbe00be00 : 0xbe80be80) : 0x64006400 + kMiddle * 0x00010001;
};
using Q4K = KTrait<k_format_q4_k>;
using Q5K = KTrait<k_format_q5_k>;
using Q6K = KTrait<k_format_q6_k>;

}  // namespace quantmoe
#endif
