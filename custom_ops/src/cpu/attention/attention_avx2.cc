// CachedAttention, CausalConv, GatedDelta and StateSpace with AVX2, FMA and F16C: a vector is two ymm.
#include <immintrin.h>

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-function"
#include "cpu/attention/latent_attention.h"
#include "cpu/attention/linear_attention.h"
#pragma GCC diagnostic pop

namespace quantmoe {
namespace {

struct Avx2Vectors {
  static constexpr int kRows = 6, kVectors = 1;  // 12 registers of sums
  static constexpr int kSlab = 2;

  struct Vector {
    __m256 low, high;
  };
  static __m256 load_half(const float* x) { return _mm256_loadu_ps(x); }
  static __m256 load_half(const uint16_t* x) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
  }
  static __m256 load_half(const int8_t* x) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(x))));
  }
  static __m256 load_half(const E4m3* x) {  // e4m3_half
    const __m128i code = _mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(x)));
    const __m128i ones = _mm_set1_epi16(0x7f), magnitude = _mm_and_si128(code, ones);
    const __m128i sign = _mm_slli_epi16(_mm_andnot_si128(ones, code), 8);
    const __m128i half = _mm_or_si128(_mm_slli_epi16(magnitude, 7), sign);
    return _mm256_cvtph_ps(_mm_blendv_epi8(half, _mm_set1_epi16(0x7e00), _mm_cmpeq_epi16(magnitude, ones)));
  }
  static Vector zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
  template <class C>
  static Vector load(const C* x) {
    return {load_half(x), load_half(x + 8)};
  }
  static void store(float* out, const Vector& x) {
    _mm256_storeu_ps(out, x.low);
    _mm256_storeu_ps(out + 8, x.high);
  }
  static Vector multiply(float a, const Vector& x) {
    const __m256 all = _mm256_set1_ps(a);
    return {_mm256_mul_ps(all, x.low), _mm256_mul_ps(all, x.high)};
  }
  static Vector multiply_add(float a, const Vector& x, const Vector& sum) {
    const __m256 all = _mm256_set1_ps(a);
    return {_mm256_fmadd_ps(all, x.low, sum.low), _mm256_fmadd_ps(all, x.high, sum.high)};
  }

  // 8 features of 8 keys, to columns of 16.
  template <class C>
  static void transpose_eight(const C* const* rows, int64_t feature, float* out) {
    __m256 x[8], y[8];
    for (int i = 0; i < 8; ++i) x[i] = load_half(rows[i] + feature);
    for (int i = 0; i < 8; i += 2) {
      y[i] = _mm256_unpacklo_ps(x[i], x[i + 1]);
      y[i + 1] = _mm256_unpackhi_ps(x[i], x[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
      x[i] = _mm256_shuffle_ps(y[i], y[i + 2], 0x44);
      x[i + 1] = _mm256_shuffle_ps(y[i], y[i + 2], 0xee);
      x[i + 2] = _mm256_shuffle_ps(y[i + 1], y[i + 3], 0x44);
      x[i + 3] = _mm256_shuffle_ps(y[i + 1], y[i + 3], 0xee);
    }
    for (int i = 0; i < 4; ++i) {
      _mm256_storeu_ps(out + i * 16, _mm256_permute2f128_ps(x[i], x[i + 4], 0x20));
      _mm256_storeu_ps(out + (i + 4) * 16, _mm256_permute2f128_ps(x[i], x[i + 4], 0x31));
    }
  }
  template <class C>
  static void transpose(const C* const* rows, int64_t at, float* out) {
    for (int key = 0; key < 16; key += 8)
      for (int feature = 0; feature < 16; feature += 8)
        transpose_eight(rows + key, at + feature, out + feature * 16 + key);
  }
  static __m256 without_payload(__m256 x) {
    return _mm256_blendv_ps(x, _mm256_set1_ps(bit_cast<float>(0x7fc00000u)), _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  }
  static Vector without_payload(const Vector& x) { return {without_payload(x.low), without_payload(x.high)}; }
};

}  // namespace

const AttentionFunctions attention_avx2 = attention_kernel<Avx2Vectors>;
const LinearAttentionFunctions linear_attention_avx2 = linear_attention_kernel<Avx2Vectors>;

}  // namespace quantmoe
