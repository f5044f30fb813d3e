// Geometry of layout marlin: FORMAT.md section 3 as numbers, for the packer, the CUDA kernels' plans and Python.
// Nothing else computes offsets.
#pragma once
#include <cstddef>
#include <cstdint>

#include "core/numbers.h"

namespace quantmoe {

constexpr int32_t kMarlinVersion = 2;
constexpr int64_t kMarlinUnit = 64;  // columns

struct MarlinRow {
  int panels, units, blocks, per_block;  // 16-row panels, 64-column units, scale blocks, groups in a block
  int half;                              // columns that gate's part takes where gate and up have orders of their own
  int columns;         // that the product has: K, or gate's and up's where they have orders of their own
  int orders;          // act-orders
  int block_shift;     // unit >> block_shift is its block; 31 for one block a row
  int scale_bytes;     // of rows g and g + 8 in a block
  size_t order_bytes;  // from an order to the next
  size_t scales_at, zeros_at, globals_at, bias_at, perm_at, input_at, pre_at, bytes;  // codes are at 0
  size_t sizes[8];                                                                    // of codes, then of those
};

constexpr bool is_marlin_group(int32_t group_size) {
  return group_size == -1 || group_size == 16 || group_size == 32 || (group_size > 0 && group_size % kMarlinUnit == 0);
}

// Scales of two levels: a row's f16 factors in a block of 4 units come first. Then its panel's int8 levels, 4 bytes a
// row and unit.
constexpr int marlin_factor_bytes(int32_t scale_type) { return scale_type == k_scale_type_k16 ? 2 : 4; }

// A row of one matrix [n, k], or of two, gate and up.
inline MarlinRow marlin_row(const qm_projection& weights, int64_t n, int64_t k, int halves) {
  const int32_t group = weights.group_size;
  const int64_t block = group < kMarlinUnit ? kMarlinUnit : group;
  const auto align = [](size_t size) { return static_cast<size_t>(align_up(static_cast<int64_t>(size), 64)); };
  MarlinRow row{};
  row.panels = static_cast<int>(ceil_div(n, 16 / halves));
  row.half = static_cast<int>(align_up(k, block));
  row.columns = static_cast<int>(weights.perm == 2 ? 2 * int64_t{row.half} : k);
  row.units = static_cast<int>(ceil_div(row.columns, kMarlinUnit));
  const int units_per_block = group == -1 ? row.units : static_cast<int>(block / kMarlinUnit);
  row.blocks = static_cast<int>(ceil_div(row.units, units_per_block));
  row.per_block = group == 16 || group == 32 ? static_cast<int>(kMarlinUnit) / group : 1;
  row.block_shift = 31;
  if (group != -1)
    for (row.block_shift = 0; 1 << row.block_shift < units_per_block;) ++row.block_shift;
  row.scale_bytes = 2 * row.per_block * scale_size(weights.scale_type);
  const size_t rows = static_cast<size_t>(row.panels) * 16, scales = rows * row.blocks * row.per_block;
  row.orders = weights.perm;
  row.order_bytes = align(static_cast<size_t>(k) * 4);
  size_t end = 0, *size_of = row.sizes;
  const auto place = [&](size_t size) {
    const size_t at = end;
    *size_of++ = size;
    end = align(at + size);
    return at;
  };
  place(rows * row.units * kMarlinUnit * code_bits(weights.format) / 8);
  row.scales_at = place(scales * scale_size(weights.scale_type));
  row.zeros_at = place(weights.zero_points ? scales : 0);
  row.globals_at = place(weights.format == k_format_nvfp4 ? 8 : 0);
  row.bias_at = place(weights.bias ? rows * 4 : 0);
  row.perm_at = place(weights.perm == 1 ? static_cast<size_t>(k) * 4 : row.orders * row.order_bytes);
  row.input_at = place(has_input_scales(weights) ? 4 : 0);
  row.pre_at = place(weights.pre_scale ? static_cast<size_t>(k) * 4 : 0);
  row.bytes = end;
  return row;
}

}  // namespace quantmoe
