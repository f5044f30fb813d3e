// What the traits of formats are made of. Codes (FORMAT.md 3.2) become the A operand of mma.m16n8k16. a[0] is row g,
// columns c(0) c(1); a[1] is row g + 8, these columns. a[2] and a[3] are columns c(2) c(3). Scales and zero points
// become factors.
//
// A code moves into the bits of a float wherever it can, however small the float is. Then a power of two is missing. It
// goes to the scale or, as a format's factors, to the sums.
#pragma once
#include <type_traits>

#include "cuda/common/ptx.cuh"
#include "cuda/formats/format.h"

namespace quantmoe {

// (q & mask) | bits in one instruction.
template <uint32_t mask>
__device__ inline uint32_t mask_or(uint32_t q, uint32_t bits) {
  uint32_t r;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(r) : "r"(q), "n"(mask), "r"(bits));
  return r;
}
// The bits of the mask from a, the others from b.
template <uint32_t mask>
__device__ inline uint32_t select(uint32_t a, uint32_t b) {
  uint32_t r;
  asm("lop3.b32 %0, %1, %2, %3, 0xe2;" : "=r"(r) : "r"(a), "n"(mask), "r"(b));
  return r;
}
template <typename T>
constexpr bool kBf16 = std::is_same_v<T, __nv_bfloat16>;

// Minus base + zero point, of rows g and g + 8: exact.
template <typename T>
__device__ inline void center(uint32_t (&a)[4], uint32_t low, uint32_t high) {
  a[0] = Half<T>::sub(a[0], low), a[2] = Half<T>::sub(a[2], low);
  a[1] = Half<T>::sub(a[1], high), a[3] = Half<T>::sub(a[3], high);
}
template <typename T>
__device__ inline void times(uint32_t (&a)[4], uint32_t low, uint32_t high) {
#pragma unroll
  for (int i = 0; i < 4; ++i) a[i] = Half<T>::mul(a[i], i % 2 ? high : low);
}

// A byte of a word in both halves of another, above it the byte of `high`; selector: byte_pair of its index.
__device__ inline constexpr uint32_t byte_pair(uint32_t index) { return 0x4040 + index * 0x0101; }

// Zero point `selector` of four, twice. kFma false: base + zero point, as center takes it. Otherwise minus zero point *
// kInt8Result, as the fma of bf16 takes it.
template <typename T, bool kFma>
__device__ inline uint32_t zero_point(uint32_t zeros, uint32_t selector) {
  if constexpr (kFma && kBf16<T>) return Half<T>::mul(__byte_perm(zeros, 0, selector), 0xff00ff00);  // -2^127
  return __byte_perm(zeros, Half<T>::kInt4Or | Half<T>::kInt4Or >> 8, selector);
}

// An e8m0 scale, byte `index` of a word. 2^-127 and infinity (for NaN) are no normal f32, but what they should be.
__device__ inline float e8m0(uint32_t scales, int index) {
  const uint32_t bits = (index < 3 ? scales << (23 - 8 * index) : scales >> 1) & 0x7f800000;
  return __uint_as_float(max(bits, 0x00400000u));
}
// Without 2^-127, which is 0: products of f16 tell them not apart.
__device__ inline float e8m0_normal(uint32_t scales, int index) {
  return __uint_as_float((index < 3 ? scales << (23 - 8 * index) : scales >> 1) & 0x7f800000);
}

template <class F, int scale_type>
constexpr bool kTakes = F::takes_scales(scale_type);
// body(type) of the type of scales: the trait's, or of those that the format takes the one that the weights have.
template <class F, class Body>
__device__ __forceinline__ void with_scale_type(int scale_type, const Body& body) {
  if constexpr (F::kScaleType >= 0) {
    body(std::integral_constant<int, F::kScaleType>());
  } else if (scale_type == k_scale_type_bf16) {
    body(std::integral_constant<int, k_scale_type_bf16>());
  } else if (!kTakes<F, k_scale_type_f32> || scale_type == k_scale_type_f16) {
    body(std::integral_constant<int, k_scale_type_f16>());
  } else if (!kTakes<F, k_scale_type_e8m0> || scale_type == k_scale_type_f32) {
    body(std::integral_constant<int, k_scale_type_f32>());
  } else {
    body(std::integral_constant<int, k_scale_type_e8m0>());
  }
}

