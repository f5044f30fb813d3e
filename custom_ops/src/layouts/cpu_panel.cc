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

// Activation sums of a block times a zero point are two 16-bit products (quant_moe.def asks for the exact sum only).
constexpr int32_t kMaxZeroPointBlock = 32768;

// Why the layout does not carry such weights; null when it does. The sentence lists what it carries.
const char* cannot_carry(int32_t format, int32_t group_size, int32_t scale_type, int32_t block_n, bool zero_points) {
  const bool wide = scale_type >= k_scale_type_f32 && scale_type <= k_scale_type_bf16;
  if (format < k_format_int4 || format > k_format_int6)
    return "it carries int4, int8, mxfp4, nvfp4, fp8_e4m3, bf16, f16, q4_k, q5_k, q6_k, q2_k, q4_1, q5_1, nf4, "
           "bnb_fp4, q8_min, int2, int3, int5, int6";
  if (is_k(format) && !takes_k_scales(format, group_size, scale_type)) return kKScales;
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
  if (zero_points && !takes_zero_point(format)) return "only integer codes have zero points";
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

void panel_rows(const PanelSource& source, const PanelMatrix& matrix, int64_t panel, int64_t* rows) {
  for (int r = 0; r < matrix.nr; ++r) {
    const int64_t row = panel * matrix.nr + r < matrix.n ? panel * matrix.nr + r : matrix.n - 1;
    rows[r] = source.row_order ? source.row_order[row] : row;
  }
}

void pack_panel(const PanelSource& source, const PanelMatrix& matrix, int64_t panel, uint8_t* out) {
  float sums[kMaxRows] = {};
  int32_t int_sums[kMaxRows] = {};
  int64_t rows[kMaxRows];
  panel_rows(source, matrix, panel, rows);
  const int chunk = matrix.bits == 4 ? 32 : 8;
  const uint8_t zero = matrix.bits == 4 ? 8 : 128;
  const int size = scale_size(matrix.scale_type);
  for (int64_t block = 0; block < matrix.blocks; ++block, out += matrix.block_bytes) {
    for (int row = 0; row < matrix.nr; ++row) {
      const uint8_t* row_codes = static_cast<const uint8_t*>(source.codes) + rows[row] * matrix.k;
      const float scale =
          matrix.grouped ? widen(matrix.scale_type, source.scales, rows[row] * matrix.blocks + block) : 0.0f;
      for (int64_t column = 0; column < matrix.block; column += chunk) {
        const int64_t k = block * matrix.block + column;
        uint8_t tail[32];
        const uint8_t* segment = row_codes + k;
        if (k + chunk > matrix.k) {
          const int64_t left = matrix.k > k ? matrix.k - k : 0;
          std::memset(tail, zero, sizeof tail);
          std::memcpy(tail, segment, static_cast<size_t>(left));
          segment = tail;
        }
        uint8_t* target = out + column * matrix.nr * matrix.bits / 8;
        for (int part = 0; part < (matrix.bits == 4 ? 2 : 1); ++part) {
          const int sum = matrix.bits == 4 ? pack_segment(segment + 8 * part, target + (part * matrix.nr + row) * 8)
                                           : pack_chunk8(segment, target + row * 8);
          sums[row] = sums[row] + static_cast<float>(sum) * scale;
          int_sums[row] += sum;
        }
      }
      if (matrix.grouped)
        std::memcpy(out + matrix.codes_bytes + row * size,
                    static_cast<const uint8_t*>(source.scales) + (rows[row] * matrix.blocks + block) * size, size);
    }
  }
  for (int row = 0; row < matrix.nr; ++row) {
    const float bias = source.bias ? source.bias[rows[row]] : 0.0f;
    if (matrix.grouped) {
      std::memcpy(out + 4 * row, &sums[row], 4);
      std::memcpy(out + 4 * (matrix.nr + row), &bias, 4);
    } else {
      const int32_t sum = matrix.bits == 4 ? 16 * int_sums[row] : int_sums[row];
      const float scale = widen(matrix.scale_type, source.scales, rows[row]) * (matrix.bits == 4 ? 0.0625f : 1.0f);
      std::memcpy(out + 4 * row, &sum, 4);
      std::memcpy(out + 4 * (matrix.nr + row), &scale, 4);
      std::memcpy(out + 4 * (2 * matrix.nr + row), &bias, 4);
    }
  }
}

// Factor of the multipliers, FORMAT.md 2.8: undoes the powers of two in the values of codes and scales.
float multiplier_unit(const PanelMatrix& matrix) {
  return (is_e2m1(matrix.format)               ? 0.5f
          : matrix.format == k_format_fp8_e4m3 ? 256.0f
                                               : 1.0f) *
         (matrix.scale_type == k_scale_type_e4m3 ? 256.0f : 1.0f);
}

// Everything that is not plain: FORMAT.md 2.7 and 2.8.
void pack_scaled_panel(const PanelSource& source, const PanelMatrix& matrix, int64_t panel, uint8_t* out) {
  int64_t rows[kMaxRows];
  panel_rows(source, matrix, panel, rows);
  const int64_t groups = ceil_div(matrix.k, matrix.group());  // the last block may have one more, of padding
  const int size = scale_size(matrix.scale_type);
  const uint8_t middle = matrix.format == k_format_int4 ? 8 : matrix.format == k_format_int8 ? 128 : 0;
  const int flip = matrix.format == k_format_int4 ? 0x88 : 0;
  const uint8_t* codes = static_cast<const uint8_t*>(source.codes);
  uint8_t* const tail = out + matrix.tail();
  float sums[kMaxRows] = {};
  for (int64_t block = 0; block < matrix.blocks; ++block, out += matrix.block_bytes) {
    uint8_t *scales = out + matrix.codes_bytes, *zeros = out + matrix.zeros();
    for (int part = 0; part < matrix.parts; ++part)
      for (int row = 0; row < matrix.nr; ++row, scales += size, zeros += matrix.zero_points) {
        const int64_t group = block * matrix.parts + part, scale_at = rows[row] / source.block_n * groups + group;
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
        const uint8_t* row_codes = codes + rows[row] * matrix.k;
        for (int64_t k = group * matrix.group(); k < (group + 1) * matrix.group() && k < matrix.k; ++k)
          sum += is_e2m1(matrix.format) ? kE2m1Doubled[row_codes[k]] : row_codes[k] - zero;
        sums[row] = sums[row] + static_cast<float>(sum) * widen(matrix.scale_type, source.scales, scale_at);
      }
    for (int row = 0; row < matrix.nr; ++row) {
      const int64_t first_code = rows[row] * matrix.k;
      const auto code = [&](int64_t k) { return k < matrix.k ? codes[first_code + k] : middle; };
      const int64_t first = block * matrix.block;
      if (matrix.bits == 4) {
        for (int64_t column = 0; column < matrix.block; column += 32)
          for (int segment = 0; segment < 2; ++segment)
            for (int i = 0; i < 8; ++i) {
              const int64_t k = first + column + 8 * segment + i;
              out[column * 4 + (segment * 8 + row) * 8 + i] =
                  static_cast<uint8_t>((code(k) | code(k + 16) << 4) ^ flip);
            }
      } else if (matrix.columns) {
        const int width = matrix.bits / 8;
        for (int64_t column = 0; column < matrix.block; ++column) {
          uint8_t* target = out + (column * 16 + row) * width;
          if (first + column < matrix.k)
            std::memcpy(target, codes + (first_code + first + column) * width, width);
          else
            std::memset(target, 0, width);
        }
      } else {
        for (int64_t column = 0; column < matrix.block; ++column)
          out[column / 8 * 32 + row * 8 + column % 8] = static_cast<uint8_t>(code(first + column) ^ 0x80);
      }
    }
  }
  const float multiplier = source.global_scale * multiplier_unit(matrix);
  for (int row = 0; row < matrix.nr; ++row) {
    const float bias = source.bias ? source.bias[rows[row]] : 0.0f;
    std::memcpy(tail + 4 * row, &sums[row], 4);
    if (matrix.multiplied()) std::memcpy(tail + 4 * (matrix.nr + row), &multiplier, 4);
    std::memcpy(tail + matrix.biases() - matrix.tail() + 4 * row, &bias, 4);
  }
}

// FORMAT.md 2.10.
void pack_k_panel(const PanelSource& source, const PanelMatrix& matrix, int64_t panel, uint8_t* out) {
  int64_t rows[kMaxRows];
  panel_rows(source, matrix, panel, rows);
  const int size = scale_size(matrix.scale_type), width = static_cast<int>(matrix.group());
  const bool minima = has_minima(matrix.format), integer = is_plane_integer(matrix.format);
  // Bits of a code in planes of each kind.
  const int low = matrix.bits == 8 ? 0 : matrix.bits & 4, pair = matrix.bits & 2, last = matrix.bits & 1;
  const int zero = matrix.format == k_format_q6_k ? 32 : 0, factors = stored_factors(matrix.format);
  const int factor = factor_size(matrix.scale_type), levels = size - factor * factors;
  const int32_t factor_type = factor == 4 ? k_scale_type_f32 : integer ? matrix.scale_type : k_scale_type_f16;
  uint8_t* const tail = out + matrix.tail();
  float sums[kMaxRows] = {};
  for (int64_t block = 0; block < matrix.blocks; ++block, out += matrix.block_bytes) {
    std::memset(out, 0, static_cast<size_t>(matrix.codes_bytes));
    uint8_t* const scales = out + matrix.codes_bytes;  // factors [16], minima's [16], bytes of groups [levels][16]
    uint8_t* const of_groups = scales + 16 * factor * factors;
    for (int row = 0; row < matrix.nr; ++row) {
      const uint8_t* stored = static_cast<const uint8_t*>(source.scales) + (rows[row] * matrix.blocks + block) * size;
      float units[2] = {};
      for (int i = 0; i < factors; ++i) {
        std::memcpy(scales + (16 * i + row) * factor, stored + factor * i, static_cast<size_t>(factor));
        units[i] = widen(factor_type, stored, i);
      }
      stored += factor * factors;
      for (int i = 0; i < levels; ++i) of_groups[16 * i + row] = stored[i];
      uint8_t zero_point = static_cast<uint8_t>(1 << (matrix.bits - 1));
      if (integer) {
        units[1] = units[0];
        if (source.zero_points) zero_point = source.zero_points[rows[row] * matrix.blocks + block];
        if (matrix.zero_points) of_groups[row] = zero_point;
        stored = &zero_point;
      }
      const uint8_t* const row_codes = static_cast<const uint8_t*>(source.codes) + rows[row] * matrix.k;
      for (int group = 0; group < matrix.parts; ++group) {
        int32_t sum = 0, columns = 0;
        for (int64_t column = group * width; column < (group + 1) * width && block * matrix.block + column < matrix.k;
             ++column, ++columns) {
          const int code = row_codes[block * matrix.block + column], quad = static_cast<int>(column % 32 / 4);
          uint8_t* const chunk = out + column / 32 * (64 * matrix.bits) + 4 * row + column % 4;
          sum += is_table(matrix.format) ? 0 : code - zero;
          if (matrix.bits == 8) chunk[64 * quad] = static_cast<uint8_t>(code);
          if (low) chunk[quad % 4 * 64] |= static_cast<uint8_t>((code & 15) << (quad < 4 ? 0 : 4));
          if (pair) chunk[64 * (low + quad / 4)] |= static_cast<uint8_t>((code >> low & 3) << quad % 4 * 2);
          if (last) chunk[64 * (low + pair)] |= static_cast<uint8_t>((code >> (low + pair) & 1) << quad);
        }
        const KLevels of_group = k_levels(matrix, stored, group, 1);
        sums[row] = sums[row] + static_cast<float>(sum) * (units[0] * static_cast<float>(of_group.scale));
        if (minima)
          sums[row] = sums[row] - static_cast<float>(columns) * (units[1] * static_cast<float>(of_group.minimum));
      }
    }
  }
  for (int row = 0; row < matrix.nr; ++row) {
    const float bias = source.bias ? source.bias[rows[row]] : 0.0f;
    std::memcpy(tail + 4 * row, &sums[row], 4);
    std::memcpy(tail + 4 * (matrix.nr + row), &bias, 4);
  }
}

// From f32 that was widened from the type, so exactly.
void narrow(int32_t scale_type, float scale, uint8_t* out) {
  if (scale_type == k_scale_type_f32) {
    std::memcpy(out, &scale, 4);
  } else if (scale_type == k_scale_type_bf16) {
    const uint16_t bits = static_cast<uint16_t>(std::bit_cast<uint32_t>(scale) >> 16);
    std::memcpy(out, &bits, 2);
  } else {
    const Half half = static_cast<Half>(scale);
    std::memcpy(out, &half, 2);
  }
}

// Codes [k] of a panel's row. read(block, c) gives the code in column c of a block.
template <class Code, class Read>
void unpack_codes(const PanelMatrix& matrix, const uint8_t* panel, Code* codes, const Read& read) {
  for (int64_t b = 0; b < matrix.blocks; ++b, panel += matrix.block_bytes)
    for (int64_t column = 0; column < matrix.block && b * matrix.block + column < matrix.k; ++column)
      *codes++ = static_cast<Code>(read(panel, column));
}

void unpack_codes(const PanelMatrix& matrix, const uint8_t* panel, int row, void* codes) {
  uint8_t* const bytes = static_cast<uint8_t*>(codes);
  if (matrix.bits == 16)
    return unpack_codes(matrix, panel, static_cast<uint16_t*>(codes), [&](const uint8_t* block, int64_t column) {
      return block[(column * 16 + row) * 2] | block[(column * 16 + row) * 2 + 1] << 8;
    });
  if (matrix.columns)
    return unpack_codes(matrix, panel, bytes,
                        [&](const uint8_t* block, int64_t column) { return block[column * 16 + row]; });
  if (matrix.bits == 8 && !is_k(matrix.format))
    return unpack_codes(matrix, panel, bytes, [&](const uint8_t* block, int64_t column) {
      return block[column / 8 * 32 + row * 8 + column % 8] ^ 0x80;
    });
  if (!is_k(matrix.format))
    return unpack_codes(matrix, panel, bytes,
                        [&, flip = matrix.format == k_format_int4 ? 0x88 : 0](const uint8_t* block, int64_t column) {
                          const int pair =
                              block[column / 32 * 128 + (column % 16 / 8 * 8 + row) * 8 + column % 8] ^ flip;
                          return column % 32 < 16 ? pair & 15 : pair >> 4;
                        });
  unpack_codes(matrix, panel, bytes, [&](const uint8_t* block, int64_t column) {
    return plane_code(block + column / 32 * (64 * matrix.bits) + 4 * row + column % 4,
                      static_cast<int>(column % 32 / 4), matrix.bits);
  });
}

// Scales and zero points of a row, from its panel's blocks.
void unpack_scales(const PanelMatrix& matrix, const uint8_t* panel, int row, int64_t groups, uint8_t* scales,
                   uint8_t* zeros) {
  const int size = scale_size(matrix.scale_type);
  if (!matrix.grouped) {
    float scale;
    std::memcpy(&scale, panel + matrix.tail() + 4 * (matrix.nr + row), 4);
    return narrow(matrix.scale_type, scale * (matrix.bits == 4 ? 16.0f : 1.0f), scales);
  }
  for (int64_t group = 0; group < groups && !is_k(matrix.format); ++group) {
    const uint8_t* const block = panel + group / matrix.parts * matrix.block_bytes;
    const int64_t place = group % matrix.parts * matrix.nr + row;
    std::memcpy(scales + group * size, block + matrix.codes_bytes + place * size, static_cast<size_t>(size));
    if (zeros) zeros[group] = block[matrix.zeros() + place];
  }
  const int factor = factor_size(matrix.scale_type);
  const int before = factor * stored_factors(matrix.format);  // factors, then bytes of the groups
  for (int64_t b = 0; b < matrix.blocks && is_k(matrix.format); ++b, scales += size) {
    const uint8_t* const of_rows = panel + b * matrix.block_bytes + matrix.codes_bytes;
    for (int i = 0; i < before; i += factor)
      std::memcpy(scales + i, of_rows + 16 * i + factor * row, static_cast<size_t>(factor));
    for (int i = before; i < size; ++i) scales[i] = of_rows[16 * i + row];
    if (zeros) zeros[b] = of_rows[16 * size + row];
  }
}

void unpack_panel(const RowMatrices& matrices, const PanelMatrix& matrix, const qm_matrix& target, int64_t first,
                  const uint8_t* panel) {
  const int64_t groups = is_k(matrix.format) ? matrix.blocks : matrices.groups();
  for (int row = 0; row < matrix.nr && first + row < matrices.n; ++row) {
    const int64_t target_row = matrices.row(first + row);
    unpack_codes(matrix, panel, row,
                 static_cast<uint8_t*>(target.codes) + target_row * matrices.k * (matrix.bits == 16 ? 2 : 1));
    if (matrices.w.bias) std::memcpy(target.bias + target_row, panel + matrix.biases() + 4 * row, 4);
    if (target_row % matrices.w.block_n) continue;  // its block's first row has the scales
    const int64_t first_scale = target_row / matrices.w.block_n * groups;
    unpack_scales(matrix, panel, row, groups,
                  static_cast<uint8_t*>(target.scales) + first_scale * scale_size(matrix.scale_type),
                  matrices.w.zero_points ? target.zero_points + first_scale : nullptr);
  }
}

// Panels of some rows of a matrix, from the first on.
void pack_panels(const PanelSource& source, const PanelMatrix& matrix, uint8_t* dst, const PackingThreads& pool) {
  constexpr int64_t kPanelsPerTask = 8;
  pool.run(ceil_div(matrix.panels, kPanelsPerTask), [&](int, int64_t task) {
    for (int64_t i = task * kPanelsPerTask; i < matrix.panels && i < (task + 1) * kPanelsPerTask; ++i)
      (is_k(matrix.format) ? pack_k_panel
       : matrix.plain()    ? pack_panel
                           : pack_scaled_panel)(source, matrix, i, dst + i * source.panel_step * matrix.stride);
  });
}

int pack_expert_panels(const RowMatrices& matrices, const qm_row&, uint8_t* row, const PackingThreads& pool, char*) {
  const PanelMatrix matrix = panel_matrix(matrices.w, matrices.n, matrices.k);
  for (int half = 0; half < matrices.halves; ++half) {
    const qm_matrix& given = *matrices.of[half];
    PanelSource source{};
    source.n = matrices.n;
    source.k = matrices.k;
    source.codes = given.codes;
    source.scales = given.scales;
    source.zero_points = matrices.w.zero_points ? given.zero_points : nullptr;
    source.block_n = matrices.w.block_n;
    source.global_scale = given.global_scale;
    source.bias = matrices.w.bias ? given.bias : nullptr;
    source.row_order = matrices.row_order;
    source.panel_step = matrices.halves;
    pack_panels(source, matrix, row + half * matrix.stride, pool);
  }
  return QM_OK;
}

void unpack_expert_panels(const RowMatrices& matrices, const qm_row&, const uint8_t* row, const PackingThreads& pool) {
  const PanelMatrix matrix = panel_matrix(matrices.w, matrices.n, matrices.k);
  pool.run(matrix.panels * matrices.halves, [&](int, int64_t i) {
    unpack_panel(matrices, matrix, *matrices.of[i % matrices.halves], i / matrices.halves * matrix.nr,
                 row + i * matrix.stride);
  });
  for (int half = 0; half < matrices.halves; ++half) {
    float multiplier = multiplier_unit(matrix);
    if (matrix.multiplied()) std::memcpy(&multiplier, row + half * matrix.stride + matrix.tail() + 4 * matrix.nr, 4);
    matrices.of[half]->global_scale = multiplier / multiplier_unit(matrix);
  }
}

}  // namespace

