// Matrices into layout marlin (FORMAT.md section 3) and back. A unit of codes is 64 columns of a 16-row panel, as
// tensor-core fragments.
//
// A column is 32 h + 8 t + 4 s + 2 a + b; row r * 8 + g of a panel is row g of gate (r = 0) and up (r = 1), or of one
// matrix. 4 bits: bytes [g][t][h][s][b][r], the code of a = 0 low; 8 bits: [r][g][t ^ g / 2][h ^ t % 2][s][b][a].
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

void pack_unit4(const Unit<uint8_t>& c, uint8_t* to) {
  for (int g = 0; g < 8; ++g)
    for (int t = 0; t < 4; ++t)
      for (int h = 0; h < 2; ++h)
        for (int s = 0; s < 2; ++s)
          for (int b = 0; b < 2; ++b)
            for (int r = 0; r < 2; ++r) {
              const uint8_t* at = c[8 * r + g] + 32 * h + 8 * t + 4 * s + b;
              *to++ = static_cast<uint8_t>(at[0] | at[2] << 4);
            }
}
void unpack_unit4(const uint8_t* from, Unit<uint8_t>& c) {
  for (int g = 0; g < 8; ++g)
    for (int t = 0; t < 4; ++t)
      for (int h = 0; h < 2; ++h)
        for (int s = 0; s < 2; ++s)
          for (int b = 0; b < 2; ++b)
            for (int r = 0; r < 2; ++r, ++from) {
              uint8_t* const at = c[8 * r + g] + 32 * h + 8 * t + 4 * s + b;
              at[0] = *from & 15;
              at[2] = *from >> 4;
            }
}

// Two bytes of each word change places, which undoes itself.
constexpr uint64_t swap_middle(uint64_t v) {
  return (v & 0xff0000ffff0000ff) | (v & 0x0000ff000000ff00) << 8 | (v & 0x00ff000000ff0000) >> 8;
}
// Where 8 columns from 32 h + 8 t on lie in a row's 64 bytes.
constexpr int place8(int row, int t, int h) { return 16 * (t ^ row / 2 % 4) + 8 * (h ^ t % 2); }

void pack_unit8(const Unit<uint8_t>& c, uint8_t* to) {
  static_assert(std::endian::native == std::endian::little);
  for (int row = 0; row < kRows; ++row, to += kUnit)
    for (int t = 0; t < 4; ++t)
      for (int h = 0; h < 2; ++h) {
        uint64_t v;
        std::memcpy(&v, c[row] + 32 * h + 8 * t, 8);
        v = swap_middle(v);
        std::memcpy(to + place8(row, t, h), &v, 8);
      }
}
void unpack_unit8(const uint8_t* from, Unit<uint8_t>& c) {
  for (int row = 0; row < kRows; ++row, from += kUnit)
    for (int t = 0; t < 4; ++t)
      for (int h = 0; h < 2; ++h) {
        uint64_t v;
        std::memcpy(&v, from + place8(row, t, h), 8);
        v = swap_middle(v);
        std::memcpy(c[row] + 32 * h + 8 * t, &v, 8);
      }
}

void pack_unit(const Unit<uint8_t>& codes, int bits, uint8_t* to) { (bits == 4 ? pack_unit4 : pack_unit8)(codes, to); }
void pack_unit(const Unit<uint16_t>& codes, int, uint8_t* to) { std::memcpy(to, codes, sizeof codes); }
void unpack_unit(const uint8_t* from, int bits, Unit<uint8_t>& codes) {
  (bits == 4 ? unpack_unit4 : unpack_unit8)(from, codes);
}
void unpack_unit(const uint8_t* from, int, Unit<uint16_t>& codes) { std::memcpy(codes, from, sizeof codes); }

// A row of a panel: its matrix, and where that has the row and its scales.
struct PanelRow {
  int half;             // gate's 0, up's 1, one matrix's 0
  int64_t row;          // below 0: past the end
  int64_t first_scale;  // of the row's
  int64_t first_group;  // that these scales have among the stored ones
  int64_t first_column;
};
using PanelRows = std::array<PanelRow, kRows>;
PanelRows rows_of(const RowMatrices& m, const MarlinRow& at, int64_t panel) {
  PanelRows rows;
  for (int64_t i = 0; i < kRows; ++i) {
    const int64_t packed = m.halves == 2 ? panel * 8 + i % 8 : panel * kRows + i;
    const int half = m.halves == 2 ? static_cast<int>(i / 8) : 0;
    const int64_t row = packed < m.n ? m.row(packed) : -1, column = m.w.perm == 2 ? int64_t{half} * at.half : 0;
    const int64_t first_group = m.w.group_size == -1 ? 0 : column / m.w.group_size;
    rows[static_cast<size_t>(i)] = {half, row, row / m.w.block_n * m.groups(), first_group, column};
  }
  return rows;
}