// What most traits have alike. The others have
//   kSumFactor<T>      mma.sync: what sums of dequant's values are multiplied by
//   dequant            mma.sync: a lane's codes to the A operand; of 4 bits q has both rows', of 8 q8 row g + 8's; low
//                      and high are what pair_of made; kShift: where latency binds; kCentered: not if kZerosLater
//   kProductFactor<T>  wgmma: what products of dequant_scaled's values are multiplied by
//   dequant_scaled     wgmma: the same times the factors of rows g and g + 8; low and high are zero_point<T, true>'s
struct Trait {
  static constexpr bool kPacked = false;
  static constexpr int kScaleType = -1;  // op.def's; -1: known at run time only
  static constexpr int kGroups = 2;      // in a unit; of 8 bits at most
  // mma.sync: whether zero points are subtracted from the sums of one token tile (Zeros), not in the inner loop.
  static constexpr bool kZerosLater = false;
  // mma.sync: whether scales multiply weights, not sums.
  template <typename T>
  static constexpr bool kScaledWeights = false;
  // mma.sync: what the values of rows g and g + 8 take, for half a unit: zero points, or scales of weights.
  template <typename T>
  __device__ static uint2 pair_of(const uint32_t* /*scales*/, uint32_t /*zeros*/, uint32_t /*selector*/, int /*half*/,
                                  int /*t*/) {
    return make_uint2(0, 0);
  }
  // wgmma: whether factors are made of scales' codes, by group_factor (QuantLinear) and half_factor, not of numbers.
  static constexpr bool kScaleFactors = false;
  // wgmma: whether 16-bit scales of the activations' type are used as they are, twice in a word.
  static constexpr bool kPlainScales = true;
  // wgmma: a scale, and one twice in a word, as a factor.
  template <typename T>
  __device__ static float factor(float s) {
    return s;
  }
  template <typename T>
  __device__ static uint32_t factor(uint32_t twice) {
    return twice;
  }
};

// The same of a format without zero points that has nothing of its own for wgmma: dequant's values, times the scales.
template <class F>
struct PlainTrait : Trait {
  template <typename T>
  static constexpr float kProductFactor = F::template kSumFactor<T>;
  template <typename T>
  __device__ static void dequant_scaled(uint32_t q, uint32_t q8, const uint32_t (&scale)[2], uint32_t, uint32_t,
                                        uint32_t (&a)[4]) {
    F::template dequant<T, false, true>(q, q8, 0, 0, a);
    times<T>(a, scale[0], scale[1]);
  }
};

// Scales as what codes are multiplied by on wgmma, twice in a word: an f32; and a half of a word of 16-bit ones.
template <typename T, class F>
__device__ inline uint32_t code_factor(float s) {
  s = F::template factor<T>(s);
  return F::template factor<T>(Half<T>::pack(s, s));
}
template <typename T, class F, typename Scale>
__device__ inline uint32_t code_factor(uint32_t word, int row) {
  if constexpr (std::is_same_v<T, Scale> && F::kPlainScales)
    return F::template factor<T>(__byte_perm(word, 0, row ? 0x3232 : 0x1010));
  return code_factor<T, F>(row ? Half<Scale>::high(word) : Half<Scale>::low(word));
}

template <typename F>
struct Sizes {
  static constexpr int kBits = F::kBits;
  static constexpr int kScaleBytes = F::scale_bytes(F::kGroups), kZeroBytes = F::kZeroBytes;
  static constexpr int kLaneBytes = kScaleBytes + kZeroBytes;
  static constexpr int kHighBytes = kBits == 5 || kBits == 6 ? 4 * kBits - 16 : 0;  // of a lane
  // Whether a unit has two groups is known at run time only.
  static constexpr bool kRuntime = kBits == 8;
  // The place of a lane's 16 bytes in a unit's codes. With 8 bits this is row g's; row g + 8's are 512 bytes further.
  __device__ static int lane_at(int lane) { return 16 * (kBits == 8 ? lane ^ (lane >> 3 & 3) : lane); }
  // Where they are in memory; 16 bits: a row's halves lie side by side, so pieces of 512 bytes, [row g, g + 8][half],
  // do not.
  __device__ static int from_at(int lane) { return kBits == 16 ? lane / 4 * 128 + lane % 4 * 16 : lane_at(lane); }
  __device__ static constexpr int piece_at(int i) { return kBits == 16 ? i / 1024 * 1024 + i % 1024 / 8 : i; }
};

}  // namespace quantmoe
