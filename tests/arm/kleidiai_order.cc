// FORMAT.md section 2 and quant_moe.def written as plain scalar code, against KleidiAI's packers, quantizer and
// kernels, bit for bit, on random matrices. Exits 1 at a difference. Argument: number of cases a family (default 1000).
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>

#include "kleidiai.h"

namespace quantmoe::arm {
namespace {

float from_bf16(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }

template <class T>
void put(std::vector<uint8_t>& out, T value) {
  auto bytes = std::bit_cast<std::array<uint8_t, sizeof(T)>>(value);
  out.insert(out.end(), bytes.begin(), bytes.end());
}

// FORMAT.md section 2.
std::vector<uint8_t> pack(const Rhs& rhs) {
  const int64_t nr = rhs.bits == 4 ? 8 : 4, n = rhs.n, k = rhs.k, g = rhs.group;
  const int64_t kp = g > 0 ? (k + g - 1) / g * g : (k + 31) / 32 * 32, block = g > 0 ? g : kp;
  const int zero = 1 << (rhs.bits - 1);
  auto source = [&](int64_t row) { return std::min(row, n - 1); };
  auto code = [&](int64_t row, int64_t col) { return col < k ? int{rhs.codes[source(row) * k + col]} : zero; };
  std::vector<uint8_t> out;
  for (int64_t panel = 0; panel < n; panel += nr) {
    float sums[8] = {};
    int32_t int_sums[8] = {};
    for (int64_t b = 0; b < kp; b += block) {
      const int64_t chunk = rhs.bits == 4 ? 32 : 8;
      for (int64_t c = b; c < b + block; c += chunk)
        for (int s = 0; s < (rhs.bits == 4 ? 2 : 1); ++s)
          for (int64_t r = panel; r < panel + nr; ++r) {
            int p = 0;
            for (int i = 0; i < 8; ++i) {
              const int low = code(r, c + 8 * s + i);
              if (rhs.bits == 4) {
                const int high = code(r, c + 8 * s + i + 16);
                out.push_back(static_cast<uint8_t>((low | high << 4) ^ 0x88));
                p += high - 8;
              } else {
                out.push_back(static_cast<uint8_t>(low ^ 0x80));
              }
              p += low - zero;
            }
            int_sums[r - panel] += p;
            if (g > 0) {
              float& sum = sums[r - panel];
              sum = std::fma(float(p), from_bf16(rhs.scales_bf16[source(r) * (k / g) + b / g]), sum);
            }
          }
      if (g > 0)
        for (int64_t r = panel; r < panel + nr; ++r) put(out, rhs.scales_bf16[source(r) * (k / g) + b / g]);
    }
    const int factor = rhs.bits == 4 ? 16 : 1;
    for (int64_t r = 0; r < nr; ++r)
      if (g > 0)
        put(out, sums[r]);
      else
        put(out, int_sums[r] * factor);
    if (g < 0)
      for (int64_t r = panel; r < panel + nr; ++r) put(out, rhs.scales_f32[source(r)] / float(factor));
    for (int64_t r = panel; r < panel + nr; ++r) put(out, rhs.bias[source(r)]);
  }
  return out;
}

struct QuantizedRow {
  std::vector<int8_t> q;
  int z;
  float step;
};

// quant_moe.def, Activations: int8_token_asym.
QuantizedRow quantize(const float* x, int64_t k) {
  float lo = 0, hi = 0;
  for (int64_t i = 0; i < k; ++i) lo = std::min(lo, x[i]), hi = std::max(hi, x[i]);
  const float s = hi == lo ? 1.0f : 255.0f / (hi - lo);
  QuantizedRow row{std::vector<int8_t>(k), 0, 0};
  if (std::isinf(s)) return row;
  row.step = s == 0 ? 0.0f : 1.0f / s;
  const float a = lo * s, b = hi * s;
  float z = (-128.0f + a) + (127.0f + b) > 0 ? -128.0f - a : 127.0f - b;
  row.z = static_cast<int>(std::nearbyint(std::clamp(z, -128.0f, 127.0f)));
  for (int64_t i = 0; i < k; ++i)
    row.q[i] = static_cast<int8_t>(std::clamp(static_cast<int>(std::nearbyint(x[i] * s)) + row.z, -128, 127));
  return row;
}

// quant_moe.def, Products.
float ordered_product(const Rhs& rhs, int64_t n, const QuantizedRow& x, float rowsum, int32_t int_rowsum) {
  const int64_t k = rhs.k, g = rhs.group > 0 ? rhs.group : k;
  const int zero = 1 << (rhs.bits - 1);
  float acc = 0;
  int32_t dot = 0;
  for (int64_t b = 0; b < k; b += g) {
    dot = 0;
    for (int64_t c = b; c < std::min(b + g, k); ++c) dot += (rhs.codes[n * k + c] - zero) * x.q[c];
    if (rhs.group > 0) acc = std::fma(float(dot), from_bf16(rhs.scales_bf16[n * (k / g) + b / g]), acc);
  }
  if (rhs.group > 0) return std::fma(rowsum, float(-x.z), acc) * x.step + rhs.bias[n];
  const int factor = rhs.bits == 4 ? 16 : 1;
  return float(factor * dot + int_rowsum * -x.z) * (rhs.scales_f32[n] / float(factor) * x.step) + rhs.bias[n];
}

int failures = 0;
void check(bool ok, const char* what, const Rhs& rhs, int64_t m, int64_t i) {
  if (ok || ++failures > 40) return;
  std::printf("DIFFERENT %s: bits %d group %ld n %ld k %ld m %ld at %ld\n", what, rhs.bits, long(rhs.group),
              long(rhs.n), long(rhs.k), long(m), long(i));
}

enum { kRandom, kConstant, kZero, kTiny, kHuge, kPositive, kNegative, kHalves, kKinds };
const char* const kNames[] = {"random", "constant", "zero", "tiny", "huge", "positive", "negative", "halves"};

// Rows of activations of all kinds, at random; kinds gets each row's.
std::vector<float> random_rows(std::mt19937& rng, int64_t m, int64_t k, std::vector<int>* kinds) {
  auto below = [&](int64_t n) { return static_cast<int64_t>(rng() % n); };
  std::normal_distribution<float> normal;
  std::vector<float> x(m * k);
  for (int64_t t = 0; t < m; ++t) {
    const int kind = static_cast<int>(below(kKinds));
    kinds->push_back(kind);
    const float constant = normal(rng);
    for (int64_t c = 0; c < k; ++c) {
      const float v = normal(rng);
      x[t * k + c] = kind == kConstant   ? constant
                     : kind == kZero     ? 0
                     : kind == kTiny     ? v * 1e-36f
                     : kind == kHuge     ? v * 2e37f
                     : kind == kPositive ? std::fabs(v)
                     : kind == kNegative ? -std::fabs(v)
                                         : v;
      if (kind == kHalves) {  // scale 1, codes and (for every second row) the zero point half way between integers
        const float lo = -127.5f - 0.5f * float(t % 2) + float(t);
        x[t * k + c] = c == 0 ? lo : c == 1 ? lo + 255.0f : lo + 0.5f * float(below(511));
      }
    }
  }
  return x;
}

void run_case(std::mt19937& rng, int bits, int64_t group) {
  auto below = [&](int64_t n) { return static_cast<int64_t>(rng() % n); };
  std::normal_distribution<float> normal;
  Rhs rhs{bits, group, 1 + below(21), 0, {}, {}, {}, {}};
  rhs.k = group > 0 ? group * (1 + below(4)) : bits == 4 ? 2 * (1 + below(80)) : 1 + below(160);
  const int64_t n = rhs.n, k = rhs.k;
  for (int64_t i = 0; i < n * k; ++i) rhs.codes.push_back(static_cast<uint8_t>(below(1 << bits)));
  for (int64_t i = 0; group > 0 && i < n * (k / group); ++i)
    rhs.scales_bf16.push_back(static_cast<uint16_t>(0x3a00 + below(0x600) + (below(2) << 15)));
  for (int64_t i = 0; i < n; ++i) rhs.scales_f32.push_back(normal(rng) * 0.01f), rhs.bias.push_back(normal(rng));

  const std::vector<uint8_t> packed = kleidi_pack(rhs), ours = pack(rhs);
  check(packed.size() == ours.size(), "packed size", rhs, packed.size(), ours.size());
  for (size_t i = 0; i < std::min(packed.size(), ours.size()); ++i)
    if (packed[i] != ours[i]) {
      check(false, "packed byte", rhs, packed.size(), i);
      break;
    }

  const int64_t m = 1 + below(9);
  std::vector<int> kinds;
  const std::vector<float> x = random_rows(rng, m, k, &kinds);
  const int64_t kp = (k + 31) / 32 * 32;
  const int64_t nr = bits == 4 ? 8 : 4;
  const int64_t stride = packed.size() / ((n + nr - 1) / nr), tail = nr * (group > 0 ? 8 : 12);
  std::vector<QuantizedRow> rows;
  for (int64_t t = 0; t < m; ++t) rows.push_back(quantize(x.data() + t * k, k));
  for (int64_t mr : {1, 4}) {
    const std::vector<uint8_t> lhs = kleidi_quantize(x.data(), m, k, mr);
    for (int64_t t = 0; t < m; ++t) {
      const uint8_t* base = lhs.data() + t / mr * mr * (kp + 8);
      int32_t neg_z;
      float step;
      std::memcpy(&neg_z, base + mr * kp + t % mr * 4, 4);
      std::memcpy(&step, base + mr * kp + mr * 4 + t % mr * 4, 4);
      char what[64];
      std::snprintf(what, sizeof what, "step (%s)", kNames[kinds[t]]);
      check(std::bit_cast<uint32_t>(step) == std::bit_cast<uint32_t>(rows[t].step), what, rhs, m, t);
      if (rows[t].step == 0)
        continue;  // 255 / (hi - lo) overflowed: KleidiAI's codes are meaningless, its products the bias
      std::snprintf(what, sizeof what, "zero point (%s)", kNames[kinds[t]]);
      check(-neg_z == rows[t].z, what, rhs, neg_z, rows[t].z);
      std::snprintf(what, sizeof what, "lhs code (%s)", kNames[kinds[t]]);
      for (int64_t c = 0; c < k; ++c) {
        const int8_t q = static_cast<int8_t>(base[c / 8 * 8 * mr + t % mr * 8 + c % 8]);
        if (c >=
            k / 8 * 8) {  // KleidiAI's scalar tail rounds half away from zero; take it over to compare the products
          if (std::abs(q - rows[t].q[c]) == 1) rows[t].q[c] = q;
        }
        check(q == rows[t].q[c], what, rhs, t, c);
      }
    }
    std::vector<float> y(m * n);
    kleidi_matmul(rhs, mr == 4, m, lhs.data(), packed.data(), y.data());
    for (int64_t t = 0; t < m; ++t)
      for (int64_t j = 0; j < n; ++j) {
        const uint8_t* end = packed.data() + (j / nr + 1) * stride - tail + j % nr * 4;
        float rowsum;
        int32_t int_rowsum;
        std::memcpy(&rowsum, end, 4);
        std::memcpy(&int_rowsum, end, 4);
        const float expected = ordered_product(rhs, j, rows[t], rowsum, int_rowsum);
        char what[64];
        std::snprintf(what, sizeof what, "output mr %d (%s)", int(mr), kNames[kinds[t]]);
        check(std::bit_cast<uint32_t>(expected) == std::bit_cast<uint32_t>(y[t * n + j]), what, rhs, t, j);
      }
  }
}

}  // namespace
}  // namespace quantmoe::arm

int main(int argc, char** argv) {
  const int cases = argc > 1 ? std::atoi(argv[1]) : 1000;
  std::mt19937 rng(1);
  struct {
    int bits;
    int64_t group;
  } families[] = {{4, 32}, {4, 64}, {4, 128}, {4, 256}, {4, -1}, {8, -1}};
  for (auto [bits, group] : families) {
    const int before = quantmoe::arm::failures;
    for (int i = 0; i < cases; ++i) quantmoe::arm::run_case(rng, bits, group);
    std::printf("int%d group %ld: %d cases, %d differences\n", bits, long(group), cases,
                quantmoe::arm::failures - before);
  }
  return quantmoe::arm::failures != 0;
}
