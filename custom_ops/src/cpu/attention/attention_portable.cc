// CachedAttention, CausalConv, GatedDelta and StateSpace in standard C++.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-function"
#include "cpu/attention/latent_attention.h"
#include "cpu/attention/linear_attention.h"
#pragma GCC diagnostic pop

namespace quantmoe {
namespace {

struct PortableVectors {
  static constexpr int kRows = 2, kVectors = 1;
  static constexpr int kSlab = 2;

  struct Vector {
    float lanes[16];
  };
  static Vector zero() { return {}; }
  template <class C>
  static Vector load(const C* x) {
    Vector out;
    for (int i = 0; i < 16; ++i) out.lanes[i] = widen(x[i]);
    return out;
  }
  static void store(float* out, const Vector& x) { std::memcpy(out, x.lanes, sizeof x); }
  static Vector multiply(float a, const Vector& x) {
    Vector out;
    for (int i = 0; i < 16; ++i) out.lanes[i] = a * x.lanes[i];
    return out;
  }
  static Vector multiply_add(float a, const Vector& x, const Vector& sum) {
    Vector out;
    for (int i = 0; i < 16; ++i) out.lanes[i] = fma(a, x.lanes[i], sum.lanes[i]);
    return out;
  }
  template <class C>
  static void transpose(const C* const* rows, int64_t at, float* out) {
    for (int j = 0; j < 16; ++j) {
      const Vector x = load(rows[j] + at);
      for (int i = 0; i < 16; ++i) out[i * 16 + j] = x.lanes[i];
    }
  }
  static Vector without_payload(Vector x) {
    for (float& lane : x.lanes) lane = lane != lane ? bit_cast<float>(0x7fc00000u) : lane;
    return x;
  }
};

}  // namespace

const AttentionFunctions attention_portable = attention_kernel<PortableVectors>;
const LinearAttentionFunctions linear_attention_portable = linear_attention_kernel<PortableVectors>;

}  // namespace quantmoe
