// Canonical codes to panels (FORMAT.md section 2), the inverse of nothing at run time: kernels read these bytes as they
// are.
#include "layouts/cpu_panel.h"

#include <cstring>

#include "core/half.h"
#include "core/minifloat.h"
#include "core/parallel.h"

namespace quantmoe {
namespace {

float widen(int32_t scale_type, const void* scales, int64_t i) {
  if (scale_type == k_scale_type_f32) return static_cast<const float*>(scales)[i];
  if (scale_type == k_scale_type_e8m0) return e8m0(static_cast<const uint8_t*>(scales)[i]);
  if (scale_type == k_scale_type_e4m3) return e4m3_scaled(static_cast<const uint8_t*>(scales)[i]);
  const uint16_t bits = static_cast<const uint16_t*>(scales)[i];
  if (scale_type == k_scale_type_bf16) {
    const uint32_t wide = uint32_t{bits} << 16;
    float out;
    std::memcpy(&out, &wide, 4);
    return out;
  }
  Half half;
  std::memcpy(&half, &bits, 2);
  return static_cast<float>(half);
}

// One segment: 8 bytes that hold columns [c, c + 8) low and [c + 16, c + 24) high. Returns the sum of the 16 codes
// minus 8 each.
int pack_segment(const uint8_t* q, uint8_t* out) {
  uint64_t low, high;
  std::memcpy(&low, q, 8);
  std::memcpy(&high, q + 16, 8);
  const uint64_t packed = (low | high << 4) ^ 0x8888888888888888u;
  std::memcpy(out, &packed, 8);
  constexpr uint64_t kOnes = 0x0101010101010101u;
  // Eight bytes of at most 30 sum to at most 240: no carry leaves the top byte.
  return static_cast<int>(((low + high) * kOnes) >> 56) - 128;
}

int pack_chunk8(const uint8_t* q, uint8_t* out) {
  uint64_t codes;
  std::memcpy(&codes, q, 8);
  codes ^= 0x8080808080808080u;
  std::memcpy(out, &codes, 8);
  int sum = 0;
  for (int i = 0; i < 8; ++i) sum += q[i] - 128;
  return sum;
}

constexpr int kMaxRows = 16;

void panel_rows(const qm_pack_source& s, const PanelMatrix& p, int64_t panel, int64_t* rows) {
  for (int r = 0; r < p.nr; ++r) {
    const int64_t row = panel * p.nr + r < p.n ? panel * p.nr + r : p.n - 1;
    rows[r] = s.row_order ? s.row_order[row] : row;
  }
}

void pack_panel(const qm_pack_source& s, const PanelMatrix& p, int64_t panel, uint8_t* out) {
  float sums[kMaxRows] = {};
  int32_t int_sums[kMaxRows] = {};
  int64_t rows[kMaxRows];
  panel_rows(s, p, panel, rows);
  const int chunk = p.bits == 4 ? 32 : 8;
  const uint8_t zero = p.bits == 4 ? 8 : 128;
  const int size = scale_size(p.scale_type);
  for (int64_t b = 0; b < p.blocks; ++b, out += p.block_bytes) {
    for (int r = 0; r < p.nr; ++r) {
      const uint8_t* q = static_cast<const uint8_t*>(s.codes) + rows[r] * p.k;
      const float scale = p.grouped ? widen(p.scale_type, s.scales, rows[r] * p.blocks + b) : 0.0f;
      for (int64_t c = 0; c < p.block; c += chunk) {
        const int64_t k = b * p.block + c;
        uint8_t tail[32];
        const uint8_t* source = q + k;
        if (k + chunk > p.k) {
          const int64_t left = p.k > k ? p.k - k : 0;
          std::memset(tail, zero, sizeof tail);
          std::memcpy(tail, source, static_cast<size_t>(left));
          source = tail;
        }
        uint8_t* to = out + c * p.nr * p.bits / 8;
        for (int part = 0; part < (p.bits == 4 ? 2 : 1); ++part) {
          const int sum = p.bits == 4 ? pack_segment(source + 8 * part, to + (part * p.nr + r) * 8)
                                      : pack_chunk8(source, to + r * 8);
          sums[r] = sums[r] + static_cast<float>(sum) * scale;
          int_sums[r] += sum;
        }
      }
      if (p.grouped)
        std::memcpy(out + p.codes_bytes + r * size,
                    static_cast<const uint8_t*>(s.scales) + (rows[r] * p.blocks + b) * size, size);
    }
  }
  for (int r = 0; r < p.nr; ++r) {
    const float bias = s.bias ? s.bias[rows[r]] : 0.0f;
    if (p.grouped) {
      std::memcpy(out + 4 * r, &sums[r], 4);
      std::memcpy(out + 4 * (p.nr + r), &bias, 4);
    } else {
      const int32_t sum = p.bits == 4 ? 16 * int_sums[r] : int_sums[r];
      const float scale = widen(p.scale_type, s.scales, rows[r]) * (p.bits == 4 ? 0.0625f : 1.0f);
      std::memcpy(out + 4 * r, &sum, 4);
      std::memcpy(out + 4 * (p.nr + r), &scale, 4);
      std::memcpy(out + 4 * (2 * p.nr + r), &bias, 4);
    }
  }
}

// Factor of the multipliers, FORMAT.md 2.8: undoes the powers of two in the values of codes and scales.
float multiplier_unit(const PanelMatrix& p) {
  return (is_e2m1(p.format)               ? 0.5f
          : p.format == k_format_fp8_e4m3 ? 256.0f
                                          : 1.0f) *
         (p.scale_type == k_scale_type_e4m3 ? 256.0f : 1.0f);
}

// Everything that is not plain: FORMAT.md 2.7 and 2.8.
void pack_scaled_panel(const qm_pack_source& s, const PanelMatrix& p, int64_t panel, uint8_t* out) {
  int64_t rows[kMaxRows];
  panel_rows(s, p, panel, rows);
  const int64_t groups = ceil_div(p.k, p.group());  // the last block may have one more, of padding
  const int size = scale_size(p.scale_type);
  const uint8_t middle = p.format == k_format_int4 ? 8 : p.format == k_format_int8 ? 128 : 0;
  const int flip = p.format == k_format_int4 ? 0x88 : 0;
  const uint8_t* codes = static_cast<const uint8_t*>(s.codes);
  uint8_t* const tail = out + p.tail();
  float sums[kMaxRows] = {};
  for (int64_t b = 0; b < p.blocks; ++b, out += p.block_bytes) {
    uint8_t *scales = out + p.codes_bytes, *zeros = out + p.zeros();
    for (int part = 0; part < p.parts; ++part)
      for (int r = 0; r < p.nr; ++r, scales += size, zeros += p.zero_points) {
        const int64_t group = b * p.parts + part, at = rows[r] / s.block_n * groups + group;
        if (group >= groups) {
          std::memset(scales, 0, size);
          if (p.zero_points) *zeros = middle;
          continue;
        }
        std::memcpy(scales, static_cast<const uint8_t*>(s.scales) + at * size, size);
        const int zero = p.zero_points ? s.zero_points[at] : middle;
        if (p.zero_points) *zeros = static_cast<uint8_t>(zero);
        if (p.columns) continue;
        int32_t sum = 0;
        const uint8_t* q = codes + rows[r] * p.k;
        for (int64_t k = group * p.group(); k < (group + 1) * p.group() && k < p.k; ++k)
          sum += is_e2m1(p.format) ? kE2m1Doubled[q[k]] : q[k] - zero;
        sums[r] = sums[r] + static_cast<float>(sum) * widen(p.scale_type, s.scales, at);
      }
    for (int r = 0; r < p.nr; ++r) {
      const int64_t row = rows[r] * p.k;
      const auto code = [&](int64_t k) { return k < p.k ? codes[row + k] : middle; };
      const int64_t first = b * p.block;
      if (p.bits == 4) {
        for (int64_t c = 0; c < p.block; c += 32)
          for (int segment = 0; segment < 2; ++segment)
            for (int i = 0; i < 8; ++i) {
              const int64_t k = first + c + 8 * segment + i;
              out[c * 4 + (segment * 8 + r) * 8 + i] = static_cast<uint8_t>((code(k) | code(k + 16) << 4) ^ flip);
            }
      } else if (p.columns) {
        const int width = p.bits / 8;
        for (int64_t c = 0; c < p.block; ++c) {
          uint8_t* to = out + (c * 16 + r) * width;
          if (first + c < p.k)
            std::memcpy(to, codes + (row + first + c) * width, width);
          else
            std::memset(to, 0, width);
        }
      } else {
        for (int64_t c = 0; c < p.block; ++c)
          out[c / 8 * 32 + r * 8 + c % 8] = static_cast<uint8_t>(code(first + c) ^ 0x80);
      }
    }
  }
  const float multiplier = s.global_scale * multiplier_unit(p);
  for (int r = 0; r < p.nr; ++r) {
    const float bias = s.bias ? s.bias[rows[r]] : 0.0f;
    std::memcpy(tail + 4 * r, &sums[r], 4);
    if (p.multiplied()) std::memcpy(tail + 4 * (p.nr + r), &multiplier, 4);
    std::memcpy(tail + p.biases() - p.tail() + 4 * r, &bias, 4);
  }
}

}  // namespace
}  // namespace quantmoe

