// Matrices into layout marlin (FORMAT.md section 3) and back. A unit of codes is 64 columns of a 16-row panel, as
// tensor-core fragments.
//
// A column is 32 h + 8 t + 4 s + 2 a + b. Row r * 8 + g of a panel is row g of gate (r = 0) or up (r = 1), or a row of
// the one matrix. Bytes of 4-bit codes are [g][t][h][s][b][r], with the code of a = 0 low. Bytes of 8-bit codes are
// [r][g][t ^ g / 2][h ^ t % 2][s][b][a]. Codes of 5 and 6 bits are 4-bit codes, then the high bits of each lane [g][t].
#include "layouts/marlin.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <iterator>

#include "layouts/row.h"

namespace quantmoe {
namespace {

constexpr int64_t kUnit = kMarlinUnit, kRows = 16;
template <class Code>
using Unit = Code[kRows][kUnit];

void pack_unit4(const Unit<uint8_t>& codes, uint8_t* out) {  // their low 4 bits
  for (int g = 0; g < 8; ++g)
    for (int t = 0; t < 4; ++t)
      for (int h = 0; h < 2; ++h)
        for (int s = 0; s < 2; ++s)
          for (int b = 0; b < 2; ++b)
            for (int r = 0; r < 2; ++r) {
              const uint8_t* pair = codes[8 * r + g] + 32 * h + 8 * t + 4 * s + b;
              *out++ = static_cast<uint8_t>((pair[0] & 15) | pair[2] << 4);
            }
}
void unpack_unit4(const uint8_t* from, Unit<uint8_t>& codes) {
  for (int g = 0; g < 8; ++g)
    for (int t = 0; t < 4; ++t)
      for (int h = 0; h < 2; ++h)
        for (int s = 0; s < 2; ++s)
          for (int b = 0; b < 2; ++b)
            for (int r = 0; r < 2; ++r, ++from) {
              uint8_t* const pair = codes[8 * r + g] + 32 * h + 8 * t + 4 * s + b;
              pair[0] = *from & 15;
              pair[2] = *from >> 4;
            }
}

// Calls body(code, where its high bits begin, counted in bits) for the codes of a unit; `high` is 1 or 2 of them.
template <class Codes, class Body>
void each_high(Codes& codes, int high, const Body& body) {
  for (int lane = 0; lane < 32; ++lane)
    for (int step = 0; step < 4; ++step)
      for (int n = 0; n < 8; ++n) {  // of the step's word, the nibble
        const int column = 32 * (step / 2) + 8 * (lane % 4) + 4 * (step % 2) + 2 * (n % 2) + n / 4;
        const int place = high * (4 * step + n % 4);  // of 16 bits; the upper halves of words have n = 4 to 7
        body(codes[lane / 4 + 8 * (n / 2 % 2)][column], 32 * (high * lane + place / 16) + place % 16 + n / 4 * 16);
      }
}
constexpr int kLowBytes = kRows * kUnit / 2;
void pack_high(const Unit<uint8_t>& codes, int high, uint8_t* out) {
  std::fill_n(out, kRows * kUnit * high / 8, uint8_t{0});
  each_high(codes, high, [&](uint8_t code, int at) { out[at / 8] |= static_cast<uint8_t>(code >> 4 << at % 8); });
}
void unpack_high(const uint8_t* from, int high, Unit<uint8_t>& codes) {
  each_high(codes, high, [&](uint8_t& code, int at) {
    code |= static_cast<uint8_t>((from[at / 8] >> at % 8 & ((1 << high) - 1)) << 4);
  });
}

// Two bytes of each word change places, which undoes itself.
constexpr uint64_t swap_middle(uint64_t v) {
  return (v & 0xff0000ffff0000ff) | (v & 0x0000ff000000ff00) << 8 | (v & 0x00ff000000ff0000) >> 8;
}
// Where 8 columns from 32 h + 8 t on lie in a row's 64 bytes.
constexpr int place8(int row, int t, int h) { return 16 * (t ^ row / 2 % 4) + 8 * (h ^ t % 2); }

void pack_unit8(const Unit<uint8_t>& codes, uint8_t* out) {
  static_assert(std::endian::native == std::endian::little);
  for (int row = 0; row < kRows; ++row, out += kUnit)
    for (int t = 0; t < 4; ++t)
      for (int h = 0; h < 2; ++h) {
        uint64_t bytes;
        std::memcpy(&bytes, codes[row] + 32 * h + 8 * t, 8);
        bytes = swap_middle(bytes);
        std::memcpy(out + place8(row, t, h), &bytes, 8);
      }
}
void unpack_unit8(const uint8_t* from, Unit<uint8_t>& codes) {
  for (int row = 0; row < kRows; ++row, from += kUnit)
    for (int t = 0; t < 4; ++t)
      for (int h = 0; h < 2; ++h) {
        uint64_t bytes;
        std::memcpy(&bytes, from + place8(row, t, h), 8);
        bytes = swap_middle(bytes);
        std::memcpy(codes[row] + 32 * h + 8 * t, &bytes, 8);
      }
}

void pack_unit(const Unit<uint8_t>& codes, int bits, uint8_t* to) {
  (bits == 8 ? pack_unit8 : pack_unit4)(codes, to);
  if (bits == 5 || bits == 6) pack_high(codes, bits - 4, to + kLowBytes);
}
void pack_unit(const Unit<uint16_t>& codes, int, uint8_t* to) { std::memcpy(to, codes, sizeof codes); }
void unpack_unit(const uint8_t* from, int bits, Unit<uint8_t>& codes) {
  (bits == 8 ? unpack_unit8 : unpack_unit4)(from, codes);
  if (bits == 5 || bits == 6) unpack_high(from + kLowBytes, bits - 4, codes);
}
void unpack_unit(const uint8_t* from, int, Unit<uint16_t>& codes) { std::memcpy(codes, from, sizeof codes); }

// A row of a panel: its matrix, and where that has the row and its scales.
struct PanelRow {
  int half;             // gate's 0, up's 1, one matrix's 0
  int64_t index;        // of the matrix's row; below 0: past the end
  int64_t first_scale;  // of the row's
  int64_t first_group;  // that these scales have among the stored ones
  int64_t first_column;
};
using PanelRows = std::array<PanelRow, kRows>;
PanelRows rows_of(const RowMatrices& matrices, const MarlinRow& geometry, int64_t panel) {
  PanelRows rows;
  for (int64_t i = 0; i < kRows; ++i) {
    const int64_t packed = matrices.halves == 2 ? panel * 8 + i % 8 : panel * kRows + i;
    const int half = matrices.halves == 2 ? static_cast<int>(i / 8) : 0;
    const int64_t row = packed < matrices.n ? matrices.row(packed) : -1,
                  column = matrices.w.perm == 2 ? int64_t{half} * geometry.half : 0;
    const int64_t first_group = matrices.w.group_size == -1 ? 0 : column / matrices.w.group_size;
    rows[static_cast<size_t>(i)] = {half, row, row / matrices.w.block_n * matrices.groups(), first_group, column};
  }
  return rows;
}

// The code of value zero where no zero point says another.
int middle_code(const qm_projection& weights) {
  return !is_integer(weights.format) ? 0 : code_bits(weights.format) == 4 ? 8 : 128;
}

// What lies beside a row's own columns [64 u, 64 u + 64): the code of value zero.
template <class Code>
void fill_around(const RowMatrices& matrices, const PanelRow& row, int64_t unit, Code* codes) {
  std::fill_n(codes, kUnit, static_cast<Code>(matrices.w.zero_points ? 0 : middle_code(matrices.w)));
  if (row.index < 0 || matrices.w.perm != 2 || !matrices.w.zero_points) return;
  const uint8_t* const zeros = matrices.of[row.half]->zero_points;
  const int64_t size = matrices.w.group_size, step = size == 16 || size == 32 ? size : kUnit;  // columns of one group
  for (int64_t column = 0; column < kUnit; column += step) {
    const int64_t group = (size == -1 ? 0 : (unit * kUnit + column) / size) - row.first_group;
    if (group >= 0 && group < matrices.groups())
      std::fill_n(codes + column, step,
                  static_cast<Code>(zeros ? zeros[row.first_scale + group] : middle_code(matrices.w)));
  }
}

// Calls body(column of the unit, column of the matrix, how many) for a row's own columns in unit u.
template <class Body>
void own_columns(const RowMatrices& matrices, const PanelRow& row, int64_t unit, const Body& body) {
  const int64_t first = std::max(unit * kUnit, row.first_column),
                end = std::min((unit + 1) * kUnit, row.first_column + matrices.k);
  if (row.index >= 0 && first < end)
    body(first - unit * kUnit, first - row.first_column, static_cast<size_t>(end - first));
}

template <class Code>
void pack_codes(const RowMatrices& matrices, const MarlinRow& geometry, const PanelRows& rows, uint8_t* out) {
  const int bits = code_bits(matrices.w.format);
  for (int64_t unit = 0; unit < geometry.units; ++unit, out += kRows * kUnit * bits / 8) {
    Unit<Code> codes;
    for (size_t i = 0; i < rows.size(); ++i) {
      const PanelRow& row = rows[i];
      fill_around(matrices, row, unit, codes[i]);
      own_columns(matrices, row, unit, [&](int64_t column, int64_t k, size_t count) {
        const Code* const from = static_cast<const Code*>(matrices.of[row.half]->codes) + row.index * matrices.k + k;
        std::memcpy(codes[i] + column, from, count * sizeof(Code));
      });
    }
    pack_unit(codes, bits, out);
  }
}
template <class Code>
void unpack_codes(const RowMatrices& matrices, const MarlinRow& geometry, const PanelRows& rows, const uint8_t* from) {
  const int bits = code_bits(matrices.w.format);
  for (int64_t unit = 0; unit < geometry.units; ++unit, from += kRows * kUnit * bits / 8) {
    Unit<Code> codes;
    unpack_unit(from, bits, codes);
    for (size_t i = 0; i < rows.size(); ++i) {
      const PanelRow& row = rows[i];
      own_columns(matrices, row, unit, [&](int64_t column, int64_t k, size_t count) {
        Code* const to = static_cast<Code*>(matrices.of[row.half]->codes) + row.index * matrices.k + k;
        std::memcpy(to, codes[i] + column, count * sizeof(Code));
      });
    }
  }
}

// Calls body(one of row i's groups, its place among the panel's [block][g][j][row g, row g + 8]).
template <class Body>
void each_group(const RowMatrices& matrices, const MarlinRow& geometry, const PanelRow& row, int64_t i,
                const Body& body) {
  const int64_t groups = matrices.groups(), per_block = geometry.per_block;
  int64_t block = row.first_group / per_block, j = row.first_group % per_block;
  for (int64_t group = 0; group < groups; ++group) {
    body(group, ((block * 8 + i % 8) * per_block + j) * 2 + i / 8);
    if (++j == per_block) j = 0, ++block;
  }
}
// Numbers of a row's groups, from its matrix to the panel and back.
template <class Number>
void pack_groups(const RowMatrices& matrices, const MarlinRow& geometry, const PanelRow& row, int64_t i,
                 const void* from, void* to) {
  const uint8_t* const own = static_cast<const uint8_t*>(from) + row.first_scale * int64_t{sizeof(Number)};
  each_group(matrices, geometry, row, i, [&](int64_t group, int64_t place) {
    std::memcpy(static_cast<Number*>(to) + place, own + group * int64_t{sizeof(Number)}, sizeof(Number));
  });
}
template <class Number>
void unpack_groups(const RowMatrices& matrices, const MarlinRow& geometry, const PanelRow& row, int64_t i,
                   const void* from, void* to) {
  uint8_t* const own = static_cast<uint8_t*>(to) + row.first_scale * int64_t{sizeof(Number)};
  each_group(matrices, geometry, row, i, [&](int64_t group, int64_t place) {
    std::memcpy(own + group * int64_t{sizeof(Number)}, static_cast<const Number*>(from) + place, sizeof(Number));
  });
}

// Calls body(where a part of a row's scales of two levels lies in its matrix, among the panel's, its bytes).
template <class Body>
void each_level(const RowMatrices& matrices, const PanelRow& row, int64_t i, const Body& body) {
  const int factor = marlin_factor_bytes(matrices.w.scale_type), size = scale_size(matrices.w.scale_type);
  const int64_t place = 2 * (i % 8) + i / 8;
  for (int64_t group = 0; group < matrices.groups(); ++group) {
    const int64_t own = (row.first_scale + group) * size, block = (row.first_group + group) * kRows * size;
    body(own, block + place * factor, factor);
    for (int64_t unit = 0; unit < 4; ++unit) {
      const int64_t levels = block + (kRows * (factor + 4 * unit)) + place * 4;
      if (factor == 2) {  // 4 scales
        body(own + factor + 4 * unit, levels, 4);
      } else {  // 2 scales, 2 minima
        body(own + factor + 2 * unit, levels, 2), body(own + factor + 8 + 2 * unit, levels + 2, 2);
      }
    }
  }
}
void pack_levels(const RowMatrices& matrices, const MarlinRow&, const PanelRow& row, int64_t i, const void* from,
                 void* to) {
  each_level(matrices, row, i, [&](int64_t own, int64_t place, size_t count) {
    std::memcpy(static_cast<uint8_t*>(to) + place, static_cast<const uint8_t*>(from) + own, count);
  });
}
void unpack_levels(const RowMatrices& matrices, const MarlinRow&, const PanelRow& row, int64_t i, const void* from,
                   void* to) {
  each_level(matrices, row, i, [&](int64_t own, int64_t place, size_t count) {
    std::memcpy(static_cast<uint8_t*>(to) + own, static_cast<const uint8_t*>(from) + place, count);
  });
}

// Where a panel's scales, zero points and biases begin in a row.
struct PanelAt {
  size_t scales, zeros, biases;
  PanelAt(const RowMatrices& matrices, const MarlinRow& geometry, int64_t panel) {
    const size_t before = static_cast<size_t>(panel * kRows), groups = before * geometry.blocks * geometry.per_block;
    scales = geometry.scales_at + groups * static_cast<size_t>(scale_size(matrices.w.scale_type));
    zeros = geometry.zeros_at + groups;
    biases = geometry.bias_at + before * 4;
  }
};

void pack_panel(const RowMatrices& matrices, const MarlinRow& geometry, int64_t panel, uint8_t* out) {
  const PanelRows rows = rows_of(matrices, geometry, panel);
  const PanelAt offsets(matrices, geometry, panel);
  const int bits = code_bits(matrices.w.format), size = scale_size(matrices.w.scale_type);
  (bits == 16 ? pack_codes<uint16_t> : pack_codes<uint8_t>)(matrices, geometry, rows,
                                                            out + panel * geometry.units * kRows * kUnit * bits / 8);
  const auto pack_scales = is_k(matrices.w.format) ? pack_levels
                           : size == 4             ? pack_groups<uint32_t>
                           : size == 2             ? pack_groups<uint16_t>
                                                   : pack_groups<uint8_t>;
  for (int64_t i = 0; i < kRows; ++i) {
    const PanelRow& row = rows[static_cast<size_t>(i)];
    if (row.index < 0) continue;  // zero bits
    const qm_matrix& from = *matrices.of[row.half];
    pack_scales(matrices, geometry, row, i, from.scales, out + offsets.scales);
    if (matrices.w.zero_points && from.zero_points) {
      pack_groups<uint8_t>(matrices, geometry, row, i, from.zero_points, out + offsets.zeros);
    } else if (matrices.w.zero_points) {
      const uint8_t middle = static_cast<uint8_t>(middle_code(matrices.w));
      each_group(matrices, geometry, row, i,
                 [&](int64_t, int64_t place) { out[offsets.zeros + static_cast<size_t>(place)] = middle; });
    }
    if (matrices.w.bias && from.bias) std::memcpy(out + offsets.biases + 4 * i, from.bias + row.index, 4);
  }
}

void unpack_panel(const RowMatrices& matrices, const MarlinRow& geometry, int64_t panel, const uint8_t* packed) {
  const PanelRows rows = rows_of(matrices, geometry, panel);
  const PanelAt offsets(matrices, geometry, panel);
  const int bits = code_bits(matrices.w.format), size = scale_size(matrices.w.scale_type);
  (bits == 16
       ? unpack_codes<uint16_t>
       : unpack_codes<uint8_t>)(matrices, geometry, rows, packed + panel * geometry.units * kRows * kUnit * bits / 8);
  const auto unpack_scales = is_k(matrices.w.format) ? unpack_levels
                             : size == 4             ? unpack_groups<uint32_t>
                             : size == 2             ? unpack_groups<uint16_t>
                                                     : unpack_groups<uint8_t>;
  for (int64_t i = 0; i < kRows; ++i) {
    const PanelRow& row = rows[static_cast<size_t>(i)];
    if (row.index < 0) continue;
    const qm_matrix& target = *matrices.of[row.half];
    if (matrices.w.bias) std::memcpy(target.bias + row.index, packed + offsets.biases + 4 * i, 4);
    if (row.index % matrices.w.block_n) continue;  // its block's first row has the scales
    unpack_scales(matrices, geometry, row, i, packed + offsets.scales, target.scales);
    if (matrices.w.zero_points)
      unpack_groups<uint8_t>(matrices, geometry, row, i, packed + offsets.zeros, target.zero_points);
  }
}

constexpr bool carries(int32_t format) { return format >= k_format_int4 && format <= k_format_q6_k; }

int check_marlin(const qm_projection& weights, int halves, char* err) {
  if (weights.layout != k_layout_marlin || weights.layout_version != kMarlinVersion)
    return fail(err, QM_INVALID, "layout %s version %d, expected marlin version %d: export the model again",
                enum_name("layout", weights.layout), weights.layout_version, kMarlinVersion);
  if (!carries(weights.format))
    return fail(err, QM_UNSUPPORTED, "format %s; layout marlin carries %s", enum_name("format", weights.format),
                enum_names("format", carries).c_str());
  const bool floats = code_bits(weights.format) == 16;
  if (!is_marlin_group(weights.group_size) || (floats && weights.group_size != -1))
    return fail(err, QM_UNSUPPORTED, "group_size %d; layout marlin carries %s", weights.group_size,
                floats ? "-1 of floats" : "-1, 16, 32, multiples of 64");
  QM_TRY(check_range("block_n", weights.block_n, 1, INT32_MAX, err));
  if (is_k(weights.format)) {
    if (!takes_k_scales(weights.format, weights.group_size, weights.scale_type))
      return fail(err, QM_UNSUPPORTED, "group_size %d with %s scales; %s", weights.group_size,
                  enum_name("scale_type", weights.scale_type), kKScales);
  } else {
    QM_TRY(check_range("scale_type", weights.scale_type, k_scale_type_f32, k_scale_type_e4m3, err));
  }
  QM_TRY(check_range("zero_points", weights.zero_points, 0, is_integer(weights.format), err));
  QM_TRY(check_range("bias", weights.bias, 0, 1, err));
  QM_TRY(check_range("pre_scale", weights.pre_scale, 0, 1, err));
  return check_range("perm", weights.perm, 0, halves, err);
}

int marlin_row_parts(const qm_projection& weights, int64_t n, int64_t k, int halves, qm_row* row, char* err) {
  if (n < 1 || k < 1 || n > INT32_MAX || k > INT32_MAX / 2 - kMarlinUnit)
    return fail(err, QM_INVALID, "cannot pack [%lld, %lld]", (long long)n, (long long)k);
  QM_TRY(check_marlin(weights, halves, err));
  const MarlinRow geometry = marlin_row(weights, n, k, halves);
  const size_t starts[QM_ROW_PARTS] = {0,
                                       geometry.scales_at,
                                       geometry.zeros_at,
                                       geometry.globals_at,
                                       geometry.bias_at,
                                       geometry.perm_at,
                                       geometry.input_at,
                                       geometry.pre_at};
  row->bytes = static_cast<int64_t>(geometry.bytes);
  std::copy(std::begin(starts), std::end(starts), row->at);
  std::copy(std::begin(geometry.sizes), std::end(geometry.sizes), row->sizes);
  return QM_OK;
}

int pack_row(const RowMatrices& matrices, const qm_row&, uint8_t* row, const PackingThreads& pool, char* err) {
  const MarlinRow geometry = marlin_row(matrices.w, matrices.n, matrices.k, matrices.halves);
  if (matrices.w.format == k_format_nvfp4) {
    const int64_t scales = ceil_div(matrices.n, matrices.w.block_n) * matrices.groups();
    for (int half = 0; half < matrices.halves; ++half)
      for (int64_t i = 0; i < scales; ++i)
        if (static_cast<const uint8_t*>(matrices.of[half]->scales)[i] & 0x80)
          return fail(err, QM_INVALID, "nvfp4 scales are negative, expected e4m3 codes without a sign");
    for (int half = 0; half < 2; ++half)
      std::memcpy(row + geometry.globals_at + 4 * half, &matrices.of[half < matrices.halves ? half : 0]->global_scale,
                  4);
  }
  pool.run(geometry.panels, [&](int, int64_t panel) { pack_panel(matrices, geometry, panel, row); });
  return QM_OK;
}

void unpack_row(const RowMatrices& matrices, const qm_row&, const uint8_t* row, const PackingThreads& pool) {
  const MarlinRow geometry = marlin_row(matrices.w, matrices.n, matrices.k, matrices.halves);
  pool.run(geometry.panels, [&](int, int64_t panel) { unpack_panel(matrices, geometry, panel, row); });
  for (int half = 0; half < matrices.halves; ++half) {
    matrices.of[half]->global_scale = 1.0f;
    if (matrices.w.format == k_format_nvfp4)
      std::memcpy(&matrices.of[half]->global_scale, row + geometry.globals_at + 4 * half, 4);
  }
}

}  // namespace

const RowLayout kMarlinRow = {marlin_row_parts, pack_row, unpack_row};

}  // namespace quantmoe

using namespace quantmoe;

int qm_check_marlin_layer(const qm_projection* w13, const qm_projection* w2, char* err) {
  return check_marlin_layer(*w13, *w2, err);
}