int check_cpu_panel(const char* prefix, const qm_projection& weights, int32_t max_perm, int32_t features, char* err) {
  const std::string before = prefix;
  if (weights.layout != k_layout_cpu_panel)
    return fail(err, QM_UNSUPPORTED, "%slayout is \"%s\", this library supports: cpu_panel", prefix,
                enum_name("layout", weights.layout));
  QM_TRY(check_range((before + "layout_version").c_str(), weights.layout_version, 1, 1, err));
  const bool integer_dot =
      is_integer(weights.format) || is_e2m1(weights.format) || (is_k(weights.format) && !of_floats(weights.format));
  QM_TRY(check_range((before + "zero_points").c_str(), weights.zero_points, 0, 1, err));
  if (const char* reason =
          cannot_carry(weights.format, weights.group_size, weights.scale_type, weights.block_n, weights.zero_points))
    return fail(err, QM_UNSUPPORTED,
                "%sformat is \"%s\", %sgroup_size %d, %sscale_type \"%s\", %sblock_n %d, %szero_points %d: %s", prefix,
                enum_name("format", weights.format), prefix, weights.group_size, prefix,
                enum_name("scale_type", weights.scale_type), prefix, weights.block_n, prefix, weights.zero_points,
                reason);
  if (weights.zero_points && weights.group_size == -1 && features > kMaxZeroPointBlock)
    return fail(err, QM_UNSUPPORTED, "%szero_points with one group of %d input features, expected at most %d", prefix,
                features, kMaxZeroPointBlock);
  if (is_int8_activation(weights) && !integer_dot)
    return fail(err, QM_UNSUPPORTED, "%sactivation_format is \"%s\", %sformat \"%s\" needs none or a float format",
                prefix, enum_name("activation_format", weights.activation_format), prefix,
                enum_name("format", weights.format));
  if (weights.activation_format > k_activation_format_int8_group)
    return fail(err, QM_UNSUPPORTED, "%sactivation_format is \"%s\", the CPU kernels do not round to it", prefix,
                enum_name("activation_format", weights.activation_format));
  QM_TRY(check_range((before + "bias").c_str(), weights.bias, 0, 1, err));
  QM_TRY(check_range((before + "pre_scale").c_str(), weights.pre_scale, 0, max_perm, err));
  return check_range((before + "perm").c_str(), weights.perm, 0, max_perm, err);
}