using namespace quantmoe;

int qm_pack_panels(const qm_pack_source* s, void* dst, int lanes, qm_parallel_for parallel_for, void* context,
                   char* err) {
  if (const char* reason = cannot_carry(s->format, s->group_size, s->scale_type, s->block_n, s->zero_points != nullptr))
    return fail(
        err, QM_UNSUPPORTED, "layout cpu_panel cannot pack format %s, group_size %d, scale_type %s, block_n %d: %s",
        enum_name("format", s->format), s->group_size, enum_name("scale_type", s->scale_type), s->block_n, reason);
  if (s->n < 1 || s->k < 1) return fail(err, QM_INVALID, "cannot pack [%lld, %lld]", (long long)s->n, (long long)s->k);
  const PanelMatrix p = panel_matrix(s->format, s->scale_type, s->group_size, s->n, s->k, s->zero_points != nullptr);
  constexpr int64_t kPanelsPerTask = 8;
  parallel(lanes, parallel_for, context, ceil_div(p.panels, kPanelsPerTask), [&](int, int64_t task) {
    for (int64_t i = task * kPanelsPerTask; i < p.panels && i < (task + 1) * kPanelsPerTask; ++i)
      (p.plain() ? pack_panel : pack_scaled_panel)(*s, p, i, static_cast<uint8_t*>(dst) + i * s->panel_step * p.stride);
  });
  return QM_OK;
}