// The code of value zero where no zero point says another.
int middle_code(const qm_projection& w) { return !is_integer(w.format) ? 0 : code_bits(w.format) == 4 ? 8 : 128; }

// What lies beside a row's own columns [64 u, 64 u + 64): the code of value zero.
template <class Code>
void fill_around(const RowMatrices& m, const PanelRow& r, int64_t u, Code* to) {
  std::fill_n(to, kUnit, static_cast<Code>(m.w.zero_points ? 0 : middle_code(m.w)));
  if (r.row < 0 || m.w.perm != 2 || !m.w.zero_points) return;
  const uint8_t* const zeros = m.of[r.half]->zero_points;
  const int64_t size = m.w.group_size, step = size == 16 || size == 32 ? size : kUnit;  // columns of one group
  for (int64_t c = 0; c < kUnit; c += step) {
    const int64_t group = (size == -1 ? 0 : (u * kUnit + c) / size) - r.first_group;
    if (group >= 0 && group < m.groups())
      std::fill_n(to + c, step, static_cast<Code>(zeros ? zeros[r.first_scale + group] : middle_code(m.w)));
  }
}

// Calls body(column of the unit, column of the matrix, how many) for a row's own columns in unit u.
template <class Body>
void own_columns(const RowMatrices& m, const PanelRow& r, int64_t u, const Body& body) {
  const int64_t first = std::max(u * kUnit, r.first_column), end = std::min((u + 1) * kUnit, r.first_column + m.k);
  if (r.row >= 0 && first < end) body(first - u * kUnit, first - r.first_column, static_cast<size_t>(end - first));
}

template <class Code>
void pack_codes(const RowMatrices& m, const MarlinRow& at, const PanelRows& rows, uint8_t* to) {
  const int bits = code_bits(m.w.format);
  for (int64_t u = 0; u < at.units; ++u, to += kRows * kUnit * bits / 8) {
    Unit<Code> codes;
    for (size_t i = 0; i < rows.size(); ++i) {
      const PanelRow& r = rows[i];
      fill_around(m, r, u, codes[i]);
      own_columns(m, r, u, [&](int64_t c, int64_t k, size_t count) {
        const Code* const from = static_cast<const Code*>(m.of[r.half]->codes) + r.row * m.k + k;
        std::memcpy(codes[i] + c, from, count * sizeof(Code));
      });
    }
    pack_unit(codes, bits, to);
  }
}
template <class Code>
void unpack_codes(const RowMatrices& m, const MarlinRow& at, const PanelRows& rows, const uint8_t* from) {
  const int bits = code_bits(m.w.format);
  for (int64_t u = 0; u < at.units; ++u, from += kRows * kUnit * bits / 8) {
    Unit<Code> codes;
    unpack_unit(from, bits, codes);
    for (size_t i = 0; i < rows.size(); ++i) {
      const PanelRow& r = rows[i];
      own_columns(m, r, u, [&](int64_t c, int64_t k, size_t count) {
        Code* const to = static_cast<Code*>(m.of[r.half]->codes) + r.row * m.k + k;
        std::memcpy(to, codes[i] + c, count * sizeof(Code));
      });
    }
  }
}

