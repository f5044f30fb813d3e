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
  int parts;            // groups of a block: 1, 2 of 16 columns, or those of FORMAT.md 2.10
  bool stepped;         // activations are nvfp4 as well: integers with a step for each group
  int64_t codes_bytes;  // of a block
  int64_t block_bytes;  // codes, scales and zero points
  int64_t stride;       // of a panel
  int64_t panels;       // of one matrix

  int64_t group() const { return block / parts; }
  int64_t groups() const { return blocks * parts; }
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
  PanelMatrix p{};
  p.format = format;
  p.scale_type = scale_type;
  p.zero_points = zero_points;
  p.grouped = group_size != -1 || zero_points || !is_integer(format);
  p.columns = !is_integer(format) && !is_e2m1(format) && !is_k(format);
  p.bits = code_bits(format);
  p.nr = p.columns || is_k(format) ? 16 : p.bits == 4 ? 8 : 4;
  p.n = n;
  p.k = k;
  p.parts = group_size == 16 && !p.columns ? 2 : 1;
  p.kp = align_up(k, group_size == -1 ? 32 : p.parts * group_size);
  p.block = group_size == -1 ? p.kp : p.parts * group_size;
  p.blocks = p.kp / p.block;
  p.codes_bytes = p.nr * p.block * p.bits / 8;
  p.block_bytes = p.codes_bytes + (p.grouped ? p.parts * p.nr * (scale_size(scale_type) + zero_points) : 0);
  if (is_k(format)) p.parts = p.block / (format == k_format_q6_k ? 16 : 32);  // whose scales lie as one
  p.stride = p.biases() + 4 * p.nr;
  p.panels = ceil_div(n, p.nr);
  return p;
}
inline PanelMatrix panel_matrix(const qm_projection& w, int64_t n, int64_t k) {
  PanelMatrix p = panel_matrix(w.format, w.scale_type, w.group_size, n, k, w.zero_points);
  // In act-order a group of weights is not one of activations.
  p.stepped = w.format == k_format_nvfp4 && w.activation_format == k_activation_format_nvfp4 && p.parts == 2 && !w.perm;
  return p;
}

// Activations that are integers; all others are rounded, if at all, and stay f32.
inline bool is_int8_activation(const qm_projection& w) {
  return w.activation_format == k_activation_format_int8_token ||
         w.activation_format == k_activation_format_int8_token_asym;
}

inline int halves(const qm_moe& moe) { return moe.gated ? 2 : 1; }

inline PanelMatrix w13_matrix(const qm_moe& m) { return panel_matrix(m.w13, m.intermediate_size, m.hidden_size); }
inline PanelMatrix w2_matrix(const qm_moe& m) { return panel_matrix(m.w2, m.hidden_size, m.intermediate_size); }

// Refuses attributes that the layout, or every kernel that reads it, does not take. prefix: of the attributes' names;
// features: input features; max_perm: most act-orders and pre-scales.
int check_cpu_panel(const char* prefix, const qm_projection& p, int32_t max_perm, int32_t features, char* err);

// Offsets of the parts of one expert's row, FORMAT.md section 1.
struct RowParts {
  int64_t input_scales, pre_scales, perms, size;
  int64_t vector;  // bytes of a pre-scale or a permutation
};
inline RowParts row_parts(const qm_projection& w, int64_t panel_bytes, int64_t k) {
  RowParts r{};
  r.vector = align_up(4 * k, kRowAlignment);
  r.input_scales = align_up(panel_bytes, kRowAlignment);
  r.pre_scales = r.input_scales + (has_input_scales(w) ? kRowAlignment : 0);
  r.perms = r.pre_scales + w.pre_scale * r.vector;
  r.size = r.perms + w.perm * r.vector;
  return r;
}
inline RowParts w13_parts(const qm_moe& m) {
  const PanelMatrix p = w13_matrix(m);
  return row_parts(m.w13, halves(m) * p.panels * p.stride, m.hidden_size);
}
inline RowParts w2_parts(const qm_moe& m) {
  const PanelMatrix p = w2_matrix(m);
  return row_parts(m.w2, p.panels * p.stride, m.intermediate_size);
}
inline int64_t w13_row_bytes(const qm_moe& m) { return w13_parts(m).size; }
inline int64_t w2_row_bytes(const qm_moe& m) { return w2_parts(m).size; }

// The layer whose w2 a linear's weights are.
inline qm_moe as_moe(const qm_linear& l) {
  qm_moe m{};
  m.num_experts = 1;
  m.hidden_size = l.out_features;
  m.intermediate_size = l.in_features;
  m.w13 = m.w2 = l.w;
  return m;
}

}  // namespace quantmoe
