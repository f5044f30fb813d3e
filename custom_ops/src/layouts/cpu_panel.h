// Geometry of layout cpu_panel: FORMAT.md section 2 as numbers. Nothing else computes offsets.
#pragma once
#include <cstddef>
#include <cstdint>

#include "core/numbers.h"
#include "layouts/row.h"

namespace quantmoe {

struct PanelMatrix {
  int32_t format, scale_type;
  bool grouped;      // scales lie in the blocks
  bool zero_points;  // and zero points after them
  bool columns;      // codes that are floats: column by column, FORMAT.md 2.8
  int nr, bits;
  int64_t n, k;         // of one matrix (a gated w13 is two)
  int64_t kp;           // columns stored
  int64_t block;        // columns of a block
  int64_t blocks;       // blocks of a row
  int parts;            // groups of a block: 1, 2 with 16 columns each, or FORMAT.md 2.10's
  bool stepped;         // activations are integers with a step for some columns: int8_group, or nvfp4 as well
  int64_t span;         // columns whose product is one integer: a group, or the columns of a step where those are fewer
  int step_spans;       // spans that share a step of the activations: 1 or 2
  int64_t codes_bytes;  // of a block
  int64_t block_bytes;  // codes, scales and zero points
  int64_t stride;       // of a panel
  int64_t panels;       // of one matrix