// Calls body(one of row i's groups, its place among the panel's [block][g][j][row g, row g + 8]).
template <class Body>
void each_group(const RowMatrices& m, const MarlinRow& at, const PanelRow& r, int64_t i, const Body& body) {
  const int64_t groups = m.groups(), per_block = at.per_block;
  int64_t block = r.first_group / per_block, j = r.first_group % per_block;
  for (int64_t group = 0; group < groups; ++group) {
    body(group, ((block * 8 + i % 8) * per_block + j) * 2 + i / 8);
    if (++j == per_block) j = 0, ++block;
  }
}
// Numbers of a row's groups, from its matrix to the panel and back.
template <class Number>
void pack_groups(const RowMatrices& m, const MarlinRow& at, const PanelRow& r, int64_t i, const void* from, void* to) {
  const uint8_t* const own = static_cast<const uint8_t*>(from) + r.first_scale * int64_t{sizeof(Number)};
  each_group(m, at, r, i, [&](int64_t group, int64_t place) {
    std::memcpy(static_cast<Number*>(to) + place, own + group * int64_t{sizeof(Number)}, sizeof(Number));
  });
}
template <class Number>
void unpack_groups(const RowMatrices& m, const MarlinRow& at, const PanelRow& r, int64_t i, const void* from,
                   void* to) {
  uint8_t* const own = static_cast<uint8_t*>(to) + r.first_scale * int64_t{sizeof(Number)};
  each_group(m, at, r, i, [&](int64_t group, int64_t place) {
    std::memcpy(own + group * int64_t{sizeof(Number)}, static_cast<const Number*>(from) + place, sizeof(Number));
  });
}

// Where a panel's scales, zero points and biases begin in a row.
struct PanelAt {
  size_t scales, zeros, biases;
  PanelAt(const RowMatrices& m, const MarlinRow& at, int64_t panel) {
    const size_t before = static_cast<size_t>(panel * kRows), groups = before * at.blocks * at.per_block;
    scales = at.scales_at + groups * static_cast<size_t>(scale_size(m.w.scale_type));
    zeros = at.zeros_at + groups;
    biases = at.bias_at + before * 4;
  }
};

void pack_panel(const RowMatrices& m, const MarlinRow& at, int64_t panel, uint8_t* row) {
  const PanelRows rows = rows_of(m, at, panel);
  const PanelAt to(m, at, panel);
  const int bits = code_bits(m.w.format), size = scale_size(m.w.scale_type);
  (bits == 16 ? pack_codes<uint16_t> : pack_codes<uint8_t>)(m, at, rows,
                                                            row + panel * at.units * kRows * kUnit * bits / 8);
  const auto pack_scales = size == 4 ? pack_groups<uint32_t> : size == 2 ? pack_groups<uint16_t> : pack_groups<uint8_t>;
  for (int64_t i = 0; i < kRows; ++i) {
    const PanelRow& r = rows[static_cast<size_t>(i)];
    if (r.row < 0) continue;  // zero bits
    const qm_matrix& from = *m.of[r.half];
    pack_scales(m, at, r, i, from.scales, row + to.scales);
    if (m.w.zero_points && from.zero_points) {
      pack_groups<uint8_t>(m, at, r, i, from.zero_points, row + to.zeros);
    } else if (m.w.zero_points) {
      const uint8_t middle = static_cast<uint8_t>(middle_code(m.w));
      each_group(m, at, r, i, [&](int64_t, int64_t place) { row[to.zeros + static_cast<size_t>(place)] = middle; });
    }
    if (m.w.bias && from.bias) std::memcpy(row + to.biases + 4 * i, from.bias + r.row, 4);
  }
}

void unpack_panel(const RowMatrices& m, const MarlinRow& at, int64_t panel, const uint8_t* row) {
  const PanelRows rows = rows_of(m, at, panel);
  const PanelAt from(m, at, panel);
  const int bits = code_bits(m.w.format), size = scale_size(m.w.scale_type);
  (bits == 16 ? unpack_codes<uint16_t> : unpack_codes<uint8_t>)(m, at, rows,
                                                                row + panel * at.units * kRows * kUnit * bits / 8);
  const auto unpack_scales = size == 4   ? unpack_groups<uint32_t>
                             : size == 2 ? unpack_groups<uint16_t>
                                         : unpack_groups<uint8_t>;
  for (int64_t i = 0; i < kRows; ++i) {
    const PanelRow& r = rows[static_cast<size_t>(i)];
    if (r.row < 0) continue;
    const qm_matrix& to = *m.of[r.half];
    if (m.w.bias) std::memcpy(to.bias + r.row, row + from.biases + 4 * i, 4);
    if (r.row % m.w.block_n) continue;  // its block's first row has the scales
    unpack_scales(m, at, r, i, row + from.scales, to.scales);
    if (m.w.zero_points) unpack_groups<uint8_t>(m, at, r, i, row + from.zeros, to.zero_points);
  }
}

