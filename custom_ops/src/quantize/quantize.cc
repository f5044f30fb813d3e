// Matrices of floats to codes and scales (quant_moe.h: qm_quantize), row by row on all threads.
#include <cstring>
#include <vector>

#include "core/attributes.h"
#include "core/numbers.h"
#include "core/parallel.h"
#include "quantize/k_quants.h"
#include "quantize/search.h"

namespace quantmoe {
namespace {

float float_at(qm_type type, const void* data, int64_t i) {
  if (type == QM_F32) return static_cast<const float*>(data)[i];
  if (type == QM_F16) return static_cast<float>(static_cast<const Half*>(data)[i]);
  return bit_cast<float>(static_cast<uint32_t>(static_cast<const uint16_t*>(data)[i]) << 16);
}

// A row's groups, padded with weights of no importance.
struct Row {
  std::vector<float> x, importance;
  int64_t group, padded;  // weights of a group, and the same as a multiple of kLanes

  Row(const qm_quantization& q, int64_t groups)
      : group(q.group_size == -1 ? q.k : q.group_size), padded(align_up(group, kLanes)) {
    x.assign(static_cast<size_t>(groups * padded), 0);
    importance.assign(x.size(), 0);
    for (int64_t i = 0; i < q.k; ++i)
      importance[static_cast<size_t>(i / group * padded + i % group)] = q.importance ? q.importance[i] : 1;
  }
  void read(const qm_quantization& q, int64_t n) {
    for (int64_t i = 0; i < q.k; ++i)
      x[static_cast<size_t>(i / group * padded + i % group)] = float_at(q.type, q.weights, n * q.k + i) * q.factor;
  }
  Group of(int64_t i) const { return {x.data() + i * padded, importance.data() + i * padded, padded}; }
};

template <typename Scale>
void integer_row(const qm_quantization& q, const Row& row, int64_t groups, int64_t n, const qm_matrix& to) {
  const int half = q.format == k_format_int4 ? 8 : 128;
  for (int64_t g = 0; g < groups; ++g) {
    const Group group = row.of(g);
    const Best best = q.zero_points ? with_zero_point<Scale>(group, 2 * half - 1) : symmetric<Scale>(group, half);
    static_cast<typename Scale::Stored*>(to.scales)[n * groups + g] = Scale::stored(best.scale);
    if (q.zero_points) to.zero_points[n * groups + g] = static_cast<uint8_t>(-best.values.low);
    const float inverse = inverse_of(best.scale);
    uint8_t* const codes = static_cast<uint8_t*>(to.codes) + n * q.k + g * row.group;
    for (int64_t i = 0; i < row.group && g * row.group + i < q.k; ++i)
      codes[i] = static_cast<uint8_t>(best.values(group.x[i] * inverse) - best.values.low);
  }
}

// e2m1 codes with scales that are codes, too, for `count` groups from `first` on.
template <typename Value>
void e2m1_row(const qm_quantization& q, const Row& row, int64_t groups, int64_t n, const qm_matrix& to,
              const Value& scales) {
  for (int64_t g = 0; g < groups; ++g) {
    const Group group = row.of(g);
    const Range range = range_of(group);
    const float reach = -range.low > range.high ? -range.low : range.high;
    int best = scales.smallest;
    float least = kInfinite;
    const int usual = scales.code(reach / 6);
    for (int code = usual - scales.below; code <= usual + scales.above && reach > 0; ++code) {
      if (code < scales.smallest || code > scales.largest) continue;
      const float scale = scales.value(code);
      if (!(scale > 0)) continue;
      if (const float error = error_of(group, scale, E2m1()); error < least) {
        least = error;
        best = code;
      }
    }
    static_cast<uint8_t*>(to.scales)[n * groups + g] = static_cast<uint8_t>(best);
    const float inverse = inverse_of(scales.value(best));
    uint8_t* const codes = static_cast<uint8_t*>(to.codes) + n * q.k + g * row.group;
    for (int64_t i = 0; i < row.group && g * row.group + i < q.k; ++i) {
      const float value = E2m1()(group.x[i] * inverse);
      uint8_t code = 0;
      while (static_cast<float>(kE2m1Doubled[code]) < 2 * std::fabs(value)) ++code;
      codes[i] = static_cast<uint8_t>(code | (value < 0 ? 8 : 0));
    }
  }
}
struct E8m0Scales {
  static constexpr int smallest = 0, largest = 254, below = 1, above = 2;
  static float value(int code) { return e8m0(static_cast<uint8_t>(code)); }
  static int code(float scale) { return static_cast<int>(bit_cast<uint32_t>(scale) >> 23); }
};
// The largest code of a group may be 6 or 4: scales up to 1.5 times the usual one, which are six codes.
struct E4m3Scales {
  static constexpr int smallest = 0, largest = 0x7e, below = 3, above = 6;
  static float value(int code) { return 256.0f * e4m3_scaled(static_cast<uint8_t>(code)); }
  static int code(float scale) {
    int low = 0, high = largest;  // the first that is not below
    while (low < high) {
      const int middle = (low + high) / 2;
      if (value(middle) < scale)
        low = middle + 1;
      else
        high = middle;
    }
    return low;
  }
};

void quantize_row(const qm_quantization& q, Row& row, int64_t groups, int64_t n, const qm_matrix& to) {
  row.read(q, n);
  if (is_integer(q.format)) {
    if (q.scale_type == k_scale_type_f32) return integer_row<F32Scale>(q, row, groups, n, to);
    if (q.scale_type == k_scale_type_f16) return integer_row<F16Scale>(q, row, groups, n, to);
    return integer_row<Bf16Scale>(q, row, groups, n, to);
  }
  if (q.format == k_format_mxfp4) return e2m1_row(q, row, groups, n, to, E8m0Scales());
  if (q.format == k_format_nvfp4) return e2m1_row(q, row, groups, n, to, E4m3Scales());
  for (int64_t g = 0; g < groups; ++g) {
    uint8_t codes[kBlock];
    const Group block = row.of(g);
    if (q.format == k_format_q6_k)
      quantize_k16(block.x, block.importance, codes, static_cast<K16*>(to.scales)[n * groups + g]);
    else
      quantize_k32(block.x, block.importance, q.format == k_format_q4_k ? 15 : 31, codes,
                   static_cast<K32*>(to.scales)[n * groups + g]);
    const int64_t count = q.k - g * kBlock < kBlock ? q.k - g * kBlock : kBlock;
    std::memcpy(static_cast<uint8_t*>(to.codes) + n * q.k + g * kBlock, codes, static_cast<size_t>(count));
  }
}

}  // namespace
}  // namespace quantmoe

