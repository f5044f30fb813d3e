// Codes (FORMAT.md 3.2) to the A operand of mma.m16n8k16: a[0] = row g, columns c(0) c(1); a[1] = row g + 8, the same;
// a[2], a[3] = columns c(2) c(3). And scales and zero points to what they are multiplied with.
//
// Wherever a code can be moved into the bits of a float it is, however small the float: what is missing is a power of
// two, which goes to the scale or, as a format's kResult, to the sums.
#pragma once
#include <type_traits>

#include "cuda/layout.h"
#include "cuda/ptx.cuh"

namespace quantmoe {

// (q & mask) | bits in one instruction.
template <uint32_t mask>
__device__ inline uint32_t MaskOr(uint32_t q, uint32_t bits) {
  uint32_t r;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(r) : "r"(q), "n"(mask), "r"(bits));
  return r;
}
// The bits of the mask from a, the others from b.
template <uint32_t mask>
__device__ inline uint32_t Select(uint32_t a, uint32_t b) {
  uint32_t r;
  asm("lop3.b32 %0, %1, %2, %3, 0xe2;" : "=r"(r) : "r"(a), "n"(mask), "r"(b));
  return r;
}
template <typename T>
constexpr bool kBf16 = std::is_same_v<T, __nv_bfloat16>;

// int4. The codes become the low mantissa bits of a power of two: 1024 + code, in bf16 32 + code / 4. Nibbles that lie
// four bits too high cost an fma (in bf16 they are a number of exponent 0 or 1, code * 2^-129): the integer pipe is
// what binds. Where latency binds, kShift is faster.
template <typename T>
constexpr float kInt4Bits = kBf16<T> ? 0.25f : 1.f;

template <typename T, bool kShift = false>
__device__ inline void DequantInt4(uint32_t q, uint32_t (&a)[4]) {
  constexpr uint32_t low = 0x000f000f, high = 0x00f000f0, base = Half<T>::kInt4Or;
  const uint32_t q8 = q >> 8;
  a[0] = MaskOr<low>(q, base), a[1] = MaskOr<low>(q8, base);
  if constexpr (kShift) {
    a[2] = MaskOr<low>(q >> 4, base), a[3] = MaskOr<low>(q >> 12, base);
  } else if constexpr (kBf16<T>) {
    a[2] = Half<T>::Fma(q & high, 0x7f007f00, base), a[3] = Half<T>::Fma(q8 & high, 0x7f007f00, base);  // 2^127
  } else {  // (1024 + 16 code) / 16 + 960
    a[2] = Half<T>::Fma(MaskOr<high>(q, base), 0x2c002c00, 0x63806380);
    a[3] = Half<T>::Fma(MaskOr<high>(q8, base), 0x2c002c00, 0x63806380);
  }
}
// Minus base + zero point, of rows g and g + 8: exact.
template <typename T>
__device__ inline void Center(uint32_t (&a)[4], uint32_t low, uint32_t high) {
  a[0] = Half<T>::Sub(a[0], low), a[2] = Half<T>::Sub(a[2], low);
  a[1] = Half<T>::Sub(a[1], high), a[3] = Half<T>::Sub(a[3], high);
}

// int4 weights times a group's scale, rounded once, for wgmma: `scale` is what Int4Scale made of the scales of rows g
// and g + 8, and the values come out times kInt4Result.
//
// bf16: a nibble in bits 0..3 or 4..7 of a zero word is a bf16 of exponent 0 or 1, that is code * 2^-133 or * 2^-129:
// one fma with the scale, times a power of two that keeps everything in range, gives (code - 8) * scale. Scales from
// 2^-60 to 2^63 are exact. f16 has not the range for that: subtract, then multiply.
template <typename T>
constexpr float kInt4Result = kBf16<T> ? 0x1p-69f : 1.f;

template <typename T>
__device__ inline uint32_t Int4Scale(uint32_t twice) {
  if constexpr (kBf16<T>) return Half<T>::Mul(twice, 0x5f805f80);  // 2^64
  return twice;
}

