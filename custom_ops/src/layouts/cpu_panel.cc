// Matrices to panels (FORMAT.md section 2) and back. At run time kernels read these bytes as they are.
#include "layouts/cpu_panel.h"

#include <bit>
#include <cstring>
#include <string>

#include "core/half.h"
#include "core/minifloat.h"
#include "layouts/row.h"

namespace quantmoe {
namespace {

// Activation sums of a block times a zero point are two 16-bit products (FORMAT.md 4.2 only asks for the exact sum).
constexpr int32_t kMaxZeroPointBlock = 32768;

// Why the layout does not carry such weights; null when it does. The sentence lists what it carries.
const char* cannot_carry(int32_t format, int32_t group_size, int32_t scale_type, int32_t block_n, bool zero_points) {
  const bool wide = scale_type >= k_scale_type_f32 && scale_type <= k_scale_type_bf16;
  if (format < k_format_int4 || format > k_format_q6_k)
    return "it carries int4, int8, mxfp4, nvfp4, fp8_e4m3, bf16, f16, q4_k, q5_k, q6_k";
  if (is_k(format) &&
      (group_size != 256 || scale_type != (format == k_format_q6_k ? k_scale_type_k16 : k_scale_type_k32)))
    return "q4_k and q5_k have k32 scales, q6_k has k16 scales, in groups of 256";
  if (group_size != -1 && (group_size < 16 || group_size > 65536 || (group_size != 16 && group_size % 32)))
    return "group_size must be -1, 16 or a multiple of 32 up to 65536";
  if (is_integer(format) && !wide) return "integer codes have f32, f16 or bf16 scales";
  if (format == k_format_mxfp4 && scale_type != k_scale_type_e8m0) return "mxfp4 has e8m0 scales";
  if (format == k_format_nvfp4 && scale_type != k_scale_type_e4m3) return "nvfp4 has e4m3 scales";
  if (format == k_format_fp8_e4m3 && !wide && scale_type != k_scale_type_e8m0)
    return "fp8_e4m3 has f32, f16, bf16 or e8m0 scales";
  if (code_bits(format) == 16 && (scale_type != k_scale_type_f32 || group_size != -1))
    return "bf16 and f16 have one f32 scale a row, of 1";
  if (block_n < 1 || block_n > 65536 || (block_n != 1 && format != k_format_fp8_e4m3))
    return "block_n must be 1, or for fp8_e4m3 1 to 65536";
  if (zero_points && !is_integer(format)) return "only integer codes have zero points";
  if (zero_points && group_size > 32768) return "with zero points group_size must be at most 32768";
  return nullptr;
}

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

void pack_panel(const qm_pack_source& source, const PanelMatrix& matrix, int64_t panel, uint8_t* out) {
  float sums[kMaxRows] = {};
  int32_t int_sums[kMaxRows] = {};
  int64_t rows[kMaxRows];
  panel_rows(source, matrix, panel, rows);
  const int chunk = matrix.bits == 4 ? 32 : 8;
  const uint8_t zero = matrix.bits == 4 ? 8 : 128;
  const int size = scale_size(matrix.scale_type);
  for (int64_t b = 0; b < matrix.blocks; ++b, out += matrix.block_bytes) {
    for (int r = 0; r < matrix.nr; ++r) {
      const uint8_t* row_codes = static_cast<const uint8_t*>(source.codes) + rows[r] * matrix.k;
      const float scale = matrix.grouped ? widen(matrix.scale_type, source.scales, rows[r] * matrix.blocks + b) : 0.0f;
      for (int64_t c = 0; c < matrix.block; c += chunk) {
        const int64_t k = b * matrix.block + c;
        uint8_t tail[32];
        const uint8_t* segment = row_codes + k;
        if (k + chunk > matrix.k) {
          const int64_t left = matrix.k > k ? matrix.k - k : 0;
          std::memset(tail, zero, sizeof tail);
          std::memcpy(tail, segment, static_cast<size_t>(left));
          segment = tail;
        }
        uint8_t* to = out + c * matrix.nr * matrix.bits / 8;
        for (int part = 0; part < (matrix.bits == 4 ? 2 : 1); ++part) {
          const int sum = matrix.bits == 4 ? pack_segment(segment + 8 * part, to + (part * matrix.nr + r) * 8)
                                           : pack_chunk8(segment, to + r * 8);
          sums[r] = sums[r] + static_cast<float>(sum) * scale;
          int_sums[r] += sum;
        }
      }
      if (matrix.grouped)
        std::memcpy(out + matrix.codes_bytes + r * size,
                    static_cast<const uint8_t*>(source.scales) + (rows[r] * matrix.blocks + b) * size, size);
    }
  }
  for (int r = 0; r < matrix.nr; ++r) {
    const float bias = source.bias ? source.bias[rows[r]] : 0.0f;
    if (matrix.grouped) {
      std::memcpy(out + 4 * r, &sums[r], 4);
      std::memcpy(out + 4 * (matrix.nr + r), &bias, 4);
    } else {
      const int32_t sum = matrix.bits == 4 ? 16 * int_sums[r] : int_sums[r];
      const float scale = widen(matrix.scale_type, source.scales, rows[r]) * (matrix.bits == 4 ? 0.0625f : 1.0f);
      std::memcpy(out + 4 * r, &sum, 4);
      std::memcpy(out + 4 * (matrix.nr + r), &scale, 4);
      std::memcpy(out + 4 * (2 * matrix.nr + r), &bias, 4);
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
void pack_scaled_panel(const qm_pack_source& source, const PanelMatrix& matrix, int64_t panel, uint8_t* out) {
  int64_t rows[kMaxRows];
  panel_rows(source, matrix, panel, rows);
  const int64_t groups = ceil_div(matrix.k, matrix.group());  // the last block may have one more, of padding
  const int size = scale_size(matrix.scale_type);
  const uint8_t middle = matrix.format == k_format_int4 ? 8 : matrix.format == k_format_int8 ? 128 : 0;
  const int flip = matrix.format == k_format_int4 ? 0x88 : 0;
  const uint8_t* codes = static_cast<const uint8_t*>(source.codes);
  uint8_t* const tail = out + matrix.tail();
  float sums[kMaxRows] = {};
  for (int64_t b = 0; b < matrix.blocks; ++b, out += matrix.block_bytes) {
    uint8_t *scales = out + matrix.codes_bytes, *zeros = out + matrix.zeros();
    for (int part = 0; part < matrix.parts; ++part)
      for (int r = 0; r < matrix.nr; ++r, scales += size, zeros += matrix.zero_points) {
        const int64_t group = b * matrix.parts + part, scale_at = rows[r] / source.block_n * groups + group;
        if (group >= groups) {
          std::memset(scales, 0, size);
          if (matrix.zero_points) *zeros = middle;
          continue;
        }
        std::memcpy(scales, static_cast<const uint8_t*>(source.scales) + scale_at * size, size);
        const int zero = source.zero_points ? source.zero_points[scale_at] : middle;
        if (matrix.zero_points) *zeros = static_cast<uint8_t>(zero);
        if (matrix.columns) continue;
        int32_t sum = 0;
        const uint8_t* row_codes = codes + rows[r] * matrix.k;
        for (int64_t k = group * matrix.group(); k < (group + 1) * matrix.group() && k < matrix.k; ++k)
          sum += is_e2m1(matrix.format) ? kE2m1Doubled[row_codes[k]] : row_codes[k] - zero;
        sums[r] = sums[r] + static_cast<float>(sum) * widen(matrix.scale_type, source.scales, scale_at);
      }
    for (int r = 0; r < matrix.nr; ++r) {
      const int64_t row = rows[r] * matrix.k;
      const auto code = [&](int64_t k) { return k < matrix.k ? codes[row + k] : middle; };
      const int64_t first = b * matrix.block;
      if (matrix.bits == 4) {
        for (int64_t c = 0; c < matrix.block; c += 32)
          for (int segment = 0; segment < 2; ++segment)
            for (int i = 0; i < 8; ++i) {
              const int64_t k = first + c + 8 * segment + i;
              out[c * 4 + (segment * 8 + r) * 8 + i] = static_cast<uint8_t>((code(k) | code(k + 16) << 4) ^ flip);
            }
      } else if (matrix.columns) {
        const int width = matrix.bits / 8;
        for (int64_t c = 0; c < matrix.block; ++c) {
          uint8_t* to = out + (c * 16 + r) * width;
          if (first + c < matrix.k)
            std::memcpy(to, codes + (row + first + c) * width, width);
          else
            std::memset(to, 0, width);
        }
      } else {
        for (int64_t c = 0; c < matrix.block; ++c)
          out[c / 8 * 32 + r * 8 + c % 8] = static_cast<uint8_t>(code(first + c) ^ 0x80);
      }
    }
  }
  const float multiplier = source.global_scale * multiplier_unit(matrix);
  for (int r = 0; r < matrix.nr; ++r) {
    const float bias = source.bias ? source.bias[rows[r]] : 0.0f;
    std::memcpy(tail + 4 * r, &sums[r], 4);
    if (matrix.multiplied()) std::memcpy(tail + 4 * (matrix.nr + r), &multiplier, 4);
    std::memcpy(tail + matrix.biases() - matrix.tail() + 4 * r, &bias, 4);
  }
}

// FORMAT.md 2.10.
void pack_k_panel(const qm_pack_source& source, const PanelMatrix& matrix, int64_t panel, uint8_t* out) {
  int64_t rows[kMaxRows];
  panel_rows(source, matrix, panel, rows);
  const int size = scale_size(matrix.scale_type), high = matrix.bits - 4, width = static_cast<int>(matrix.group());
  const bool minima = matrix.format != k_format_q6_k;
  const int zero = minima ? 0 : 32;
  uint8_t* const tail = out + matrix.tail();
  float sums[kMaxRows] = {};
  for (int64_t b = 0; b < matrix.blocks; ++b, out += matrix.block_bytes) {
    std::memset(out, 0, static_cast<size_t>(matrix.codes_bytes));
    uint8_t* const scales = out + matrix.codes_bytes;  // f16 [16], minima's f16 [16], int8 [parts][16], int8 minima
    uint8_t* const of_groups = scales + (minima ? 64 : 32);
    for (int r = 0; r < matrix.nr; ++r) {
      const uint8_t* stored = static_cast<const uint8_t*>(source.scales) + (rows[r] * matrix.blocks + b) * size;
      const float d = widen(k_scale_type_f16, stored, 0), d_min = minima ? widen(k_scale_type_f16, stored, 1) : 0.0f;
      for (int i = 0; i < (minima ? 2 : 1); ++i) std::memcpy(scales + 32 * i + 2 * r, stored + 2 * i, 2);
      stored += minima ? 4 : 2;
      for (int64_t i = 0; i < matrix.parts * (minima ? 2 : 1); ++i) of_groups[16 * i + r] = stored[i];
      const uint8_t* const row_codes = static_cast<const uint8_t*>(source.codes) + rows[r] * matrix.k;
      for (int g = 0; g < matrix.parts; ++g) {
        int32_t sum = 0, columns = 0;
        for (int64_t c = g * width; c < (g + 1) * width && b * matrix.block + c < matrix.k; ++c, ++columns) {
          const int code = row_codes[b * matrix.block + c], quad = static_cast<int>(c % 32 / 4);
          uint8_t* const chunk = out + c / 32 * (matrix.codes_bytes / 8) + 4 * r + c % 4;
          sum += code - zero;
          chunk[quad % 4 * 64] |= static_cast<uint8_t>((code & 15) << (quad < 4 ? 0 : 4));
          if (high == 1) chunk[256] |= static_cast<uint8_t>((code >> 4 & 1) << quad);
          if (high == 2) chunk[256 + quad / 4 * 64] |= static_cast<uint8_t>((code >> 4 & 3) << quad % 4 * 2);
        }
        const float scale = d * static_cast<float>(static_cast<int8_t>(stored[g]));
        sums[r] = sums[r] + static_cast<float>(sum) * scale;
        if (!minima) continue;
        const float minimum = d_min * static_cast<float>(static_cast<int8_t>(stored[matrix.parts + g]));
        sums[r] = sums[r] - static_cast<float>(columns) * minimum;
      }
    }
  }
  for (int r = 0; r < matrix.nr; ++r) {
    const float bias = source.bias ? source.bias[rows[r]] : 0.0f;
    std::memcpy(tail + 4 * r, &sums[r], 4);
    std::memcpy(tail + 4 * (matrix.nr + r), &bias, 4);
  }
}

// From f32 that was widened from the type, so exactly.
void narrow(int32_t scale_type, float scale, uint8_t* to) {
  if (scale_type == k_scale_type_f32) {
    std::memcpy(to, &scale, 4);
  } else if (scale_type == k_scale_type_bf16) {
    const uint16_t bits = static_cast<uint16_t>(std::bit_cast<uint32_t>(scale) >> 16);
    std::memcpy(to, &bits, 2);
  } else {
    const Half half = static_cast<Half>(scale);
    std::memcpy(to, &half, 2);
  }
}

// Codes [k] of a panel's row, of which read(block, c) gives that in column c of a block.
template <class Code, class Read>
void unpack_codes(const PanelMatrix& p, const uint8_t* panel, Code* to, const Read& read) {
  for (int64_t b = 0; b < p.blocks; ++b, panel += p.block_bytes)
    for (int64_t c = 0; c < p.block && b * p.block + c < p.k; ++c) *to++ = static_cast<Code>(read(panel, c));
}

void unpack_codes(const PanelMatrix& p, const uint8_t* panel, int r, void* to) {
  uint8_t* const bytes = static_cast<uint8_t*>(to);
  if (p.bits == 16)
    return unpack_codes(p, panel, static_cast<uint16_t*>(to), [&](const uint8_t* block, int64_t c) {
      return block[(c * 16 + r) * 2] | block[(c * 16 + r) * 2 + 1] << 8;
    });
  if (p.columns)
    return unpack_codes(p, panel, bytes, [&](const uint8_t* block, int64_t c) { return block[c * 16 + r]; });
  if (p.bits == 8)
    return unpack_codes(p, panel, bytes,
                        [&](const uint8_t* block, int64_t c) { return block[c / 8 * 32 + r * 8 + c % 8] ^ 0x80; });
  if (!is_k(p.format))
    return unpack_codes(p, panel, bytes,
                        [&, flip = p.format == k_format_int4 ? 0x88 : 0](const uint8_t* block, int64_t c) {
                          const int pair = block[c / 32 * 128 + (c % 16 / 8 * 8 + r) * 8 + c % 8] ^ flip;
                          return c % 32 < 16 ? pair & 15 : pair >> 4;
                        });
  unpack_codes(p, panel, bytes, [&, high = p.bits - 4](const uint8_t* block, int64_t c) {
    const int quad = static_cast<int>(c % 32 / 4);
    const uint8_t* const chunk = block + c / 32 * (p.codes_bytes / 8) + 4 * r + c % 4;
    int code = chunk[quad % 4 * 64] >> (quad < 4 ? 0 : 4) & 15;
    if (high == 1) code |= (chunk[256] >> quad & 1) << 4;
    if (high == 2) code |= (chunk[256 + quad / 4 * 64] >> quad % 4 * 2 & 3) << 4;
    return code;
  });
}

// Scales and zero points of a row, from its panel's blocks.
void unpack_scales(const PanelMatrix& p, const uint8_t* panel, int r, int64_t groups, uint8_t* scales, uint8_t* zeros) {
  const int size = scale_size(p.scale_type);
  if (!p.grouped) {
    float scale;
    std::memcpy(&scale, panel + p.tail() + 4 * (p.nr + r), 4);
    return narrow(p.scale_type, scale * (p.bits == 4 ? 16.0f : 1.0f), scales);
  }
  for (int64_t group = 0; group < groups && !is_k(p.format); ++group) {
    const uint8_t* const block = panel + group / p.parts * p.block_bytes;
    const int64_t at = group % p.parts * p.nr + r;
    std::memcpy(scales + group * size, block + p.codes_bytes + at * size, static_cast<size_t>(size));
    if (zeros) zeros[group] = block[p.zeros() + at];
  }
  const int factors = p.format == k_format_q6_k ? 1 : 2;  // f16, then int8 of the groups for each
  for (int64_t b = 0; b < p.blocks && is_k(p.format); ++b, scales += size) {
    const uint8_t* const of_rows = panel + b * p.block_bytes + p.codes_bytes;
    for (int i = 0; i < factors; ++i) std::memcpy(scales + 2 * i, of_rows + 32 * i + 2 * r, 2);
    for (int64_t i = 0; i < p.parts * factors; ++i) scales[2 * factors + i] = of_rows[32 * factors + 16 * i + r];
  }
}

void unpack_panel(const RowMatrices& m, const PanelMatrix& p, const qm_matrix& to, int64_t first,
                  const uint8_t* panel) {
  const int64_t groups = is_k(p.format) ? p.blocks : m.groups();
  for (int r = 0; r < p.nr && first + r < m.n; ++r) {
    const int64_t row = m.row(first + r);
    unpack_codes(p, panel, r, static_cast<uint8_t*>(to.codes) + row * m.k * (p.bits == 16 ? 2 : 1));
    if (m.w.bias) std::memcpy(to.bias + row, panel + p.biases() + 4 * r, 4);
    if (row % m.w.block_n) continue;  // its block's first row has the scales
    const int64_t at = row / m.w.block_n * groups;
    unpack_scales(p, panel, r, groups, static_cast<uint8_t*>(to.scales) + at * scale_size(p.scale_type),
                  m.w.zero_points ? to.zero_points + at : nullptr);
  }
}

// Panels of some rows of a matrix, from the first on.
void pack_panels(const qm_pack_source& source, const PanelMatrix& p, uint8_t* dst, const Pool& pool) {
  constexpr int64_t kPanelsPerTask = 8;
  pool.run(ceil_div(p.panels, kPanelsPerTask), [&](int, int64_t task) {
    for (int64_t i = task * kPanelsPerTask; i < p.panels && i < (task + 1) * kPanelsPerTask; ++i)
      (is_k(p.format) ? pack_k_panel
       : p.plain()    ? pack_panel
                      : pack_scaled_panel)(source, p, i, dst + i * source.panel_step * p.stride);
  });
}

int pack_expert_panels(const RowMatrices& m, const qm_row&, uint8_t* row, const Pool& pool, char*) {
  const PanelMatrix p = panel_matrix(m.w, m.n, m.k);
  for (int h = 0; h < m.halves; ++h) {
    const qm_matrix& of = *m.of[h];
    qm_pack_source source{};
    source.n = m.n;
    source.k = m.k;
    source.codes = of.codes;
    source.scales = of.scales;
    source.zero_points = m.w.zero_points ? of.zero_points : nullptr;
    source.block_n = m.w.block_n;
    source.global_scale = of.global_scale;
    source.bias = m.w.bias ? of.bias : nullptr;
    source.row_order = m.row_order;
    source.panel_step = m.halves;
    pack_panels(source, p, row + h * p.stride, pool);
  }
  return QM_OK;
}

void unpack_expert_panels(const RowMatrices& m, const qm_row&, const uint8_t* row, const Pool& pool) {
  const PanelMatrix p = panel_matrix(m.w, m.n, m.k);
  pool.run(p.panels * m.halves,
           [&](int, int64_t i) { unpack_panel(m, p, *m.of[i % m.halves], i / m.halves * p.nr, row + i * p.stride); });
  for (int h = 0; h < m.halves; ++h) {
    float multiplier = multiplier_unit(p);
    if (p.multiplied()) std::memcpy(&multiplier, row + h * p.stride + p.tail() + 4 * p.nr, 4);
    m.of[h]->global_scale = multiplier / multiplier_unit(p);
  }
}

}  // namespace

int check_cpu_panel(const char* prefix, const qm_projection& p, int32_t max_perm, int32_t features, char* err) {
  const std::string at = prefix;
  if (p.layout != k_layout_cpu_panel)
    return fail(err, QM_UNSUPPORTED, "%slayout is \"%s\", this library supports: cpu_panel", prefix,
                enum_name("layout", p.layout));
  QM_TRY(check_range((at + "layout_version").c_str(), p.layout_version, 1, 1, err));
  const bool integer_dot = is_integer(p.format) || is_e2m1(p.format) || is_k(p.format);
  QM_TRY(check_range((at + "zero_points").c_str(), p.zero_points, 0, 1, err));
  if (const char* reason = cannot_carry(p.format, p.group_size, p.scale_type, p.block_n, p.zero_points))
    return fail(err, QM_UNSUPPORTED,
                "%sformat is \"%s\", %sgroup_size %d, %sscale_type \"%s\", %sblock_n %d, %szero_points %d: %s", prefix,
                enum_name("format", p.format), prefix, p.group_size, prefix, enum_name("scale_type", p.scale_type),
                prefix, p.block_n, prefix, p.zero_points, reason);
  if (p.zero_points && p.group_size == -1 && features > kMaxZeroPointBlock)
    return fail(err, QM_UNSUPPORTED, "%szero_points with one group of %d input features, expected at most %d", prefix,
                features, kMaxZeroPointBlock);
  if (is_int8_activation(p) && !integer_dot)
    return fail(err, QM_UNSUPPORTED, "%sactivation_format is \"%s\", %sformat \"%s\" needs none or a float format",
                prefix, enum_name("activation_format", p.activation_format), prefix, enum_name("format", p.format));
  if (p.activation_format > k_activation_format_mxfp4)
    return fail(err, QM_UNSUPPORTED, "%sactivation_format is \"%s\", the CPU kernels do not round to it", prefix,
                enum_name("activation_format", p.activation_format));
  QM_TRY(check_range((at + "bias").c_str(), p.bias, 0, 1, err));
  QM_TRY(check_range((at + "pre_scale").c_str(), p.pre_scale, 0, max_perm, err));
  return check_range((at + "perm").c_str(), p.perm, 0, max_perm, err);
}

namespace {

// Offsets of a row's parts.
int cpu_panel_row(const qm_projection& w, int64_t n, int64_t k, int halves, qm_row* row, char* err) {
  if (n < 1 || k < 1 || n > INT32_MAX || k > INT32_MAX)
    return fail(err, QM_INVALID, "a matrix is [%lld, %lld], expected 1 to 2^31 - 1 rows and columns", (long long)n,
                (long long)k);
  QM_TRY(check_cpu_panel("", w, halves, static_cast<int32_t>(k), err));
  const PanelMatrix p = panel_matrix(w, n, k);
  const int64_t panels = halves * p.panels * p.stride;
  const RowParts parts = row_parts(w, panels, k);
  *row = {.bytes = parts.size,
          .at = {0, panels, panels, panels, panels, parts.perms, parts.input_scales, parts.pre_scales},
          .sizes = {panels, 0, 0, 0, 0, w.perm * parts.vector, has_input_scales(w) ? 4 * halves : 0,
                    w.pre_scale * parts.vector}};
  return QM_OK;
}

}  // namespace

const RowLayout kCpuPanelRow = {cpu_panel_row, pack_expert_panels, unpack_expert_panels};

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
  pack_panels(*s, p, static_cast<uint8_t*>(dst), {lanes, parallel_for, context});
  return QM_OK;
}

int qm_panel_row_of(const qm_projection* w, int64_t n, int64_t k, int halves, qm_panel_row* row, char* err) {
  qm_row found{};
  QM_TRY(cpu_panel_row(*w, n, k, halves, &found, err));
  const PanelMatrix p = panel_matrix(*w, n, k);
  *row = {p.nr, p.stride, found.bytes};
  return QM_OK;
}