  int64_t group() const { return block / parts; }
  int64_t groups() const { return blocks * parts; }
  // Of a row of activations.
  int64_t spans() const { return kp / span; }
  int64_t steps() const { return stepped ? spans() / step_spans : 0; }
  // Offsets in a block.
  int64_t zeros() const { return codes_bytes + parts * nr * scale_size(scale_type); }
  // Offset of the panel's tail: row sums, then (scales when channelwise, multipliers when the codes are no integers),
  // then biases.
  int64_t tail() const { return blocks * block_bytes; }
  bool multiplied() const { return !is_integer(format) && !is_k(format); }
  int64_t biases() const { return tail() + (grouped && !multiplied() ? 4 : 8) * nr; }
  // Layouts that KleidiAI has too.
  bool plain() const { return is_integer(format) && !zero_points && parts == 1; }
};

inline PanelMatrix panel_matrix(int32_t format, int32_t scale_type, int64_t group_size, int64_t n, int64_t k,
                                bool zero_points = false) {
  PanelMatrix matrix{};
  matrix.format = format;
  matrix.scale_type = scale_type;
  matrix.zero_points = zero_points;
  matrix.grouped = group_size != -1 || zero_points || !is_integer(format);
  matrix.columns = !is_integer(format) && !is_e2m1(format) && !is_k(format);
  matrix.bits = code_bits(format);
  matrix.nr = matrix.columns || is_k(format) ? 16 : matrix.bits == 4 ? 8 : 4;
  matrix.n = n;
  matrix.k = k;
  matrix.parts = group_size == 16 && !matrix.columns ? 2 : 1;
  matrix.kp = align_up(k, group_size == -1 ? 32 : matrix.parts * group_size);
  matrix.block = group_size == -1 ? matrix.kp : matrix.parts * group_size;
  matrix.blocks = matrix.kp / matrix.block;
  matrix.codes_bytes = matrix.nr * matrix.block * matrix.bits / 8;
  matrix.block_bytes =
      matrix.codes_bytes + (matrix.grouped ? matrix.parts * matrix.nr * (scale_size(scale_type) + zero_points) : 0);
  if (is_k(format)) matrix.parts = matrix.block / k_group(format);  // whose scales lie as one
  matrix.stride = matrix.biases() + 4 * matrix.nr;
  matrix.panels = ceil_div(n, matrix.nr);
  matrix.span = matrix.group();
  matrix.step_spans = 1;
  return matrix;
}
inline PanelMatrix panel_matrix(const qm_projection& weights, int64_t n, int64_t k) {
  PanelMatrix matrix = panel_matrix(weights.format, weights.scale_type, weights.group_size, n, k, weights.zero_points);
  if (weights.activation_format == k_activation_format_int8_group) {
    matrix.stepped = true;
    matrix.step_spans = matrix.group() == 16 ? 2 : 1;
    matrix.span = matrix.group() % 64 == 0 ? 64 : 32 / matrix.step_spans;
  } else {
    // In act-order a group of weights is not one of nvfp4 activations.
    matrix.stepped = weights.format == k_format_nvfp4 && weights.activation_format == k_activation_format_nvfp4 &&
                     matrix.parts == 2 && !weights.perm;
  }
  return matrix;
}

// The code of one of four columns `quad` of FORMAT.md 2.10. chunk: the row's byte of the column in the first plane.
inline int plane_code(const uint8_t* chunk, int quad, int bits) {
  if (bits == 8) return chunk[64 * quad];
  const int low = bits & 4, pair = bits & 2;
  int code = low ? chunk[quad % 4 * 64] >> (quad < 4 ? 0 : 4) & 15 : 0;
  if (pair) code |= (chunk[64 * (low + quad / 4)] >> quad % 4 * 2 & 3) << low;
  if (bits & 1) code |= (chunk[64 * (low + pair)] >> quad & 1) << (low + pair);
  return code;
}

// The factors of a group's scale and minimum, FORMAT.md 2.10. of_block: a row's bytes after its block's factors, each
// `apart` bytes from the next.
struct KLevels {
  int scale, minimum;
};
inline KLevels k_levels(const PanelMatrix& matrix, const uint8_t* of_block, int64_t group, int apart) {
  if (is_plane_integer(matrix.format))
    return {1, matrix.zero_points ? static_cast<int8_t>(of_block[0]) : 1 << (matrix.bits - 1)};
  if (!has_levels(matrix.scale_type)) return {1, 1};
  const uint8_t first = of_block[group * apart];
  if (matrix.scale_type == k_scale_type_k16_minima) return {first & 15, first >> 4};
  return {static_cast<int8_t>(first),
          has_minima(matrix.format) ? static_cast<int8_t>(of_block[(matrix.parts + group) * apart]) : 0};
}

// Activations that are int8; all others are rounded, if at all, and stay f32, or are nvfp4.
inline bool is_int8_activation(const qm_projection& w) {
  return w.activation_format == k_activation_format_int8_token ||
         w.activation_format == k_activation_format_int8_token_asym ||
         w.activation_format == k_activation_format_int8_group;
}

inline int halves(const qm_moe& moe) { return moe.gated ? 2 : 1; }

inline PanelMatrix w13_matrix(const qm_moe& moe) {
  return panel_matrix(moe.w13, moe.intermediate_size, moe.hidden_size);
}
inline PanelMatrix w2_matrix(const qm_moe& moe) { return panel_matrix(moe.w2, moe.hidden_size, moe.intermediate_size); }

// Refuses attributes that the layout, or every kernel that reads it, does not take. prefix: of the attributes' names;
// features: input features; max_perm: most act-orders and pre-scales.
int check_cpu_panel(const char* prefix, const qm_projection& weights, int32_t max_perm, int32_t features, char* err);

// Some rows of a matrix, for hosts that have no whole expert in memory.
struct PanelSource {
  int32_t format, group_size, scale_type;
  int64_t n, k;
  const void* codes;           // as qm_matrix's
  const void* scales;          // [ceil(n / block_n), groups] of scale_type
  const uint8_t* zero_points;  // the shape of scales, or null
  int32_t block_n;
  float global_scale;        // 1 when there is none
  const float* bias;         // [n] or null
  const int32_t* row_order;  // [n] or null: source row of each packed row
  int panel_step;
};
// Packs them. `dst` starts at panel 0 of these rows. Consecutive panels are `panel_step` panels apart: 2 for the halves
// of a gated w13.
int pack_panels(const PanelSource&, void* dst, char* err);

// Offsets of the parts of one expert's row, FORMAT.md section 1.
struct RowParts {
  int64_t input_scales, pre_scales, perms, size;
  int64_t vector;  // bytes of a pre-scale or a permutation
};
inline RowParts row_parts(const qm_projection& weights, int64_t panel_bytes, int64_t k) {
  RowParts parts{};
  parts.vector = align_up(4 * k, kRowAlignment);
  parts.input_scales = align_up(panel_bytes, kRowAlignment);
  parts.pre_scales = parts.input_scales + (has_input_scales(weights) ? kRowAlignment : 0);
  parts.perms = parts.pre_scales + weights.pre_scale * parts.vector;
  parts.size = parts.perms + weights.perm * parts.vector;
  return parts;
}
inline RowParts w13_parts(const qm_moe& moe) {
  const PanelMatrix matrix = w13_matrix(moe);
  return row_parts(moe.w13, halves(moe) * matrix.panels * matrix.stride, moe.hidden_size);
}
inline RowParts w2_parts(const qm_moe& moe) {
  const PanelMatrix matrix = w2_matrix(moe);
  return row_parts(moe.w2, matrix.panels * matrix.stride, moe.intermediate_size);
}
inline int64_t w13_row_bytes(const qm_moe& m) { return w13_parts(m).size; }
inline int64_t w2_row_bytes(const qm_moe& m) { return w2_parts(m).size; }

// The layer whose w2 a linear's weights are.
inline qm_moe as_moe(const qm_linear& linear) {
  qm_moe moe{};
  moe.num_experts = 1;
  moe.hidden_size = linear.out_features;
  moe.intermediate_size = linear.in_features;
  moe.w13 = moe.w2 = linear.w;
  return moe;
}

}  // namespace quantmoe