constexpr bool carries(int32_t format) { return format >= k_format_int4 && format <= k_format_f16; }

int check_marlin(const qm_projection& w, int halves, char* err) {
  if (w.layout != k_layout_marlin || w.layout_version != kMarlinVersion)
    return fail(err, QM_INVALID, "layout %s version %d, expected marlin version %d: export the model again",
                enum_name("layout", w.layout), w.layout_version, kMarlinVersion);
  if (!carries(w.format))
    return fail(err, QM_UNSUPPORTED, "format %s; layout marlin carries %s", enum_name("format", w.format),
                enum_names("format", carries).c_str());
  const bool floats = code_bits(w.format) == 16;
  if (!is_marlin_group(w.group_size) || (floats && w.group_size != -1))
    return fail(err, QM_UNSUPPORTED, "group_size %d; layout marlin carries %s", w.group_size,
                floats ? "-1 of floats" : "-1, 16, 32, multiples of 64");
  QM_TRY(check_range("block_n", w.block_n, 1, INT32_MAX, err));
  QM_TRY(check_range("scale_type", w.scale_type, k_scale_type_f32, k_scale_type_e4m3, err));
  QM_TRY(check_range("zero_points", w.zero_points, 0, is_integer(w.format), err));
  QM_TRY(check_range("bias", w.bias, 0, 1, err));
  QM_TRY(check_range("pre_scale", w.pre_scale, 0, 1, err));
  return check_range("perm", w.perm, 0, halves, err);
}

int marlin_row_parts(const qm_projection& w, int64_t n, int64_t k, int halves, qm_row* row, char* err) {
  if (n < 1 || k < 1 || n > INT32_MAX || k > INT32_MAX / 2 - kMarlinUnit)
    return fail(err, QM_INVALID, "cannot pack [%lld, %lld]", (long long)n, (long long)k);
  QM_TRY(check_marlin(w, halves, err));
  const MarlinRow at = marlin_row(w, n, k, halves);
  const size_t starts[QM_ROW_PARTS] = {0,          at.scales_at, at.zeros_at, at.globals_at,
                                       at.bias_at, at.perm_at,   at.input_at, at.pre_at};
  row->bytes = static_cast<int64_t>(at.bytes);
  std::copy(std::begin(starts), std::end(starts), row->at);
  std::copy(std::begin(at.sizes), std::end(at.sizes), row->sizes);
  return QM_OK;
}

int pack_row(const RowMatrices& m, const qm_row&, uint8_t* row, const Pool& pool, char* err) {
  const MarlinRow at = marlin_row(m.w, m.n, m.k, m.halves);
  if (m.w.format == k_format_nvfp4) {
    const int64_t scales = ceil_div(m.n, m.w.block_n) * m.groups();
    for (int h = 0; h < m.halves; ++h)
      for (int64_t i = 0; i < scales; ++i)
        if (static_cast<const uint8_t*>(m.of[h]->scales)[i] & 0x80)
          return fail(err, QM_INVALID, "nvfp4 scales are negative, expected e4m3 codes without a sign");
    for (int h = 0; h < 2; ++h) std::memcpy(row + at.globals_at + 4 * h, &m.of[h < m.halves ? h : 0]->global_scale, 4);
  }
  pool.run(at.panels, [&](int, int64_t panel) { pack_panel(m, at, panel, row); });
  return QM_OK;
}

void unpack_row(const RowMatrices& m, const qm_row&, const uint8_t* row, const Pool& pool) {
  const MarlinRow at = marlin_row(m.w, m.n, m.k, m.halves);
  pool.run(at.panels, [&](int, int64_t panel) { unpack_panel(m, at, panel, row); });
  for (int h = 0; h < m.halves; ++h) {
    m.of[h]->global_scale = 1.0f;
    if (m.w.format == k_format_nvfp4) std::memcpy(&m.of[h]->global_scale, row + at.globals_at + 4 * h, 4);
  }
}

}  // namespace

const RowLayout kMarlinRow = {marlin_row_parts, pack_row, unpack_row};

}  // namespace quantmoe

using namespace quantmoe;

int qm_check_marlin_layer(const qm_projection* w13, const qm_projection* w2, char* err) {
  return check_marlin_layer(*w13, *w2, err);
}
