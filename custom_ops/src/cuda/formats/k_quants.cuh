// q4_k, q5_k and q6_k: codes of 4 to 6 bits, and scales (and minima) that are an f16 times an int8.
#pragma once
#include "core/numbers.h"
#include "cuda/formats/format.h"

namespace quantmoe {

template <int32_t format>
struct KFacts : FormatFacts {
  static constexpr int kBits = code_bits(format);
  static constexpr bool kTwoLevels = true;
  static constexpr int scale_bytes(int) { return 4; }  // one of four words, which the lanes of a row share
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

// Stream::consume_levels takes group, minima, level_at, dequant and levels.
template <int32_t format>
struct KTrait : KFacts<format>, Trait {
  static constexpr int kGroups = 1;  // whose scales are numbers
  static constexpr bool kMinima = format != k_format_q6_k;
  static constexpr int kGroup = kMinima ? 32 : 16;  // columns
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
    constexpr int kHigh = KTrait::kBits - 4;
    constexpr uint32_t mask = ((1u << kHigh) - 1) * 0x00100010;
    constexpr uint32_t zero = Half<T>::kInt4Or | (kMinima ? 0 : 0x00200020);
    dequant_int4<T, true>(q, a);
    if constexpr (kHigh > 0) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = kHigh * (4 * step + i % 2 * 2 + i / 2);  // a[1] is nibbles 2 and 6, a[2] nibbles 1 and 5
        const uint32_t word = at < 16 ? high.x : high.y, place = at % 16;
        a[i] = mask_or<mask>(place < 4 ? word << (4 - place) : word >> (place - 4), a[i]);
      }
    }
    center<T>(a, zero, zero);
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
};
using Q4K = KTrait<k_format_q4_k>;
using Q5K = KTrait<k_format_q5_k>;
using Q6K = KTrait<k_format_q6_k>;

}  // namespace quantmoe
#endif