template <typename T>
__device__ inline void DequantInt4Scaled(uint32_t q, const uint32_t (&scale)[2], uint32_t (&a)[4]) {
  if constexpr (kBf16<T>) {
    const uint32_t q8 = q >> 8;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t high = Half<T>::Mul(scale[i], 0x3d803d80);  // 2^-4
      const uint32_t zero = Half<T>::Mul(scale[i], 0x80088008);  // minus code 8
      a[i] = Half<T>::Fma((i ? q8 : q) & 0x000f000f, scale[i], zero);
      a[i + 2] = Half<T>::Fma((i ? q8 : q) & 0x00f000f0, high, zero);
    }
  } else {
    DequantInt4<T>(q, a);
    Center<T>(a, Half<T>::kInt4Zero, Half<T>::kInt4Zero);
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = Half<T>::Mul(a[i], scale[i % 2]);
  }
}

// int8: the words of rows g and g + 8; times kInt8Result, or in bf16 the `scale` of wgmma as above, times kInt4Result.
// A bf16 whose bits are a byte is the byte * 2^-133.
template <typename T>
constexpr float kInt8Result = kBf16<T> ? 0x1p-6f : 1.f;

// The zero points of rows g and g + 8 as ZeroPoint<T, true> makes them; exact.
template <typename T>
__device__ inline void DequantInt8(uint32_t low, uint32_t high, uint32_t zero_low, uint32_t zero_high,
                                   uint32_t (&a)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t q = i % 2 ? high : low, zero = i % 2 ? zero_high : zero_low, bytes = i / 2 ? 0x4341 : 0x4240;
    if constexpr (kBf16<T>) {
      a[i] = Half<T>::Fma(__byte_perm(q, 0, bytes), 0x7f007f00, zero);  // 2^127
    } else {
      a[i] = Half<T>::Sub(__byte_perm(q, 0x64646464, bytes), zero);
    }
  }
}
// Symmetric: code 128 is zero.
template <typename T>
__device__ inline void DequantInt8(uint32_t low, uint32_t high, uint32_t (&a)[4]) {
  constexpr uint32_t kMiddle = kBf16<T> ? 0xc000c000 : 0x64806480;  // -128 * 2^-6; 1024 + 128
  DequantInt8<T>(low, high, kMiddle, kMiddle, a);
}
template <typename T>
__device__ inline void DequantInt8Scaled(uint32_t low, uint32_t high, const uint32_t (&scale)[2], uint32_t (&a)[4]) {
  if constexpr (kBf16<T>) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t zero = Half<T>::Mul(scale[i % 2], 0x80808080);  // minus code 128
      a[i] = Half<T>::Fma(__byte_perm(i % 2 ? high : low, 0, i / 2 ? 0x4341 : 0x4240), scale[i % 2], zero);
    }
  } else {
    DequantInt8<T>(low, high, a);
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = Half<T>::Mul(a[i], scale[i % 2]);
  }
}
// int4 with zero points as ZeroPoint makes them, times kInt8Result, for wgmma.
template <typename T>
__device__ inline void DequantInt4Zero(uint32_t q, uint32_t zero_low, uint32_t zero_high, uint32_t (&a)[4]) {
  if constexpr (kBf16<T>) {
    const uint32_t q8 = q >> 8;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      a[i] = Half<T>::Fma((i ? q8 : q) & 0x000f000f, 0x7f007f00, i ? zero_high : zero_low);
      a[i + 2] = Half<T>::Fma((i ? q8 : q) & 0x00f000f0, 0x7d007d00, i ? zero_high : zero_low);  // 2^123
    }
  } else {
    DequantInt4<T>(q, a);
    Center<T>(a, zero_low, zero_high);
  }
}

// A byte of a word in both halves of another, above it the byte of `high`; selector: BytePair of its index.
__device__ inline constexpr uint32_t BytePair(uint32_t index) { return 0x4040 + index * 0x0101; }

// Zero point `selector` of four, twice: base + zero point as Center takes it (kFma false), or as the Fma of bf16 does,
// minus zero point * kInt8Result.
template <typename T, bool kFma>
__device__ inline uint32_t ZeroPoint(uint32_t zeros, uint32_t selector) {
  if constexpr (kFma && kBf16<T>) return Half<T>::Mul(__byte_perm(zeros, 0, selector), 0xff00ff00);  // -2^127
  return __byte_perm(zeros, Half<T>::kInt4Or | Half<T>::kInt4Or >> 8, selector);
}