namespace {

// Offsets of a row's parts.
int cpu_panel_row(const qm_projection& weights, int64_t n, int64_t k, int halves, qm_row* row, char* err) {
  if (n < 1 || k < 1 || n > INT32_MAX || k > INT32_MAX)
    return fail(err, QM_INVALID, "a matrix is [%lld, %lld], expected 1 to 2^31 - 1 rows and columns", (long long)n,
                (long long)k);
  QM_TRY(check_cpu_panel("", weights, halves, static_cast<int32_t>(k), err));
  const PanelMatrix matrix = panel_matrix(weights, n, k);
  const int64_t panels = halves * matrix.panels * matrix.stride;
  const RowParts parts = row_parts(weights, panels, k);
  *row = {.bytes = parts.size,
          .at = {0, panels, panels, panels, panels, parts.perms, parts.input_scales, parts.pre_scales},
          .sizes = {panels, 0, 0, 0, 0, weights.perm * parts.vector, has_input_scales(weights) ? 4 * halves : 0,
                    weights.pre_scale * parts.vector},
          .panel_rows = matrix.nr,
          .panel_bytes = matrix.stride};
  return QM_OK;
}

}  // namespace

int pack_panels(const PanelSource& source, void* dst, char* err) {
  if (const char* reason = cannot_carry(source.format, source.group_size, source.scale_type, source.block_n,
                                        source.zero_points != nullptr))
    return fail(err, QM_UNSUPPORTED,
                "layout cpu_panel cannot pack format %s, group_size %d, scale_type %s, block_n %d: %s",
                enum_name("format", source.format), source.group_size, enum_name("scale_type", source.scale_type),
                source.block_n, reason);
  if (source.n < 1 || source.k < 1)
    return fail(err, QM_INVALID, "cannot pack [%lld, %lld]", (long long)source.n, (long long)source.k);
  const PanelMatrix matrix = panel_matrix(source.format, source.scale_type, source.group_size, source.n, source.k,
                                          source.zero_points != nullptr);
  pack_panels(source, matrix, static_cast<uint8_t*>(dst), {1, nullptr, nullptr});
  return QM_OK;
}

const RowLayout kCpuPanelRow = {cpu_panel_row, pack_expert_panels, unpack_expert_panels};

}  // namespace quantmoe
