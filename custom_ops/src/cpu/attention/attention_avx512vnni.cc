// CachedAttention, CausalConv, GatedDelta and StateSpace with AVX-512: a vector is a zmm.
#include <immintrin.h>

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-function"
#include "cpu/attention/latent_attention.h"
#include "cpu/attention/linear_attention.h"
#pragma GCC diagnostic pop

namespace quantmoe {
namespace {

struct Avx512Vectors {
  static constexpr int kRows = 8, kVectors = 2;  // 16 registers of sums
  static constexpr int kSlab = 4;

  using Vector = __m512;
  static Vector zero() { return _mm512_setzero_ps(); }
  static Vector load(const float* x) { return _mm512_loadu_ps(x); }
  // 16 elements of a cache as 16-bit numbers, and what these are.
  static __m128i load_bytes(const void* x) { return _mm_loadu_si128(static_cast<const __m128i*>(x)); }
  static __m256i load_short(const uint16_t* x) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)); }
  static __m256i load_short(const int8_t* x) { return _mm256_cvtepi8_epi16(load_bytes(x)); }
  static __m256i load_short(const E4m3* x) {  // e4m3_half
    const __m256i code = _mm256_cvtepu8_epi16(load_bytes(x)), ones = _mm256_set1_epi16(0x7f);
    const __m256i magnitude = _mm256_and_si256(code, ones);
    const __m256i sign = _mm256_slli_epi16(_mm256_andnot_si256(ones, code), 8);
    const __m256i half = _mm256_or_si256(_mm256_slli_epi16(magnitude, 7), sign);
    return _mm256_mask_mov_epi16(half, _mm256_cmpeq_epi16_mask(magnitude, ones), _mm256_set1_epi16(0x7e00));
  }
  template <class C>
  static Vector numbers(__m256i x) {
    if constexpr (std::is_same_v<C, int8_t>) return _mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(x));
    return _mm512_cvtph_ps(x);
  }
  static Vector load(const uint16_t* x) { return numbers<uint16_t>(load_short(x)); }
  static Vector load(const int8_t* x) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_bytes(x))); }
  static Vector load(const E4m3* x) { return numbers<E4m3>(load_short(x)); }
  static void store(float* out, Vector x) { _mm512_storeu_ps(out, x); }
  static Vector multiply(float a, Vector x) { return _mm512_mul_ps(_mm512_set1_ps(a), x); }
  static Vector multiply_add(float a, Vector x, Vector sum) { return _mm512_fmadd_ps(_mm512_set1_ps(a), x, sum); }

  // In each 128 bits: 4 x 4 numbers of 4 rows.
  static void transpose_quarters(const __m512& a, const __m512& b, const __m512& c, const __m512& d, __m512* out) {
    const __m512d ab = _mm512_castps_pd(_mm512_unpacklo_ps(a, b)), cd = _mm512_castps_pd(_mm512_unpacklo_ps(c, d));
    const __m512d high_ab = _mm512_castps_pd(_mm512_unpackhi_ps(a, b)),
                  high_cd = _mm512_castps_pd(_mm512_unpackhi_ps(c, d));
    out[0] = _mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd));
    out[1] = _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd));
    out[2] = _mm512_castpd_ps(_mm512_unpacklo_pd(high_ab, high_cd));
    out[3] = _mm512_castpd_ps(_mm512_unpackhi_pd(high_ab, high_cd));
  }

  // 4 x 4 blocks of 4 x 4 numbers: the blocks' insides, then the blocks.
  static void transpose(const float* const* rows, int64_t feature, float* out) {
    __m512 x[16];
    for (int i = 0; i < 16; i += 4)
      transpose_quarters(load(rows[i] + feature), load(rows[i + 1] + feature), load(rows[i + 2] + feature),
                         load(rows[i + 3] + feature), x + i);
    for (int i = 0; i < 4; ++i) {  // quarter q of x[4 j + i]: column 4 q + i of rows 4 j ..
      const __m512 even = _mm512_shuffle_f32x4(x[i], x[4 + i], 0x88), odd = _mm512_shuffle_f32x4(x[i], x[4 + i], 0xdd);
      const __m512 more = _mm512_shuffle_f32x4(x[8 + i], x[12 + i], 0x88),
                   last = _mm512_shuffle_f32x4(x[8 + i], x[12 + i], 0xdd);
      store(out + i * 16, _mm512_shuffle_f32x4(even, more, 0x88));
      store(out + (8 + i) * 16, _mm512_shuffle_f32x4(even, more, 0xdd));
      store(out + (4 + i) * 16, _mm512_shuffle_f32x4(odd, last, 0x88));
      store(out + (12 + i) * 16, _mm512_shuffle_f32x4(odd, last, 0xdd));
    }
  }

  // As 16-bit numbers, half as many vectors: row i and row i + 8 are the halves of one. Each 128 bits are 8 x 8 of
  // them.
  template <class C>
  static void transpose(const C* const* rows, int64_t feature, float* out) {
    const auto half = [&](int i) { return load_short(rows[i] + feature); };
    __m512i x[8], y[8];
    for (int i = 0; i < 8; ++i) x[i] = _mm512_inserti64x4(_mm512_castsi256_si512(half(i)), half(i + 8), 1);
    for (int i = 0; i < 4; ++i) {
      y[2 * i] = _mm512_unpacklo_epi16(x[i], x[i + 4]);
      y[2 * i + 1] = _mm512_unpackhi_epi16(x[i], x[i + 4]);
    }
    for (int i = 0; i < 4; ++i) {
      x[2 * i] = _mm512_unpacklo_epi16(y[i], y[i + 4]);
      x[2 * i + 1] = _mm512_unpackhi_epi16(y[i], y[i + 4]);
    }
    for (int i = 0; i < 4; ++i) {
      y[2 * i] = _mm512_unpacklo_epi16(x[i], x[i + 4]);
      y[2 * i + 1] = _mm512_unpackhi_epi16(x[i], x[i + 4]);
    }
    for (int i = 0; i < 8; ++i) {  // quarters: column i of rows 0 .. 7, column 8 + i of them, and of rows 8 .. 15
      const __m512i columns = _mm512_shuffle_i64x2(y[i], y[i], 0xd8);
      store(out + i * 16, numbers<C>(_mm512_castsi512_si256(columns)));
      store(out + (8 + i) * 16, numbers<C>(_mm512_extracti64x4_epi64(columns, 1)));
    }
  }
  static Vector without_payload(Vector x) {
    return _mm512_mask_mov_ps(x, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), _mm512_set1_ps(bit_cast<float>(0x7fc00000u)));
  }
};

}  // namespace

const AttentionFunctions attention_avx512vnni = attention_kernel<Avx512Vectors>;
const LinearAttentionFunctions linear_attention_avx512vnni = linear_attention_kernel<Avx512Vectors>;

}  // namespace quantmoe