using namespace quantmoe;

extern "C" int qm_quantize(const qm_quantization* q, const qm_matrix* to, int lanes, qm_parallel_for parallel_for,
                           void* context, char* err) {
  const int32_t wanted = q->format == k_format_mxfp4   ? 32
                         : q->format == k_format_nvfp4 ? 16
                         : is_k(q->format)             ? kBlock
                                                       : q->group_size;
  if (q->format > k_format_q6_k || (!is_integer(q->format) && !is_e2m1(q->format) && !is_k(q->format)))
    return fail(err, QM_UNSUPPORTED, "floats are quantized to integers, e2m1 and K-quants, not to format %d",
                q->format);
  if (q->group_size != wanted || (q->group_size != -1 && q->group_size < 1))
    return fail(err, QM_INVALID, "group_size is %d, expected %d", q->group_size, wanted < 1 ? 1 : wanted);
  if (q->zero_points && !is_integer(q->format))
    return fail(err, QM_INVALID, "zero points are of integers, not of format %d", q->format);
  const int64_t groups = q->group_size == -1 ? 1 : ceil_div(q->k, q->group_size);
  constexpr int64_t kRows = 16;  // of a thread at a time
  parallel(lanes, parallel_for, context, ceil_div(q->n, kRows), [&](int, int64_t at) {
    Row row(*q, groups);
    for (int64_t n = at * kRows; n < q->n && n < (at + 1) * kRows; ++n) quantize_row(*q, row, groups, n, *to);
  });
  return QM_OK;
}