// fp8_e4m3, times kFp8Bits: bit patterns moved to where the exponent of T ends. The codes that are not numbers count as
// 480, as on the CPU. kShift as for int4: of as many instructions, less of them for the integer pipe or shorter chains.
template <typename T>
constexpr float kFp8Bits = kBf16<T> ? 0x1p-120f : 0x1p-8f;

template <typename T, bool kShift = false>
__device__ inline void DequantFp8(uint32_t low, uint32_t high, uint32_t (&a)[4]) {
  constexpr uint32_t mask = kBf16<T> ? 0x07f007f0 : 0x3f803f80;
  constexpr int left = kBf16<T> ? 4 : 7, right = kBf16<T> ? 4 : 1;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t q = i ? high : low;
    uint32_t even, odd;  // bytes 0 and 2, bytes 1 and 3, their signs above them
    asm("prmt.b32 %0, %1, 0, 0xa280;" : "=r"(even) : "r"(q));
    a[i] = (even << left) & (mask | 0x80008000);
    if constexpr (kShift) {
      a[i + 2] = MaskOr<mask>(q >> right, q & 0x80008000);
    } else {
      asm("prmt.b32 %0, %1, 0, 0xb391;" : "=r"(odd) : "r"(q));
      a[i + 2] = (odd << left) & (mask | 0x80008000);
    }
  }
}

// e2m1, times kE2m1Bits, in the same way.
template <typename T>
constexpr float kE2m1Bits = kBf16<T> ? 0x1p-126f : 0x1p-14f;

template <typename T>
__device__ inline void DequantE2m1(uint32_t q, uint32_t (&a)[4]) {
  if constexpr (kBf16<T>) {
    // Two shifted copies that do not meet, in one multiplication: the sign to bit 15, the rest to bits 6..8.
    a[0] = ((q & 0x000f000f) * 0x1040) & 0x81c081c0;
    a[2] = ((q & 0x00f000f0) * 0x0104) & 0x81c081c0;
    a[1] = MaskOr<0x01c001c0>(q >> 2, (q << 4) & 0x80008000);
    a[3] = MaskOr<0x01c001c0>(q >> 6, q & 0x80008000);
  } else {
    // Only the high byte of an f16 is not zero: four codes at once, other bits among theirs until the end.
    const uint32_t odd = Select<0x80808080>(q, q >> 3), even = Select<0x80808080>(q << 4, q << 1);
    a[0] = (even << 8) & 0x8e008e00, a[1] = even & 0x8e008e00;
    a[2] = (odd << 8) & 0x8e008e00, a[3] = odd & 0x8e008e00;
  }
}
template <typename T>
__device__ inline void Times(uint32_t (&a)[4], uint32_t low, uint32_t high) {
#pragma unroll
  for (int i = 0; i < 4; ++i) a[i] = Half<T>::Mul(a[i], i % 2 ? high : low);
}

// An e8m0 scale, byte `index` of a word. 2^-127 and infinity (for NaN) are no normal f32, but what they should be.
__device__ inline float E8m0(uint32_t scales, int index) {
  const uint32_t bits = (index < 3 ? scales << (23 - 8 * index) : scales >> 1) & 0x7f800000;
  return __uint_as_float(max(bits, 0x00400000u));
}
// Without 2^-127, which is 0: products of f16 tell them not apart.
__device__ inline float E8m0Normal(uint32_t scales, int index) {
  return __uint_as_float((index < 3 ? scales << (23 - 8 * index) : scales >> 1) & 0x7f800000);
}
// The same as a factor on e2m1 bits, whose product, value * scale * kMxfp4Result, is exact for scales of 2^-70 to 2^63;
// f16, 2^-21 to 2^3.
template <typename T>
constexpr float kMxfp4Result = kBf16<T> ? 0x1p-62f : 0x1p-2f;
template <typename T>
__device__ inline uint32_t Mxfp4Factor(uint32_t scales, uint32_t selector) {
  const uint32_t twice = __byte_perm(scales, 0, selector);
  if constexpr (kBf16<T>) return twice * 128 + 0x20002000;                     // exponent + 64
  const int exponent = min(max(static_cast<int>(twice & 0xff) - 100, 0), 30);  // + 12
  return exponent * 0x04000400;
}
// An e4m3 scale (not negative) as a factor on e2m1 bits: the product, value * scale * kNvfp4Result, is always exact.
template <typename T>
constexpr float kNvfp4Result = kBf16<T> ? 0x1p-62f : 0x1p-8f;
template <typename T>
__device__ inline uint32_t Nvfp4Factor(uint32_t scales, uint32_t selector) {
  const uint32_t twice = __byte_perm(scales, 0, selector);
  if constexpr (kBf16<T>) return Half<T>::Mul(Half<T>::Mul(twice << 4, 0x7b807b80), 0x5f805f80);  // 2^120, 2^64
  return Half<T>::Mul(twice << 7, 0x74007400);                                                    // 2^14
}

// On wgmma codes are multiplied by scales before the product. What products are to be multiplied by then; nvfp4's also
// by the global scale.
template <typename T>
__host__ __device__ constexpr float ProductFactor(WeightKind kind) {
  switch (kind) {
    case WeightKind::kInt4:
    case WeightKind::kInt8:
      return 1 / kInt4Result<T>;
    case WeightKind::kInt4Zero:
    case WeightKind::kInt8Zero:
      return 1 / kInt8Result<T>;
    case WeightKind::kFp8:
      return kBf16<T> ? 0x1p56f : 1.f;
    case WeightKind::kMxfp4:
      return 1 / kMxfp4Result<T>;
    case WeightKind::kFloat:
      return 1.f;
    default:
      return 1 / kNvfp4Result<T>;
  }
}
template <typename T, WeightKind kind>
constexpr float kProductFactor = ProductFactor<T>(kind);
// A scale as what codes are multiplied by, twice in a word; from T, and from f32.
template <typename T, WeightKind kind>
__device__ inline uint32_t ScaledFactor(uint32_t twice) {
  if constexpr (kind == WeightKind::kInt4 || kind == WeightKind::kInt8) return Int4Scale<T>(twice);
  return twice;
}
template <typename T, WeightKind kind>
__device__ inline uint32_t CodeFactor(float s) {
  if constexpr (kind == WeightKind::kFp8) s *= 1 / (kProductFactor<T, kind> * kFp8Bits<T>);
  return ScaledFactor<T, kind>(Half<T>::Pack(s, s));
}

// Formats as the kernels' template argument.
template <typename Scale_, int GS>
struct Int4 {
  using Scale = Scale_;
  static constexpr bool kPacked = false;
  static constexpr WeightKind kKind = WeightKind::kInt4;
  static constexpr int kGroups = GS;  // in a unit: 2 for groups of 32, else 1
};
template <WeightKind kind, int GS = 2>  // 8 bits: at most 2
struct Format {
  static constexpr WeightKind kKind = kind;
  static constexpr int kGroups = GS;
  static constexpr bool kPacked = false;
};
// nvfp4 and e4m3 times the same codes of activations as MoeRound packs them.
struct PackedNvfp4 : Format<WeightKind::kNvfp4> {
  static constexpr bool kPacked = true;
};
struct PackedE4m3 : Format<WeightKind::kFp8> {
  static constexpr bool kPacked = true;
};
template <typename F>
struct Sizes {
  static constexpr int kBits = BitsOf(F::kKind);
  static constexpr int kScaleBytes = ScaleBytes(F::kKind, F::kGroups), kZeroBytes = ZeroBytes(F::kKind);
  static constexpr int kLaneBytes = kScaleBytes + kZeroBytes;
  // Whether a unit has two groups is known at run time only.
  static constexpr bool kRuntime = kBits == 8;
  // Where in a unit's codes a lane has its 16 bytes; of 8 bits those of row g, 512 bytes before those of row g + 8.
  __device__ static int LaneAt(int lane) { return 16 * (kBits == 8 ? lane ^ (lane >> 3 & 3) : lane); }
  // Where they are in memory; 16 bits: a row's halves lie side by side, so pieces of 512 bytes, [row g, g + 8][half], do
  // not.
  __device__ static int FromAt(int lane) { return kBits == 16 ? lane / 4 * 128 + lane % 4 * 16 : LaneAt(lane); }
  __device__ static constexpr int PieceAt(int i) { return kBits == 16 ? i / 1024 * 1024 + i % 1024 / 8 : i; }
};

}  // namespace quantmoe
